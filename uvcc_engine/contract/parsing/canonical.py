"""Canonical JSON (RFC 8785): the one byte string of a JSON value, so that it can be hashed and signed.

It cannot carry integers of 2^53 and above. What must (the state of random generators in a checkpoint's manifest, a
model's seed) is written by :func:`sorted_json`, and so is what only has to read the same on every pod.
"""

from __future__ import annotations

import json
from typing import Any

from uvcc_engine.contract.errors import ConfigError


def canonical(value: Any) -> bytes:
    """The canonical bytes. Raises ConfigError for what JSON cannot carry (NaN, integers of 2^53 and above, bytes)."""
    import rfc8785

    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as e:
        raise ConfigError(f"not representable in canonical JSON: {e}", "use strings for large or odd values") from e


def sorted_json(value: Any) -> str:
    """ASCII on one line without spaces, keys sorted, integers of any size. Raises ValueError, TypeError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def same_json(one: Any, two: Any) -> bool:
    """Whether two JSON values are the same text: to Python, ``1``, ``1.0`` and ``true`` are equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
