"""The branches for 32-bit floats on a processor as compiled loops; importing this imports no compiler."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from functools import lru_cache
from types import ModuleType
from typing import Any


@lru_cache(maxsize=1)
def found() -> ModuleType | None:
    """``attention_loops``, or None: numba is not installed, or the processor multiplies and adds in two steps."""
    if importlib.util.find_spec("numba") is None:
        return None
    if platform.machine() in ("x86_64", "AMD64") and "+fma" not in features():
        return None
    return importlib.import_module("uvcc_engine.nsa.loops.attention_loops")


def features() -> frozenset[str]:
    """What numba compiles for, in LLVM's words."""
    registry: Any = importlib.import_module("numba.core.registry")
    _, _, names = registry.cpu_target.target_context.codegen().magic_tuple()
    return frozenset(names.split(","))
