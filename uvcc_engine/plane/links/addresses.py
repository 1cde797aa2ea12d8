"""Where a worker's peers are met: an address as it is written, and a socket that listens at one."""

from __future__ import annotations

import socket
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreachableError

_SSH_PORT: Final = 22
_BACKLOG: Final = 1024  # a peer waits behind a stranger's connects, not outside


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"not an address: {text!r}", "write it like 10.0.0.2:7000")
    if int(port) == _SSH_PORT:
        raise ConfigError(f"{text} is the SSH port", "give the plane a port of its own")
    return host.strip("[]"), int(port)


def listening(listen: str) -> socket.socket:
    """Raises ConfigError, UnreachableError."""
    host, port = parse_address(listen)
    try:
        found = socket.create_server((host, port), backlog=_BACKLOG, reuse_port=False)
        found.setblocking(False)
        return found
    except OSError as error:
        raise UnreachableError(f"cannot listen on {listen}: {error.strerror}", "choose another port") from error
