"""The log of a run: what a line says of whom, and that neither a full disk nor what it quotes does any harm."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.log import JsonLines, WarningsOnStderr, logger, tell_of_warnings, within
from uvcc_console.runs import logfile
from uvcc_engine.contract.errors import UvccError

log = logger("uvcc_console.made.up")
T = 1_795_223_700.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Without what a verb that was called here before left behind, and afterwards as it was."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, WarningsOnStderr)]:
        root.removeHandler(handler)
    before, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.fixture
def run_dir() -> Path:
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / "made-1"
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(ev.RunEnded(status="ok"))
    journal.close()
    return folder


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_says_of_which_run_pod_halt_and_stage_it_speaks(run_dir: Path) -> None:
    logfile.begin(run_dir, "conductor")

    async def below() -> None:
        log.warning("lost %d", 3, pod="p0r0")
        logging.getLogger("asyncio").error("of a library")

    with within(run="made-1"):
        with within(stage="drill"):
            await asyncio.gather(below(), asyncio.create_task(below()))
        try:
            raise UvccError("no room", "make some")
        except UvccError:
            log.exception("it failed", nonce="n1", stage="full")
    log.info("outside")
    found = rows(run_dir / "conductor.jsonl")
    pod = {
        "level": "warning",
        "logger": "made.up",
        "message": "lost 3",
        "run": "made-1",
        "pod": "p0r0",
        "stage": "drill",
    }
    assert [{k: v for k, v in r.items() if k in pod} for r in found[::2][:2]] == [pod, pod]
    assert (found[1]["message"], found[1]["stage"], found[1]["level"]) == ("of a library", "drill", "error")
    error = found[4]
    assert [error[k] for k in ("error", "hint", "nonce", "stage")] == ["UvccError", "make some", "n1", "full"]
    assert "no room" in str(error["trace"])
    assert "raise UvccError" in str(error["trace"])
    assert not {"run", "stage"} & found[5].keys()
    assert all(r["process"] == "conductor" for r in found)


def test_a_full_disk_costs_the_line_and_nothing_else(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        return
    (run_dir / "conductor.jsonl").symlink_to("/dev/full")
    logfile.begin(run_dir, "conductor")
    for n in range(2000):
        log.error("line %d", n, pod="p0r0")
    assert capsys.readouterr().err == ""
    (run_dir / "conductor.jsonl").unlink()
    logfile.begin(run_dir / "no such folder", "haltd")
    log.info("nowhere to go")
    log.error("nowhere at \x1b[31mall")
    assert capsys.readouterr().err == "nowhere at all\n"  # <process>.log takes it


def test_the_files_stay_bounded_and_read_in_order(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "BYTES", 2000)
    logfile.begin(run_dir, "haltd")
    for n in range(200):
        log.info("line %03d", n)
    files = sorted(p.name for p in run_dir.glob("haltd.jsonl*"))
    assert files == ["haltd.jsonl", "haltd.jsonl.1", "haltd.jsonl.2", "haltd.jsonl.3"]
    assert all((run_dir / name).stat().st_size <= 2000 for name in files)
    seen = [e.message for e in logfile.LogReader(run_dir).new()]
    assert seen == [f"line {n:03d}" for n in range(200 - len(seen), 200)]
    assert len(seen) > 40


def test_what_comes_is_followed_over_a_rotation(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "BYTES", 1500)
    logfile.begin(run_dir, "conductor")
    reader, seen = logfile.LogReader(run_dir), []
    for n in range(100):
        log.info("line %03d", n)
        seen += [e.message for e in reader.new()]
    reader.close()
    assert seen == [f"line {n:03d}" for n in range(100)]


def test_a_line_that_is_still_being_written_is_read_once_it_is_whole(run_dir: Path) -> None:
    path = run_dir / "conductor.jsonl"
    whole = json.dumps({"ts": T, "level": "info", "message": "whole"})
    path.write_text(whole[:9])
    reader = logfile.LogReader(run_dir)
    assert reader.new() == []
    with path.open("a") as out:
        out.write(whole[9:] + "\n" + '{"ts": 1')
    assert [e.message for e in reader.new()] == ["whole"]
    assert reader.new(unfinished=True) == []  # half an object is none


def test_the_verb_merges_filters_and_keeps_what_has_no_date(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(at: float, level: str, message: str, **more: str) -> str:
        return json.dumps({"ts": T + at, "level": level, "process": "x", "message": message, **more}) + "\n"

    (run_dir / "conductor.jsonl").write_text(
        line(1, "info", "one", pod="uvcc-made-1-p0r0", stage="smoke") + line(4, "error", "four", trace="a\n  b")
    )
    (run_dir / "haltd.jsonl").write_text(line(2, "warning", "two", pod="p0r0", nonce="ab") + "nonsense\n" + "[1]\n")
    (run_dir / "conductor.log").write_text("Fatal Python error\nhalf a line")
    os.utime(run_dir / "conductor.log", (T + 3, T + 3))
    assert main(["logs", "made-1", "--json"]) == 0
    said = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [r["message"] for r in said] == ["one", "two", "Fatal Python error", "half a line", "four"]
    assert said[1] == {
        "ts": T + 2, "level": "warning", "process": "haltd", "message": "two", "pod": "p0r0", "nonce": "ab",
    }  # fmt: skip
    os.utime(run_dir, (T, T))  # a run that was just made waits for its conductor to start, and no other does
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nobody writes any more, and yet it waits"))
    assert main(["logs", "made-1", "--pod", "p0r0", "--follow"]) == 0
    text = capsys.readouterr().out
    assert [t.split()[-2:] for t in text.splitlines()] == [
        ["[pod=uvcc-made-1-p0r0", "stage=smoke]"],
        ["[pod=p0r0", "nonce=ab]"],
    ]
    assert main(["logs", "made-1", "--level", "error"]) == 0
    assert [t.split()[-1] for t in capsys.readouterr().out.splitlines()] == ["four", "a", "b"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=400))
def test_every_line_of_bytes_is_an_entry_or_none(data: bytes) -> None:
    logfile.entry(data, "conductor")
    found = logfile.plain(data, "conductor", T)
    assert found.message.isprintable()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(["ts", "level", "message", "pod", "trace", "error"]),
        st.text() | st.floats() | st.none() | st.lists(st.integers()),
    )
)
def test_every_object_is_an_entry_or_none(row: dict[str, object]) -> None:
    found = logfile.entry(json.dumps({"ts": T, **row}).encode(), "haltd")
    if found is not None:
        assert found.text().replace("\n", "").replace("\t", "").isprintable()
        assert found.level in ("info", "warning", "error")


def test_warnings_of_a_command_are_told_cleaned_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell_of_warnings()
    tell_of_warnings()
    log.warning("pod says %s", "\x1b[31mevil\x1b]0;t\x07")
    log.info("nothing to tell")
    assert capsys.readouterr().err == "uvcc: pod says evil\n"


def test_a_record_is_bounded_and_one_line_whatever_it_quotes() -> None:
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "\n\x00é" * 9999, None, None)
    line = JsonLines("conductor").format(record)
    assert line.isascii()
    assert "\n" not in line
    assert len(line) < 40_000
