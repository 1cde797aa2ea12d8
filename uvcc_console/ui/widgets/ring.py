"""A bounded store of log lines with a filter. Appending is a list extend; only visible lines are ever formatted.

What several workers say in the same words within a few seconds is one line with the names of all their pods.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.judging.filters import LEVELS, Filter

_COORD: Final = re.compile(r"(?:^| )coord=(\S+)")
PARTY = re.compile(r"p(?:arty)?[-_]?([012])(?!\d)", re.IGNORECASE)
TOGETHER_S: Final = 10.0
_REMEMBERED: Final = 64  # lines that a later one may still join
_ASKED: Final = "replica stage tensor coord phase step age state root loss rate toks_per_s samples_per_s mem_mib rank"
FLEET_ONLY = frozenset(f"{_ASKED} waiting_on dt_fetch_s gpu gmem temp power cpu".split())
"""What a filter may ask of workers and no line of a log has."""


def fields_of(entry: LogEntry, source: str) -> dict[str, str | float]:
    """What a filter can ask of a log line. ``pod`` is the source's part before a slash."""
    pod, _, file = source.partition("/")
    found = {"level": entry.level, "source": source, "pod": pod, "file": file, "text": entry.text}
    party = PARTY.search(pod)
    return {**found, "party": party.group(1)} if party else {**found}


def sources_of(entry: LogEntry) -> list[str]:
    """The pods that said it; for a line of a file, and for an operator's (``me@host tui``), its one source."""
    found = entry.source.split(" ")
    return found if entry.level != "debug" and all(PARTY.match(one) for one in found) else [entry.source]


def speaker_of(entry: LogEntry) -> str:
    """The worker whose word it is where that is told, else the pod."""
    found = _COORD.search(entry.detail)
    return found[1] if found else entry.source


def _by_number(name: str) -> list[tuple[int, str]]:
    """Pods in the order that people count in, whichever spoke first: p0r2 before p0r10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class RingLog:
    """The newest ``cap`` lines (a quarter more between trims). Positions are of shown lines, 0 = oldest shown."""

    def __init__(self, cap: int = 200_000) -> None:
        self.cap = cap
        self.dropped = 0
        self.least = "debug"
        self._lines: list[LogEntry] = []
        self._filter = Filter()
        self._shown: list[int] | None = None  # absolute numbers of the lines that pass the filter; None = all
        self._recent: OrderedDict[tuple[str, str], tuple[int, set[str]]] = OrderedDict()
        self._skip = 0

    def extend(self, entries: Sequence[LogEntry]) -> int:
        """Add lines in order; returns how many of them are shown and new."""
        fresh = 0
        for entry in entries:
            if entry.level != "debug" and PARTY.match(entry.source) and self._joined(entry):
                continue
            at = self.dropped + len(self._lines)
            self._lines.append(entry)
            if self._shown is None:
                fresh += 1
            elif self._passes(entry):
                self._shown.append(at)
                fresh += 1
        if len(self._lines) > self.cap + self.cap // 4:
            self._trim()
        return fresh

    def _joined(self, entry: LogEntry) -> bool:
        """Whether an earlier line says the same of another pod, and now says it of this one too."""
        key = (entry.level, entry.text)
        number, speakers = self._recent.get(key, (-1, set()))
        at, speaker = number - self.dropped, speaker_of(entry)
        if at >= 0:
            old = self._lines[at]
            said_by = sources_of(old)
            if entry.ts - old.ts <= TOGETHER_S and speaker not in speakers:
                speakers.add(speaker)
                names = " ".join(sorted({*said_by, entry.source}, key=_by_number))
                both = replace(old, source=names, detail="")
                self._lines[at] = both
                if self._shown is not None and self._passes(both):
                    place = bisect_left(self._shown, number)
                    if place == len(self._shown) or self._shown[place] != number:
                        insort(self._shown, number)
                return True
        self._recent.pop(key, None)
        self._recent[key] = (self.dropped + len(self._lines), {speaker})
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return False

    def _trim(self) -> None:
        extra = len(self._lines) - self.cap
        del self._lines[:extra]
        self.dropped += extra
        self._skip = max(0, self._skip - extra)
        if self._shown is not None:
            del self._shown[: bisect_left(self._shown, self.dropped)]

    def _passes(self, entry: LogEntry) -> bool:
        if LEVELS.get(entry.level, 20) < LEVELS[self.least]:
            return False
        text = f"{entry.source} {entry.text} {entry.detail}".lower()
        return any(self._filter.matches(fields_of(entry, one), text) for one in sources_of(entry))

    def clear(self) -> None:
        """Forget every line."""
        self._lines.clear()
        self._recent.clear()
        self.dropped = self._skip = 0
        if self._shown is not None:
            self._shown = []

    @property
    def filter(self) -> Filter:
        return self._filter

    @property
    def narrowed(self) -> bool:
        """Whether lines are left out."""
        return bool(self._filter) or self.least != "debug" or self._skip > 0

    def set_filter(self, wanted: Filter, least: str | None = None) -> None:
        """Show only what passes, and is at least as bad as ``least``."""
        self._filter = wanted = wanted.without(FLEET_ONLY)
        self.least = least or self.least
        every = not wanted and self.least == "debug"
        self._shown = None if every else [self.dropped + i for i, e in enumerate(self._lines) if self._passes(e)]
        self._skip = 0

    def since(self, ts: float | None) -> bool:
        """Show only what is not older; None: everything. Whether that changed what is shown."""
        before, self._skip = self._skip, 0
        if ts is not None:
            self._skip = self.at_time(ts)
        return self._skip != before

    def __len__(self) -> int:
        return (len(self._lines) if self._shown is None else len(self._shown)) - self._skip

    def __getitem__(self, at: int) -> LogEntry:
        at += self._skip
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
            if low in entry.text.lower() or low in entry.source.lower() or low in entry.detail.lower():
                return at
            at += direction
        return None

    def next_of_level(self, level: str, start: int, direction: int) -> int | None:
        """Position of the next shown line that is at least as bad as ``level``; None if none."""
        at, wanted = start, LEVELS[level]
        while 0 <= at < len(self):
            if LEVELS.get(self[at].level, 20) >= wanted:
                return at
            at += direction
        return None
