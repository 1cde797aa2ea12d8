"""Processes of this machine, told apart by pid and start time. Linux /proc, standard library only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MARK = "UVCC_POD"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for ever: a reused pid has another start time (clock ticks since boot)."""

    pid: int
    starttime: int


def boot_id() -> str:
    """Changes at every boot; empty where /proc does not tell."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command, state first; None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()


def identify(pid: int) -> ProcessId | None:
    """The identity of a running pid; a zombie has ended and counts as none."""
    fields = _stat(pid)
    return ProcessId(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def state(pid: int) -> str:
    """What the kernel says the process does (R, S, D, T, ...); empty when there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def age_s(who: ProcessId) -> float:
    """Seconds since the process was started; 0 where the system does not tell."""
    try:
        up = float((PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, up - who.starttime / os.sysconf("SC_CLK_TCK"))


def alive(who: ProcessId) -> bool:
    """Whether exactly this process still runs."""
    return identify(who.pid) == who


def children() -> dict[int, list[int]]:
    """Parent pid -> its children, zombies included."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir(PROC):
        if entry.isdigit() and (fields := _stat(int(entry))):
            found.setdefault(int(fields[1]), []).append(int(entry))
    return found


def children_of(pid: int) -> list[int]:
    """The children of one process, zombies included, without a look at every other process of the machine."""
    found: list[int] = []
    try:
        for task in (PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except (OSError, ValueError):
        return children().get(pid, [])  # a kernel that does not keep such lists, or a thread that just ended
    return found


def descendants(root: int) -> set[int]:
    """Every process below ``root``, without it."""
    tree, found, todo = children(), set[int](), [root]
    while todo:
        for child in tree.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def marked(value: str, name: str = MARK) -> set[int]:
    """Processes that were started with ``name=value`` in their environment, whatever session they moved to."""
    needle, found = f"{name}={value}".encode(), set[int]()
    for entry in os.listdir(PROC):
        if not entry.isdigit():
            continue
        try:
            environ = (PROC / entry / "environ").read_bytes()
        except OSError:
            continue  # ended meanwhile, or another user's
        if needle in environ.split(b"\0"):
            found.add(int(entry))
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Signal each pid; those that ended meanwhile do not matter."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def stop_all(find: Callable[[], set[int]], *, grace_s: float = 1.0, limit_s: float = 5.0) -> set[int]:
    """SIGTERM, then SIGKILL, until ``find`` names no live process; returns those that would not end.

    SIGCONT goes first: a stopped process cannot act on SIGTERM. ``find`` is asked again each round because a
    process may fork while it is being ended.
    """
    begin = time.monotonic()
    termed = set[int]()
    while True:
        left = {pid for pid in find() if identify(pid) is not None}
        waited = time.monotonic() - begin
        if not left or waited > limit_s:
            return left
        if waited < grace_s:
            send(left - termed, signal.SIGTERM)
            send(left - termed, signal.SIGCONT)
            termed |= left
        else:
            send(left, signal.SIGKILL)
        time.sleep(0.02)
