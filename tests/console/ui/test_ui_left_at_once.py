"""What was asked for right before the console is left is done all the same, and what fails of it is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ui_desk import FakeProcesses, desk, modes
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_engine.contract.errors import UvccError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


class SlowDisk:
    """Takes nothing before it is ``free``, and then all or, with an ``error``, nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.error: UvccError | None = None
        append = Journal.append

        def held(journal: Journal, *batch: ev.Event) -> int:
            assert self.free.wait(240)
            if self.error is not None:
                raise self.error
            return append(journal, *batch)

        self.install = lambda: monkeypatch.setattr(Journal, "append", held)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    made = SlowDisk(monkeypatch)
    yield made
    made.free.set()


def nobody() -> FakeProcesses:
    found = FakeProcesses()
    found.living.clear()
    return found


async def test_a_conductor_takes_up_what_was_asked_by_who_left(folder: Path, disk: SlowDisk) -> None:
    processes = nobody()
    async with desk(Story().halted(), folder, processes=processes) as d:
        disk.install()
        await d.pilot.press("r", "q")
        await d.pilot.pause()
        assert not d.app.is_running
        disk.free.set()
    ((seq, asked),) = [(n, e) for n, e in Journal(folder / "journal.sqlite").since(0) if isinstance(e, ev.Intent)]
    assert asked.action == "resume"
    assert processes.started == [("conductor", "--adopt", "resume", "--since", str(seq))]


async def test_a_sidecar_takes_up_the_halt_and_its_release(folder: Path, disk: SlowDisk) -> None:
    """The first order is with the disk, the second waits for it: both are done."""
    processes = nobody()
    async with desk(Story().full(5), folder, processes=processes) as d:
        disk.install()
        await d.pilot.press("f9", "escape", "q")
        await d.pilot.pause()
        assert not d.app.is_running
        disk.free.set()
    assert [mode for mode, _ in modes(d)] == ["hold", "release"]
    assert processes.started == [("haltd",)]


async def test_what_could_not_be_done_is_said_to_the_shell(
    folder: Path, disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    async with desk(Story().halted(), folder) as d:
        disk.install()
        await d.pilot.press("r", "q")
        await d.pilot.pause()
        disk.error = UvccError("the disk is full")
        disk.free.set()
    told = capsys.readouterr().err
    assert f"uvcc: NOT DONE: the disk is full. In another terminal: uvcc status {RUN}\n" in told
