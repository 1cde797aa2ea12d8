"""Whether a process of a run still moves. That its pid exists says little: a stopped or stuck one has a pid as well.

Each process writes a beat from the very loop that does its work, with the machine's counter since boot, so neither a
clock that is set nor a reader that has just come can mistake one for the other. The file is written in place: a full
disk takes that too. One that was made read-only does not, and there nobody is called frozen for want of a beat.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_console.fleet import procs
from uvcc_console.fleet.procs import LocalProcess
from uvcc_console.fleet.runclock import up

BEAT_S: Final = 0.5
STOPPED_S: Final = 2.0  # without a beat, for one that a signal has stopped
SILENT_S: Final = 60.0  # for one that runs or waits: a crowded machine may leave it no turn for so long
MOVING, FROZEN, DEAD = "moving", "frozen", "dead"


_NO_WRITES: Final = frozenset({errno.EROFS, errno.EIO})


def no_writes(path: Path) -> str:
    """Why the disk takes nothing at all, not even the times that a file has already; "" where it takes that, or where
    nobody can tell."""
    try:
        found = os.stat(path)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    except OSError as e:
        return os.strerror(e.errno) if e.errno in _NO_WRITES else ""
    return ""


def _file(run_dir: Path, name: str) -> Path:
    return run_dir / f"{name}.beat"


class Beat:
    """The writing end. ``beat`` may be called as often as one likes; it never raises."""

    def __init__(self, run_dir: Path, name: str) -> None:
        me = procs.identify(os.getpid())
        self._head = f"{os.getpid()} {me.starttime if me else 0}"
        self._fd = -1
        self._due = float("-inf")
        with contextlib.suppress(OSError):
            self._fd = os.open(_file(run_dir, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self) -> None:
        """Say that the loop came round."""
        now = up()
        if self._fd < 0 or now < self._due:
            return
        self._due = now + BEAT_S
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, f"{self._head} {now:.3f}".ljust(63).encode() + b"\n", 0)

    def close(self) -> None:
        """The last beat stays in the file: it names its process, and that one has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class Vital:
    """``state``: moving | frozen | dead. ``silent_s``: since when there is no beat; ``stopped``: by a signal."""

    who: LocalProcess | None
    state: str
    silent_s: float = 0.0
    stopped: bool = False

    @property
    def moving(self) -> bool:
        return self.state == MOVING

    def words(self) -> str:
        """How it is, for the operator."""
        if self.state != FROZEN or self.who is None:
            return self.state
        why = "a signal stopped it" if self.stopped else "it is stuck"
        return f"pid {self.who.pid} has not moved for {self.silent_s:.0f} s: {why}"


def beat_age_s(run_dir: Path, name: str) -> float:
    """For how many seconds the file of its beats is as it is, by the wall clock; infinite where there is none."""
    try:
        return abs(time.time() - _file(run_dir, name).stat().st_mtime)
    except OSError:
        return float("inf")


def vital(run_dir: Path, name: str, who: LocalProcess | None) -> Vital:
    """How the process ``who`` of that name is. One that never gave a beat, or cannot, moves, unless it is stopped."""
    if who is None or not procs.alive(who):
        return Vital(None, DEAD)
    stopped = procs.stopped(who.pid)
    silent = min(procs.age_s(who), SILENT_S) if stopped else 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid, start, at = _file(run_dir, name).read_bytes()[:256].split()[:3]
        if (int(pid), int(start)) == (who.pid, who.starttime):
            silent = max(0.0, up() - float(at))
    frozen = silent > (STOPPED_S if stopped else SILENT_S) and (stopped or not no_writes(_file(run_dir, name)))
    return Vital(who, FROZEN if frozen else MOVING, silent, stopped)


def end(who: LocalProcess, limit_s: float = 5.0) -> bool:
    """Kill exactly this process, which cannot end by itself any more; whether it is gone within ``limit_s``."""
    limit = time.monotonic() + limit_s
    while procs.alive(who):
        procs.send([who.pid], signal.SIGKILL)
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
