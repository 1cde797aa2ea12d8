"""Events of a halt on their way to the journal: told at once, written when the disk takes them, in order, none lost.

A full disk or a process that is frozen inside a transaction must not delay a halt, so nothing here waits for either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.log import logger
from uvcc_engine.contract.errors import UvccError

log = logger(__name__)
BUSY_S: Final = 0.05  # an ordinary commit of another process is over by then
AGAIN_S: Final = 0.5
LAST_S: Final = 4.0  # a conductor that ends waits a second longer for its sidecar


class Deferred:
    """The sidecar's pen. ``publish`` hears of every event at once, with its time, written or not."""

    def __init__(
        self,
        journal: Journal,
        publish: Callable[[Sequence[ev.Event]], None] = lambda events: None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._publish = publish
        self._clock = clock
        self._monotonic = monotonic
        self._waiting: list[ev.Event] = []
        self._due = float("-inf")
        self._told = False

    @property
    def waiting(self) -> int:
        """How many events the journal has not taken yet."""
        return len(self._waiting)

    def note(self, event: ev.Event) -> None:
        """Tell of an event now; it is written with the next one, before it."""
        stamped = event if event.ts else replace(event, ts=self._clock())
        self._waiting.append(stamped)
        self._publish([stamped])

    def append(self, events: Sequence[ev.Event]) -> None:
        """Tell of events now and write them if the journal takes them. Never raises for the disk's sake."""
        for event in events:
            self.note(event)
        if not self._told:
            self._try()

    def tick(self) -> None:
        """Call often: what could not be written is tried again now and then."""
        if self._waiting and (not self._told or self._monotonic() >= self._due):
            self._try()

    async def finish(self) -> None:
        """Call before the journal is closed: who is in the middle of a commit is waited for, a full disk not for long.

        The evidence of a halt would be told, and written nowhere.
        """
        end = self._monotonic() + LAST_S
        while self._waiting and self._monotonic() < end:
            self._try()
            if self._waiting:
                await asyncio.sleep(BUSY_S)

    def _try(self) -> None:
        try:
            self._journal.append(*self._waiting)
        except UvccError as e:
            self._due = self._monotonic() + AGAIN_S
            if not self._told:
                log.error("%d events wait for the journal: %s", len(self._waiting), e)
            self._told = True
            return
        if self._told:
            log.info("the journal takes events again: %d written", len(self._waiting))
        self._waiting, self._told = [], False
