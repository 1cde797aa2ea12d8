"""Ports of this machine that nobody listens on now, for processes that are about to meet here."""

from __future__ import annotations

import random
import socket
from typing import Final

_HOST: Final = "127.0.0.1"


def ports(count: int) -> list[int]:
    """Free ports, all different, below the range that outgoing connections take theirs from.

    Whoever asks after us gets others for a minute, so that two that ask at once do not get the same: a connection that
    its listener closed keeps its port until then from all but those that bind it for reuse, as every server does.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
        if len(found) == count:
            break
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
