"""Ports of this machine that nobody listens on now, for processes that are about to meet here."""

from __future__ import annotations

import random
import socket
from typing import Final

_HOST: Final = "127.0.0.1"
RANGE: Final = range(20_000, 32_000)
"""Below the range that outgoing connections take their ports from."""


def ports(count: int) -> list[int]:
    """Free ports of ``RANGE``, all different.

    Whoever asks after us gets others for a minute, so that two that ask at once do not get the same: a connection that
    its listener closed keeps its port until then from all but those that bind it for reuse, as every server does.
    """
    found: list[int] = []
    left, chance = list(RANGE), random.SystemRandom()
    while left and len(found) < count:
        drawn = chance.randrange(len(left))  # as many as are asked for: to shuffle all takes thousands of system calls
        left[drawn], left[-1] = left[-1], left[drawn]
        port = left.pop()
        if _taken(port):
            found.append(port)
    return found


def _taken(port: int) -> bool:
    """Whether the port was free; from now on it is not for others who ask."""
    with socket.socket() as door, socket.socket() as visitor:
        try:
            door.bind((_HOST, port))  # this fails where somebody has asked a moment ago: not yet for reuse
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what stays of it lets a server bind it
            door.listen(1)
            visitor.connect((_HOST, port))
            inside, _ = door.accept()
        except OSError:
            return False
        inside.close()  # first: what waits for stray packets is the side that closes first
        visitor.recv(1)
    return True
