"""A console is killed at a random moment of a whole rollout; no pod, no process and no foreign pod comes to harm.

Everything is real but the market's money: the command line, the conductor, the sidecar, pods with SSH servers, agents,
workers. What comes after the death is a sweep, a teardown, the sidecar alone, or a resume, which may die as well.
``UVCC_CRASHES`` sets how many deaths the slow test tries.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from crashlife import RESUME, SWEEP, Death, Life, deaths
from primehost import PrimeHost

CRASHES = int(os.environ.get("UVCC_CRASHES", "24"))
AT_ONCE = int(os.environ.get("UVCC_CRASHES_AT_ONCE", "2"))
SEED = int(os.environ.get("UVCC_CRASHES_SEED", "20261121"))


async def _live(host: PrimeHost, home: Path, moments: tuple[Death, ...], heir: str) -> Life:
    home.mkdir(parents=True)
    life = Life(home, host, moments, heir)
    await life.live()
    said = f"{' then '.join(map(str, moments))}; {heir}"
    assert life.billing == [], said
    assert host.standing(life.prefix) == [], said
    return life


def _foreign_untouched(host: PrimeHost, foreign: str) -> None:
    assert host.fake.billing == ["somebody-elses"]
    assert not [path for method, path, _ in host.fake.requests if method == "DELETE" and foreign in path]


@pytest.mark.parametrize(
    ("death", "heir", "status"),
    [
        pytest.param(
            Death("bootstrap", 0.5), SWEEP, "running", marks=pytest.mark.ci("tests/console/fleet/test_prime_crash.py")
        ),
        pytest.param(Death("drill", 0.3), RESUME, "ok", marks=pytest.mark.slow),
    ],
    ids=[SWEEP, RESUME],
)
async def test_a_console_killed_within_a_rollout_leaves_nothing(
    short: Path, death: Death, heir: str, status: str
) -> None:
    (short / "market").mkdir()
    async with PrimeHost(short / "market") as host:
        foreign = host.fake.foreign("somebody-elses")
        life = await _live(host, short / "home", (death,), heir)
        _foreign_untouched(host, foreign)
    assert life.died == [death.stage]
    assert life.billing_then == 3
    assert life.snapshot.status == status


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_killed_at_random_moments_of_whole_rollouts(short: Path) -> None:
    (short / "market").mkdir()
    turns = asyncio.Semaphore(AT_ONCE)
    began = time.monotonic()
    planned: list[tuple[tuple[Death, ...], str]] = []
    for one in islice(deaths(SEED), CRASHES):
        if sum(len(moments) for moments, _ in planned) < CRASHES:
            planned.append(one)

    async with PrimeHost(short / "market") as host:
        foreign = host.fake.foreign("somebody-elses")

        async def turn(n: int, moments: tuple[Death, ...], heir: str) -> Life:
            async with turns:
                life = await _live(host, short / f"h{n}", moments, heir)
            status = life.snapshot.status
            then = " then ".join(map(str, moments))
            sys.stderr.write(f"{n:3} {time.monotonic() - began:6.0f} s: {then}; {heir}: {status}\n")
            return life

        lives = await asyncio.gather(*(turn(n, *one) for n, one in enumerate(planned)))
        _foreign_untouched(host, foreign)
    killed = Counter(stage for life in lives for stage in life.died)
    heirs = Counter(life.heir for life in lives)
    paying = sum(life.billing_then > 0 for life in lives)
    sys.stderr.write(f"{killed.total()} kills in {len(lives)} rollouts, {paying} of them while pods were billing; ")
    sys.stderr.write(f"by stage {dict(killed)}; afterwards {dict(heirs)}; 0 pods and 0 processes left\n")
    resumed = [life.snapshot.status for life in lives if life.heir == RESUME]
    sys.stderr.write(f"resumed: {dict(Counter(resumed))}\n")
    assert killed.total() >= CRASHES * 3 // 4
    assert paying > len(lives) // 2
