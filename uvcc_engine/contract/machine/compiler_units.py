"""What the loops' compiler knows of this processor: code for units that it lacks would end the process."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Collection
from typing import Any, Final

_VARIABLES: Final = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")


def is_x86() -> bool:
    """Whether this is an x86-64 processor."""
    return platform.machine() in ("x86_64", "AMD64")


def compiler_knows(features: Collection[str]) -> bool:
    """Whether numba compiles for these units of an x86-64 processor (``+amx-tile``, say), as it does here by itself or
    by its own variables; False on other processors, and without numba."""
    if not is_x86():
        return False
    try:
        registry: Any = importlib.import_module("numba.core.registry")
    except ImportError:
        return False
    known = registry.cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return set(features) <= set(known)


def compiled_for() -> str:
    """For what processor numba was told to compile, empty where it finds out by itself."""
    return " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
