"""Ways into pods that no address leads to by itself: each kind of tunnel by the name that a pod's ``jump`` begins with.

``kubernetes:CONTEXT|KUBECONFIG`` is such a way; what has no such beginning is a jump host of SSH.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from uvcc_console.fleet.provider_kinds import alternatives, sections

_KINDS: Final = {"kubernetes": "uvcc_console.fleet.vendors.kube_tunnel"}


def kind_of(jump: str) -> str:
    """The kind of tunnel; empty for a jump host."""
    kind, colon, _ = jump.partition(":")
    return kind if colon and kind in _KINDS else ""


async def through(jump: str, host: str, port: int) -> socket.socket:
    """A socket whose other end is that port of the pod. Raises OSError, or UvccError with a hint."""
    opened: Callable[[str, str, int], Awaitable[socket.socket]] = importlib.import_module(_KINDS[kind_of(jump)]).through
    return await opened(jump.partition(":")[2], host, port)


def jump_of(fleet: Mapping[str, Any], address: str) -> str:
    """The tunnel that leads to this address of a fleet's pods; empty where none is needed."""
    for part in (one for section in sections(fleet) for one in alternatives(section)):
        if (module := _KINDS.get(str(part.get("provider")))) is not None:
            found: str = importlib.import_module(module).jump_of(part, address)
            if found:
                return found
    return ""


def command(jump: str) -> str:
    """What OpenSSH runs as its ProxyCommand to go this way."""
    import shlex
    import sys

    return f"{shlex.quote(sys.executable)} -m {_KINDS[kind_of(jump)]} {shlex.quote(jump.partition(':')[2])} %h %p"
