"""For how long the rendezvous has not answered: this domain's operator is told soon, and at last the run ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.rollout.bus import Bus
from uvcc_engine.contract.errors import UnreachableError, UvccError

log = logger(__name__)
AWAY_S: Final = 10.0  # a relay that is started again is there within a few


class RendezvousWatch:
    """What the visits to the rendezvous came to. ``silence_s``: after so long without an answer the run ends."""

    def __init__(self, bus: Bus, silence_s: float, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._silence_s = silence_s
        self._clock = clock
        self._answered = clock()
        self._told = False
        self._said = ""

    def answered(self) -> None:
        """A visit was answered."""
        self._answered = self._clock()
        self._said = ""
        if self._told:
            self._told = False
            self._bus.record([ev.Alert(level="info", name="relay_away", text="the relay of the domains answers again")])

    def failed(self, error: UvccError) -> UvccError | None:
        """A visit was not; returns what ends the run, None while there is time left."""
        if self._said != error.what:  # every half second the same
            self._said = error.what
            log.warning("the rendezvous: %s", error)
        quiet = self._clock() - self._answered
        if quiet > self._silence_s:
            return UnreachableError(f"the rendezvous has not answered for {quiet:.0f} s", "is the relay up?")
        if quiet > AWAY_S and not self._told:
            self._told = True
            text = f"the relay of the domains has not answered for {quiet:.0f} s: {error.what}"
            hint = f"start it again at the same address; after {self._silence_s:.0f} s this domain ends safe"
            self._bus.record([ev.Alert(level="error", name="relay_away", text=text, hint=hint)])
        return None
