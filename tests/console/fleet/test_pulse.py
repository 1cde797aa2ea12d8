"""A process moves, is frozen or is dead: told by its beat, with real processes that are really stopped."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from uvcc_console.fleet import procs, pulse
from uvcc_console.fleet.procs import LocalProcess
from uvcc_console.fleet.pulse import DEAD, FROZEN, MOVING, Beat, vital
from uvcc_console.fleet.runclock import up

BEATER = """
import sys, time
from pathlib import Path
from uvcc_console.fleet import pulse
beat = pulse.Beat(Path(sys.argv[1]), "one")
while True:
    beat.beat()
    print("beat", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "STOPPED_S", 1.0)


@pytest.fixture
def beater(tmp_path: Path) -> Iterator[LocalProcess]:
    child = subprocess.Popen([sys.executable, "-c", BEATER, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = procs.identify(child.pid)
    assert found is not None
    yield found
    child.kill()
    child.wait()


def read_only(path: object, **times: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_nobody_is_frozen_whose_disk_takes_no_beat(
    tmp_path: Path, beater: LocalProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one that had become read-only conductor and sidecar took each other for stuck, and one killed the other."""
    (tmp_path / "other.beat").write_text(f"{beater.pid} {beater.starttime} {up() - 2 * pulse.SILENT_S:.3f}")
    before = (tmp_path / "other.beat").stat()
    assert vital(tmp_path, "other", beater).state == FROZEN
    assert (tmp_path / "other.beat").stat().st_mtime_ns == before.st_mtime_ns  # to ask changes nothing
    monkeypatch.setattr(os, "utime", read_only)
    assert vital(tmp_path, "other", beater).state == MOVING
    os.kill(beater.pid, signal.SIGSTOP)
    end = time.monotonic() + 120.0
    while vital(tmp_path, "other", beater).state != FROZEN:  # that it is stopped needs no disk
        assert time.monotonic() < end
    os.kill(beater.pid, signal.SIGCONT)


def until(tmp_path: Path, who: LocalProcess, state: str) -> pulse.Vital:
    end = time.monotonic() + 120.0
    while (found := vital(tmp_path, "one", who)).state != state:
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def test_a_stopped_process_is_frozen_and_moves_again(tmp_path: Path, beater: LocalProcess) -> None:
    assert vital(tmp_path, "one", beater).state == MOVING
    os.kill(beater.pid, signal.SIGSTOP)
    found = until(tmp_path, beater, FROZEN)
    assert found.stopped
    assert "a signal stopped it" in found.words()
    os.kill(beater.pid, signal.SIGCONT)
    until(tmp_path, beater, MOVING)
    os.kill(beater.pid, signal.SIGSTOP)
    assert pulse.end(beater)  # a stopped one too, and exactly that one
    assert vital(tmp_path, "one", beater).state == DEAD


def test_one_that_runs_but_does_not_come_round_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = procs.identify(os.getpid())
    now = [1000.0]
    monkeypatch.setattr(pulse, "up", lambda: now[0])
    beat = Beat(tmp_path, "one")
    beat.beat()
    now[0] += pulse.SILENT_S - 1
    assert vital(tmp_path, "one", me).state == MOVING
    now[0] += 2
    found = vital(tmp_path, "one", me)
    assert (found.state, found.stopped) == (FROZEN, False)
    assert "stuck" in found.words()
    beat.beat()
    assert vital(tmp_path, "one", me).state == MOVING


@pytest.mark.parametrize("junk", [b"", b"\xff" * 64, b"1 2", b"1 1 1e9", b"x y z", b"nan nan nan"])
def test_a_beat_of_another_or_of_nobody_says_nothing(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "one.beat").write_bytes(junk)
    assert vital(tmp_path, "one", procs.identify(os.getpid())).state == MOVING
    assert vital(tmp_path, "one", None).state == DEAD
    assert vital(tmp_path, "one", LocalProcess(os.getpid(), 1)).state == DEAD


def test_a_folder_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    beat = Beat(tmp_path / "nowhere", "one")
    beat.beat()
    beat.close()


def test_a_stopped_process_is_told() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not procs.stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert procs.stopped(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not procs.stopped(child.pid)
