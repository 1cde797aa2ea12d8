"""A halt that is asked for while workers are being started: none runs behind a verdict that told the run as halted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.rollout.context import HaltedEarly, Rollout
from uvcc_console.rollout.stages.training import halts_in_between
from uvcc_console.runs import processes

BEFORE: list[ev.Event] = [
    ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="ab"),
    ev.HaltRequested(nonce="old", mode="halt", by="cli"),
    ev.HaltDone(nonce="old", mode="halt", verified=3, total=3, step=4, seconds=1.0),
    ev.StageChanged(name="full", status="running"),
]


def asked(mode: str, **more: Any) -> ev.HaltRequested:
    return ev.HaltRequested(nonce="new", mode=mode, by="cli", **more)


def context(*stories: list[ev.Event]) -> tuple[Rollout, list[ev.Event]]:
    """A rollout whose snapshots follow one another as they are waited for."""
    said: list[ev.Event] = []
    bus = SimpleNamespace(snapshot=Snapshot())

    async def wait(condition: Callable[[Snapshot], Any], timeout: float) -> Any:
        for story in stories:
            bus.snapshot = fold([*BEFORE, *story])
            if condition(bus.snapshot):
                return True
        raise TimeoutError

    bus.wait = wait
    ctx = SimpleNamespace(bus=bus, say=lambda *events: said.extend(events), start_from=None)
    return cast(Rollout, ctx), said


@pytest.mark.parametrize(
    "stories",
    [
        [[asked("halt")]],
        [[asked("hold")], [asked("hold"), asked("halt")]],
        [[asked("hold")]],
    ],
    ids=["a halt", "a hold that becomes one", "a hold of which nothing more is heard"],
)
async def test_what_was_halted_meanwhile_is_not_started(stories: list[list[ev.Event]]) -> None:
    ctx, _ = context(*stories)
    with pytest.raises(HaltedEarly, match="halted while no worker ran, and before full"):
        await halts_in_between.heed(ctx, "old", 3)
    assert ctx.start_from == 3  # what was chosen stays chosen


@pytest.mark.parametrize(
    "stories",
    [
        [[]],
        [[asked("hold", drill=True)]],
        [[asked("hold")], [asked("hold"), asked("release")]],
    ],
    ids=["the halt of before", "a drill", "a hold that is released"],
)
async def test_what_was_not_halted_is_started(stories: list[list[ev.Event]]) -> None:
    ctx, _ = context(*stories)
    await halts_in_between.heed(ctx, "old", 3)
    assert ctx.start_from is None


PHASE = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="ab", attempt=1)


@pytest.mark.parametrize("early", [True, False], ids=["just before the phase began", "after"])
@pytest.mark.parametrize(
    ("orders", "again"),
    [
        ([], []),
        ([asked("halt")], ["halt"]),
        ([asked("hold")], ["hold"]),
        ([asked("hold"), asked("release")], []),
        ([asked("hold", drill=True)], []),
    ],
    ids=["nothing", "a halt", "a hold", "a hold that was released", "a drill"],
)
def test_what_found_no_worker_is_asked_for_once_more(
    orders: list[ev.Event], again: list[str], early: bool, tmp_path: Path
) -> None:
    """Between the last look and the beginning of the phase lie some milliseconds, in which one was lost."""
    ctx, said = context([])
    cast(Any, ctx).run_dir = tmp_path
    journal = Journal(tmp_path / processes.JOURNAL, source="test")
    known_to = journal.append(*BEFORE)
    journal.append(*orders, PHASE) if early else journal.append(PHASE, *orders)
    journal.close()
    halts_in_between.ask_again(ctx, known_to)
    assert [e.mode for e in said if isinstance(e, ev.HaltRequested)] == again
    assert all(e.nonce != "new" and "cli asked for it" in e.reason for e in said if isinstance(e, ev.HaltRequested))
