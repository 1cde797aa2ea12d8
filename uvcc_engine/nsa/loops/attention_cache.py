"""The folder of the machine code of these loops, and how a loop gets there."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from uvcc_engine.contract.machine.compiled import loops_folder
from uvcc_engine.contract.machine.numba_cache import SourceLocator, kept_loop


@cache
def _name() -> str:
    """Of all sources of this room: numba looks at the one alone in which a loop stands."""
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"attention-{hashlib.sha256(sys.version.encode() + source).hexdigest()[:16]}"


class AttentionLocator(SourceLocator):
    """The folder that all these loops share."""

    def get_cache_path(self) -> str:
        """The folder of these sources' machine code."""
        return str(loops_folder() / _name())


def compiled_loop(function: Callable[..., Any]) -> Any:
    """``numba.njit`` of a single-threaded loop that is kept in the folder above."""
    return kept_loop(AttentionLocator, function)
