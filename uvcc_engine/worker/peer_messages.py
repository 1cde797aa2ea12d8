"""What another party says in a control message: read totally, refused by name. A peer may say anything.

Messages are JSON (see ``votes``). Every reader here returns a value of the right type and size or raises
ProtocolError naming the party; text that ends up in logs is cut and cleaned.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from uvcc_engine.contract.errors import ProtocolError

MOST_BYTES: Final = 64 << 20  # of a message
MOST_STEPS: Final = 1 << 17  # of a list of checkpoints
MOST_NUMBER: Final = (1 << 53) - 1
MOST_TEXT: Final = 64 << 10
_SHOWN: Final = 400


def message(body: bytes | memoryview, peer: int) -> dict[str, Any]:
    """A control message: an object with a topic and a run."""
    if len(body) > MOST_BYTES:
        raise ProtocolError(f"P{peer} sent a control message of {len(body)} bytes", party=peer)
    try:
        found = json.loads(bytes(body), parse_constant=_no_number)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(k), str) for k in ("topic", "run")):
        raise ProtocolError(f"P{peer} sent a malformed control message", party=peer)
    return found


def _no_number(name: str) -> Any:
    raise ValueError(name)


def same(told: Any, due: Any) -> bool:
    """Whether a field is exactly what was due: true is not 1, and neither is 1.0."""
    return type(told) is type(due) and bool(told == due)


def number(value: Any, peer: int, what: str, *, low: int = 0, high: int = MOST_NUMBER) -> int:
    """A whole number in bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ProtocolError(f"P{peer} sent a malformed {what}", party=peer)
    return value


def text(value: Any, peer: int, what: str, limit: int) -> str:
    """A string of at most ``limit`` characters."""
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"P{peer} sent a malformed {what}", party=peer)
    return value


def steps(value: Any, peer: int) -> set[int]:
    """The steps of a list of checkpoints."""
    if not isinstance(value, list) or len(value) > MOST_STEPS:
        raise ProtocolError(f"P{peer} sent a malformed list of checkpoints", party=peer)
    return {number(s, peer, "list of checkpoints") for s in value}


def note(found: Mapping[str, Any], peer: int) -> bytes:
    """The bytes that came with a message."""
    value = found.get("note")
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else _refuse(peer)
    except ValueError as error:
        raise ProtocolError(f"P{peer} sent a malformed note", party=peer) from error


def _refuse(peer: int) -> bytes:
    raise ProtocolError(f"P{peer} sent a malformed note", party=peer)


def note_text(data: bytes, peer: int) -> str:
    """A note that is text."""
    try:
        return text(data.decode(), peer, "note", MOST_TEXT)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"P{peer} sent a malformed note", party=peer) from error


def shown(value: Any, limit: int = _SHOWN) -> str:
    """Whatever it is, as it may stand in an error and in a log: short, on one line, without control characters."""
    cut = value[:limit] if isinstance(value, str) else str(value)[:limit] if isinstance(value, int | float) else ""
    return "".join(c if c.isprintable() else " " for c in cut)
