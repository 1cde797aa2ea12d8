"""The folder of the machine code of the protocols' loops, and how a loop gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvcc_engine.contract.machine.numba_cache import SourceLocator, kept_loop
from uvcc_engine.mpc.kernels.compiling.loops import code_folder


class LoopLocator(SourceLocator):
    """The folder that all these loops share."""

    def get_cache_path(self) -> str:
        """The folder of these sources' machine code."""
        return str(code_folder())


def compiled_loop(function: Callable[..., Any]) -> Any:
    """``numba.njit`` of a single-threaded loop that is kept in the folder above."""
    return kept_loop(LoopLocator, function)
