"""A command whose standard output is lost: a reader that has left, a full disk, a stream closed, letters it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_engine.train.sinks.printed_rows import PrintedRows

UVCC = (sys.executable, "-m", "uvcc_console.cli.main")
ENGINE = (sys.executable, "-m", "uvcc_engine.cli")
FULL = "error: cannot write standard output: No space left on device (free space there, or send it elsewhere)\n"
CLOSED = "error: cannot write standard output: it was closed before this command began "
CLOSED += "(send it to a file, or to /dev/null)\n"
WRITES = [(*UVCC, "docs", "--list"), (*UVCC, "docs", "glossary"), (*UVCC, "man"), (*UVCC, "profiles", "--json")]
WRITES += [(*UVCC, "--help"), (*ENGINE, "bench", "--help"), (*ENGINE, "verify", "nothing", "--json")]


def left_at_once(command: tuple[str, ...], buffered: bool = True) -> subprocess.CompletedProcess[str]:
    """The command's end with nobody at the other end of its pipe."""
    reads, writes = os.pipe()
    os.close(reads)
    env = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    try:
        return subprocess.run(command, env=env, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writes)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", WRITES, ids=lambda c: " ".join(c[2:]))
def test_a_full_disk_is_told_by_one_line(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(FULL)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", WRITES, ids=lambda c: " ".join(c[2:]))
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_has_left_is_no_error_and_no_verdict(command: tuple[str, ...], buffered: bool) -> None:
    done = left_at_once(command, buffered)
    assert "Traceback" not in done.stderr
    assert "standard output" not in done.stderr
    assert done.returncode in (1, 2 if "verify" in command else 0)
    assert buffered or done.returncode == 1


def closed(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The command's end where it has no standard output."""
    return subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("command", [(*UVCC, "docs", "--list"), (*ENGINE, "bench", "--help")])
def test_a_stream_that_was_closed_is_told_where_something_was_to_be_said(command: tuple[str, ...]) -> None:
    done = closed(command)
    assert (done.returncode, done.stderr) == (1, CLOSED)


def test_a_command_without_output_does_its_work_to_the_end_and_may_be_silent() -> None:
    code = """
import sys
from uvcc_engine.contract.machine.standard_output import guarded
def run():
    if "told" in sys.argv:
        print("one", flush=True)
    print("done", file=sys.stderr)
    return 0
sys.exit(guarded(run))
"""
    silent, told = (closed((sys.executable, "-c", code, word)) for word in ("silent", "told"))
    assert (silent.returncode, silent.stderr) == (0, "done\n")
    assert told.returncode == 1
    assert told.stderr.startswith("done\n")
    assert "it was closed before this command began" in told.stderr


def test_a_letter_that_the_terminal_lacks_is_an_escape(tmp_path: Path) -> None:
    profile = tmp_path / "größe.yaml"
    profile.write_text("job: {kind: command, argv: [x], steps: 1}\nfleet: {provider: local}\n")
    plan = (*UVCC, "plan", str(profile), "--no-rehearsal")
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(plan, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"gr\\xf6\\xdfe ")


def test_a_command_ends_where_its_reader_leaves() -> None:
    code = """
import sys
from uvcc_engine.contract.machine.standard_output import guarded
def run():
    for _ in range(100):
        print("x" * 10_000)
    raise SystemExit("it went on")
sys.exit(guarded(run))
"""
    done = left_at_once((sys.executable, "-c", code))
    assert (done.returncode, done.stderr) == (1, "")


def test_another_files_error_is_not_put_down_to_standard_output() -> None:
    code = """
from uvcc_engine.contract.machine.standard_output import guarded
def run():
    raise OSError(28, "No space left on device")
guarded(run)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("\nOSError: [Errno 28] No space left on device\n")


def test_a_training_goes_on_where_nobody_reads_its_rows_any_more() -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    rows = PrintedRows(4, clock=lambda: 0.0, say=say)
    for step in (1, 2):
        rows.show(step, {"loss": 2.5, "lr": 3e-3, "toks_per_s": 27742.9})
    assert len(said) == 2
