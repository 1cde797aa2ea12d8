"""Where an installation keeps what it has compiled, and how its pods on this machine find it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LOOPS_ENV: Final = "UVCC_LOOPS"
BYTECODE_ENV: Final = "UVCC_BYTECODE"
"""The installed ``uvcc_engine``: a pod's copy of the same sources begins with what Python has compiled of it."""


def kept_in(package: Path) -> Path:
    """The folder for the compiled loops of an installed ``uvcc_engine`` that lies at ``package``."""
    return package / "mpc" / "kernels" / "__pycache__"


def shared_loops(package: Path) -> str:
    """What ``UVCC_LOOPS`` shall be for pods that run a copy of this ``package`` on this very machine."""
    return os.environ.get(LOOPS_ENV) or str(kept_in(package))
