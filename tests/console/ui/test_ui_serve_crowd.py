"""The console in a browser while strangers hold its connections: none for long, few at once, and viewers stay."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse

from uvcc_console.ui.web.page_door import PageDoor
from uvcc_console.ui.web.page_guard import PageGuard, hosts
from uvcc_console.ui.web.page_server import RunPage
from uvcc_console.ui.web.serving import answering, bound

ECHO = """
import os
os.write(1, b"__GANGLION__\\n")
while data := os.read(0, 65536): os.write(1, b"D" + len(data).to_bytes(4, "big") + data)
"""
_LIMIT_S = 120.0
FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Served:
    page: RunPage
    host: str

    async def connected(self, said: bytes = b"") -> asyncio.StreamReader:
        """A connection of a stranger's, who says this and nothing more; it reads until it is ended."""
        name, _, port = self.host.partition(":")
        reader, writer = await asyncio.open_connection(name, int(port))
        writer.write(said)
        reader.writer = writer  # type: ignore[attr-defined]  # kept as long as the reader
        return reader

    async def waiting(self, count: int) -> None:
        """Until so many are counted: the server notes a connection a moment after it is made."""
        async with asyncio.timeout(_LIMIT_S):
            while len(self.page.door) != count:
                await asyncio.sleep(0.005)

    async def opened(self, session: ClientSession) -> ClientWebSocketResponse:
        """A viewer, as the page opens it."""
        headers = {"Origin": f"http://{self.host}"}
        token = {"token": self.page.guard.token}
        async with session.post(f"http://{self.host}/session", json=token, headers=headers) as answer:
            key = (await answer.json())["key"]
        return await session.ws_connect(
            f"ws://{self.host}/ws?width=100&height=30", protocols=("uvcc", f"uvcc-key.{key}"), headers=headers
        )


@asynccontextmanager
async def served(most: int) -> AsyncIterator[Served]:
    listener = bound("127.0.0.1", 0)
    address, port = listener.getsockname()
    page = RunPage(PageGuard(hosts(address, port)), (sys.executable, "-c", ECHO), door=PageDoor(most, FOREVER_S))
    async with answering(page, listener):
        yield Served(page, f"{address}:{port}")


async def echoes(viewer: ClientWebSocketResponse, word: str) -> None:
    await viewer.send_str(f'["stdin", "{word}"]')
    async with asyncio.timeout(_LIMIT_S):
        while word.encode() not in await viewer.receive_bytes():
            pass


async def ended(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(_LIMIT_S):
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass  # an abort may be seen as a reset


async def test_the_oldest_silent_ones_make_way_and_neither_a_viewer_nor_a_newcomer_is_hurt() -> None:
    async with served(most=8) as s, ClientSession() as session:
        viewer = await s.opened(session)
        silent = [await s.connected() for _ in range(40)]
        for reader in silent[:-8]:
            await ended(reader)
        assert len(s.page.door) <= 8
        async with ClientSession() as another:
            second = await s.opened(another)
            await echoes(second, "newcomer")
        await echoes(viewer, "viewer")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHos",
        b"POST /session HTTP/1.1\r\nHost: %s\r\nOrigin: http://%s\r\nContent-Length: 99\r\n\r\n{",
    ],
    ids=["silent", "half a head", "half a body"],
)
async def test_what_is_no_viewers_is_ended_by_time(said: bytes) -> None:
    async with served(most=8) as s, ClientSession() as session:
        viewer = await s.opened(session)
        s.page.door.stays_s = 0.05
        await ended(await s.connected(said.replace(b"%s", s.host.encode())))
        await s.waiting(0)
        await echoes(viewer, "still there")


async def test_who_has_asked_makes_way_after_those_who_have_not() -> None:
    async with served(most=4) as s:
        asked = await s.connected(f"GET /page.css HTTP/1.1\r\nHost: {s.host}\r\n\r\n".encode())
        assert (await asyncio.wait_for(asked.readline(), _LIMIT_S)).startswith(b"HTTP/1.1 200")
        silent = [await s.connected() for _ in range(6)]
        for reader in silent[:3]:
            await ended(reader)
        assert not asked.at_eof()
        asked.writer.write(f"GET /page.css HTTP/1.1\r\nHost: {s.host}\r\nConnection: close\r\n\r\n".encode())  # type: ignore[attr-defined]
        assert (await asyncio.wait_for(asked.read(), _LIMIT_S)).count(b"HTTP/1.1 200") == 1
