"""One table: every injection -> what the console did -> pods left billing (0) -> US dollars over the cap (0).

``UVCC_TABLE=FILE`` writes it down. The fleet's cap is 9 $/h: three pods of at most 3.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncssh
import pytest
from injections_market import API, LIFE
from injections_market import Act as MarketAct
from injections_pod import BOOT, USE, Site
from injections_pod import Act as PodAct
from injections_run import FILES
from primeworld import World, new_world
from sshfake import SshFake

HOURLY_CAP = 9.0
Row = tuple[str, str, str, int, float]


def note(row: Row) -> None:
    """Add a row to the table that was asked for."""
    if path := os.environ.get("UVCC_TABLE"):
        with open(path, "a") as f:
            f.write("| {} | {} | {} | {} | {:.4f} |\n".format(*row))


COSTLY = (">100 pods (paging)", "page_dup/shift", "stock_gone_on_create: a whole provider")


async def settle(w: World, where: str, name: str, did: str, expected: str) -> None:
    """Whatever happened: sweep up, then count what is left and what was spent beyond the cap."""
    await w.down()
    left = len(w.ours)
    note((where, name, did, left, w.fake.over_cap))
    assert did == expected
    assert left == 0
    assert w.fake.over_cap == 0.0
    touched = [p for m, p, _ in w.fake.requests if m == "DELETE" and p.startswith("/pods/")]
    foreign = [i for i, pod in w.fake.pods.items() if pod.foreign]
    assert not [p for p in touched if p.removeprefix("/pods/") in foreign]


@pytest.mark.parametrize(
    ("name", "act", "expected"),
    [
        pytest.param(*row, id=row[0], marks=pytest.mark.ci(__file__) if n % 2 or row[0] in COSTLY else ())
        for n, row in enumerate((*API, *LIFE))
    ],
)
async def test_the_market(run_dir: Path, name: str, act: MarketAct, expected: str) -> None:
    async with new_world(run_dir) as w:
        w.fake.cap = HOURLY_CAP
        did = await act(w)
        await settle(w, "market" if name in {n for n, _, _ in API} else "life", name, did, expected)


@pytest.fixture
async def site(
    run_dir: Path,
    tmp_path: Path,
    ssh_fake: Callable[..., Awaitable[SshFake]],
    client_key: asyncssh.SSHKey,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    monkeypatch.chdir(tmp_path)
    async with new_world(run_dir) as w:
        w.fake.cap = HOURLY_CAP
        yield Site(w, tmp_path, ssh_fake, client_key)


@pytest.mark.parametrize(("name", "act", "expected"), BOOT, ids=[n for n, _, _ in BOOT])
async def test_pods_that_nobody_gets_into(site: Site, name: str, act: PodAct, expected: str) -> None:
    await settle(site.world, "ssh", name, await act(site), expected)


@pytest.mark.parametrize(
    ("name", "act", "expected"),
    [pytest.param(*value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate([*USE, *FILES])],
    ids=[n for n, _, _ in (*USE, *FILES)],
)
async def test_pods_in_use(site: Site, name: str, act: PodAct, expected: str) -> None:
    await site.world.up()
    with site.world.clock.outside():
        did = await act(site)
    await settle(site.world, "pod", name, did, expected)


def test_no_row_is_there_twice() -> None:
    names = [n for n, _, _ in (*API, *LIFE, *BOOT, *USE, *FILES)]
    assert len(set(names)) == len(names)
    assert len(names) >= 90
