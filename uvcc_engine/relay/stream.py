"""The relay's stream front: the same requests as ``/exchange`` over one framed TCP or TLS connection, without HTTP.

A client sends ``"UVS1", u16 length, token`` and gets ``"UVS1"``, or ``"UVS-"`` and the end of the connection where the
token is not known; an end without a word says nothing of the token. After that both sides send frames ``u32 length,
body``. A request may follow another before its reply; replies come in the order of requests. The
first request subscribes its box: messages are pushed as they arrive, as replies without fates, as long as no more than
``max_bytes`` of them are unacknowledged.

Who shows no token in time, stops in the middle of a request or does not read replies is disconnected (see ``gate``).
Nothing more is read from a connection while it does not read.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Final, cast

from uvcc_engine.relay import binary
from uvcc_engine.relay.app import Fault, RelayFront
from uvcc_engine.relay.config import Credential, RelayConfig
from uvcc_engine.relay.gate import Visitor
from uvcc_engine.relay.queues import NoRoomError
from uvcc_engine.relay.refusals import Refusal, RefusedConnectionError

MAGIC: Final = b"UVS1"
REFUSED: Final = b"UVS-"
LENGTH: Final = struct.Struct("<I")
_HELLO: Final = struct.Struct("<4sH")
_MAX_TOKEN: Final = 1024
PUSH_BYTES: Final = 4 << 20


def hello(token: str) -> bytes:
    """What a client says first."""
    data = token.encode()
    return _HELLO.pack(MAGIC, len(data)) + data


class _Subscription:
    """What a connection has asked for."""

    __slots__ = ("box", "consumer", "outstanding", "window")

    def __init__(self, box: int, consumer: int, window: int) -> None:
        self.box, self.consumer, self.window = box, consumer, window
        self.outstanding: dict[int, int] = {}  # delivery id -> bytes


class StreamProtocol(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(
        self, front: RelayFront, config: RelayConfig, connections: set[StreamProtocol], visitor: Visitor
    ) -> None:
        self._front = front
        self._hub = front.hub
        self._config = config
        self._connections = connections
        self._visitor = visitor
        self._deadline: asyncio.TimerHandle | None = None  # while a request is on its way
        self._received = self._at = 0  # bytes, in all and when that was set
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._who: Credential | None = None
        self._buffer = bytearray(1 << 16)
        self._have = 0
        self._body: bytearray | None = None  # of a frame larger than the buffer
        self._filled = 0
        self._subscription: _Subscription | None = None
        self._unacked_bytes = 0
        self._writable = True
        self._push_due = False
        self._draining = False
        self._replies: deque[list[bytes | None]] = deque()  # fates in the order of requests; None: not durable yet

    # -- transport ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._visitor.gone:
            cast(asyncio.Transport, transport).abort()
            return
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no common class
        self._transport.set_write_buffer_limits(high=2 * PUSH_BYTES)
        self._visitor.ends_by(self._transport.abort)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = self._body = None  # what was held for the rest is free now, not when cycles are collected
        self._end_deadline()
        self._visitor.left()
        if self._subscription is not None and self._who is not None:
            self._hub.stop_awaiting(self._who, self._subscription.box, self)

    def pause_writing(self) -> None:
        self._writable = False
        if self._transport is not None:
            self._visitor.paused()
            self._transport.pause_reading()  # its requests would only add to what it does not read

    def resume_writing(self) -> None:
        self._writable = True
        if self._transport is not None:
            self._visitor.resumed()
            self._transport.resume_reading()
        self.wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        return memoryview(self._buffer)[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        try:
            if self._body is not None:
                self._filled += nbytes
                if self._filled == len(self._body):
                    body, self._body = self._body, None
                    self._end_deadline()
                    self._serve(memoryview(body))
                    self._visitor.release()
                return
            self._have += nbytes
            at = 0 if self._who is not None else self._authenticate()
            while self._who is not None and self._body is None and self._have - at >= LENGTH.size:
                before, at = at, self._next_frame(at)
                if at == before:
                    break  # the rest of it is still to come
            if at:
                self._buffer[: self._have - at] = self._buffer[at : self._have]
                self._have -= at
            if self._who is not None and self._body is None:
                self._await_rest()
        except Fault as fault:
            if fault.status == 401:
                self._write([REFUSED])
            self._close()
        except RefusedConnectionError as refused:  # not a client of this front, or one that sends too much
            self._turn_away(refused.code)
        except NoRoomError:
            self._turn_away(Refusal.NO_ROOM)
        except ValueError:
            self._turn_away(Refusal.MALFORMED)

    def _turn_away(self, code: Refusal) -> None:
        self._front.gate.refused(self._visitor.address, code)
        self._close()

    def _await_rest(self) -> None:
        """A request that has begun goes on, or its connection ends."""
        if not self._have:
            self._end_deadline()
        elif self._deadline is None:
            self._begin_deadline()

    def _begin_deadline(self) -> None:
        self._at = self._received
        self._deadline = self._loop.call_later(self._config.stall_s, self._look_at_progress)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look_at_progress(self) -> None:
        self._deadline = None
        if self._received > self._at:
            self._begin_deadline()
        else:
            self._visitor.refuse(Refusal.STALLED)

    def _authenticate(self) -> int:
        if self._have < _HELLO.size:
            return 0
        magic, length = _HELLO.unpack_from(self._buffer)
        if magic != MAGIC or length > _MAX_TOKEN:
            raise RefusedConnectionError(Refusal.NOT_STREAM)
        end = _HELLO.size + int(length)
        if self._have < end:
            return 0
        token = self._buffer[_HELLO.size : end].decode("utf-8", "replace")
        who = self._front.credential(token, self._visitor)
        if not who.scope.mail:
            raise RefusedConnectionError(Refusal.NO_MAILBOX)
        self._who = who
        self._write([MAGIC])
        return end

    def _next_frame(self, at: int) -> int:
        """Take a frame from the buffer, or begin a large one; returns where the next begins (``at``: wait)."""
        length = int.from_bytes(self._buffer[at : at + LENGTH.size], "little")
        if length > self._config.max_body:
            raise RefusedConnectionError(Refusal.TOO_LARGE)
        start, have = at + LENGTH.size, self._have - at - LENGTH.size
        if have >= length:
            self._serve(memoryview(bytes(memoryview(self._buffer)[start : start + length])))
            return start + length
        if start + length > len(self._buffer):
            if not self._visitor.hold(length):
                raise RefusedConnectionError(Refusal.UNFINISHED)
            self._end_deadline()
            self._begin_deadline()
            self._body = bytearray(length)
            self._body[:have] = memoryview(self._buffer)[start : self._have]
            self._filled = have
            return self._have
        return at

    # -- requests ----------------------------------------------------------------------------------------------------

    def _serve(self, body: memoryview) -> None:
        assert self._who is not None
        if self._draining:
            return  # unanswered, so the client brings it to the next relay
        request = binary.read_request(body)
        if request.acks:
            self._acknowledged(request)
        if request.items:
            slot: list[bytes | None] = [None]
            self._replies.append(slot)
            self._hub.enqueue(self._who, request.box, request.items, lambda fates: self._durable(slot, fates))
        if request.max_bytes and self._subscription is None:
            self._subscription = _Subscription(request.box, request.consumer, request.max_bytes)
            self._hub.await_mail(self._who, request.box, self)
            self._hub.release_leases(self._who, request.box)  # what an earlier connection did not acknowledge
            self.wake()

    def _acknowledged(self, request: binary.Request) -> None:
        assert self._who is not None
        self._hub.acknowledge(self._who, request.box, request.acks)
        subscription = self._subscription
        if subscription is not None:
            for ident in request.acks:
                self._unacked_bytes -= subscription.outstanding.pop(ident, 0)
            self.wake()

    def _durable(self, slot: list[bytes | None], fates: bytes) -> None:
        slot[0] = fates
        while self._replies and (ready := self._replies[0][0]) is not None:
            self._replies.popleft()
            self._reply(ready, [])
        if self._draining and not self._replies:
            self._close()

    # -- pushing -----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Push what is there at the end of this turn of the loop, so that a batch travels together."""
        if not self._push_due and self._subscription is not None:
            self._push_due = True
            self._loop.call_soon(self._push)

    def superseded(self) -> None:
        self._subscription = None
        self._close()

    def _push(self) -> None:
        self._push_due = False
        subscription = self._subscription
        if subscription is None or self._who is None or self._transport is None or not self._writable:
            return
        room = subscription.window - self._unacked_bytes
        if room <= 0:
            return
        size = min(room, PUSH_BYTES)
        try:
            messages = self._front.take(self._who, subscription.box, size, consumer=subscription.consumer)
        except Fault:
            self._close()
            return
        if not messages:
            return
        for m in messages:
            if m.delivery and m.delivery not in subscription.outstanding:
                subscription.outstanding[m.delivery] = len(m.payload) + 1
                self._unacked_bytes += len(m.payload) + 1
        self._reply(b"", messages)
        self.wake()

    def _reply(self, fates: bytes, messages: list[binary.Message]) -> None:
        pieces = binary.reply_pieces(binary.DRAINING if self._hub.draining else 0, fates, messages)
        self._write([LENGTH.pack(sum(len(p) for p in pieces)), *pieces])

    def _write(self, pieces: list[binary.Buffer]) -> None:
        if self._transport is not None:
            self._transport.writelines(pieces)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def drain(self) -> None:
        """The relay stops: what was accepted is answered, then the connection ends."""
        self._draining = True
        if not self._replies:
            self._close()
