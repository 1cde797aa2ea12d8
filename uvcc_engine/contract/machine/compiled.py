"""Where an installation keeps what it has compiled, and how its pods on this machine find it."""

from __future__ import annotations

import os
import stat
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


def loops_folder() -> Path:
    """Where machine code of loops is kept: UVCC_LOOPS if it can be written and by nobody else, NUMBA_CACHE_DIR, or the
    installation's folder.

    Machine code from a folder that anybody may write would be anybody's program.
    """
    shared = os.environ.get(LOOPS_ENV)
    if shared and os.access(shared, os.W_OK | os.X_OK) and is_guarded(Path(shared)):
        return Path(shared)
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen) if chosen else kept_in(Path(__file__).parents[2])


def is_guarded(path: Path) -> bool:
    """Whether not everybody may write into a folder."""
    return not path.stat().st_mode & stat.S_IWOTH
