"""Batch framing of LIFT payloads: "BLV1", a sequence of typed vectors of 64-bit words.

Header ``u32 "BLV1", u8 version 1, u8 flags 0, u16 0, u32 count, u32 bytes``; then per vector ``u8 type, u8 flags 0,
u16 length, value, zeros to a multiple of 4``. A value is ``u64 id, u32 q, u8 edge, u8 0, u16 0, u64[q]``. The 16-bit
length holds at most 8189 words; a longer vector continues in further entries of the same type, id and edge.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane.api import Buffer

M_U64VEC: Final = 0x01  # masked values; id = fss_id64
COMP_U64VEC: Final = 0x02  # one share component; id = component
MAX_WORDS: Final = 8189

_MAGIC: Final = 0x31564C42
_HEAD = struct.Struct("<IBBHII")
_ENTRY = struct.Struct("<BBHQIBBH")
_VALUE_HEAD: Final = 16


class Vector(NamedTuple):
    """``words``: little-endian 64-bit words; ``edge``: 0 = parties 0-1, 1 = 1-2, 2 = 2-0."""

    type: int
    id: int
    edge: int
    words: bytes


def encode_batch(vectors: Iterable[Vector]) -> bytes:
    """Frame vectors; neighbours differ in type, id or edge. Raises ProtocolError if one is not of this format."""
    out: list[bytes] = []
    before: tuple[int, int, int] | None = None
    for v in vectors:
        if (v.type, v.id, v.edge) == before:
            raise ProtocolError(f"two LIFT vectors of id {v.id} and edge {v.edge} in a row")
        before = (v.type, v.id, v.edge)
        if v.type not in (M_U64VEC, COMP_U64VEC) or v.edge not in (0, 1, 2) or len(v.words) % 8:
            raise ProtocolError(f"not a LIFT vector: type {v.type}, edge {v.edge}, {len(v.words)} bytes")
        for at in range(0, max(1, len(v.words)), 8 * MAX_WORDS):
            words = v.words[at : at + 8 * MAX_WORDS]
            out.append(_ENTRY.pack(v.type, 0, _VALUE_HEAD + len(words), v.id, len(words) // 8, v.edge, 0, 0) + words)
    body = b"".join(out)  # every entry is a multiple of 4 bytes long, so no padding is ever due
    return _HEAD.pack(_MAGIC, 1, 0, 0, len(out), len(body)) + body


def decode_batch(data: Buffer, *, party: int = -1) -> list[Vector]:
    """Read a batch; continued vectors come back whole. Raises ProtocolError naming ``party`` unless it is canonical."""
    if len(data) < _HEAD.size:
        raise ProtocolError("a LIFT batch is cut short", party=party)
    magic, version, flags, zero, count, size = _HEAD.unpack_from(data)
    if (magic, version, flags, zero) != (_MAGIC, 1, 0, 0) or len(data) != _HEAD.size + size:
        raise ProtocolError("not a LIFT batch", party=party)
    found: list[Vector] = []
    words_of: list[list[bytes]] = []  # joined at the end: a long vector comes in many pieces
    at, continues = _HEAD.size, False
    for _ in range(count):
        if len(data) - at < _ENTRY.size:
            raise ProtocolError("a LIFT batch ends inside an entry", party=party)
        kind, flags, length, ident, q, edge, zero8, zero16 = _ENTRY.unpack_from(data, at)
        start = at + _ENTRY.size
        at = start + 8 * q
        good = kind in (M_U64VEC, COMP_U64VEC) and edge < 3 and not (flags or zero8 or zero16)
        if not good or q > MAX_WORDS or length != _VALUE_HEAD + 8 * q or at > len(data):
            raise ProtocolError("malformed LIFT entry", party=party)
        words = bytes(data[start:at])
        if continues and (found[-1].type, found[-1].id, found[-1].edge) == (kind, ident, edge):
            words_of[-1].append(words)
        elif found and (found[-1].type, found[-1].id, found[-1].edge) == (kind, ident, edge):
            raise ProtocolError(f"two LIFT vectors of id {ident} and edge {edge} in a row", party=party)
        else:
            found.append(Vector(kind, ident, edge, b""))
            words_of.append([words])
        continues = q == MAX_WORDS
    if at != len(data):
        raise ProtocolError("a LIFT batch holds more than its entries", party=party)
    return [v._replace(words=b"".join(pieces)) for v, pieces in zip(found, words_of, strict=True)]
