"""Processes of this machine, told apart by pid and start time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.host import boot_id

__all__ = [
    "MARK",
    "LocalProcess",
    "age_s",
    "alive",
    "boot_id",
    "descendants",
    "identify",
    "marked",
    "send",
    "stop_all",
    "stopped",
]

MARK = "UVCC_POD"


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """One process for ever: a reused pid has another start time (see ``host.Process``)."""

    pid: int
    starttime: int


def identify(pid: int) -> LocalProcess | None:
    """The identity of a running pid; a zombie has ended and counts as none."""
    found = host.process_by_psutil(pid)
    return LocalProcess(pid, found.starttime) if found is not None and not found.ended else None


def stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process; False when there is none."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def age_s(who: LocalProcess) -> float:
    """Seconds since the process was started; 0 if it is gone."""
    try:
        return max(0.0, time.time() - psutil.Process(who.pid).create_time()) if alive(who) else 0.0
    except psutil.Error:
        return 0.0


def alive(who: LocalProcess) -> bool:
    """Whether exactly this process still runs."""
    return identify(who.pid) == who


def descendants(root: int) -> set[int]:
    """Every process below ``root``, without it."""
    try:
        return {child.pid for child in psutil.Process(root).children(recursive=True)}
    except psutil.Error:
        return set()


def marked(value: str, name: str = MARK) -> set[int]:
    """Processes that were started with ``name=value`` in their environment, whatever session they moved to.

    Those whose environment the system does not show are left out: other users', and on macOS the system's own programs.
    """
    found = set[int]()
    for process in psutil.process_iter():  # which remembers what it has seen: this is asked again and again
        try:
            if process.environ().get(name) == value:
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's
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
