"""What a page sends over its WebSocket, parsed: anything that is not one of these is None, and ends the connection."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

COLUMNS: Final = (20, 500)
ROWS: Final = (5, 200)
LARGEST: Final = 1 << 16  # characters of one message: a paste


@dataclass(frozen=True, slots=True)
class Typed:
    """Keys, pasted text, the mouse."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Resized:
    """The page's terminal in cells."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Asked:
    """ping (with ``text`` to be sent back) | focus | blur."""

    what: str
    text: str = ""


PagePacket = Typed | Resized | Asked


def size(width: object, height: object) -> Resized | None:
    """A size within bounds; None for what is no size."""
    try:
        columns, rows = int(str(width)[:6]), int(str(height)[:6])
    except ValueError:
        return None
    return Resized(min(max(columns, COLUMNS[0]), COLUMNS[1]), min(max(rows, ROWS[0]), ROWS[1]))


def parse(text: str) -> PagePacket | None:
    """One message of the page."""
    if len(text) > LARGEST:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match found:
        case ["stdin", str(data)]:
            return Typed(data.encode(errors="replace"))
        case ["resize", {"width": width, "height": height}]:
            return size(width, height)
        case ["ping", str(data)]:
            return Asked("ping", data[:40])
        case ["focus" | "blur" as what, *_]:
            return Asked(what)
    return None
