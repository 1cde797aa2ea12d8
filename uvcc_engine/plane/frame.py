"""The frame: what travels between two parties. Canonical little-endian, CRC32C (RFC 3720) over header and body.

A frame has a clear header of 48 bytes and a body. The body of a DATA frame is one sealed block of packed messages; the
body of a BULK frame is one sealed part head followed by one sealed payload of at most 1 MiB, so that a large payload is
sealed and opened in place, without a copy. What an observer learns is sizes, times and the order of frames.

``msg_id32`` and the class and kind numbers follow UVCC's native frame; the label is computed with the step in
the upper half of the 64-bit stream, so that labels of different steps differ.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import google_crc32c

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.relay.checksum import crc32c

MAGIC: Final = b"UVCF"
VERSION: Final = 1
HELLO: Final = 0x01  # handshake, see session.py
AUTH: Final = 0x02
DATA: Final = 0x21  # packed messages of one channel
ACK: Final = 0x22  # acknowledgements, credit, sign of life; outside any channel
BULK: Final = 0x24  # one message or chunk of up to 1 MiB
CLASSES: Final = frozenset({HELLO, AUTH, DATA, ACK, BULK})

CHUNK: Final = 1 << 20  # payload bytes of one chunk
PACK_LIMIT: Final = 1 << 15  # messages up to this size share a frame
PACK_FRAME: Final = 1 << 17  # a packed frame is closed at this size
CONTROL_STREAM: Final = 0xFFFF_FFFE
ACK_STREAM: Final = 0xFFFF_FFFF
MAX_MESSAGE: Final = 1 << 34
MAX_KIND: Final = 0xFF
MAX_SEQ: Final = (1 << 63) - 1  # twice that is still a nonce
TAG_BYTES: Final = 16  # of the AEAD
HEADER_BYTES: Final = 48
PART_BYTES: Final = 40
MAX_BODY: Final = CHUNK + PACK_FRAME + PART_BYTES + 2 * TAG_BYTES

_HEADER = struct.Struct("<4sBBBBQQIIQII")
_AAD = struct.Struct("<4sBBBBQQIIQI")
_CRC = struct.Struct("<I")
_PART = struct.Struct("<IHHIIIIQQ")
_NONCE = struct.Struct("<IQ")
_LABEL = struct.Struct("<QBBBBIII")
_PAD = (b"", bytes(1), bytes(2), bytes(3), bytes(4), bytes(5), bytes(6), bytes(7))


class UnprovenError(ProtocolError):
    """A frame that breaks the rules but that anybody on the path can have made: drop it, report it, go on."""


class Header(NamedTuple):
    """The clear part of a frame. ``aad`` are the bytes that the seal covers."""

    cls: int
    src: int
    dst: int
    sid64: int
    session: int
    stream: int
    generation: int
    seq: int
    length: int
    crc: int
    aad: bytes


class FramePart(NamedTuple):
    """One message, or one chunk of a message, inside a frame."""

    tag: Tag
    chunk: int
    chunks: int
    total: int
    payload: memoryview

    @property
    def credit(self) -> int:
        """What the part costs of the channel's credit, in bytes."""
        return PART_BYTES + len(self.payload) + (-len(self.payload) & 7)


def sid64(sid_sub: bytes) -> int:
    """Short name of a subsession on the wire."""
    return int.from_bytes(hashlib.sha256(sid_sub).digest()[:8], "little")


class Labeler:
    """``msg_id32`` of one direction of a subsession: LE32(SHA-256("uvcc.msgid.v1" || sid || ...)[:4]), never 0."""

    __slots__ = ("_base", "_dst", "_src")

    def __init__(self, sid_sub: bytes, src: int, dst: int) -> None:
        self._base = hashlib.sha256(b"uvcc.msgid.v1" + sid_sub)
        self._src, self._dst = src, dst

    def __call__(self, tag: Tag, chunk: int = 0, chunks: int = 1) -> int:
        digest = self._base.copy()
        stream = tag.epoch << 32 | tag.stream
        digest.update(_LABEL.pack(stream, self._src, self._dst, DATA, tag.kind, tag.op, chunk, chunks))
        return int.from_bytes(digest.digest()[:4], "little") or 1


