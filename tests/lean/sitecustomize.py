"""On PYTHONPATH, this makes a Python one in which torch, numba and triton are not installed."""

from __future__ import annotations

import importlib.machinery
from typing import Any

_ABSENT = ("torch", "numba", "triton")
_find = importlib.machinery.PathFinder.find_spec


def _without(name: str, *args: Any, **kwargs: Any) -> Any:
    return None if name.partition(".")[0] in _ABSENT else _find(name, *args, **kwargs)


importlib.machinery.PathFinder.find_spec = _without  # type: ignore[method-assign, assignment]
