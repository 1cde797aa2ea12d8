"""What waits to be journalled. Evidence and control are never dropped and never wait behind telemetry.

A heartbeat that has not been written yet is replaced by the newer one of the same worker: that is the only thing that
is ever left out. Everything else waits, and its senders wait with it (``Bus.room``): the pods' files are the queue.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from uvcc_console.core import events as ev

BATCH: Final = 4000  # events a commit: a slow disk or a starved process still commits often
_STREAM: Final = (ev.LogLines, ev.HeartbeatRead, ev.PodTelemetry, ev.Metric, ev.CursorMoved)


def key_of(event: ev.Event) -> Hashable | None:
    """What a newer event of the same key supersedes; None if nothing does."""
    if isinstance(event, ev.HeartbeatRead):
        return ("heartbeat", event.pod, event.coord)
    if isinstance(event, ev.CostTick):
        return ("cost",)
    return None


class EventOutbox:
    """Messages of events, in order. The events of one message are written together, for its cursor is among them."""

    def __init__(self) -> None:
        self._urgent: dict[int, list[ev.Event]] = {}  # by number, in order
        self._stream: dict[int, list[ev.Event]] = {}
        self._newest: dict[Hashable, tuple[int, int]] = {}  # key -> message, place
        self._number = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, events: Sequence[ev.Event]) -> None:
        """Queue one message's events."""
        kept = [event for event in events if not self._supersedes(event)]
        if not kept:
            return
        streamed = all(isinstance(event, _STREAM) for event in kept)
        self._number += 1
        (self._stream if streamed else self._urgent)[self._number] = kept
        self._count += len(kept)
        for place, event in enumerate(kept):
            if (key := key_of(event)) is not None:
                self._newest[key] = (self._number, place)

    def _supersedes(self, event: ev.Event) -> bool:
        """Take the place of an older one of its kind that still waits."""
        found = self._newest.get(key_of(event)) if key_of(event) is not None else None
        if found is None:
            return False
        number, place = found
        message = self._stream.get(number) or self._urgent[number]
        message[place] = event
        return True

    def take(self, most: int = BATCH) -> list[ev.Event]:
        """The next events to be written: all in order while they are few, else what is not streamed first."""
        if self._count <= most:
            numbers = sorted((*self._urgent, *self._stream))
        else:
            numbers = [*self._urgent, *self._stream]
        taken: list[ev.Event] = []
        for number in numbers:
            if taken and len(taken) >= most:
                break
            taken += (self._urgent if number in self._urgent else self._stream).pop(number)
        self._count -= len(taken)
        self._newest = {k: at for k, at in self._newest.items() if at[0] in self._stream or at[0] in self._urgent}
        return taken

    def put_back(self, events: Sequence[ev.Event]) -> None:
        """What could not be written comes first again."""
        if events:
            first = min((*self._urgent, *self._stream), default=self._number + 1) - 1
            self._urgent = {first: list(events), **self._urgent}
            self._count += len(events)
