"""Everybody's clock is ten minutes or more away from the others': nobody is named for it, and whoever is gone still is.

Each participant's wall clock and monotonic clock are its own (a context variable says whose code runs); the relay's is
ahead of all. What a clock decides, a proposal's end and a site's hours, is decided by the reader's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import COORDINATOR, TOKENS, relay_of
from test_peers import ONE, QUIET_S, STAGES, WAIT_S, Clock, Table, met
from test_rendezvous import People

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.federation import data_owner, domain_key, rendezvous
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted
from uvcc_console.rollout.federated import peers as peers_module
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.contract.errors import ConfigError, PeerLostError
from uvcc_engine.relay import server

TEN_MINUTES = 600.0
RELAY, BY_PARTY = 2 * TEN_MINUTES, (-TEN_MINUTES, 0.0, TEN_MINUTES)
SKEW: ContextVar[float] = ContextVar("SKEW", default=RELAY)
"""Whose clock: the relay's thread has a context of its own, and so the default."""
real_time = time.time


@pytest.fixture
def skewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A relay whose clock is twenty minutes ahead; its URL."""
    monkeypatch.setattr(time, "time", lambda: real_time() + SKEW.get())
    monkeypatch.setattr(server, "numbered", partial(server.numbered, clock=time.time))
    people = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"coordinator": 0, "group": "g", "token": COORDINATOR}, {"owner": 0, "group": "g", "token": OWNER}]
    with relay_of(tmp_path, people) as url:
        before = SKEW.set(0.0)
        yield url
        SKEW.reset(before)


OWNER = "token-of-owner-0-0123456789"


@contextlib.asynccontextmanager
async def on_their_clocks(table: Table, *who: int) -> AsyncIterator[list[Peers]]:
    """The ends of these domains, each with its own clocks."""
    made, tasks = [], []
    for n in who:
        SKEW.set(BY_PARTY[n])
        bus = table.buses[n] = Bus(Journal(table.root / f"p{n}.sqlite", source="test"))
        made.append(Peers(bus, table.seats[n], STAGES))
        tasks += [asyncio.create_task(bus.run()), asyncio.create_task(made[-1].run())]
    SKEW.set(0.0)
    assert table.clock is not None
    try:
        async with table.clock.among(made):
            yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def table(tmp_path: Path, skewed: str, monkeypatch: pytest.MonkeyPatch) -> Table:
    clock = Clock(monkeypatch)
    clocks = SimpleNamespace(monotonic=lambda: clock.now + 7 * SKEW.get())  # no wall clock at all
    monkeypatch.setattr(peers_module, "time", clocks)
    made = Table(tmp_path, skewed, monkeypatch, WAIT_S, QUIET_S)
    made.clock = clock
    return made


def test_barriers_halts_and_attempts_do_not_depend_on_a_clock(table: Table) -> None:
    async def story() -> None:
        async with on_their_clocks(table, 0, 1, 2) as peers:
            assert await met(peers) == [0, 0, 0]
            for stage in STAGES[1:]:
                found = await asyncio.gather(*(p.reach(stage, ONE) for p in peers))
                assert all(set(f) == {0, 1, 2} for f in found)
        async with on_their_clocks(table, 0, 1, 2) as peers:
            assert await met(peers) == [1, 1, 1]
            table.buses[0].commit(ev.HaltRequested(nonce="n1", mode="halt", by="operator", reason="F9"))
            for n in (1, 2):
                with pytest.raises(Halted):
                    await peers[n].guarded(asyncio.sleep(150))
                await table.buses[n].wait(lambda s: (s.halt.mode, s.halt.by) == ("halt", "P0"), 120)

    asyncio.run(story())


@pytest.mark.parametrize("gone", [0, 2])
def test_who_vanishes_is_named_whatever_its_clock_said(table: Table, gone: int) -> None:
    """The one whose clock is behind all others, and the one whose clock is ahead."""

    async def story() -> None:
        left = [n for n in range(3) if n != gone]
        async with on_their_clocks(table, *left) as peers:
            async with on_their_clocks(table, gone) as third:
                await met([*peers, *third])
                assert table.clock is not None
                going = asyncio.create_task(peers[0].guarded(asyncio.sleep(150)))
                end = table.clock.now + 1.5 * QUIET_S  # longer than the silence that is allowed: all are heard
                while table.clock.now < end:
                    await asyncio.sleep(0.02)
                assert not going.done()
                going.cancel()
                await asyncio.gather(going, return_exceptions=True)
            with pytest.raises(PeerLostError, match=f"P{gone}'s domain vanished"):
                await peers[0].guarded(asyncio.sleep(150))

    asyncio.run(story())


def test_approvals_count_and_the_end_of_a_proposal_is_by_the_readers_clock(
    tmp_path: Path, skewed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    people = People(tmp_path, skewed, monkeypatch, capsys)
    SKEW.set(-TEN_MINUTES)
    wanted = people.propose()
    trusted = people.key("coordinator").read_text().rsplit(" ", 1)[0]
    for n in range(3):
        SKEW.set(BY_PARTY[n])
        people.allows(f"p{n}", yes_for=[trusted])
        assert people.at(f"p{n}", "join", wanted, "--yes") == 0, people.err
    SKEW.set(-TEN_MINUTES)
    assert people.at("coordinator", "proposals") == 0
    assert "approved by all three" in people.out
    standing = rendezvous.kept(wanted)
    pins = list(standing.signed.proposal.domains)
    for skew in (*BY_PARTY, RELAY):  # a data owner anywhere between
        data_owner.approved(standing, pins, real_time() + skew)
    late = standing.signed.proposal.expires - real_time() + 1.0
    with pytest.raises(ConfigError, match="by this machine's clock the proposal of the coordinator") as ended:
        data_owner.approved(standing, pins, real_time() + late)
    assert domain_key.fingerprint(trusted) in ended.value.what
    SKEW.set(late)
    assert people.at("p0", "join", wanted, "--yes") == 1
    assert "REFUSED      expires: it expired at" in people.out
    assert "by this machine's clock it is" in people.out
