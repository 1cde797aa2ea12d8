"""How local pods find the process of their machine that has imported torch, so that each need not.

The zygote of a pod's agent is then a fork of that process (``uvcc_engine/agent/processes/preloaded_server.py``). Only
pods that share a machine with their console are told of one.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Final

PRELOADED_ENV: Final = "UVCC_PRELOADED"
ROOM: Final = 1 << 14
"""Bytes for the environment of a fork, where the system shows it."""


def socket_name() -> str:
    """The name of the socket of a process that runs this very Python with these very packages."""
    same = "\0".join((sys.version, sys.prefix, sys.executable if sys.prefix == sys.base_prefix else ""))
    return f"torch-{hashlib.sha256(same.encode()).hexdigest()[:8]}"
