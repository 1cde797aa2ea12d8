"""Bytes on their way out of a non-blocking socket."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from uvcc_engine.plane.api import Buffer

_IOV: Final = 64
_TLS_WRITE: Final = 1 << 16


class OutQueue:
    """Buffers in order; :meth:`flush` writes them without copying as far as the socket takes them."""

    __slots__ = ("bytes", "pieces")

    def __init__(self) -> None:
        self.pieces: deque[Buffer] = deque()
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def add(self, pieces: Iterable[Buffer]) -> None:
        for piece in pieces:
            if len(piece):
                self.pieces.append(piece)
                self.bytes += len(piece)

    def flush(self, sock: socket.socket) -> None:
        """Write what the socket takes now. Raises OSError if the connection is broken."""
        while self.pieces:
            try:
                if isinstance(sock, ssl.SSLSocket):
                    sent = sock.send(self._head(_TLS_WRITE))
                else:
                    sent = sock.sendmsg(self.pieces if len(self.pieces) <= _IOV else [*islice(self.pieces, _IOV)])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            self._written(sent)

    def _head(self, limit: int) -> Buffer:
        first = self.pieces[0]
        return first if len(first) <= limit else memoryview(first)[:limit]

    def _written(self, sent: int) -> None:
        if sent == self.bytes:
            self.pieces.clear()
            self.bytes = 0
            return
        self.bytes -= sent
        while sent:
            first = self.pieces[0]
            if sent < len(first):
                self.pieces[0] = memoryview(first)[sent:]
                return
            sent -= len(first)
            self.pieces.popleft()
