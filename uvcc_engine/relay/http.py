"""uvicorn's HTTP protocol with bounds: on who connects, on a request's head, and on how slowly it may come.

uvicorn leaves these to a proxy in front of it; the relay has none.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from uvcc_engine.relay.gate import Gate, Visitor
from uvcc_engine.relay.refusals import Refusal

_HEAD_BYTES: Final = 16 << 10
_HEADERS: Final = 64


class GuardedHttp(HttpToolsProtocol):
    """One connection. ``scope["visitor"]`` is its :class:`Visitor`."""

    visitor: Visitor
    gate: Gate
    request_s: float

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head = 0  # bytes of the head that is being read
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.visitor.gone:
            transport.abort()
            return
        super().connection_made(transport)
        self.visitor.ends_by(self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            super().connection_lost(exc)
        self._on_time()
        self.visitor.left()

    def data_received(self, data: bytes) -> None:
        if self._head >= 0:
            self._head += len(data)
            if self._head > _HEAD_BYTES + len(data):  # of the last piece a body may be part
                self._refuse(Refusal.LONG_HEAD)
                return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        self.gate.refused(self.visitor.address, Refusal.NOT_HTTP)
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["visitor"] = self.visitor  # type: ignore[typeddict-unknown-key]
        self._on_time()
        self._deadline = self.loop.call_later(self.request_s, self._refuse, Refusal.SLOW)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _HEAD_BYTES:
            raise ValueError("too long a request head")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _HEADERS or len(name) + len(value) > _HEAD_BYTES:
            raise ValueError("too long a request head")

    def on_headers_complete(self) -> None:
        self._head = -1
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head = 0
        self._on_time()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.visitor.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.visitor.resumed()

    def _end(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # what is being answered has nobody left to be sent to
        self.transport.abort()

    def _on_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, why: Refusal) -> None:
        self.visitor.refuse(why)


def guarded(gate: Gate, request_s: float) -> type[GuardedHttp]:
    """The protocol class of one relay, as uvicorn wants it; ``visitor`` is set when a connection is there."""
    return type("Guarded", (GuardedHttp,), {"gate": gate, "request_s": request_s})
