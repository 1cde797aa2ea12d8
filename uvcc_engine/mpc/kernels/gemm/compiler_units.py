"""What the loops' compiler knows of this processor: code for units that it lacks would end the process."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Collection
from typing import Any


def compiler_knows(features: Collection[str]) -> bool:
    """Whether numba compiles for these units of an x86-64 processor (``+amx-tile``, say), as it does here by itself or
    by its own variables."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        registry: Any = importlib.import_module("numba.core.registry")
    except ImportError:
        return False
    known = registry.cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return set(features) <= set(known)
