"""A line to a relay that a test may listen to and cut: a TCP proxy in threads that keeps every byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class RelayTap:
    """``url``: what its user takes for the relay; ``sent`` and ``got``: the bytes of each connection, as they crossed;
    ``cut``: nobody gets through.
    """

    url: str
    sent: list[bytearray] = field(default_factory=list)
    got: list[bytearray] = field(default_factory=list)
    cut: bool = False
    answered: int = 0
    """Connections that carried an answer and have ended."""

    def bytes(self) -> bytes:
        return b"".join(bytes(piece) for piece in (*self.sent, *self.got))


def _pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            kept += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


def _serve(tap: RelayTap, one: socket.socket, at: tuple[str, int]) -> None:
    with one, contextlib.suppress(OSError), socket.create_connection(at, timeout=120) as other:
        sent, got = bytearray(), bytearray()
        tap.sent.append(sent)
        tap.got.append(got)
        back = threading.Thread(target=_pump, args=(other, one, got))
        back.start()
        _pump(one, other, sent)
        back.join()
        tap.answered += bool(got)


@contextlib.contextmanager
def tapped(url: str) -> Iterator[RelayTap]:
    """A line to the relay at ``url``."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        tap = RelayTap(f"http://127.0.0.1:{server.getsockname()[1]}")
        threads: list[threading.Thread] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    if tap.cut:
                        one.close()
                        continue
                    threads.append(threading.Thread(target=_serve, args=(tap, one, (host, port))))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield tap
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            accepting.join(120)
            for thread in threads:
                thread.join(120)
