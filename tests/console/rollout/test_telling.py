"""What comes while the place to notify changes hands is told once: by who has it, or by the conductor once it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.rollout import telling
from uvcc_console.rollout.bus import Bus
from uvcc_console.runs import notices, notify
from uvcc_console.runs.notices import Note, SoleSender
from uvcc_console.runs.notify import state_note
from uvcc_console.runs.processes import JOURNAL


@dataclass
class Conducted:
    """A run of which a conductor tells, and another one who has the place to send notices at first."""

    bus: Bus
    other: SoleSender
    told: list[str]
    by_other: list[str]
    looks: asyncio.Queue[None]
    telling: asyncio.Task[None]

    def alert(self, text: str) -> None:
        self.bus.commit(ev.Alert(level="error", name=text, text=text, subject="p0r0"))

    async def look(self) -> None:
        """Wait for a look of the conductor's at all that there is by now."""
        while not self.looks.empty():
            self.looks.get_nowait()
        for _ in range(2):
            await asyncio.wait_for(self.looks.get(), 120)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Conducted]:
    told, by_other, looks = list[str](), list[str](), asyncio.Queue[None]()
    monkeypatch.setattr(notify, "operators_program", lambda: told.append)
    monkeypatch.setattr(telling, "LOOK_EVERY_S", 0.0)
    hand_on = notices.Unsent.hand_on

    def handed(unsent: notices.Unsent) -> bool:
        left = hand_on(unsent)
        looks.put_nowait(None)
        return left

    monkeypatch.setattr(notices.Unsent, "hand_on", handed)
    other = SoleSender(tmp_path, lambda note: by_other.append(note.text))
    assert other.claim()
    journal = Journal(tmp_path / JOURNAL, source="conductor")
    bus = Bus(journal)
    made = {"profile_name": "demo", "profile": {}, "job_kind": "private", "stages": ["quote", "teardown"]}
    bus.commit(ev.RunCreated(run="r", replicas=1, pipeline_stages=1, tensor=1, **made))
    task = asyncio.create_task(telling.tell_operator(tmp_path, bus))
    found = Conducted(bus, other, told, by_other, looks, task)
    await found.look()
    yield found
    task.cancel()
    await asyncio.wait({task})
    journal.close()


async def test_what_came_before_the_place_was_given_back_is_told_afterwards(run: Conducted) -> None:
    run.alert("late")
    await run.look()
    assert run.told == []
    run.other.close()  # it looked before the alert, and looks no more
    await run.look()
    assert run.told == ["p0r0: late"]
    await run.look()
    assert run.told == ["p0r0: late"]


async def test_what_the_other_one_told_is_not_told_again(run: Conducted) -> None:
    run.alert("slow")
    await run.look()
    run.other(Note("error", "p0r0: slow"))
    run.other.close()
    run.alert("hot")
    await run.look()
    assert (run.by_other, run.told) == (["p0r0: slow"], ["p0r0: hot"])


async def test_what_waited_for_long_is_not_told(run: Conducted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console told of it, and the record of what was sent is not looked at so far back."""
    run.alert("old")
    await run.look()
    now = notices.time.time()
    monkeypatch.setattr(notices.time, "time", lambda: now + notices.AGAIN_S)
    await run.look()
    run.other.close()
    await run.look()
    assert run.told == []


async def test_the_end_of_a_run_is_told_though_another_one_has_the_place_still(run: Conducted) -> None:
    run.bus.commit(ev.RunEnded(status="failed", detail="no pods"))
    run.telling.cancel()
    await run.look()
    assert run.told == []
    run.other.close()  # the sidecar ends with the run
    await asyncio.wait({run.telling}, timeout=120)
    assert run.told == ["r: ended failed: no pods"]


def test_an_operators_own_teardown_is_told_as_no_failure() -> None:
    asked = "teardown asked by me@desk tui"
    stopped = fold([ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="")], Snapshot(run="r"))
    stopped = fold([ev.StageChanged(name="full", status="failed", detail=asked)], stopped)
    assert state_note(stopped) is None
    ended = fold([ev.RunEnded(ts=5.0, status="torn_down", detail=asked)], stopped)
    assert state_note(ended) == Note("warn", f"r: ended torn down: {asked}")
    broken = fold([ev.StageChanged(name="full", status="failed", detail="no pods")], stopped)
    assert state_note(broken) == Note("error", "r: FAILED no pods")


async def test_who_does_not_give_the_place_back_keeps_no_conductor(
    run: Conducted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "END_S", 0.0)
    run.bus.commit(ev.RunEnded(status="ok", detail=""))
    run.telling.cancel()
    await asyncio.wait({run.telling}, timeout=120)
    assert (run.telling.done(), run.told) == (True, [])
