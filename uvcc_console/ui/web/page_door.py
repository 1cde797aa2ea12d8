"""Who is connected to a run's page without looking at it: not for long, and not many at once.

A browser asks as soon as it is connected, has the page within seconds, and keeps one connection, its viewer's. Whatever
else stays (silent, half open, a request that drips in, an answer that nobody reads) holds a file of this process, of
which there are some thousand; it is ended by time, and by number before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

WAITING: Final = 128  # connections at once that are no viewer's
IDLE_S: Final = 15.0  # before a whole request, and between two
STAYS_S: Final = 120.0  # in all, for what is no viewer's: the page over a slow line is some 500 KB


class PageDoor:
    """The connections of one page. One thread (the event loop's) uses it."""

    def __init__(self, most: int = WAITING, stays_s: float = STAYS_S) -> None:
        self._most, self.stays_s = most, stays_s
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}  # the oldest first
        self._asked: set[asyncio.BaseTransport] = set()  # of them, who has sent a whole request
        self.ended = 0

    def __len__(self) -> int:
        """How many are connected that are no viewer's."""
        return len(self._waiting)

    def protocol(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """What ``make`` makes for a new connection, which is counted from its beginning to its end."""
        return _Counted(make(), self)

    def enters(self, transport: asyncio.Transport) -> None:
        """A connection is there; one that is full makes way: the oldest that has asked nothing, else the oldest."""
        if len(self._waiting) >= self._most:
            silent = (one for one in self._waiting if one not in self._asked)
            self._end(next(silent, next(iter(self._waiting))))
        end = asyncio.get_running_loop().call_later(self.stays_s, self._end, transport)
        self._waiting[transport] = end

    def asks(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request's head has come over it."""
        if transport in self._waiting:
            self._asked.add(transport)

    def leaves(self, transport: asyncio.BaseTransport | None) -> None:
        """It is closed, or has become a viewer's, which are counted elsewhere."""
        if transport in self._waiting:
            self._waiting.pop(transport).cancel()
            self._asked.discard(transport)

    def _end(self, transport: asyncio.BaseTransport) -> None:
        self.leaves(transport)
        self.ended += 1
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()  # it may read nothing, so nothing is left to be written


class _Counted(asyncio.Protocol):
    """A connection's protocol, with its beginning and end told to the door."""

    def __init__(self, inner: asyncio.Protocol, door: PageDoor) -> None:
        self._inner, self._door = inner, door
        self._lost: Callable[[], None] = lambda: None
        self.data_received = inner.data_received  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._door.enters(transport)
        self._lost = partial(self._door.leaves, transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
        self._inner.connection_lost(exc)
