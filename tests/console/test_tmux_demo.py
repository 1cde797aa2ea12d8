"""The main job as an operator does it: a real tmux, real keys, real pods. Start, watch, F9, resume, verified, gone."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
UVCC = f"{sys.executable} -c 'import sys; from uvcc_console.cli.main import main; sys.exit(main())'"


class Terminal:
    """One tmux server of our own with one window that runs a command."""

    def __init__(self, home: Path, command: str, width: int, height: int) -> None:
        self.home = home
        self._tmux = ["tmux", "-S", str(home / "tmux.sock"), "-f", "/dev/null"]
        # a test runner's COLUMNS and LINES would hide the window's own size from the program
        # and this demo is one of a user, whose pods share an import of their own and not the tests' one
        env = {k: v for k, v in os.environ.items() if k not in ("TMUX", "NO_COLOR", "COLUMNS", "LINES", PRELOADED_ENV)}
        env |= {
            "UVCC_HOME": str(home / "data"),
            "TMPDIR": str(home),
            "COLORTERM": "truecolor",
            "TERM": "xterm-256color",
        }
        shell = f"{command}; echo left with $?; cat"
        size = ["-x", str(width), "-y", str(height)]
        subprocess.run([*self._tmux, "new-session", "-d", *size, shell], env=env, check=True)

    def screen(self) -> str:
        return subprocess.run([*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    def keys(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def resize(self, width: int, height: int) -> None:
        subprocess.run([*self._tmux, "resize-window", "-x", str(width), "-y", str(height)], check=True)

    def wait_for(self, pattern: str, seconds: float) -> str:
        """The first screen on which the pattern stands; fails with the last screen seen."""
        return self.wait_until(lambda s: bool(re.search(pattern, s)), seconds, pattern)

    def wait_until(self, holds: Callable[[str], bool], seconds: float, what: str) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen = self.screen()
            if holds(seen):
                return seen
            select.select([], [], [], 0.15)
        raise AssertionError(f"not seen within {seconds} s: {what}\n{self.screen()}")

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: unix sockets below it must stay under 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ut-"))
    yield path
    if _alive(path):  # a failed test may not leave pods behind
        env = {**os.environ, "UVCC_HOME": str(path / "data"), "TMPDIR": str(path)}
        subprocess.run(f"{UVCC} teardown last", shell=True, env=env, check=False, capture_output=True, timeout=500)
    shutil.rmtree(path, ignore_errors=True)


def _snapshot(home: Path) -> Snapshot:
    (journal,) = (home / "data" / "runs").glob("*/journal.sqlite")
    return read_all(Journal(journal, readonly=True))


def _asked(home: Path) -> list[str]:
    """The halts that were asked for, drills aside."""
    (journal,) = (home / "data" / "runs").glob("*/journal.sqlite")
    found = [e for _, e in iter_events(journal) if isinstance(e, ev.HaltRequested) and not e.drill]
    return [e.mode for e in found]


def _alive(home: Path) -> list[str]:
    """Processes of this demo that still run (tmux itself aside)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(home).encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "uvcc_" in command and "cli.main" not in command:
                    found.append(command)
        except OSError:
            continue
    return found


@pytest.mark.timeout(1800)
def test_watch_halt_resume_and_end_verified(home: Path) -> None:
    patient = "--set halt.patience=60s --set gates.halt_drill_s=90"  # the drill has the workers' start in it
    terminal = Terminal(home, f"{UVCC} demo --seed 11 --steps 50 --set job.test_rows=200 {patient}", 160, 50)
    try:
        terminal.wait_until(lambda s: "Fleet" in s and "F9" in s, 300, "the first screen")
        terminal.wait_for(r"FULL .*step [1-9]\d+/50", 300)
        before = _snapshot(home).series["p0r0s0t0"]["loss"]
        assert before.ys()[-1] < before.ys()[0]
        terminal.keys("F9")
        terminal.wait_for(r"HOLD|HALT \d/3", 300)  # a busy machine may draw nothing of a hold's three seconds
        halted = terminal.wait_for(r"HALT 3/3 verified at step \d+", 300)
        assert "HALTED" in halted
        assert _asked(home) == ["hold", "halt"]
        halt = _snapshot(home).halt
        assert halt.verified == halt.total == 3
        assert all(stage == "gone" and checkpoint for stage, _, checkpoint, _ in halt.acks.values())
        terminal.wait_for(r"full waiting: halted", 300)  # before that a resume is refused, and the screen says why
        terminal.keys("r")
        terminal.wait_until(lambda s: "✓ VERIFIED" in s and "the same from 3 workers" in s, 300, "the result")
        terminal.wait_for(r"all gone", 300)
        s = _snapshot(home)
        assert (s.status, s.leaks, s.attempt) == ("ok", (), 1)
        assert s.verdicts["full"].ok
        terminal.resize(80, 24)
        small = terminal.wait_until(lambda s: "✓ VERIFIED" in s and "F9" in s, 300, "the small layout")
        assert max(len(line) for line in small.splitlines()) <= 80
        terminal.keys("q")
        terminal.wait_for(r"left with 0", 300)
        terminal.wait_until(lambda _: not _alive(home), 300, "every process gone")
        assert not list(home.glob("uvcc-*")), "a pod's home was left"
    finally:
        terminal.close()
