"""What this console asked of the run's halt, from the moment it was asked until the journal shows it.

The picture may be behind; whoever has just pressed F9 must not see the proof of an earlier halt, and Esc must find its
hold. Any thread may note and read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import HaltView, Snapshot

KEEP_S: Final = 30.0  # by then the journal has it, or somebody else's halt came after it
_ORDER: Final = {"hold": 0, "release": 1, "halt": 1}


class OwnHaltRequest:
    """The newest request of this console. ``over`` lays it over a snapshot that does not know it yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._event: ev.HaltRequested | None = None
        self._at = 0.0

    def note(self, event: ev.HaltRequested) -> None:
        """Remember that this console has just asked for a halt."""
        with self._lock:
            self._event, self._at = event, self._clock()

    def drop(self, event: ev.HaltRequested) -> None:
        """It was not done after all."""
        with self._lock:
            if self._event is event:
                self._event = None

    def over(self, s: Snapshot, now: float) -> Snapshot:
        """The snapshot with the request in it; ``now`` is the time that the snapshot is looked at with."""
        with self._lock:
            event, since = self._event, self._clock() - self._at
            if event is None:
                return s
            known = s.halt.nonce == event.nonce
            if since > KEEP_S or (known and _ORDER.get(s.halt.mode, 0) >= _ORDER[event.mode]):
                self._event = None
                return s
        if known:
            return replace(s, halt=replace(s.halt, mode=event.mode, by=event.by, done=False))
        halt = HaltView(event.nonce, event.mode, event.by, asked=now - since, total=len(s.pods))
        return replace(s, halt=replace(halt, last_drill_s=s.halt.last_drill_s))
