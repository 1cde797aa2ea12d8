"""Sessions over one SSH connection: never more than servers allow, and fewer where this one allows fewer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncssh
from asyncssh.constants import OPEN_ADMINISTRATIVELY_PROHIBITED, OPEN_CONNECT_FAILED, OPEN_RESOURCE_SHORTAGE

T = TypeVar("T")
LIMIT = 8  # of OpenSSH's MaxSessions 10: one is left for a halt, one for SFTP
_FULL = (OPEN_ADMINISTRATIVELY_PROHIBITED, OPEN_CONNECT_FAILED, OPEN_RESOURCE_SHORTAGE)
_AGAIN_S = (0.05, 0.1, 0.2)  # the server counts a session that has ended for a moment longer


class FullError(Exception):
    """The server opens no further session, and none of ours is going to end."""


class _Refused(Exception):
    """The server opens no further session now."""


class Sessions:
    """Counts the short sessions of one connection; ``spare`` gives up one that is only kept for later, if there is."""

    def __init__(self, spare: Callable[[], Awaitable[bool]]) -> None:
        self.slots = asyncio.Semaphore(LIMIT)
        self._spare = spare
        self._passing = 0
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()
        self.scarce = False  # the server has refused one: nothing is kept for later

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Around the use of an open session: others may wait for its end."""
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1
            self._freed.set()

    async def opened(self, opening: Callable[[], Awaitable[T]], *, elsewhere: bool = False) -> T:
        """Open one. While the server refuses: give up a spare one, wait for one of ours to end, then try again.

        Raises FullError where nothing of ours will end; at once if there is room ``elsewhere``.
        """
        if not self.scarce:
            with contextlib.suppress(_Refused):
                return await self._try(opening)
        async with self._turn:  # one after the other: who comes first shall not lose to who comes later
            tried = 0
            while True:
                self._freed.clear()
                with contextlib.suppress(_Refused):
                    return await self._try(opening)
                if await self._spare():
                    continue
                if self._passing:
                    await self._freed.wait()
                    tried = 0
                elif tried < len(_AGAIN_S) and not elsewhere:
                    await asyncio.sleep(_AGAIN_S[tried])
                    tried += 1
                else:
                    raise FullError

    async def _try(self, opening: Callable[[], Awaitable[T]]) -> T:
        try:
            return await opening()
        except asyncssh.ChannelOpenError as e:
            if e.code not in _FULL:
                raise
            self.scarce = True
            raise _Refused from e
