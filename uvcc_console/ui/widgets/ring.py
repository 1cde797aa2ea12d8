"""A bounded store of log lines with a filter. Appending is a list extend; only visible lines are ever formatted."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.judging.filters import Filter

PARTY = re.compile(r"p(?:arty)?[-_]?([012])(?!\d)", re.IGNORECASE)
_ASKED = "replica stage tensor coord phase step age state root loss rate toks_per_s samples_per_s mem_mib rank"
FLEET_ONLY = frozenset(f"{_ASKED} waiting_on dt_fetch_s gpu gmem temp power cpu".split())
"""What a filter may ask of workers and no line of a log has."""


def fields_of(entry: LogEntry) -> dict[str, str | float]:
    """What a filter can ask of a log line. ``pod`` is the source's part before a slash."""
    pod, _, file = entry.source.partition("/")
    found = {"level": entry.level, "source": entry.source, "pod": pod, "file": file, "text": entry.text}
    party = PARTY.search(pod)
    return {**found, "party": party.group(1)} if party else {**found}


class RingLog:
    """The newest ``cap`` lines (a quarter more between trims). Positions are of shown lines, 0 = oldest shown."""

    def __init__(self, cap: int = 200_000) -> None:
        self.cap = cap
        self.dropped = 0
        self._lines: list[LogEntry] = []
        self._filter = Filter()
        self._shown: list[int] | None = None  # absolute numbers of the lines that pass the filter; None = all

    def extend(self, entries: Sequence[LogEntry]) -> int:
        """Add lines in order; returns how many of them are shown."""
        start = self.dropped + len(self._lines)
        self._lines.extend(entries)
        fresh = len(entries)
        if self._shown is not None:
            new = [start + i for i, e in enumerate(entries) if self._passes(e)]
            self._shown.extend(new)
            fresh = len(new)
        if len(self._lines) > self.cap + self.cap // 4:
            self._trim()
        return fresh

    def _trim(self) -> None:
        extra = len(self._lines) - self.cap
        del self._lines[:extra]
        self.dropped += extra
        if self._shown is not None:
            del self._shown[: bisect_left(self._shown, self.dropped)]

    def _passes(self, entry: LogEntry) -> bool:
        return self._filter.matches(fields_of(entry), f"{entry.source} {entry.text}".lower())

    def clear(self) -> None:
        """Forget every line."""
        self._lines.clear()
        self.dropped = 0
        if self._shown is not None:
            self._shown = []

    @property
    def filter(self) -> Filter:
        return self._filter

    def set_filter(self, wanted: Filter) -> None:
        """Show only what passes."""
        self._filter = wanted = wanted.without(FLEET_ONLY)
        self._shown = [self.dropped + i for i, e in enumerate(self._lines) if self._passes(e)] if wanted else None

    def __len__(self) -> int:
        return len(self._lines) if self._shown is None else len(self._shown)

    def __getitem__(self, at: int) -> LogEntry:
        return self._lines[at if self._shown is None else self._shown[at] - self.dropped]

    @property
    def total(self) -> int:
        """Lines kept, shown or not."""
        return len(self._lines)

    def at_time(self, ts: float) -> int:
        """Position of the first shown line at or after ``ts``."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self[middle].ts < ts:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, needle: str, start: int, direction: int) -> int | None:
        """Position of the next shown line containing ``needle`` (any case), searching from ``start``; None if none."""
        low = needle.lower()
        at = start
        while 0 <= at < len(self):
            entry = self[at]
            if low in entry.text.lower() or low in entry.source.lower():
                return at
            at += direction
        return None
