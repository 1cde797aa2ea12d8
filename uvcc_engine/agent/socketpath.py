"""Unix sockets in directories of any depth, that only this user can reach."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from uvcc_engine.contract.machine.shortpath import short

NAME: Final = "agent.sock"  # in the agent's folder


def connect(path: Path, timeout: float) -> socket.socket:
    """A connected socket, each of whose operations takes at most ``timeout`` seconds. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        with short(path) as address:
            sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user can reach; a stale one is replaced. Raises OSError."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with short(path) as address:
            sock.bind(address)
    finally:
        os.umask(before)
    sock.listen(64)
    sock.setblocking(False)
    return sock
