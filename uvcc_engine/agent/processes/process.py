"""Processes known by pid, start time and boot id, never by name; signals go to their own process groups.

A process counts as absent when it is a zombie, when its pid belongs to another start time, and after a reboot.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.host import boot_id
from uvcc_engine.contract.parsing import strict


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for ever; ``starttime`` as in ``host.Process``."""

    pid: int
    starttime: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Of a living process; None if there is none or it has already ended."""
        found = host.process(pid)
        return cls(pid, found.starttime, boot_id()) if found is not None and not found.ended else None

    @classmethod
    def of_child(cls, pid: int) -> ProcessId:
        """Of a child that nobody has collected yet, also if it has ended. ``starttime`` is 0 where nothing tells it."""
        found = host.process(pid)
        return cls(pid, max(0, found.starttime) if found is not None else 0, boot_id())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessId:
        """Of a record that names a process and may say more. Raises UnreadableError for fields missing or of others."""
        try:
            named = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            return strict.read(cls, named, "a process identity")
        except ConfigError as error:
            raise UnreadableError(error.what, error.hint) from error

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
        leader = host.process(self.pid)
        if leader is not None and leader.starttime not in (self.starttime, -1):
            return False  # the pid was given to another process, so the group is long gone
        if not self.alive() and not group_members(self.pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            return True
        return False


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = ((pid, host.process(pid)) for pid in host.pids())
    return [pid for pid, seen in found if seen is not None and seen.group == group and not seen.ended]


def has_ended(child: int) -> bool:
    """Whether a child of this process has ended and waits to be collected, which this does not do."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    found = host.process(child)  # macOS' Python has it since 3.13 only
    return found is None or found.ended


def wake_pipe() -> tuple[int, int]:
    """A pipe for ``signal.set_wakeup_fd``: both ends do not wait, and neither is inherited."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def exit_of(status: int) -> tuple[int, str]:
    """A wait status as (return code, signal name or ""); a signal gives a negative code, as in subprocess."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code, ""
    try:
        return code, signal.Signals(-code).name
    except ValueError:
        return code, f"signal {-code}"
