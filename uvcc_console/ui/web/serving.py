"""Serves a run's page until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from uvcc_console.ui.web.page_door import IDLE_S
from uvcc_console.ui.web.page_guard import PageGuard, hosts
from uvcc_console.ui.web.page_server import RunPage, viewer_command
from uvcc_engine.contract.errors import ConfigError


def bound(address: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((address, port))
    except OSError as e:
        found.close()
        raise ConfigError(f"cannot listen at {address}:{port}: {e.strerror or e}", "take another --port") from None
    return found


@contextlib.asynccontextmanager
async def answering(page: RunPage, listener: socket.socket) -> AsyncIterator[None]:
    """The page answers there for as long as the context lasts."""
    runner = web.AppRunner(
        page.app(), access_log=None, handle_signals=False, shutdown_timeout=1.0, keepalive_timeout=IDLE_S
    )
    await runner.setup()
    make = runner.server
    assert make is not None
    # a site of aiohttp's own would not let the door count who connects
    listening = await asyncio.get_running_loop().create_server(lambda: page.door.protocol(make), sock=listener)
    try:
        yield
    finally:
        listening.close()
        await runner.cleanup()


async def serve(run_dir: Path, listener: socket.socket, viewers: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. ``ready`` is told the address, with its token, once it answers."""
    address, port = listener.getsockname()[:2]
    page = RunPage(PageGuard(hosts(address, port)), viewer_command(run_dir), viewers)
    async with answering(page, listener):
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, ended.set)
        named = f"[{address}]" if ":" in address else address
        ready(f"http://{named}:{port}/#{page.guard.token}")
        await ended.wait()
