"""Relay link over the stream front: one framed connection, requests without waiting for replies, messages pushed.

Everything that has not been confirmed is sent again on a new connection; the relay recognises it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.plane.inbox import buffer
from uvcc_engine.plane.links.addresses import parse_address
from uvcc_engine.plane.links.link import Arrival, no_work
from uvcc_engine.plane.links.relay_client import RELAY_POLICY, RelayBase, RelayStanding, read_token
from uvcc_engine.plane.links.sockets import OutQueue
from uvcc_engine.plane.timing import LinkTiming
from uvcc_engine.relay import binary
from uvcc_engine.relay.stream import LENGTH, MAGIC, REFUSED, hello

_CONNECT_S: Final = 10.0
_WINDOW: Final = 64 << 20  # bytes that the relay may push ahead of our acknowledgements
_UNCONFIRMED: Final = 64 << 20
_ACK_BYTES: Final = 4 << 20
_ACK_S: Final = 0.05
_MAX_REPLY: Final = 1 << 27
_READ: Final = 1 << 18


class RelayReplies:
    """Reads length-prefixed replies from a non-blocking socket."""

    def __init__(self) -> None:
        self.buffer = bytearray(_READ)
        self.have = 0
        self._body: memoryview | None = None
        self._filled = 0

    def read(self, sock: socket.socket) -> list[binary.Reply]:
        """Replies that can be had without waiting. Raises OSError if the connection ended, ValueError on nonsense."""
        found: list[binary.Reply] = []
        while not found:
            into = memoryview(self.buffer)[self.have :] if self._body is None else self._body[self._filled :]
            try:
                count = sock.recv_into(into)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not count:
                raise ConnectionResetError("the relay closed the connection")
            if self._body is not None:
                self._filled += count
                if self._filled == len(self._body):
                    found.append(binary.read_reply(self._body))
                    self._body = None
            else:
                self.have += count
                self.split(found)
        return found

    def split(self, found: list[binary.Reply]) -> None:
        """Add the whole replies of the buffer to ``found``. Raises ValueError on nonsense."""
        at, view = 0, memoryview(self.buffer)
        while self.have - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.buffer, at)
            if length > _MAX_REPLY:
                raise ValueError(f"a reply of {length} bytes")
            start, have = at + LENGTH.size, self.have - at - LENGTH.size
            if have >= length:
                found.append(binary.read_reply(bytes(view[start : start + length])))
                at = start + length
            elif start + length > len(self.buffer) or (at > 0 and have > 0 and length > len(self.buffer) // 2):
                self._body = buffer(length)
                self._body[:have] = view[start : self.have]
                self._filled, at = have, self.have
            else:
                break
        if at:
            self.buffer[: self.have - at] = self.buffer[at : self.have]
            self.have -= at


class StreamLink(RelayBase):
    """Implements ``links.Link`` over a relay's stream front."""

    kind = "stream"

    def __init__(
        self,
        *,
        address: str,
        token_file: Path,
        tls: ssl.SSLContext | None,
        box: int,
        policy: LinkTiming = RELAY_POLICY,
        standing: RelayStanding | None = None,
    ) -> None:
        """``address``: ``host:port`` of the stream front."""
        super().__init__(url=address, box=box, policy=policy, standing=standing)
        self._address = parse_address(address)
        self._token = read_token(token_file)
        self._tls = tls
        self._sock: socket.socket | None = None
        self._poll = select.poll()
        self._out = OutQueue()
        self._replies = RelayReplies()
        self._unconfirmed: deque[list[binary.Item]] = deque()
        self._unconfirmed_bytes = 0
        self._unacked_bytes = 0
        self._ack_due = float("inf")

    def ready(self, dst: int) -> bool:
        return self._bytes + self._unconfirmed_bytes < _UNCONFIRMED

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        if self._sock is None and (self._resting(wait) or not self._connect(wait)):
            return []
        end = self._clock() + wait
        full = not self.ready(-1)
        try:
            while True:
                self._request()
                self._out.flush(self._socket())
                found = self._take_in()
                now = self._clock()
                if found or now >= end or self._notices:
                    return found
                if full and self._unconfirmed_bytes <= _UNCONFIRMED // 2:
                    return found  # there is room again for whoever waits to send
                meanwhile()
                meanwhile = no_work
                self._wait(min(end, self._ack_due) - self._clock())
        except (OSError, ValueError) as error:
            self._disconnect(error)
            return []

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise ConnectionError("not connected")
        return self._sock

    def _wait(self, seconds: float) -> None:
        sock = self._socket()
        if isinstance(sock, ssl.SSLSocket) and sock.pending():
            return
        self._poll.modify(sock.fileno(), select.POLLIN | (select.POLLOUT if self._out else 0))
        self._poll.poll(max(0.0, seconds) * 1000)

    def _request(self) -> None:
        """Turn what was taken into one request."""
        due = self._unacked_bytes >= _ACK_BYTES or self._clock() >= self._ack_due
        if not self._items and not due:
            return
        items, acks = self._items, self._acks
        self._items, self._acks = [], []
        self._unconfirmed_bytes += self._bytes
        self._bytes = 0
        for at in range(0, max(len(items), len(acks)), binary.MAX_ITEMS):
            part = items[at : at + binary.MAX_ITEMS]
            self._put(part, acks[at : at + binary.MAX_ITEMS])
            if part:
                self._unconfirmed.append(part)

    def _put(self, items: list[binary.Item], acks: list[int]) -> None:
        pieces = binary.request_pieces(self._box, self._consumer, 0, _WINDOW, acks, items)
        self._out.add([LENGTH.pack(sum(len(p) for p in pieces)), *pieces])
        self._unacked_bytes, self._ack_due = 0, float("inf")

    def _take_in(self) -> list[Arrival]:
        found: list[Arrival] = []
        for reply in self._replies.read(self._socket()):
            if reply.fates:
                if not self._unconfirmed or len(self._unconfirmed[0]) != len(reply.fates):
                    raise ValueError("a reply to another request")
                items = self._unconfirmed.popleft()
                self._unconfirmed_bytes -= sum(len(i.payload) for i in items)
                again = self._refused(items, reply.fates)
                self._items += again
                self._bytes += sum(len(i.payload) for i in again)
            if reply.messages:
                self._unacked_bytes += sum(len(m.payload) for m in reply.messages)
                self._ack_due = min(self._ack_due, self._clock() + _ACK_S)
                found += self._arrivals(reply.messages)
        return found

    # -- connection --------------------------------------------------------------------------------------------------

    def _connect(self, wait: float) -> bool:
        try:
            sock = socket.create_connection(self._address, min(_CONNECT_S, max(wait, 1.0)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._address[0])
            sock.sendall(hello(self._token))
            answer = sock.recv(len(MAGIC))
        except OSError as error:
            self._down(host_names.why(error, self._address[0]))
            return False
        if answer != MAGIC:
            sock.close()
            if answer == REFUSED:
                self._turned_away("")
            else:
                self._down("not a stream front" if answer else "closed while it was greeted")
            return False
        sock.setblocking(False)
        self._sock = sock
        self._poll.register(sock.fileno(), select.POLLIN)
        self._out, self._replies = OutQueue(), RelayReplies()
        self._up()
        # what the last connection may have lost; the relay recognises what it has
        before, self._unconfirmed = self._unconfirmed, deque()
        acks, self._acks = self._acks, []
        for at in range(0, max(len(acks), 1), binary.MAX_ITEMS):
            self._put([], acks[at : at + binary.MAX_ITEMS])
        for items in before:
            self._put(items, [])
            self._unconfirmed.append(items)
        return True

    def _disconnect(self, error: Exception) -> None:
        if self._sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(self._sock.fileno())
            self._sock.close()
            self._sock = None
        self._down(str(error))

    def unconfirmed(self) -> bool:
        return bool(self._items or self._unconfirmed)

    def pending(self) -> bool:
        return bool(self._items or self._out)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def stream_address(url: str, announced: str) -> str:
    """``host:port`` of the stream front, from the relay's URL and what its ``/healthz`` says. Raises ConfigError."""
    if not announced:
        raise ConfigError("this relay has no stream front", "set stream_listen in its configuration, or use link relay")
    host, port = parse_address(announced)
    if host in ("0.0.0.0", "::"):
        host = urlsplit(url).hostname or host
    return f"{host}:{port}"
