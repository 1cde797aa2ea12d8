"""Runs a relay: opens the store, listens, announces itself, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.run_files.files import write_json
from uvcc_engine.relay.app import RelayApp, RelayFront
from uvcc_engine.relay.config import RelayConfig
from uvcc_engine.relay.db import SqliteStore
from uvcc_engine.relay.gate import Gate, Visitor, admit
from uvcc_engine.relay.http import GuardedHttp, guarded
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.relay_records import Records
from uvcc_engine.relay.relay_roles import called
from uvcc_engine.relay.store import Store, Write
from uvcc_engine.relay.stream import StreamProtocol

_TICK_S = 1.0
_FORGET_TICKS = 60
_DRAIN_S = 5.0
_BACKLOG = 1024
_FILES = 65_536


_Accept = Callable[[Callable[[Visitor], asyncio.Protocol | asyncio.BufferedProtocol]], Coroutine[Any, Any, None]]


class _Server(uvicorn.Server):
    """uvicorn behind the gate, plus the ready file at the start and the release of long polls at the end."""

    def __init__(
        self, config: uvicorn.Config, hub: Hub, relay: RelayConfig, ready: dict[str, str], accept: _Accept, gate: Gate
    ) -> None:
        super().__init__(config)
        self._hub, self._relay, self._ready, self._accept, self._gate = hub, relay, ready, accept, gate
        self._accepting: asyncio.Task[None] | None = None

    def _connection(self, visitor: Visitor) -> GuardedHttp:
        made: GuardedHttp = self.config.http_protocol_class(  # type: ignore[call-arg,assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        made.visitor = visitor
        return made

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)  # of none: it would not count who has not done the TLS handshake
        self._accepting = asyncio.create_task(self._accept(self._connection))
        if self.started and self._relay.ready_file is not None:
            write_json(self._relay.ready_file, self._ready | {"pid": os.getpid()}, durable=False)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self._gate.clear()
        self._hub.drain()
        await super().shutdown(sockets)


def metrics_text(hub: Hub, store: Store, gate: Gate) -> str:
    """Prometheus text format."""
    figures: dict[str, Any] = {f"{name}_total": getattr(hub.totals, name) for name in hub.totals.__slots__}
    figures |= hub.state() | gate.state() | {"commits_total": store.commits, "rows_total": store.rows}
    lines = [f"uvcc_relay_{name} {value}" for name, value in figures.items()]
    for (group, number), usage in sorted(hub.usage.items()):
        labels = f'{{group={json.dumps(group)},party="{called(number)}"}}'
        lines.append(f"uvcc_relay_queued_messages{labels} {usage.messages}")
        lines.append(f"uvcc_relay_queued_bytes{labels} {usage.bytes}")
    return "\n".join(lines) + "\n"


def bind(listen: str) -> socket.socket:
    """A listening socket. Raises UnreachableError."""
    host, _, port = listen.rpartition(":")
    try:
        return socket.create_server((host.strip("[]"), int(port)), backlog=_BACKLOG)
    except (OSError, ValueError) as error:
        raise UnreachableError(f"the relay cannot listen on {listen}: {error}", "choose another port") from error


def steady(wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """The wall clock of this moment, gone on with evenly: when somebody sets the clock, no lease ends or lasts for it
    and no message expires; over a restart it is the wall clock that counts."""
    began = wall() - elapsed()
    return lambda: began + elapsed()


@contextlib.asynccontextmanager
async def running_hub(
    config: RelayConfig, open_store: Callable[[Path], Store] = SqliteStore
) -> AsyncIterator[tuple[Hub, Store]]:
    """A hub over the store at ``config.db``, and its periodic work, for as long as the context lasts."""
    loop = asyncio.get_running_loop()
    store = open_store(config.db)

    def schedule(then: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(then)

    hub = Hub(config, store, schedule, steady())

    async def tick() -> None:
        n = 0
        while True:
            await asyncio.sleep(_TICK_S)
            hub.tick()
            n += 1
            if n % _FORGET_TICKS == 0:
                hub.forget()

    ticking = asyncio.create_task(tick())
    try:
        yield hub, store
    finally:
        ticking.cancel()
        hub.tick()
        store.close()


@contextlib.asynccontextmanager
async def _stream_front(config: RelayConfig, front: RelayFront, tls: ssl.SSLContext | None) -> AsyncIterator[str]:
    """The stream front beside the HTTP one; yields its ``host:port`` ("" if it is not configured)."""
    if not config.stream_listen:
        yield ""
        return
    loop = asyncio.get_running_loop()
    sock = bind(config.stream_listen)
    host, port = sock.getsockname()[:2]
    connections: set[StreamProtocol] = set()
    make = partial(StreamProtocol, front, config, connections)
    accepting = asyncio.create_task(admit(front.gate, sock, tls, config.login_s, make))
    try:
        yield f"{host}:{port}"
    finally:
        accepting.cancel()
        for connection in tuple(connections):
            connection.drain()
        end = loop.time() + _DRAIN_S
        while connections and loop.time() < end:
            await asyncio.sleep(0.01)


def _tls(config: RelayConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(config.tls_cert, config.tls_key)
    return tls


async def _watch(gate: Gate) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        gate.tick(time.monotonic())


class Running:
    """A relay that serves. ``stop`` begins to drain it (call on its loop); :meth:`finished` waits for the end."""

    def __init__(self, url: str, stream: str, server: uvicorn.Server, task: asyncio.Task[None]) -> None:
        self.url = url
        self.stream = stream
        self._server, self._task = server, task

    def stop(self) -> None:
        self._server.should_exit = True

    async def finished(self) -> None:
        await asyncio.shield(self._task)


def _mark(mark: int, done: Callable[[Exception | None], None]) -> Write:
    return Write([], [], [], [], 0.0, done, mark=mark)


async def numbered(store: Store, clock: Callable[[], float] = time.time) -> Records:
    """Records whose numbers are above all that an earlier relay on this store gave out, and are reserved there."""
    loop = asyncio.get_running_loop()
    durable: asyncio.Future[None] = loop.create_future()
    records = Records(clock, store.high_mark(), lambda mark: store.put(_mark(mark, lambda failure: None)))

    def done(failure: Exception | None) -> None:  # a disk that refuses refuses the mail as well, which says so
        loop.call_soon_threadsafe(durable.set_result, None)

    store.put(_mark(records.next_mark(), done))
    await durable
    return records


@contextlib.asynccontextmanager
async def serving(config: RelayConfig) -> AsyncIterator[Running]:
    """Serve for as long as the context lasts, or until SIGTERM or :meth:`Running.stop`."""
    sock = bind(config.listen)
    host, port = sock.getsockname()[:2]
    url = f"{'https' if config.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    async with running_hub(config) as (hub, store), contextlib.AsyncExitStack() as stack:
        gate, tls = Gate(config, time.monotonic), _tls(config)
        watching = asyncio.create_task(_watch(gate))
        stack.callback(watching.cancel)
        front = RelayFront(hub, config, gate)
        stream = await stack.enter_async_context(_stream_front(config, front, tls))
        records = await numbered(store)
        app = RelayApp(front, config, lambda: metrics_text(hub, store, gate), stream, records)
        options = uvicorn.Config(
            app,
            loop="none",
            http=guarded(gate, config.request_s),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # a stranger's nonsense is counted by the gate
            server_header=False,
            date_header=False,
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=10,
        )
        accept = partial(admit, gate, sock, tls, config.login_s)
        server = _Server(options, hub, config, {"url": url, "stream": stream}, accept, gate)
        task = asyncio.create_task(server.serve(sockets=[]))
        running = Running(url, stream, server, task)
        try:
            yield running
        finally:
            running.stop()
            await task


async def serve(config: RelayConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with serving(config) as running:
        await running.finished()


def run(config: RelayConfig) -> None:
    """Serve on a uvloop event loop until told to stop."""
    import uvloop

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _FILES) if most >= 0 else _FILES, most))
    # uvicorn raises a caught SIGTERM again when it is done; by then there is nothing left that it should kill
    signal.signal(signal.SIGTERM, lambda *_: None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))
