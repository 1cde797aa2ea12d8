"""Canonical JSON (RFC 8785): the one byte string of a JSON value, so that it can be hashed and signed.

It cannot carry integers of 2^53 and above. What must (the state of random generators in a checkpoint's manifest, a
model's seed) is written by :func:`sorted_json`, and so is what only has to read the same on every pod.
"""

from __future__ import annotations

import json
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError

_LONG: Final = 2**53


def canonical(value: Any) -> bytes:
    """The canonical bytes. Raises ConfigError for what JSON cannot carry (NaN, integers of 2^53 and above, bytes)."""
    if (quick := quick_canonical(value)) is not None:
        return quick
    import rfc8785

    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as e:
        raise ConfigError(f"not representable in canonical JSON: {e}", "use strings for large or odd values") from e


def quick_canonical(value: Any) -> bytes | None:
    """The canonical bytes by the standard library's encoder, which is written in C; None where it might spell a value
    in another way: floats that need an exponent or end in ``.0``, long integers, keys beyond ASCII, other types."""
    try:
        return _quick_json(value).encode() if _is_plain(value) else None
    except (UnicodeEncodeError, RecursionError):
        return None


_quick_json: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


def _is_plain(value: Any) -> bool:
    """Whether both encoders write this value alike."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(-_LONG < value < _LONG)
    if kind is float:
        spelled = repr(value)
        return "e" not in spelled and "n" not in spelled and not spelled.endswith(".0")
    if kind is dict:
        return all(type(key) is str and key.isascii() and _is_plain(inner) for key, inner in value.items())
    return (kind is list or kind is tuple) and all(map(_is_plain, value))


def sorted_json(value: Any) -> str:
    """ASCII on one line without spaces, keys sorted, integers of any size. Raises ValueError, TypeError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def same_json(one: Any, two: Any) -> bool:
    """Whether two JSON values are the same text: to Python, ``1``, ``1.0`` and ``true`` are equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
