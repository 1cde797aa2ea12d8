"""Processes known by pid, start time and boot id, never by name; signals go to their own process groups. Linux.

A process counts as absent when it is a zombie, when its pid belongs to another start time, and after a reboot.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from uvcc_engine.contract.errors import UnreadableError


@cache
def boot_id() -> str:
    """Identifies this boot of the host; "" where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for ever. ``starttime`` in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    starttime: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Of a living process; None if there is none or it has already ended."""
        fields = _stat(pid)
        return cls(pid, int(fields[19]), boot_id()) if fields and fields[0] not in "ZX" else None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessId:
        """Raises UnreadableError if a field is missing or of another type."""
        try:
            return cls(int(data["pid"]), int(data["starttime"]), str(data["boot_id"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableError(f"not a process identity: {dict(data)!r:.200}") from error

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, number: int) -> bool:
        """Signal exactly this process; False if it is gone."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def send_group(self, number: int) -> bool:
        """Signal the process group that this process leads (it was started with setsid), also what is left of the
        group after its leader has gone; False if nothing is left."""
        if self.boot_id != boot_id():
            return False
        leader = _stat(self.pid)
        if leader is not None and int(leader[19]) != self.starttime:
            return False  # the pid was given to another process, so the group is long gone
        if not self.alive() and not group_members(self.pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            return True
        return False


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) and int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(name))
    return found


def exit_of(status: int) -> tuple[int, str]:
    """A wait status as (return code, signal name or ""); a signal gives a negative code, as in subprocess."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code, ""
    try:
        return code, signal.Signals(-code).name
    except ValueError:
        return code, f"signal {-code}"


def _stat(pid: int) -> list[str] | None:
    """Fields 3 and on of /proc/PID/stat: state first, then ppid, pgrp, session; start time is the 20th."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read().decode(errors="replace")
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()
