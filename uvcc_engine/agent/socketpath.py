"""Unix sockets in directories of any depth: a path of more than 107 bytes goes through /proc/self/fd."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

LONGEST = 100
T = TypeVar("T")


def connect(path: Path, timeout: float) -> socket.socket:
    """A connected socket. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        _with_short(path, sock.connect)
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
        _with_short(path, sock.bind)
    finally:
        os.umask(before)
    sock.listen(64)
    sock.setblocking(False)
    return sock


def _with_short(path: Path, use: Callable[[str], T]) -> T:
    if len(os.fsencode(path)) <= LONGEST:
        return use(os.fspath(path))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return use(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
