"""A process that floods both fronts of a relay: ``python relay_flood.py HOST:PORT HOST:PORT``, until it is ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys

SORTS = (
    b"",
    b"UV",
    b"UVS1" + (40).to_bytes(2, "little") + b"x" * 40,
    b"POST /exchange HTTP/1.1\r\nauthorization: Bearer nonsense\r\ncontent-length: 5\r\n\r\n12345",
    b"GET / HT",
    b"\x16\x03\x01" + os.urandom(200),
    b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /records HTTP/1.1\r\n" + b"a: b\r\n" * 5000,
)


def main(fronts: list[tuple[str, int]]) -> None:
    kept: list[socket.socket] = []
    for n in itertools.count():
        with contextlib.suppress(OSError):
            sock = socket.create_connection(fronts[n // len(SORTS) % len(fronts)], 5)
            kept.append(sock)
            sock.sendall(SORTS[n % len(SORTS)])
        if len(kept) > 150:
            kept.pop(0).close()


if __name__ == "__main__":
    main([(host, int(port)) for host, _, port in (at.rpartition(":") for at in sys.argv[1:])])
