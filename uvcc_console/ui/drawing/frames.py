"""When to paint: as often as something changes, and twice a second while the journal is still being caught up with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from uvcc_console.core.snapshot import LogEntry

BEHIND_EVERY_S: Final = 0.5
KEEP: Final = 200_000  # as many lines as the log panel keeps


class Frames:
    """Collects log lines between two pictures, and says when the next one is due."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._painted = float("-inf")
        self._lines: list[LogEntry] | None = []

    def take(self, lines: list[LogEntry] | None) -> None:
        """New lines; None: what was there before no longer counts."""
        if lines is None or self._lines is None:
            self._lines = None
            return
        self._lines += lines
        if len(self._lines) > 2 * KEEP:
            del self._lines[:-KEEP]

    def due(self, behind: bool) -> bool:
        """Whether to paint now."""
        now = self._clock()
        if behind and now - self._painted < BEHIND_EVERY_S:
            return False
        self._painted = now
        return True

    def paint_next(self) -> None:
        """Have the next picture due at once, however lately the last one was painted."""
        self._painted = float("-inf")

    def give(self) -> list[LogEntry] | None:
        """What came since the last picture; None: draw the log anew."""
        lines, self._lines = self._lines, []
        return lines
