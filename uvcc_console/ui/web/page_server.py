"""The page and its WebSocket: of textual-serve the process of one viewer and the terminal's files, the rest is ours.

Its own server asks nobody for anything and fetches a font from elsewhere, so it is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import textual_serve
from aiohttp import WSMsgType, web
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from uvcc_console.ui.web import packets
from uvcc_console.ui.web.page_door import PageDoor
from uvcc_console.ui.web.page_guard import PROTOCOL, PageGuard, policy
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.text import complain

OURS: Final = Path(__file__).parent / "page"
THEIRS: Final = Path(textual_serve.__file__).parent / "static"
FILES: Final = {
    "/": (OURS / "index.html", "text/html"),
    "/page.js": (OURS / "page.js", "text/javascript"),
    "/page.css": (OURS / "page.css", "text/css"),
    "/textual.js": (THEIRS / "js" / "textual.js", "text/javascript"),
    "/xterm.css": (THEIRS / "css" / "xterm.css", "text/css"),
    "/mono.ttf": (THEIRS / "fonts" / "RobotoMono-VariableFont_wght.ttf", "font/ttf"),
}
VIEWERS: Final = 4
END_S: Final = 8.0  # a viewer's process that has not ended so long after it was asked to is killed
_GUARD: Final = web.AppKey("guard", PageGuard)
_DOOR: Final = web.AppKey("door", PageDoor)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewerProcess(AppService):
    """One viewer's process. It draws and reads keys; files and addresses that it offers are not passed on."""

    def __init__(self, command: Sequence[str], socket: web.WebSocketResponse) -> None:
        async def close() -> None:
            await socket.close()

        super().__init__(
            shlex.join(command),
            write_bytes=socket.send_bytes,
            write_str=socket.send_str,
            close=close,
            download_manager=DownloadManager(),
        )
        self._argv = tuple(command)
        self._complaints: asyncio.Task[None] | None = None

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        """Start it without a shell between; its complaints go to standard error, cleaned, and not to ours of data."""
        pipe = asyncio.subprocess.PIPE
        environment = self._build_environment(width, height)
        process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        )
        assert process.stderr is not None
        self._process, self._stdin = process, process.stdin
        self._complaints = asyncio.create_task(_pass_complaints(process.stderr))
        process.stderr = asyncio.StreamReader()
        process.stderr.feed_eof()
        return process

    async def on_meta(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):
            if json_of(data).get("type") == "exit":
                await self.remote_close()

    async def on_packed(self, payload: bytes) -> None:
        """Chunks of files: none was offered."""

    async def end(self) -> None:
        """Until the process is gone: asked, then killed."""
        process = self._process
        if process is None:
            return
        if self._stdin is not None:
            self._stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        tasks = [task for task in (self._task, self._complaints) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None

    @property
    def pid(self) -> int:
        """The process's id; 0 before it was started."""
        return self._process.pid if self._process else 0


@dataclass(slots=True)
class RunPage:
    """A run's page. ``command`` starts one viewer; ``living`` are the viewers' processes now."""

    guard: PageGuard
    command: Sequence[str]
    viewers: int = VIEWERS
    living: set[ViewerProcess] = field(default_factory=set)
    door: PageDoor = field(default_factory=PageDoor)

    def app(self) -> web.Application:
        """The page as an aiohttp application."""
        app = web.Application(middlewares=[_guarded], client_max_size=4096)
        app[_GUARD], app[_DOOR] = self.guard, self.door
        for path in FILES:
            app.router.add_get(path, _file)
        app.router.add_post("/session", self._session)
        app.router.add_get("/ws", self._socket)
        app.on_shutdown.append(self._end_all)
        return app

    async def _session(self, request: web.Request) -> web.StreamResponse:
        """The page's token, or its tab's key, for a key."""
        try:
            asked = await request.json()
        except (ValueError, RecursionError):
            asked = None
        key = self.guard.exchange(asked.get("token") if isinstance(asked, dict) else None)
        if not key:
            return web.Response(
                status=403, text="This address has no valid token: open the one that uvcc serve printed."
            )
        if len(self.living) >= self.viewers:
            return web.Response(status=503, text=f"{self.viewers} viewers look at this run already: close one of them.")
        return web.json_response({"key": key})

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        """One viewer, from the first size to the end of its process."""
        if not self.guard.knows(request.headers.get("Sec-WebSocket-Protocol", "")):
            return web.Response(status=403, text="no valid key")
        if len(self.living) >= self.viewers:
            return web.Response(status=503, text="too many viewers")
        size = packets.size(request.query.get("width", "80"), request.query.get("height", "24"))
        if size is None:
            return web.Response(status=400, text="no size")
        socket = web.WebSocketResponse(
            heartbeat=15, max_msg_size=4 * packets.LARGEST, protocols=(PROTOCOL,), compress=False
        )
        viewer = ViewerProcess(self.command, socket)
        self.living.add(viewer)  # before anything is waited for, so that the limit holds
        try:
            await socket.prepare(request)
            self.door.leaves(request.transport)
            await viewer.start(size.width, size.height)
            await _pass_on(socket, viewer)
        finally:
            # a connection that is cut cancels this; the process ends all the same
            await asyncio.shield(self._end(viewer))
        return socket

    async def _end(self, viewer: ViewerProcess) -> None:
        try:
            await viewer.end()
        finally:
            self.living.discard(viewer)

    async def _end_all(self, _: web.Application) -> None:
        await asyncio.gather(*(self._end(viewer) for viewer in tuple(self.living)))


async def _pass_on(socket: web.WebSocketResponse, viewer: ViewerProcess) -> None:
    async for message in socket:
        packet = packets.parse(message.data) if message.type == WSMsgType.TEXT else None
        match packet:
            case packets.Typed(data):
                await viewer.send_bytes(data)
            case packets.Resized(width, height):
                await viewer.set_terminal_size(width, height)
            case packets.Asked("ping", text):
                await socket.send_json(["pong", text])
            case packets.Asked("focus"):
                await viewer.focus()
            case packets.Asked("blur"):
                await viewer.blur()
            case None:
                await socket.close(code=1008, message=b"not a message of this page")
                return


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[_DOOR].asks(request.transport)
    acts = request.method != "GET" or request.path == "/ws"
    why = request.app[_GUARD].refuses(request.headers, origin=acts)
    response = web.Response(status=403, text=why) if why else await _answered(request, handler)
    if not response.prepared:
        response.headers.update(
            {
                "Content-Security-Policy": policy("" if why else request.headers["Host"]),
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cross-Origin-Opener-Policy": "same-origin",
                "Cache-Control": "no-store",
            }
        )
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as e:
        return web.Response(status=e.status, text=e.reason)


async def _file(request: web.Request) -> web.StreamResponse:
    path, kind = FILES[request.path]
    return web.Response(body=path.read_bytes(), content_type=kind)


async def _pass_complaints(said: asyncio.StreamReader) -> None:
    while line := await said.read(4096):
        complain(f"uvcc: a viewer says: {line.decode(errors='replace').strip()}")


def viewer_command(run_dir: Path) -> tuple[str, ...]:
    """What is started for one viewer."""
    return sys.executable, "-m", "uvcc_console.ui.web.page_viewer", str(run_dir)
