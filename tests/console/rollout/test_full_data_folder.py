"""The disk here is full: who follows is told of it, and nobody takes for silence what could not be written down."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.cli.follow import headless
from uvcc_console.cli.view import status
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.paths import JOURNAL
from uvcc_console.rollout import bus as bus_module
from uvcc_console.rollout import side_tasks
from uvcc_console.rollout.bus import Bus
from uvcc_console.runs import disk_space
from uvcc_engine.contract.errors import UvccError


class Disk:
    """One that takes nothing while it is full: what ``statvfs`` says of it, and every append."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        append, statvfs = Journal.append, os.statvfs

        def refuse(journal: Journal, *batch: ev.Event) -> int:
            if self.full:
                raise UvccError("cannot write the journal: database or disk is full", "free disk space")
            return append(journal, *batch)

        def measured(path: Any) -> Any:
            found = statvfs(path)
            return SimpleNamespace(f_bavail=0, f_frsize=4096, f_files=9, f_favail=9) if self.full else found

        monkeypatch.setattr(Journal, "append", refuse)
        monkeypatch.setattr(disk_space.os, "statvfs", measured)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def training(now: float) -> list[ev.Event]:
    """A worker that trains, and whose last sign of life in the journal is a minute old."""
    record = {"ts": now - 60, "rank": 0, "step": 3, "phase": "train"}
    return [
        ev.RunCreated(
            ts=now - 90,
            run="r",
            profile_name="t",
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=["full"],
            profile={},
        ),
        ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent"),
        ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job=""),
        ev.HeartbeatRead(ts=now - 60, pod="p0r0", coord="p0r0s0t0", record=record),
    ]


async def until(found: Any) -> None:
    async with asyncio.timeout(120):
        while not found():
            await asyncio.sleep(0.01)


async def test_what_could_not_be_written_down_is_taken_for_nobody_s_silence(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it each worker was called silent, and after ``limits.stall`` the run was ended for it."""
    monkeypatch.setattr(side_tasks, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(bus_module, "RETRY_S", 0.01)
    monkeypatch.setattr(side_tasks.alerts, "SETTLES_S", 600.0)  # no busy machine is over it
    looks: list[float] = []
    path = tmp_path / "journal.db"
    journal = Journal(path, source="t")
    bus = Bus(journal, batch_s=0.01, poll_s=0.01)
    assert bus.settled_s == float("inf")
    bus.commit(*training(time.time()))
    tasks = [asyncio.create_task(bus.run())]
    disk.full = True
    bus.record([ev.LogLines(pod="p0r0", src="x", lines=["waits"])])
    await until(lambda: bus.settled_s == 0.0)
    watched = SimpleNamespace(bus=bus)
    monkeypatch.setattr(side_tasks.alerts.Watch, "look", lambda *args: looks.append(time.time()) or [])
    tasks.append(asyncio.create_task(side_tasks.detect(cast(Any, watched))))
    await asyncio.sleep(0.1)
    disk.full = False
    await until(lambda: bus.snapshot.alerts)
    assert 0 < bus.settled_s < side_tasks.alerts.SETTLES_S
    assert looks == []
    monkeypatch.setattr(side_tasks.alerts, "SETTLES_S", 0.0)
    await until(lambda: looks)  # later on it is judged again
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    journal.close()
    (told,) = [e for _, e in iter_events(path) if isinstance(e, ev.Alert)]
    assert (told.name, told.level) == ("journal_refused", "warn")
    assert f"nothing could be written down: the disk of {tmp_path} is full" in told.text


def test_whoever_follows_or_looks_is_told_what_no_journal_can_say(tmp_path: Path, disk: Disk) -> None:
    out = io.StringIO()
    printer = headless.Printer(out)
    s = fold(training(1000.0))
    assert headless.tell_of_full_disk(tmp_path, printer, "") == ""
    assert "DISK" not in status.text(s, tmp_path, 1001.0)
    disk.full = True
    told = headless.tell_of_full_disk(tmp_path, printer, "")
    assert headless.tell_of_full_disk(tmp_path, printer, told) == told
    assert out.getvalue().count(f"alert the disk of {tmp_path} is full (0.0 MiB free) (make room there") == 1
    assert f"DISK     the disk of {tmp_path} is full" in status.text(s, tmp_path, 1001.0)
    disk.full = False
    assert headless.tell_of_full_disk(tmp_path, printer, told) == ""
    assert "takes more again" in out.getvalue()
    assert disk_space.full_disk(tmp_path / "absent") == ""


def test_a_disk_that_became_read_only_is_told_like_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its room nothing says so: on many kernels not even its flags, after an error of the file system."""

    def refuse(path: Any, **times: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    Journal(tmp_path / JOURNAL, source="t").close()
    out = io.StringIO()
    printer = headless.Printer(out)
    assert headless.tell_of_full_disk(tmp_path, printer, "") == ""
    monkeypatch.setattr(os, "utime", refuse)
    told = headless.tell_of_full_disk(tmp_path, printer, "")
    assert told == f"the disk of {tmp_path} takes no writes (Read-only file system)"
    assert "the kernel's log says why" in out.getvalue()
    assert "make room" not in out.getvalue()
    assert f"DISK     {told} (the kernel's log" in status.text(fold(training(1000.0)), tmp_path, 1001.0)
    (tmp_path / "haltd.beat").write_text("one that was just written")
    assert disk_space.full_disk(tmp_path) == ""
