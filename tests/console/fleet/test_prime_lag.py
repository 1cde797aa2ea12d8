"""A market that shows late what there is, and creates that are never answered: whole lives of runs, many of them.

Whatever the lag, no pod that a run uses is deleted, none costs anything a minute after the run's time to live, no
stranger's pod is touched, and every create is proven in the end.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from othermarket import Quirks
from otherworld import RUN, first_site, life, other_site

LIVES = int(os.environ.get("UVCC_MARKET_LIVES", "10"))  # on each of the two markets
PARTS = 5
EACH = [
    0,
    *(pytest.param(n, marks=pytest.mark.ci(__file__)) for n in range(1, PARTS)),
]
TTL_S = 1800.0


def _quirks(rng: random.Random) -> Quirks:
    """A lag from 55 to 300 s for some or all, one or two creates without an answer, lists in any order."""
    lag = rng.uniform(55.0, 300.0)
    everybody = rng.random() < 0.5
    lost = frozenset(rng.sample(range(1, 5), rng.choice((1, 1, 2))))
    return Quirks(
        list_lag=lag if everybody else 0.0,
        get_lag=lag if everybody else 0.0,
        history_lag=rng.choice((0.0, lag)),
        lag_of=() if everybody else tuple((n + 3, lag) for n in lost),
        lost=lost if rng.random() < 0.8 else frozenset(),
        half=frozenset() if rng.random() < 0.8 else lost,
        order=rng.choice(("asc", "desc", "name", "shuffled")),
        total=rng.choice(("right", "missing", "zero")),
        bare=rng.random() < 0.5,
        after=rng.choice(("told", "404")),
        boot_s=rng.uniform(60.0, 240.0),
        delete_blind=rng.random() < 0.3,
        seed=rng.randrange(1 << 30),
    )


@pytest.mark.parametrize("part", EACH)
async def test_no_life_on_the_other_market_loses_a_pod_in_use_or_leaves_one_behind(tmp_path: Path, part: int) -> None:
    for n in range(part, LIVES, PARTS):
        quirks = _quirks(random.Random(7000 + n))
        async with other_site(tmp_path / f"run-{n}", quirks) as (site, market):
            for name in (f"{RUN}-p0r0xaaaaaa", f"{RUN}-p0r0", "somebody-elses"):
                market.stranger(name)
            told = await life(site, TTL_S)
            assert (told.deleted_in_use, told.billing_late, told.creates_open) == (set(), set(), 0), (n, quirks)
            assert market.creates <= 9, (n, quirks)


@pytest.mark.ci(__file__)
@pytest.mark.parametrize("part", EACH)
async def test_no_life_on_the_first_market_loses_a_pod_in_use_or_leaves_one_behind(tmp_path: Path, part: int) -> None:
    for n in range(part, LIVES, PARTS):
        rng = random.Random(9000 + n)
        async with first_site(tmp_path / f"run-{n}") as (site, fake):
            site.fleet["image"] = "cuda_12_6_pytorch_2_7"
            fake.visible_after = rng.uniform(55.0, 300.0)
            how = rng.choice(("commit_then_timeout", "commit_then_500", "commit_then_reset"))
            fake.fail("POST", "/pods", how, *rng.sample(range(1, 5), rng.choice((1, 2))))
            foreign = fake.foreign(f"{RUN}-p0r0")
            told = await life(site, TTL_S)
            assert (told.deleted_in_use, told.billing_late, told.creates_open) == (set(), set(), 0), n
            assert not [p for m, p, _ in fake.requests if m == "DELETE" and foreign in p]
