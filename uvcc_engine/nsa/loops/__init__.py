"""The branches for 32-bit floats on a processor as compiled loops; importing this imports no compiler."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

from uvcc_engine.contract.machine.compiler_units import compiler_knows, is_x86


@lru_cache(maxsize=1)
def found() -> ModuleType | None:
    """``attention_loops``, or None: numba is not installed, or the processor multiplies and adds in two steps."""
    if importlib.util.find_spec("numba") is None:
        return None
    if is_x86() and not compiler_knows(("+fma",)):
        return None
    return importlib.import_module("uvcc_engine.nsa.loops.attention_loops")
