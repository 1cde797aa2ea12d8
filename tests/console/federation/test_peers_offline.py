"""A domain without a line to the relay: a minute of it costs nothing, longer is named. The clock is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relay_tap import RelayTap, tapped
from relaykit import relay  # noqa: F401
from test_peers import ONE, QUIET_S, WAIT_S, Table, met

from uvcc_console.federation.seat import SILENCE_S
from uvcc_console.rollout.federated import peers as peers_module
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.contract.errors import PeerLostError, UnreachableError

STEP_S = 2.0  # of the clock between two looks


T = TypeVar("T")


async def gathered(tasks: list[asyncio.Task[T]]) -> list[T]:
    return list(await asyncio.gather(*tasks))


class Line:
    """Three domains, each with a line of its own, on one clock; ``pass_time`` moves it while they look around."""

    def __init__(self, table: Table, taps: list[RelayTap], clock: SimpleNamespace) -> None:
        self.table, self.taps, self.clock = table, taps, clock
        for n, tap in enumerate(taps):
            seat = table.seats[n]
            table.seats[n] = replace(seat, terms=replace(seat.terms, relay=tap.url, wait_s=900.0, silence_s=SILENCE_S))

    async def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += STEP_S
            before = [tap.answered for tap in self.taps]
            async with asyncio.timeout(120):  # each of those that have a line told, and read, in between
                while any(t.answered < b + 4 and not t.cut for t, b in zip(self.taps, before, strict=True)):
                    await asyncio.sleep(0.005)

    @contextlib.asynccontextmanager
    async def met(self) -> AsyncIterator[list[Peers]]:
        async with self.table.peers(0, 1, 2) as peers:
            assert await self.while_time_passes(met(peers)) == [0, 0, 0]
            yield peers

    async def while_time_passes(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.pass_time(STEP_S)
        return task.result()


@pytest.fixture
def line(tmp_path: Path, relay: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:  # noqa: F811
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(peers_module, "LOOK_S", 0.01)
    with ExitStack() as stack:
        taps = [stack.enter_context(tapped(relay)) for _ in range(3)]
        yield Line(Table(tmp_path, relay, monkeypatch, WAIT_S, QUIET_S), taps, clock)


@pytest.mark.ci("tests/console/federation/test_peers.py")
def test_a_domain_that_is_offline_for_a_minute_goes_on_where_it_was(line: Line) -> None:
    async def story() -> None:
        async with line.met() as peers:
            line.taps[1].cut = True
            going_on = [asyncio.create_task(p.guarded(p.reach("roster", ONE))) for p in (peers[0], peers[2])]
            await line.pass_time(60.0)
            assert not any(task.done() for task in going_on)
            line.taps[1].cut = False
            going_on.append(asyncio.create_task(peers[1].guarded(peers[1].reach("roster", ONE))))
            found = await line.while_time_passes(gathered(going_on))
            assert all(set(f) == {0, 1, 2} for f in found)
            assert not any(p.found.stopped for p in peers)
            assert all(d.status != "silent" for bus in line.table.buses.values() for d in bus.snapshot.domains.values())

    asyncio.run(story())


@pytest.mark.ci("tests/console/federation/test_peers.py")
def test_a_domain_that_stays_away_is_named_by_both_and_ends_by_itself(line: Line) -> None:
    async def story() -> None:
        async with line.met() as peers:
            line.taps[1].cut = True
            going_on = [asyncio.create_task(p.guarded(asyncio.sleep(3600))) for p in peers]
            await line.pass_time(SILENCE_S - 10.0)
            assert not any(task.done() for task in going_on)
            await line.pass_time(20.0)
            said = await asyncio.gather(*going_on, return_exceptions=True)
            assert isinstance(said[1], UnreachableError)
            assert "the rendezvous has not answered" in str(said[1])
            for error in (said[0], said[2]):
                assert isinstance(error, PeerLostError)
                assert error.party == 1
                assert "P1's domain vanished at meet: no sign of life" in str(error)

    asyncio.run(story())
