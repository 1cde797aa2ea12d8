"""A clock that jumps to the next alarm as soon as nobody has anything left to do: minutes pass in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Iterator
from itertools import count

QUIET = 60  # rounds of the event loop without any news after which everybody is taken to be waiting


class VirtualClock:
    """``now`` and ``sleep`` as the provider wants them. Use as an async context manager around the test."""

    def __init__(self, start: float = 1_795_000_000.0) -> None:
        self.time = start
        self.news = 0
        self._alarms: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = count()
        self._outside = 0
        self._driver: asyncio.Task[None] | None = None

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        heapq.heappush(self._alarms, (self.time + max(0.0, seconds), next(self._numbers), event))
        self.news += 1
        await event.wait()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """While real sockets are at work the clock stands still."""
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1
            self.news += 1

    async def __aenter__(self) -> VirtualClock:
        self._driver = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._driver is not None
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)

    async def _drive(self) -> None:
        quiet, seen = 0, self.news
        while True:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.news == seen and not self._outside else 0
            seen = self.news
            if quiet > QUIET and self._alarms:
                at, _, event = heapq.heappop(self._alarms)
                self.time = max(self.time, at)
                event.set()
                quiet = 0
