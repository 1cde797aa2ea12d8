"""Canonical JSON (RFC 8785): the one byte string of a JSON value, so that it can be hashed and signed."""

from __future__ import annotations

import json
from typing import Any

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.transcript.formats import reading


def canonical(value: Any) -> bytes:
    """The canonical bytes. Raises ConfigError for what JSON cannot carry (NaN, integers of 2^53 and above, bytes)."""
    import rfc8785

    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as e:
        raise ConfigError(f"not representable in canonical JSON: {e}", "use strings for large or odd values") from e


def same_json(one: Any, two: Any) -> bool:
    """Whether two JSON values are the same text: to Python, ``1``, ``1.0`` and ``true`` are equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def parse_canonical(data: bytes, what: str) -> Any:
    """Read JSON that must be canonical (a final newline is allowed). Raises UnreadableError, naming ``what``.

    Whatever reads differently from how it is spelled (duplicate keys, spaces, other number forms) is refused.
    """
    body = data[:-1] if data.endswith(b"\n") else data
    value = reading.parse_json(body, what)
    try:
        same = canonical(value) == body
    except (ValueError, RecursionError, MemoryError, ConfigError) as e:
        raise UnreadableError(f"{what} is not JSON: {reading.reason(e)}", "fetch it again") from e
    if not same:
        raise UnreadableError(f"{what} is not canonical JSON (RFC 8785)", "it was changed, or written by another tool")
    return value
