"""A process that floods a port with junk of every sort: ``python stranger.py HOST PORT COUNT KNOCK_HEX FRAME_HEX``.

Real sockets, from several addresses of this host, as fast as one process can. Some connections hang. Prints
``{"connections": n, "refused": n}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import sys

SOURCES = ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3")
NO_LINGER = struct.pack("ii", 1, 0)
HANGING = 400


def junk(rng: random.Random, knock: bytes, frame: bytes) -> bytes:
    """One of: nothing, part of a knock, a replayed knock and frame, a giant length, another subsession, noise, HTTP."""
    forged = bytearray(knock)
    forged[rng.randrange(8, len(forged))] ^= 1 + rng.randrange(255)
    giant = bytearray(frame)
    giant[36:40] = b"\xff\xff\xff\xff"
    return rng.choice(
        (
            b"",
            knock[: rng.randrange(1, len(knock))],
            knock + frame,
            knock + knock,
            bytes(forged) + frame,
            bytes(giant),
            frame,
            os.urandom(rng.randrange(1, 4096)),
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 8,
        )
    )


def main(host: str, port: int, count: int, knock: bytes, frame: bytes) -> dict[str, int]:
    rng, hanging, done, refused = random.Random(7), list[socket.socket](), 0, 0
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        sock.settimeout(5)
        try:
            sock.bind((rng.choice(SOURCES), 0))
            sock.connect((host, port))
            done += 1
            sock.sendall(junk(rng, knock, frame))
        except OSError:
            refused += 1
        if rng.random() < 0.1:
            hanging.append(sock)
            if len(hanging) > HANGING:
                hanging.pop(0).close()
        else:
            with contextlib.suppress(OSError):
                sock.close()
    return {"connections": done, "refused": refused}


if __name__ == "__main__":
    where, at, number, recorded, hello = sys.argv[1:]
    print(json.dumps(main(where, int(at), int(number), bytes.fromhex(recorded), bytes.fromhex(hello))))
