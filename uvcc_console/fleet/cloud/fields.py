"""Values of an answer, read tolerantly: what is of another form is not there, and nothing of it is trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.text import clean


def number(value: Any) -> float | None:
    """A finite number: one that is none would pass every cap that it is held against."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) and not isinstance(value, bool) else None


def whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and abs(found) < 1e15 else None


def text(value: Any) -> str:
    """What the market says ends in the journal and on terminals."""
    return "" if value is None else clean(str(value))


def items(value: Any) -> list[Any]:
    return [v for v in value if v is not None] if isinstance(value, list) else []


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """An object of JSON. Raises UnreachableError naming what came in another form."""
    if not isinstance(value, Mapping):
        raise UnreachableError(f"{what} came in another form", "the API may have changed")
    return value


def rows(value: Any, what: str) -> list[Mapping[str, Any]]:
    """A list of objects, whole: half a list is never taken for all of it. Raises UnreachableError."""
    if not isinstance(value, list):
        raise UnreachableError(f"{what} came in another form", "the API may have changed")
    return [mapping(row, what) for row in value]


def part(value: Any) -> Mapping[str, Any]:
    """An object inside another; an empty one for everything else."""
    return value if isinstance(value, Mapping) else {}


def ident(value: Any, what: str) -> str:
    """An id, which becomes part of a path. Raises UnreachableError for one that would lead elsewhere."""
    found = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not found or len(found) > 128 or not all(c.isascii() and (c.isalnum() or c in "_-") for c in found):
        raise UnreachableError(f"{what} has {found[:80]!r} for an id", "the API may have changed")
    return found
