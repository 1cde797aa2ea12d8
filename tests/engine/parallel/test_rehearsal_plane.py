"""The links of rehearsals in forked processes: an end that nobody announced is one."""

from __future__ import annotations

import socket
import time

import pytest
from parallel_kit import SocketPlane

from uvcc_engine.contract.errors import PeerLostError
from uvcc_engine.plane.api import Tag


@pytest.mark.parametrize("said", [b"", b"half of a head"])
def test_a_peer_that_ends_with_something_unread_is_lost_and_not_waited_for(said: bytes) -> None:
    mine, theirs = socket.socketpair()
    plane = SocketPlane(0, {1: mine})
    due = [(1, Tag(0, 1, 0, 2))]
    plane.send(1, Tag(0, 1, 0, 3), b"it never reads this")
    theirs.sendall(said)
    theirs.close()
    end = time.monotonic() + 120
    plane.wait_any([due], lambda: time.monotonic() > end)
    assert plane.arrived(due)
    with pytest.raises(PeerLostError, match="party 1 never sent"):
        plane.recv(*due[0])
