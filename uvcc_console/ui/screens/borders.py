"""The two borders of the overview that can be moved: between its columns, and above the log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from textual.geometry import Region

LEAST_RIGHT: Final = 24
LEAST_LEFT: Final = 40
LEAST_LOG: Final = 5
LEAST_BODY: Final = 8
Grip = Literal["", "column", "log"]


@dataclass(frozen=True, slots=True)
class Borders:
    """Columns of the right-hand side and lines of the log, on a short screen ``low`` of them; 0: as usual."""

    right: int = 0
    log: int = 0
    low: int = 0

    def pulled(self, grip: Grip, x: int, y: int, right: Region, log: Region, *, short: bool = False) -> Borders:
        """With that border pulled to this cell, both sides as large as they must be at least.

        ``right`` and ``log``: where these two are now, in cells of the screen; ``short``: a screen of few lines.
        """
        if grip == "column":
            most = right.right - LEAST_LEFT
            return replace(self, right=max(LEAST_RIGHT, min(most, right.right - x)))
        if grip == "log":
            most = log.bottom - LEAST_BODY
            lines = max(LEAST_LOG, min(most, log.bottom - y))
            return replace(self, low=lines) if short else replace(self, log=lines)
        return self

    def fitting(self, width: int, height: int) -> Borders:
        """What of it a screen of this size has room for."""
        right = min(self.right, width - LEAST_LEFT) if width >= LEAST_LEFT + LEAST_RIGHT else 0
        room = height - LEAST_BODY if height >= LEAST_BODY + LEAST_LOG else 0
        return Borders(max(0, right), *(max(0, min(lines, room)) for lines in (self.log, self.low)))


def grip_at(x: int, y: int, body: Region, right: Region, log: Region) -> Grip:
    """The movable border that this cell belongs to."""
    if body.contains(x, y) and right.height and x in (right.x - 1, right.x):
        return "column"
    if y == log.y and log.x <= x < log.right:
        return "log"
    return ""
