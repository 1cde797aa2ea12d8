"""How often is often enough: a token bucket, and events that strangers can cause said a few times and then counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

OnEvent = Callable[[str, dict[str, Any]], None]


class TokenBucket:
    """``burst`` things at once, ``per_s`` per second in the long run. The caller tells the time."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at = burst, 0.0

    def take(self, now: float) -> bool:
        """Whether one more is allowed now; it is counted if so."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class _Kind:
    """Events of one kind within a minute."""

    __slots__ = ("count", "event", "fields", "since", "told")

    def __init__(self, now: float) -> None:
        self.since, self.told, self.count = now, 0, 0
        self.event, self.fields = "", dict[str, Any]()


class EventLimiter:
    """Passes the first events of a kind on at once, and then one a minute with the ``count`` of those left out."""

    BURST: Final = 8
    EVERY_S: Final = 60.0
    KINDS: Final = 64

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._kinds: dict[Hashable, _Kind] = {}
        self._next = float("inf")

    def say(self, kind: Hashable, event: str, fields: dict[str, Any], now: float) -> None:
        self.look(now)
        if kind not in self._kinds and len(self._kinds) >= self.KINDS:
            kind = None
        found = self._kinds.setdefault(kind, _Kind(now))
        self._next = min(self._next, found.since + self.EVERY_S)
        if found.told < self.BURST:
            found.told += 1
            self._on_event(event, fields)
        else:
            found.count += 1
            found.event, found.fields = event, fields

    def look(self, now: float) -> None:
        """Say what has been counted, if its minute is over (``now`` infinite: the end)."""
        if now < self._next:
            return
        for key, kind in tuple(self._kinds.items()):
            if now - kind.since < self.EVERY_S:
                continue
            if kind.count:
                self._on_event(kind.event, {**kind.fields, "count": kind.count})
                fresh = self._kinds[key] = _Kind(now)
                fresh.told = self.BURST  # it goes on: further lines only by the minute
            else:
                del self._kinds[key]
        self._next = min((k.since + self.EVERY_S for k in self._kinds.values()), default=float("inf"))
