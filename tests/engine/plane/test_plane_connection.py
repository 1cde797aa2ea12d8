"""A connection wakes its owner for what comes behind a large frame, however small it is."""

from __future__ import annotations

import select
import socket
import struct

import pytest

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.links.connection import Connection

SMALL, LARGE = 40, 1 << 20


def whole_frame(length: int, seq: int) -> bytes:
    head = fr.pack_header(min(fr.CLASSES), 0, 1, 7, 1, 0, 0, seq, length)
    return head + struct.pack("<I", 0) + bytes(length)


def readable(sock: socket.socket, wait: float = 5.0) -> bool:
    return bool(select.select([sock], [], [], wait)[0])


@pytest.mark.parametrize("cut", [300_000, LARGE - 100_000, LARGE - 10])
def test_a_small_frame_behind_a_large_one_wakes_its_reader(cut: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        connection = Connection(near, 0.0, 0, "127.0.0.1")
        large, small = whole_frame(LARGE, 0), whole_frame(SMALL, 1)
        found = []
        far.sendall(large[:cut])
        while readable(near, 0.2):  # until it waits for much more
            found += connection.read()
        assert not found
        far.sendall(large[cut:])
        while not found:
            assert readable(near)
            found += connection.read()
        far.sendall(small)  # an acknowledgement, say; nobody asks this peer for anything else
        assert readable(near)
        found += connection.read()
        assert [header.length for header, _ in found] == [LARGE, SMALL]
        connection.close()
