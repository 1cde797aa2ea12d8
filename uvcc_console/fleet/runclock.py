"""The clock of a run: it starts with the wall's at the run's birth and then goes by the machine's own counter.

Setting the machine's clock, by hours and in either direction, neither ends nor prolongs anything that is measured with
it: time to live, waiting, spending. Every process of the run reads the same anchor file. Only after a reboot, when the
counter began anew, the wall clock is believed again, and never less than what had been reached before.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from uvcc_console.fleet import procs
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import discard

FILE = "clock.json"
MARK_S = 30.0


def up() -> float:
    """Seconds since the machine was booted, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine tells of time: which boot this is ("" = it does not say), seconds since then, the wall clock."""

    boot: Callable[[], str] = procs.boot_id
    up: Callable[[], float] = up
    wall: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class _Anchor:
    """At ``up`` seconds of boot ``boot`` it was ``at``; ``last`` is the latest time that was written down."""

    boot: str
    up: float
    at: float
    last: float


class RunClock:
    """``now`` in seconds of the epoch; also a clock as the market's client wants one (``now`` and ``sleep``)."""

    def __init__(self, run_dir: Path | None, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._path = run_dir / FILE if run_dir is not None else None
        self._boot = self._machine.boot()
        self._anchor = self._begin()

    def now(self) -> float:
        """The run's time. Writes it down now and then, so that a reboot cannot turn it back."""
        anchor = self._anchor
        found = anchor.at + max(0.0, self._machine.up() - anchor.up)
        if found - anchor.last >= MARK_S:
            self._anchor = _Anchor(anchor.boot, anchor.up, anchor.at, found)
            self._write(self._anchor)
        return found

    async def sleep(self, seconds: float) -> None:
        import asyncio  # whoever only reads the clock is spared it

        await asyncio.sleep(seconds)

    def _begin(self) -> _Anchor:
        """The anchor of this boot; the run's first, or the first after a reboot, is made here."""
        known = self._read()
        if known is not None and known.boot == self._boot and self._boot:
            return known
        at = self._machine.wall()
        if known is not None:
            at = max(at, known.last)
        made = _Anchor(self._boot, self._machine.up(), at, at)
        self._write(made, first=known is None)
        written = self._read()  # another process may have been quicker
        return written if written is not None and written.boot == self._boot and self._boot else made

    def _read(self) -> _Anchor | None:
        if self._path is None:
            return None
        try:
            row = json_of(self._path.read_text())
            numbers = [float(row[k]) for k in ("up", "at", "last")]
            return _Anchor(str(row["boot"]), *numbers) if all(map(math.isfinite, numbers)) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, anchor: _Anchor, *, first: bool = False) -> None:
        """As well as it goes: without the file, or on a full disk, this process still has its own steady clock."""
        if self._path is None:
            return
        row = {"boot": anchor.boot, "up": anchor.up, "at": anchor.at, "last": anchor.last}
        partial = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(row))
            if first and not self._path.exists():
                os.link(partial, self._path)
                partial.unlink()
            else:
                partial.replace(self._path)
        except OSError:
            discard(partial)


def run_now(run_dir: Path) -> float:
    """The time of a run now, without leaving anything in its folder; by the wall where it has no clock of its own."""
    if not (run_dir / FILE).exists():
        return time.time()
    return RunClock(run_dir).now()
