"""What a JSON request may ask: every field read totally, refused by name. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

MAX_ENTRIES: Final = 65_536
_U64: Final = (1 << 64) - 1


def document(body: bytes) -> dict[str, Any]:
    """The object of a request. Raises ValueError for anything else, also for one that is nested too deeply."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def whole(data: Mapping[str, Any], name: str, default: int | None, low: int = 0, high: int = _U64) -> int:
    """An integer field in bounds. Raises ValueError."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is not a whole number from {low} to {high}")
    return value


def seconds(data: Mapping[str, Any], name: str, default: float, high: float) -> float:
    """A time; longer ones are cut to ``high``. Raises ValueError."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is not a number")
    return float(max(0.0, min(value, high)))


def text(data: Mapping[str, Any], name: str, default: str | None, limit: int) -> str:
    """A string of ``limit`` UTF-8 bytes at most. Raises ValueError."""
    value = data.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string")
    try:
        if len(value) > limit or len(value.encode()) > limit:
            raise ValueError(f"{name} has more than {limit} bytes")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not text") from None
    return value


def entries(value: Any, name: str) -> list[dict[str, Any]]:
    """A bounded list of objects. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(e, dict) for e in value):
        raise ValueError(f"{name} is not a list of at most {MAX_ENTRIES} objects")
    return value


def numbers(value: Any, name: str) -> list[int]:
    """A bounded list of ids. Raises ValueError."""
    good = isinstance(value, list) and len(value) <= MAX_ENTRIES
    if not good or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _U64 for n in value):
        raise ValueError(f"{name} is not a list of at most {MAX_ENTRIES} ids")
    return list(value)
