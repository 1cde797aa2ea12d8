"""What the screen reads: a growing journal in small portions, and a recording that can be walked in any direction."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from pathlib import Path

import pytest
from ui_journals import Story

from uvcc_console.bench import feeder
from uvcc_console.core import events as ev
from uvcc_console.core.folding.reducing import changed
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal import KEEP_AFTER, Journal
from uvcc_console.ui.feed.source import JournalSource, JournalWriter, ReplaySource
from uvcc_engine.contract.errors import UnreadableError


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Story, Path]:
    story = Story(replicas=2).halted()
    return story, story.write(tmp_path / "run") / "journal.sqlite"


def test_catching_up_takes_small_portions_and_loses_no_line(recorded: tuple[Story, Path]) -> None:
    story, path = recorded
    source = JournalSource(path, budget_s=0.0)
    lines, polls = [], 0
    while polls == 0 or source.behind:
        lines += source.poll() or []
        polls += 1
    assert polls > 100
    whole = fold(story.events)
    assert source.snapshot.step == whole.step
    assert [e.text for e in lines] == [e.text for e in whole.log]


def test_a_large_batch_of_lines_arrives_whole_though_the_snapshot_keeps_fewer(tmp_path: Path) -> None:
    path = Story().full(2).write(tmp_path / "run") / "journal.sqlite"
    source = JournalSource(path, budget_s=60)
    source.poll()
    journal = Journal(path)
    journal.append(ev.LogLines(pod="p0r0", src="worker.log", lines=[f"line {i}" for i in range(5000)]))
    journal.append(ev.LogLines(pod="p1r0", src="worker.log", lines=["one", "two"]))
    journal.close()
    texts = [e.text for e in source.poll() or []]
    assert len(texts) == 5002
    assert texts[4999:] == ["line 4999", "one", "two"]


def test_no_journal_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        JournalSource(tmp_path / "journal.sqlite")


def test_the_writer_keeps_the_order_of_what_was_asked(tmp_path: Path) -> None:
    path = Story().full(2).write(tmp_path / "run") / "journal.sqlite"
    writer = JournalWriter(path, "tui")
    first = writer.append(ev.Intent(action="resume", by="a"), int)
    second = writer.append(ev.Intent(action="teardown", by="a"), int)
    writer.close()
    assert second.result() == first.result() + 1


def test_walking_a_recording_in_any_order_shows_what_playing_it_shows(recorded: tuple[Story, Path]) -> None:
    story, path = recorded
    source = ReplaySource(path, clock=lambda: 0.0, budget_s=60)
    rnd = random.Random(5)
    for _ in range(25):
        ts = rnd.uniform(source.start, source.end)
        source.seek(ts)
        source.poll()
        wanted = fold([e for e in story.events if e.ts <= source.now()])
        assert (source.snapshot.step, source.snapshot.status) == (wanted.step, wanted.status)
        assert source.snapshot.log == wanted.log
        assert source.snapshot.agreed_epoch == wanted.agreed_epoch


def test_a_long_way_forward_is_folded_in_portions(recorded: tuple[Story, Path]) -> None:
    story, path = recorded
    source = ReplaySource(path, clock=lambda: 0.0, budget_s=0.0)
    source.seek(source.end)
    polls = 0
    while polls == 0 or source.behind:
        source.poll()
        polls += 1
    assert polls > 100
    assert source.snapshot.status == fold(story.events).status == "halted"
    assert not source.playing


def test_playing_takes_the_speed_and_stops_at_the_end(recorded: tuple[Story, Path]) -> None:
    _, path = recorded
    clock = [0.0]
    source = ReplaySource(path, clock=lambda: clock[0], budget_s=60)
    source.faster(4.0)
    clock[0] = 1.0
    source.poll()
    assert source.now() == pytest.approx(source.start + 4.0)
    clock[0] = 1e6
    source.poll()
    assert source.now() == source.end
    assert not source.playing
    source.toggle()
    assert source.playing
    assert source.now() == source.start


def test_catching_up_is_bounded_by_processor_time_not_by_the_clock(recorded: tuple[Story, Path]) -> None:
    story, path = recorded
    source = JournalSource(path, budget_s=0.03, used=lambda: 0.0)  # the machine gives us no turn: no time is used
    source.poll()
    assert not source.behind
    assert source.snapshot.status == fold(story.events).status


def test_while_it_is_behind_the_time_is_that_of_the_picture(tmp_path: Path) -> None:
    story = Story().full(40)
    path = story.write(tmp_path / "run") / "journal.sqlite"
    source = JournalSource(path, clock=lambda: story.now + 300.0, budget_s=0.0)
    source.poll()
    first = source.snapshot.updated
    assert source.behind
    assert source.behind_s == pytest.approx(story.now - first)
    assert source.now() == first
    while source.behind:
        source.poll()
    assert (source.behind_s, source.now()) == (0.0, story.now + 300.0)


def test_a_record_changed_quickly_is_what_replace_makes_of_it() -> None:
    s = fold(Story().full(3).events)
    assert changed(s, seq=7, detail="x") == dataclasses.replace(s, seq=7, detail="x")
    worker = next(iter(s.workers.values()))
    assert changed(worker, step=9) == dataclasses.replace(worker, step=9)
    with pytest.raises(KeyError):
        changed(s, no_such_field=1)


def test_an_hour_of_twenty_four_pods_is_folded_in_seconds_of_processor_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    count = journal.append(*feeder.opening(24))
    step = 0
    while count < 16_810:
        step += 1
        count = journal.append(*feeder.beat(24, step), *feeder.lines(24, 24, step))
    journal.close()
    source = JournalSource(path, budget_s=60.0)
    before = time.process_time()
    source.poll()
    assert source.snapshot.seq == count
    assert time.process_time() - before <= 6.0  # a quiet processor takes about a fifth of it


def test_a_long_run_is_shown_from_the_snapshot_beside_its_journal_and_its_newest_lines_come_with_it(
    tmp_path: Path,
) -> None:
    story = Story(replicas=2).full(160)
    assert len(story.events) > KEEP_AFTER
    run_dir = story.write(tmp_path / "run")
    journal = Journal(run_dir / "journal.sqlite", readonly=True)
    at = len(story.events) - 50
    snapshot_cache.keep(run_dir, fold(story.events[:at]), journal.mark(at))
    journal.close()
    source = JournalSource(run_dir / "journal.sqlite", budget_s=60.0)
    assert source.snapshot.seq == at
    assert source.poll() is None  # the log is drawn anew, from the snapshot
    whole = fold(story.events)
    assert source.snapshot.log == whole.log
    assert (source.snapshot.step, source.snapshot.workers) == (whole.step, whole.workers)
    assert source.poll() == []
    source.close()
    clock = itertools.count()
    source = JournalSource(run_dir / "journal.sqlite", used=lambda: next(clock) / 1000)  # a millisecond an event
    source.poll()
    assert (source.behind, source.snapshot.step) == (False, whole.step)  # the first picture is of now
    source.close()
    for odd in ("{", "[]", '{"version": 1}'):  # a damaged one is left alone
        (run_dir / snapshot_cache.NAME).write_text(odd)
        source = JournalSource(run_dir / "journal.sqlite", budget_s=60.0)
        assert source.poll()
        assert source.snapshot == whole
        source.close()
