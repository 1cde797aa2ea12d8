"""Keeps looking whether what was verified still lies there as it was, for the screens. Never in the way of a key.

Little evidence is read at once, so that the first frame says how things stand; much of it in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from uvcc_console.core.answers.shown import Changes
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.report import recheck

EVERY_S: Final = 5.0
AT_ONCE: Final = 16 << 20


class Rechecks:
    """``look`` as often as convenient; what it returns goes into the view."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._thread: ThreadPoolExecutor | None = None
        self.reading: Future[Mapping[str, tuple[str, ...]]] | None = None
        self._about: tuple[float, ...] = ()
        self._due = float("-inf")
        self.changed: Changes = {}

    def look(self, s: Snapshot, now: float) -> Changes:
        """What is known by now; begins to read again when there is a new verdict or some seconds have passed."""
        about = tuple(v.ts for v in s.verdicts.values())
        if self.reading is not None and self.reading.done():
            self.changed, self.reading = self.reading.result(), None
        if not about or self.reading is not None or (about == self._about and abs(now - self._due) < EVERY_S):
            return self.changed
        fresh, self._about, self._due = about != self._about, about, now
        if recheck.size(self._run_dir, s) <= AT_ONCE:
            self.changed = recheck.recheck(self._run_dir, s)
            return self.changed
        if fresh:
            self.changed = {phase: None for phase, verdict in s.verdicts.items() if verdict.files}
        self._thread = self._thread or ThreadPoolExecutor(1, "recheck")
        self.reading = self._thread.submit(recheck.recheck, self._run_dir, s)
        return self.changed

    def close(self) -> None:
        """End without waiting for a check that is under way."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
