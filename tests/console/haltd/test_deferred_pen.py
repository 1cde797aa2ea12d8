"""The sidecar's pen on a real journal that another connection holds: told at once, written later, in order, once."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.haltd.deferred import AGAIN_S, LAST_S, Deferred


class Disk:
    """The journal, who else may hold it, and a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal.db", source="test", busy_s=0.0)
        self.other = sqlite3.connect(self.journal.path, isolation_level=None)
        self.now = 100.0
        self.told: list[ev.Event] = []
        self.tries = 0
        self.pen = Deferred(self, self.told.extend, clock=lambda: 1234.5, monotonic=lambda: self.now)  # type: ignore[arg-type]

    def append(self, *events: ev.Event) -> None:
        self.tries += 1
        self.journal.append(*events)

    def hold(self) -> None:
        self.other.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self.other.execute("COMMIT")

    @property
    def written(self) -> list[tuple[str, float]]:
        return [(e.nonce, e.ts) for _, e in self.journal.since(0) if isinstance(e, ev.HaltRequested)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.other.close()
    made.journal.close()


def order(nonce: str, ts: float = 0.0) -> ev.Event:
    return ev.HaltRequested(nonce=nonce, mode="hold", by="test", ts=ts)


def test_an_event_is_told_with_its_time_before_it_is_written(disk: Disk) -> None:
    disk.pen.note(order("a"))
    disk.pen.note(order("b", ts=7.0))  # whoever made it knew when
    assert [(e.nonce, e.ts) for e in disk.told if isinstance(e, ev.HaltRequested)] == [("a", 1234.5), ("b", 7.0)]
    assert (disk.written, disk.pen.waiting, disk.tries) == ([], 2, 0)
    disk.pen.append([order("c")])
    assert disk.written == [("a", 1234.5), ("b", 7.0), ("c", 1234.5)]
    assert (disk.pen.waiting, len(disk.told)) == (0, 3)


def test_what_was_only_noted_is_written_at_the_next_tick(disk: Disk) -> None:
    disk.pen.tick()
    assert disk.tries == 0
    disk.pen.note(order("a"))
    disk.pen.tick()
    assert disk.written == [("a", 1234.5)]
    disk.pen.tick()
    assert disk.tries == 1


def test_a_journal_that_is_held_is_asked_now_and_then_and_complained_of_once(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk.hold()
    disk.pen.append([order("a")])
    disk.pen.append([order("b")])  # each event would wait for the disk by itself
    assert (disk.tries, disk.pen.waiting, len(disk.told)) == (1, 2, 2)
    disk.now += AGAIN_S * 0.9
    disk.pen.tick()
    assert disk.tries == 1
    disk.now += AGAIN_S * 0.1
    disk.pen.tick()
    disk.pen.tick()
    assert (disk.tries, disk.written) == (2, [])
    complaints = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(complaints) == 1
    assert complaints[0].startswith("1 events wait for the journal: ")
    disk.release()
    disk.now += AGAIN_S
    disk.pen.tick()
    assert [nonce for nonce, _ in disk.written] == ["a", "b"]
    assert caplog.records[-1].getMessage() == "the journal takes events again: 2 written"
    disk.pen.append([order("c")])  # at once again, and without a word
    assert [nonce for nonce, _ in disk.written] == ["a", "b", "c"]
    assert caplog.records[-1].getMessage() == "the journal takes events again: 2 written"
    disk.hold()
    disk.pen.append([order("d")])
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 2  # another trouble, another complaint


async def test_the_last_words_wait_for_a_commit_and_not_for_ever(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        disk.now += seconds
        if len(waits) == 3:
            disk.release()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await disk.pen.finish()
    assert (disk.tries, waits) == (0, [])
    disk.hold()
    disk.pen.append([order("a")])
    await disk.pen.finish()
    assert disk.written == [("a", 1234.5)]
    assert len(waits) == 3
    disk.hold()
    disk.pen.append([order("b")])
    begun = disk.now
    await disk.pen.finish()
    assert disk.now - begun == pytest.approx(LAST_S, abs=waits[0])
    assert disk.pen.waiting == 1
    disk.release()
