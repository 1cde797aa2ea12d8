"""Reading JSON that must be canonical (RFC 8785), of unknown origin."""

from __future__ import annotations

from typing import Any

from uvcc_engine.contract.canonical import canonical
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.transcript.formats import reading


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
