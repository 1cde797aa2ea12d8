"""The clock of the operator's machine is set in a run: nobody is called silent for it, no silence is missed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.training import phases

FULL = make_plan("demo-1", "demo", load("demo")[1]).phases["full"]
COORDS = [str(c) for c in FULL.coords()]


class Wall:
    """The wall clock, which somebody sets; counters of the machine go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.by, real = 0.0, time.time
        patch.setattr(time, "time", lambda: real() + self.by)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


@contextlib.asynccontextmanager
async def run(folder: Path, stall: float) -> AsyncIterator[tuple[Bus, asyncio.Task[Any]]]:
    """A run whose workers have just been heard, and the conductor's own judgement of it."""
    journal = Journal(folder / "journal.sqlite", source="test")
    bus = Bus(journal, poll_s=0.005)
    bus.commit(ev.PhaseStarted(phase="full", engine_run=FULL.engine_run, steps=12, sid_job="ab"))
    for n, coord in enumerate(COORDS):
        bus.commit(ev.WorkerProcess(pod=coord[:4], coord=coord, state="started", pid=n + 1), beat(coord))
    profile = SimpleNamespace(limits=SimpleNamespace(stall=stall))
    ctx = SimpleNamespace(bus=bus, plan=SimpleNamespace(profile=profile))
    outcome = asyncio.create_task(phases.outcome(cast(Rollout, ctx), FULL))
    following = asyncio.create_task(bus.run())
    await asyncio.sleep(0)
    yield bus, outcome
    for task in (outcome, following):
        task.cancel()
    await asyncio.gather(outcome, following, return_exceptions=True)
    journal.close()


def beat(coord: str) -> ev.HeartbeatRead:
    return ev.HeartbeatRead(pod=coord[:4], coord=coord, record={"step": 3, "phase": "train"})


@pytest.mark.parametrize(("by", "word"), [(3600.0, "forward by 3600 s"), (-3600.0, "back by 3600 s")])
async def test_a_step_of_the_clock_ends_no_run_and_is_told(tmp_path: Path, wall: Wall, by: float, word: str) -> None:
    """Every worker seemed silent for an hour at once, and the run was ended for it."""
    async with run(tmp_path, 600.0) as (bus, outcome):
        wall.by += by
        for _ in range(5):  # each makes the conductor look anew
            bus.commit(ev.LinkChanged(pod="p0r0", path="ssh", up=True))
            await asyncio.sleep(0.01)
        assert not outcome.done()
        await bus.wait(lambda s: s.alerts, 120.0)
    told = [e for e in read(tmp_path) if isinstance(e, ev.Alert)]
    assert [(e.name, e.level) for e in told] == [("clock", "warn")]
    assert word in told[0].text


@pytest.mark.parametrize("by", [3600.0, -3600.0])
async def test_who_is_silent_from_then_on_is_told_of_in_the_usual_time(tmp_path: Path, wall: Wall, by: float) -> None:
    async with run(tmp_path, 1.0) as (_, outcome):
        wall.by += by
        async with asyncio.timeout(120.0):
            found = await outcome
    assert found is not None
    seconds = float(found.what.removeprefix("no worker gave a sign of life for ").removesuffix(" s"))
    assert 0 < seconds < 60


def read(folder: Path) -> list[ev.Event]:
    journal = Journal(folder / "journal.sqlite", readonly=True)
    found = [event for _, event in journal.since(0)]
    journal.close()
    return found
