"""Reading what a pod sends without letting it decide how much: memory, disk and time are not its to use."""

from __future__ import annotations

import asyncio
import stat
from collections import deque
from collections.abc import Callable
from typing import Final

import asyncssh

from uvcc_engine.contract.parsing.safepaths import shown

OUTPUT: Final = 16 << 20
"""What a command may say, and what a small file may hold."""
_PIECE: Final = 32 << 10
_AHEAD: Final = 32  # pieces asked for before the first has come, where the way is fast
_FAST_S: Final = 0.5
_SLOW_S: Final = 5.0
_CHUNK: Final = 64 << 10


class TooMuchError(Exception):
    """More came than was agreed, or something else than a file."""


class StalledError(Exception):
    """A file gave nothing for longer than anybody waits."""


async def output(process: asyncssh.SSHClientProcess[bytes], stdin: bytes, limit: int) -> tuple[bytes, bytes]:
    """Feed a process and read both its streams to their ends. Raises TooMuchError beyond ``limit`` bytes."""
    left = limit

    async def take(stream: asyncssh.SSHReader[bytes]) -> bytes:
        nonlocal left
        parts = []
        while data := await stream.read(_CHUNK):
            left -= len(data)
            if left < 0:
                raise TooMuchError(f"sends more than {limit} bytes")
            parts.append(data)
        return b"".join(parts)

    if stdin:
        process.stdin.write(stdin)
        process.stdin.write_eof()
    taking = [asyncio.ensure_future(take(stream)) for stream in (process.stdout, process.stderr)]
    try:
        out, err = await asyncio.gather(*taking)
        await process.wait_closed()
    finally:
        for task in taking:
            task.cancel()
    return out, err


async def read_into(
    sftp: asyncssh.SFTPClient,
    remote: str,
    take: Callable[[bytes], object],
    limit: int,
    *,
    growing: bool,
    stall: float,
    last: bool = False,
) -> None:
    """Hand the bytes of a regular file to ``take``, in order; at most ``limit``.

    A file with more raises TooMuchError, unless it is ``growing``: then its beginning is read, or its end if ``last``.
    What the other side said of itself is believed for no longer than it holds: the count is kept here.
    """
    try:
        async with asyncio.timeout(stall):
            found = await sftp.lstat(remote)
            if found.permissions is not None and not stat.S_ISREG(found.permissions):
                raise TooMuchError(f"has no regular file at {shown(remote)}")
            size = found.size or 0
            if size > limit and not growing:
                raise TooMuchError(f"holds {size} bytes in {shown(remote)}, more than the {limit} that it announced")
            file = await sftp.open(remote, "rb", block_size=0)
    except TimeoutError:
        raise StalledError(f"does not open {shown(remote)}") from None
    start = max(0, size - limit) if last else 0
    pieces = _Pieces(file, remote, start, min(limit, size - start), stall)
    try:
        async for data in pieces:
            take(data)
        if not growing and pieces.taken == limit and await pieces.one(pieces.at, 1):
            raise TooMuchError(f"gives more of {shown(remote)} than the {limit} bytes that it announced")
    finally:
        await pieces.close()


class _Pieces:
    """A file in pieces, several on the way at once; each is counted when it comes."""

    def __init__(self, file: asyncssh.SFTPClientFile, remote: str, start: int, size: int, stall: float) -> None:
        self._file, self._remote, self._stall = file, remote, stall
        self._start, self._end = start, start + size
        self._asked = self.at = start
        self._ahead = 2
        self._coming: deque[tuple[int, float, asyncio.Task[bytes]]] = deque()

    @property
    def taken(self) -> int:
        return self.at - self._start

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        now = asyncio.get_running_loop().time
        while len(self._coming) < self._ahead and self._asked < self._end:
            size = min(_PIECE, self._end - self._asked)
            self._coming.append((size, now(), asyncio.ensure_future(self.one(self._asked, size))))
            self._asked += size
        if not self._coming:
            raise StopAsyncIteration
        size, since, task = self._coming.popleft()
        data = await task
        took = now() - since
        self._ahead = min(2 * self._ahead, _AHEAD) if took < _FAST_S else self._ahead
        self._ahead = max(1, self._ahead // 2) if took > _SLOW_S else self._ahead
        if len(data) < size:  # the end, or a server that gives less at a time: what was asked beyond is asked again
            await self._forget()
            self._asked = self.at + len(data)
        if not data:
            raise StopAsyncIteration
        self.at += len(data)
        return data

    async def one(self, at: int, size: int) -> bytes:
        try:
            async with asyncio.timeout(self._stall):
                data: bytes | str = await self._file.read(size, at)
        except TimeoutError:
            raise StalledError(f"gives nothing of {shown(self._remote)} for {self._stall:g} s") from None
        if isinstance(data, str) or len(data) > size:
            raise TooMuchError(f"gives more of {shown(self._remote)} than was asked for")
        return data

    async def _forget(self) -> None:
        tasks = [task for _, _, task in self._coming]
        self._coming.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the file there, if it is not too far gone for that."""
        await self._forget()
        try:
            async with asyncio.timeout(min(self._stall, 2.0)):
                await self._file.close()
        except (TimeoutError, OSError, ValueError, asyncssh.Error):
            return