def pack_header(
    cls: int, src: int, dst: int, sid: int, session: int, stream: int, generation: int, seq: int, length: int
) -> bytes:
    """The 44 header bytes in front of the CRC; the seal's associated data."""
    return _AAD.pack(MAGIC, VERSION, cls, src, dst, sid, session, stream, generation, seq, length)


def finish(aad: bytes, *body: Buffer) -> bytes:
    """The 48 header bytes: ``aad`` and the CRC over it and the body."""
    crc = google_crc32c.value(aad)
    for piece in body:
        crc = crc32c(piece, crc)
    return aad + _CRC.pack(crc)


def read_header(data: Buffer) -> Header:
    """Read 48 bytes. Raises ProtocolError (party -1 if it cannot be told) if they are not a frame header."""
    magic, version, cls, src, dst, sid, session, stream, generation, seq, length, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("not a frame", "is the other end the same version of this program?")
    if version != VERSION or cls not in CLASSES or length > MAX_BODY or seq > MAX_SEQ:
        raise ProtocolError(f"frame of version {version}, class {cls:#x}, {length} bytes", party=src)
    return Header(
        cls, src, dst, sid, session, stream, generation, seq, length, crc, bytes(data[: HEADER_BYTES - _CRC.size])
    )


def check_crc(header: Header, body: Buffer) -> None:
    """Raises UnprovenError naming the claimed sender if the bytes were damaged on the way."""
    if crc32c(body, google_crc32c.value(header.aad)) != header.crc:
        raise UnprovenError("damaged frame: CRC32C differs", party=header.src)


def nonce(stream: int, seq: int, half: int = 0) -> bytes:
    """96-bit AEAD nonce: stream, then twice the sequence number plus the half (0 head or whole, 1 bulk payload)."""
    return _NONCE.pack(stream, seq << 1 | half)


def chunk_count(total: int) -> int:
    """Chunks of a message of ``total`` bytes."""
    return max(1, -(-total // CHUNK))


def pack_part(label: int, tag: Tag, chunk: int, chunks: int, length: int, total: int) -> bytes:
    """The head of one part."""
    return _PART.pack(label, tag.kind, 0, tag.epoch, tag.op, chunk, chunks, length, total)


def padding(length: int) -> bytes:
    """Zero bytes from ``length`` up to the next multiple of 8, so that int64 payloads stay aligned."""
    return _PAD[-length & 7]


def read_part(head: Buffer, at: int, stream: int, src: int, labeler: Labeler) -> tuple[Tag, int, int, int, int]:
    """One part head: (tag, chunk, chunks, length, total). Raises ProtocolError unless it is canonical."""
    label, kind, flags, epoch, op, chunk, chunks, length, total = _PART.unpack_from(head, at)
    tag = Tag(epoch, stream, op, kind)
    if chunks == 1:
        good = length == total and total <= CHUNK and chunk == 0
    else:
        due = CHUNK if chunk + 1 < chunks else total - (chunks - 1) * CHUNK
        good = chunk < chunks == chunk_count(total) and length == due and total <= MAX_MESSAGE
    if flags or kind > MAX_KIND or not good:
        raise ProtocolError(f"malformed part of {tag}", party=src)
    if label != labeler(tag, chunk, chunks):
        raise ProtocolError(f"msg_id32 {label:#010x} does not belong to {tag}", party=src)
    return tag, chunk, chunks, length, total


def read_packed(body: memoryview, stream: int, src: int, labeler: Labeler) -> Iterator[FramePart]:
    """The messages of an opened DATA frame. Raises ProtocolError unless the body is canonical."""
    at, end = 0, len(body)
    while at < end:
        if end - at < PART_BYTES:
            raise ProtocolError("a packed frame ends inside a part", party=src)
        tag, chunk, chunks, length, total = read_part(body, at, stream, src, labeler)
        start = at + PART_BYTES
        at = start + length + (-length & 7)
        if at > end or body[start + length : at] != padding(length):
            raise ProtocolError("a packed frame is cut short or badly padded", party=src)
        yield FramePart(tag, chunk, chunks, total, body[start : start + length])
