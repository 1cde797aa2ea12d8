"""The log: one line for what several pods say, wrapped, by level and time, copied, saved, and long texts to read."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from ui_desk import desk, typed
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import LogEntry
from uvcc_console.core.words import engine_words
from uvcc_console.ui.actions.log_actions import newest_dump
from uvcc_console.ui.drawing.glyphs import UNICODE
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.judging.filters import parse
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.screens.viewer import ViewerScreen
from uvcc_console.ui.widgets.log_lines import (
    entry_line,
    histogram,
    indent_of,
    row_count,
    source_word,
    stamp_text,
    wrapped,
)
from uvcc_console.ui.widgets.ring import RingLog
from uvcc_engine.contract.run_files.event_names import NAMES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def said(pod: str, text: str, ts: float = 100.0, level: str = "info", detail: str = "") -> LogEntry:
    return LogEntry(ts, level, pod, text, "", detail)


def test_a_checkpoint_of_all_parties_is_one_line_without_hashes() -> None:
    fields = [{"step": 20, "sha256": c * 64} for c in "abc"]
    texts = [engine_words("checkpoint_written", f) for f in fields]
    assert {text for text, _ in texts} == {"checkpoint written at step 20"}
    assert texts[0][1] == "sha256=" + "a" * 12
    ring = RingLog()
    shown = ring.extend([said(f"p{i}r0", *texts[i][:1], ts=100 + i, detail=texts[i][1]) for i in range(3)])
    assert (shown, len(ring), ring[0].source, ring[0].detail) == (1, 1, "p0r0 p1r0 p2r0", "")
    assert "p0r0 p1r0 p2r0" in plain(entry_line(ring[0], UNICODE))
    assert "3 pods" in plain(entry_line(ring[0], UNICODE, wide=False))


def test_what_all_ranks_of_a_pod_say_is_one_line() -> None:
    ring = RingLog()
    ring.extend([said("p0r0", "training starts", detail=f"coord=p0r{i}s0t0 world=4") for i in range(4)])
    ring.extend([said("p0r0", "training starts", detail="coord=p0r1s0t0 world=4")])  # it says so again
    ring.extend([said(f"p{i}r0", "link up", detail=f"coord=p{i}r0s{k}t0") for i in range(3) for k in range(8)])
    assert [(ring[i].source, ring[i].text) for i in range(len(ring))] == [
        ("p0r0", "training starts"),
        ("p0r0", "training starts"),
        ("p0r0 p1r0 p2r0", "link up"),
    ]


def test_whoever_speaks_first_the_names_of_a_line_stand_in_order() -> None:
    ring = RingLog()
    ring.extend([said(pod, "agent up") for pod in ("p1r0", "p0r10", "p2r0", "p0r2")])
    assert ring[0].source == "p0r2 p0r10 p1r0 p2r0"


def test_lines_of_files_and_repeated_or_late_words_stay_apart() -> None:
    ring = RingLog()
    ring.extend([said("p0r0/x.log", "same", level="debug"), said("p1r0/x.log", "same", level="debug")])
    ring.extend([said("p0r0", "link up"), said("p0r0", "link up"), said("p1r0", "link up", ts=200.0)])
    ring.extend([said("rollout", "stage full ok"), said("gate", "stage full ok")])
    assert len(ring) == 7


def test_a_joined_line_is_found_by_a_filter_on_any_of_its_pods() -> None:
    ring = RingLog()
    ring.set_filter(parse("pod=p1r0"))
    ring.extend([said("p0r0", "ready"), said("p0r0", "other"), said("p1r0", "ready")])
    assert [ring[i].source for i in range(len(ring))] == ["p0r0 p1r0"]
    ring.set_filter(parse("party=1"))
    assert len(ring) == 1


def test_joined_lines_survive_trims_whatever_comes() -> None:
    rnd, ring = random.Random(3), RingLog(cap=40)
    for i in range(2000):
        ring.extend([said(f"p{rnd.randrange(3)}r0", f"word {rnd.randrange(9)}", ts=100 + i * 0.2)])
        if i % 100 == 50:
            ring.set_filter(parse("word" if i % 200 == 50 else ""))
    assert 0 < len(ring) <= 50
    assert all(ring[i].text.startswith("word") for i in range(len(ring)))


def test_levels_and_time_windows_narrow_and_the_next_error_is_found() -> None:
    ring = RingLog()
    levels = ["info", "warn", "error", "info", "debug"]
    ring.extend([said("rollout", f"line {i}", ts=100.0 + i, level=level) for i, level in enumerate(levels)])
    ring.set_filter(parse(""), "warn")
    assert [ring[i].text for i in range(len(ring))] == ["line 1", "line 2"]
    ring.set_filter(parse(""), "debug")
    assert ring.since(102.5)
    assert [ring[i].text for i in range(len(ring))] == ["line 3", "line 4"]
    ring.since(None)
    assert ring.next_of_level("error", len(ring) - 1, -1) == 2
    assert ring.next_of_level("error", 3, 1) is None


@given(st.text(max_size=300), st.integers(30, 200))
def test_a_wrapped_line_takes_the_rows_that_were_counted(text: str, width: int) -> None:
    entry = said("p0r0", text)
    indent = indent_of("clock", wide=width >= 100)
    line = entry_line(entry, UNICODE, wide=width >= 100)
    pieces = wrapped(line, width, indent)
    assert all(sum(cell_len(t) for t, _ in piece) <= width for piece in pieces)
    if text.isascii() and text.isprintable():
        assert len(pieces) == row_count(entry, width, indent)
        whole = plain(pieces[0])[indent:] + "".join(plain(p)[indent:].ljust(width - indent) for p in pieces[1:])
        assert whole.split() == text.split() or len(pieces) > 1


def test_times_are_shown_in_four_ways() -> None:
    at = {
        kind: stamp_text(1_795_223_700.0, kind, 1_795_223_790.0, wide=True, utc=True)
        for kind in ("ago", "date", "none")
    }
    assert at == {"ago": "1 m 30 s ago", "date": "2026-11-21 01:15:00", "none": ""}


def test_the_strip_in_the_border_shows_when_most_came_and_where_errors_are() -> None:
    ring = RingLog()
    times = [100.0 + (i if i < 9 else 90) for i in range(40)]
    ring.extend([said("x", f"{i}", ts=ts, level="error" if i == 3 else "info") for i, ts in enumerate(times)])
    strip = histogram(ring, 10, UNICODE)
    assert len(strip) == 10
    assert strip[-1][0] == UNICODE.heat[-1]
    assert [role for text, role in strip if text != " "] == ["bad", "accent"]


def test_every_known_event_has_words_whatever_its_fields_are() -> None:
    for name in NAMES:
        for fields in ({}, {"step": 10**400, "since_s": 10**400, "peer": [], "mode": None}, {"since_s": float("nan")}):
            text, detail = engine_words(name, fields)
            assert text
            assert isinstance(detail, str)
            assert text not in (name, f"{name} step=1")
            assert "_" not in re.sub(r" \S+=\S+", "", text), "words of the field, not a name with fields"


def test_what_the_console_reports_of_a_rollout_has_words_too() -> None:
    fields = {"hourly": 4.5, "at_most": 60, "pods": ["a local 1.50 $/h"] * 3, "wallet": None, "funnel": []}
    assert engine_words("quote", fields) == ("3 pods for $4.50/h, $60.00 at most", "")  # what is empty is not told
    assert engine_words("quote", {"pods": 7, "hourly": "much"})[0] == "0 pods for $0.00/h, $0.00 at most"
    assert engine_words("dp_preflight_ok", {"relay_rtt_ms": 4.2}) == ("preflight passed", "relay_rtt_ms=4.2")
    assert engine_words("exit", {"status": "done", "step": 4, "pid": 7}) == ("worker ends, done at step 4", "pid=7")
    assert engine_words("my_own_word", {"x": 1})[0] == "my_own_word x=1"  # another trainer's event


async def test_keys_of_the_log_wrap_narrow_copy_and_save(folder: Path) -> None:
    story = Story().full(20)
    story.add(ev.Alert(level="warn", name="x", text="a long word " * 30))
    async with desk(story, folder) as d:
        log = d.app.main.query_one(LogView)
        await d.press("3")
        before = log.virtual_size.height
        await d.press("w")
        assert log.virtual_size.height > before
        assert d.text.count("a long word") > 20
        await d.press("l", "l")
        assert "warn and worse" in d.text
        assert len(log.ring) < before
        await d.press("l", "l", "i")
        assert "last 1 min" in d.text
        await d.press("y")
        assert "a long word" in d.app.clipboard
        assert "info rollout stage full running" in d.app.clipboard
        await d.press("S")
        (kept,) = folder.glob("log-*.txt")
        assert len(kept.read_text().splitlines()) == len(log.ring)
        await d.press("slash", *typed("nosuchword"), "enter")
        assert f"none of {log.ring.total} lines is shown" in d.text
        d.app.commands.set_filter("", final=True)
        await d.settle()
        await d.press("colon", *typed("find checkpoint"), "enter")
        assert "checkpoint written at step 20" in log.ring[log.hit].text


async def test_the_last_minute_of_a_run_that_has_ended_is_its_own_last_one(folder: Path) -> None:
    story = Story(steps=5).finished()
    for event in story.events[:20]:  # it was long in its first stages
        object.__setattr__(event, "ts", event.ts - 3000)
    async with desk(story, folder, after=3600.0) as d:
        log = d.app.main.query_one(LogView)
        await d.press("3", "i")
        assert "last 1 min of the run" in d.text
        assert 0 < len(log.ring) < log.ring.total
        end = d.app.snap.ended
        assert all(end - 60 <= log.ring[at].ts <= end for at in range(len(log.ring)))
        assert "run ended" in log.ring[len(log.ring) - 1].text


async def test_enter_and_a_click_read_a_line_whole_or_the_dump_that_it_is_of(folder: Path) -> None:
    story = Story().full(5)
    for pod in ("p1r0", "p2r0"):
        for line in (f"Current thread of {pod}:", f'  File "{pod}.py", line 3 in wait'):
            story.add(ev.LogLines(pod=pod, src="stackdump_1.txt", lines=[line]), 0.1)
    story.add(
        ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields={"step": 4, "sha256": "a" * 64}),
        0.1,
    )
    async with desk(story, folder) as d:
        log = d.app.main.query_one(LogView)
        await d.press("3", "enter")
        assert isinstance(d.app.screen, ViewerScreen)
        assert "checkpoint written at step 4" in d.text
        assert "sha256=" in d.text, "what the log leaves out is here"
        await d.press("q")
        rows = [plain(log._line(at)) for at in range(len(log.ring))]
        at = next(i for i, row in enumerate(rows) if "Current thread of p1r0" in row) - log.scroll_offset.y
        await d.pilot.click(LogView, offset=(12, at + 1))
        assert isinstance(d.app.screen, ViewerScreen)
        assert "p1r0.py" in d.text, "the dump of the line, not the newest"
        assert "p2r0.py" not in "\n".join(d.text.splitlines()[4:-4])


async def test_three_keys_show_what_one_party_did_in_the_last_minute(folder: Path) -> None:
    async with desk(Story().full(20), folder) as d:
        log = d.app.main.query_one(LogView)
        await d.press("3", "a", "i")
        assert (d.app.filter.source, log.window) == ("party=0", 60)
        await d.press("a", "a", "a")
        assert d.app.filter.source == ""


@pytest.mark.ci(__file__)
async def test_v_reads_the_newest_stack_dump_and_a_command_an_artifact(folder: Path) -> None:
    story = Story().full(5)
    for i, line in enumerate(("Current thread 0x1 (most recent call first):", '  File "plane.py", line 3 in wait')):
        story.add(ev.LogLines(pod="p1r0", src="stackdump_1.txt", lines=[line]), 0.1 * i)
    async with desk(story, folder) as d:
        assert newest_dump(d.app.main.query_one(LogView).ring)[0] == "p1r0/stackdump_1.txt"
        await d.press("3", "v")
        assert isinstance(d.app.screen, ViewerScreen)
        assert "line 3 in wait" in d.text
        await d.press("escape")
        home = folder / "artifacts" / "flight"
        home.mkdir(parents=True)
        (home / "rank0.json").write_text('{"seq": 1840}')
        await d.press("colon", *typed("view rank0"), "enter")
        assert "1840" in d.text
        await d.press("q", "colon", *typed("view nothing"), "enter")
        assert "nothing to read called nothing; there are rank0.json" in d.toasts


def test_many_speakers_are_counted_as_what_they_are() -> None:
    counted = {
        "p0r0s0t0 p0r1s0t0": "2 workers",
        "p0r0 p1r0 p2r0 p0r1 p1r1": "5 pods",
        "p0r0 p1r0": "p0r0 p1r0",
        "operator@machine tui": "operator@machine tui",  # a person at a console is no two pods
        "p0@machine tui": "p0@machine tui",
    }
    for sources, shown in counted.items():
        assert source_word(LogEntry(0.0, "info", sources, "x"), 12) == shown
