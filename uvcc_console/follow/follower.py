"""Reads a folder until told to stop: through lost links, folders that go away for a while, and long silence.

Whatever happens is told as an event; nothing here decides what becomes of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.follow.reader import FolderReader
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError

log = logger(__name__)
POLL_S: Final = 1.0
FIRST_S, LONGEST_S = 0.5, 15.0
SILENCES_S: Final = (15.0, 60.0, 300.0, 1800.0, 7200.0)
Record = Callable[[Sequence[ev.Event]], None]
QUIET: Final = (ev.PodTelemetry, ev.CursorMoved, ev.Alert)
"""What is no news of the run itself."""


class FolderFollower:
    """Follows one folder. ``record`` takes every event in order; ``news`` is told of silence, in words, now and then.

    ``up``: whether the folder answered when it was asked last; ``looked``: whether it ever did.
    """

    def __init__(
        self,
        reader: FolderReader,
        record: Record,
        news: Callable[[str], None] = lambda text: None,
        *,
        path: str = "ssh",
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.reader = reader
        self.up, self.looked = True, False
        self._record, self._news = record, news
        self._path, self.poll_s = path, poll_s
        self._clock, self._sleep = clock, sleep
        self._trouble = ""
        self._tries = 0
        self._heard = clock()
        self._said = 0

    async def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Follow until ``stop``, or the run there is over. Raises VerificationError for a machine with another key."""
        while not stop():
            if await self.once():
                wait = 0.0 if self.reader.behind else self.poll_s
            else:
                wait = min(FIRST_S * 2 ** min(self._tries, 8), LONGEST_S)
                self._tries += 1
            if self.reader.over and not self.reader.behind:
                return
            await self._sleep(wait)

    async def once(self) -> bool:
        """One look; whether the folder answered. Raises VerificationError."""
        try:
            await self.reader.shell.open()
            found = await self.reader.look()
        except VerificationError:
            raise
        except UvccError as e:
            self._failed(e)
            self._tell_silence()
            return False
        if not self.up:
            self._record([ev.LinkChanged(pod=self.reader.pod, path=self._path, up=True, detail="from its cursor on")])
        if self._trouble:  # the newest word is the one on the screen
            text = "it answers again: what is shown is of now"
            self._record([ev.Alert(level="info", name="follow", text=text, subject=self.reader.pod)])
        self.up, self.looked, self._trouble, self._tries = True, True, "", 0
        begun = self.reader.begun()
        if begun or found:
            self._record([*begun, *found])
        if any(not isinstance(event, QUIET) for event in found):
            self._heard, self._said = self._clock(), 0
        self._tell_silence()
        return True

    def _failed(self, error: UvccError) -> None:
        """Tell of what stands in the way, each thing once."""
        log.info("it does not answer: %s", error)
        if self.up:
            self._record([ev.LinkChanged(pod=self.reader.pod, path=self._path, up=False, detail=error.what)])
        if type(error).__name__ != self._trouble:
            level = "warn" if isinstance(error, UnreachableError) else "error"
            hint = error.hint or "it is tried again, and goes on where it was"
            text = f"{error.what}: what is shown is old"
            self._record([ev.Alert(level=level, name="follow", text=text, hint=hint, subject=self.reader.pod)])
        self.up, self._trouble = False, type(error).__name__

    def _tell_silence(self) -> None:
        silent = self._clock() - self._heard
        if self._said < len(SILENCES_S) and silent >= SILENCES_S[self._said]:
            while self._said < len(SILENCES_S) and silent >= SILENCES_S[self._said]:
                self._said += 1
            why = "the link is up, nothing was written there" if self.up else "the link is down"
            self._news(f"no news for {silent:.0f} s: {why}")
