"""Where a replay stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tape:
    """A recording: its start and end, the position and speed, and moments worth a mark (time, role)."""

    start: float = 0.0
    end: float = 0.0
    at: float = 0.0
    speed: float = 1.0
    playing: bool = False
    marks: tuple[tuple[float, str], ...] = ()

    @property
    def span(self) -> float:
        """Length in seconds, never zero."""
        return max(1e-9, self.end - self.start)
