"""Values from elsewhere, read totally: each function answers for every JSON value there is, and none raises.

``None`` means "not such a value". What is kept is bounded: numbers by range, text by length, nesting by depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from uvcc_engine.contract.text import clean

WIDE: Final = (1 << 63) - 1
STEPS: Final = 1_000_000_000
LATEST: Final = 253_402_300_799.0  # the last second of the year 9999: what the calendar can still print
DEPTH: Final = 6
NODES: Final = 512
TEXT: Final = 16_384


def as_int(value: object, low: int = 0, high: int = WIDE) -> int | None:
    """An integer in [low, high]; a float without a fraction counts, a bool does not."""
    if type(value) is int:
        return value if low <= value <= high else None
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            return None
        value = int(value)
    return value if isinstance(value, int) and low <= value <= high else None


def as_float(value: object, low: float = -1e300, high: float = 1e300) -> float | None:
    """A finite number in [low, high]; a bool is none."""
    if type(value) is float:
        return value if low <= value <= high and math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and low <= number <= high else None


def as_timestamp(value: object) -> float | None:
    """A time stamp that a calendar can print."""
    return as_float(value, 0.0, LATEST)


def as_text(value: object, limit: int = 256) -> str | None:
    """Text, cleaned, of at most ``limit`` characters; None for anything else."""
    return clean(value, limit) if isinstance(value, str) else None


def scalar_text(value: object, limit: int = 256) -> str:
    """Any scalar in words, cleaned, of at most ``limit`` characters; empty for null, lists and objects."""
    if isinstance(value, str):
        return clean(value, limit)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if -WIDE <= value <= WIDE else ""
    return str(value) if isinstance(value, float) else ""


def hint_of(found: Mapping[str, Any]) -> str:
    """What an operator is told to do about an error; records of earlier versions call it ``cure``."""
    return scalar_text(found.get("hint", found.get("cure")), 500)


def json_of(text: str | bytes | bytearray) -> Any:
    """The JSON value of a text; raises ValueError, and nothing else, for whatever is none: ``json.loads`` raises
    RecursionError for a list in a list in a list, a thousand times over."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def nested(value: Any, deep: int) -> bool:
    """Whether lists and objects lie in each other more than ``deep`` times."""
    level = [value]
    for _ in range(deep):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def load_json(text: str | bytes, most: int = 1 << 20) -> Any:
    """The same of a text of at most ``most`` characters or bytes."""
    if len(text) > most:
        raise ValueError(f"longer than {most}")
    return json_of(text)


def as_object(text: str | bytes, most: int = 1 << 20) -> dict[str, Any] | None:
    """The JSON object of a text of at most ``most`` characters or bytes; None for whatever is none."""
    try:
        found = load_json(text, most)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def bounded_copy(value: Mapping[str, Any], *, nodes: int = NODES, depth: int = DEPTH) -> dict[str, Any]:
    """A bounded copy of an object: text cleaned, what is nested too deeply or beyond ``nodes`` values left out.

    Numbers stay as they are (a loss may be NaN) unless they are too large for anything to print.
    """
    left = _Left(nodes, TEXT)
    return {k: v for k, v in left.items(value, depth) if v is not _OUT}


_OUT: Final = object()


class _Left:
    """How much of a value may still be copied."""

    def __init__(self, nodes: int, text: int) -> None:
        self._nodes = nodes
        self._text = text

    def _clean(self, text: str, limit: int) -> str:
        kept = clean(text, max(0, min(limit, self._text)))
        self._text -= len(kept)
        return kept

    def items(self, value: Mapping[str, Any], depth: int) -> list[tuple[str, Any]]:
        found = []
        for key, inner in value.items():
            if self._nodes <= 0:
                break
            found.append((self._clean(str(key), 64), self.copy(inner, depth - 1)))
        return found

    def copy(self, value: Any, depth: int) -> Any:
        self._nodes -= 1
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return value if -WIDE <= value <= WIDE else None
        if isinstance(value, str):
            return self._clean(value, TEXT)
        if depth <= 0:
            return _OUT
        if isinstance(value, Mapping):
            return {k: v for k, v in self.items(value, depth) if v is not _OUT}
        if isinstance(value, Sequence):
            found = []
            for inner in value:
                if self._nodes <= 0:
                    break
                found.append(self.copy(inner, depth - 1))
            return [v for v in found if v is not _OUT]
        return _OUT


def without_nan(value: Any) -> Any:
    """The same with ``null`` for numbers that JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in value]
    return value
