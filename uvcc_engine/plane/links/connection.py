"""A non-blocking TCP connection that carries frames both ways; a large body is read where it will be opened."""

from __future__ import annotations

import socket
import sys
from typing import Final

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.inbox import buffer
from uvcc_engine.plane.links.sockets import OutQueue

_READ: Final = 1 << 17
_SOCKET_BUFFER: Final = 4 << 20
_BACKLOG_BYTES: Final = 1 << 20  # frames taken but not written yet, per peer; few, so that they are still in the cache
_LOWAT: Final = 256 << 10
DEAD_PATH_MS = (
    10_000  # without an acknowledgement, or in front of a full window: the connection is given up, not the peer
)
_TCP_RXT_CONNDROPTIME: Final = 0x80  # macOS: seconds of retransmission; Python has no name for it


class Connection:
    """A socket with frames going out and frames coming in."""

    def __init__(self, sock: socket.socket, now: float, peer: int, address: str) -> None:
        """``peer``: who was dialled, or who knocked; a sealed frame has yet to prove it."""
        self.sock = sock
        self.peer = peer
        self.address = address
        self.since = now
        self.connecting = False
        self.mask = 0  # of the poll
        self.out = OutQueue()
        self._buffer = bytearray(_READ)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._header: fr.Header | None = None
        self._body: memoryview | None = None  # of a frame larger than what is buffered
        self._filled = 0
        self._large = memoryview(b"")  # holds one such body; its content is opened before the next read
        self._lowat = 1
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "darwin":
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, DEAD_PATH_MS // 1000)
        elif hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PATH_MS)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)

    def read(self) -> list[tuple[fr.Header, Buffer]]:
        """Whole frames that can be had without waiting.

        Raises OSError if the connection is broken or closed, ProtocolError if it does not carry frames.
        """
        found: list[tuple[fr.Header, Buffer]] = []
        while not found:
            try:
                if self._body is not None:
                    count = self.sock.recv_into(self._body[self._filled :])
                    self._filled += count
                else:
                    count = self.sock.recv_into(self._view[self._end :])
                    self._end += count
            except BlockingIOError:
                self._wait_for_more()
                break
            if count == 0:
                raise ConnectionResetError("closed by the other end")
            self._parse(found)
        if found:
            self._wait_for_more()  # a body's end took the wait for much of it away: what follows may be an answer
        return found

    def _parse(self, found: list[tuple[fr.Header, Buffer]]) -> None:
        if self._body is not None and self._header is not None:
            if self._filled < len(self._body):
                return
            found.append((self._header, self._body))
            self._header = self._body = None
        while True:
            if self._header is None:
                if self._end - self._start < fr.HEADER_BYTES:
                    break
                self._header = fr.read_header(self._view[self._start : self._start + fr.HEADER_BYTES])
                self._start += fr.HEADER_BYTES
            header, have = self._header, self._end - self._start
            if have >= header.length:
                found.append((header, bytes(self._view[self._start : self._start + header.length])))
                self._start += header.length
                self._header = None
                continue
            if header.length > _READ // 2:
                if not self._large:
                    self._large = buffer(fr.MAX_BODY)
                self._body = self._large[: header.length]
                self._body[:have] = self._view[self._start : self._end]
                self._filled, self._start = have, self._end
            break
        left = self._end - self._start
        if self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left

    @property
    def room(self) -> bool:
        """True if the backlog takes another frame."""
        return self.out.bytes < _BACKLOG_BYTES

    def _wait_for_more(self) -> None:
        """Inside a large body, be woken when there is much to read and not at every segment."""
        missing = 1 if self._body is None else min(len(self._body) - self._filled, _LOWAT)
        if missing != self._lowat:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)
            self._lowat = missing

    def close(self) -> None:
        self.sock.close()
