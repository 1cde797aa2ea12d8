"""Plain bodies of ACK frames and of the cursors in a handshake. Little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane.channel import Acknowledgement

BYE: Final = 1  # nothing more will come

_HEAD = struct.Struct("<HHI")  # flags, entries, zero
_ENTRY = struct.Struct("<IIQQQQ")  # stream, ranges, expected, limit, frames numbered, messages committed
_RANGE = struct.Struct("<QQ")
_CURSOR = struct.Struct("<IIQQ")  # stream, zero, expected frame, whole messages


class StreamCursors(NamedTuple):
    """State of both directions of one stream."""

    ack: Acknowledgement  # of what we received
    numbered: int  # frames that we numbered for the peer
    committed: int  # messages of the peer that are safe with our reader


def encode(flags: int, entries: list[StreamCursors]) -> bytes:
    out = [_HEAD.pack(flags, len(entries), 0)]
    for ack, numbered, committed in entries:
        out.append(_ENTRY.pack(ack.stream, len(ack.ranges), ack.expected, ack.limit, numbered, committed))
        out.extend(_RANGE.pack(*r) for r in ack.ranges)
    return b"".join(out)


def decode(plain: bytes, party: int) -> tuple[int, list[StreamCursors]]:
    """(flags, entries). Raises ProtocolError naming ``party`` unless it is one acknowledgement."""
    found = []
    try:
        flags, entries, _ = _HEAD.unpack_from(plain)
        at = _HEAD.size
        for _ in range(entries):
            stream, count, expected, limit, numbered, committed = _ENTRY.unpack_from(plain, at)
            at += _ENTRY.size
            ranges: list[tuple[int, int]] = []
            for _ in range(count):
                start, end = _RANGE.unpack_from(plain, at)
                at += _RANGE.size
                if not (ranges[-1][1] if ranges else expected) < start < end:
                    raise ProtocolError(f"unordered ranges in an acknowledgement of stream {stream}", party=party)
                ranges.append((start, end))
            found.append(StreamCursors(Acknowledgement(stream, expected, limit, tuple(ranges)), numbered, committed))
    except struct.error:
        raise ProtocolError("malformed acknowledgement", party=party) from None
    return flags, found


def encode_cursors(cursors: Iterable[tuple[int, int, int]]) -> bytes:
    """``(stream, expected frame, whole messages)`` each."""
    return b"".join(_CURSOR.pack(stream, 0, expected, has) for stream, expected, has in cursors)


def decode_cursors(data: bytes, party: int) -> dict[int, tuple[int, int]]:
    """Stream -> (expected frame, whole messages). Raises ProtocolError naming ``party`` on other bytes."""
    if len(data) % _CURSOR.size:
        raise ProtocolError("malformed cursors in a handshake", party=party)
    return {stream: (expected, has) for stream, _, expected, has in _CURSOR.iter_unpack(data)}
