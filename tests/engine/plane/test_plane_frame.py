"""The frame codec: canonical, checked, and the same labels as the seeds'."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag

SID = bytes(range(32))
LABEL = fr.Labeler(SID, 0, 1)


def test_crc32c_is_castagnoli_and_takes_any_buffer() -> None:
    assert fr.crc32c(b"123456789") == 0xE3069283
    assert fr.crc32c(memoryview(bytearray(b"456789")), fr.crc32c(b"123")) == 0xE3069283
    assert fr.crc32c(b"") == 0


def test_msg_id32_is_the_hash_of_the_seeds() -> None:
    tag = Tag(epoch=7, stream=3, op=9, kind=200)
    packed = struct.pack("<QBBBBIII", 7 << 32 | 3, 0, 1, 0x21, 200, 9, 2, 5)
    digest = hashlib.sha256(b"uvcc.msgid.v1" + SID + packed).digest()
    assert LABEL(tag, 2, 5) == int.from_bytes(digest[:4], "little")


def packed(*payloads: bytes) -> bytes:
    out = b""
    for op, p in enumerate(payloads):
        tag = Tag(1, 4, op, 2)
        out += fr.pack_part(LABEL(tag), tag, 0, 1, len(p), len(p)) + p + fr.padding(len(p))
    return out


@given(st.lists(st.binary(max_size=100), max_size=6))
def test_packed_messages_come_back_aligned(payloads: list[bytes]) -> None:
    body = packed(*payloads)
    parts = list(fr.read_packed(memoryview(body), 4, 0, LABEL))
    assert [(p.tag, bytes(p.payload)) for p in parts] == [(Tag(1, 4, n, 2), p) for n, p in enumerate(payloads)]
    assert len(body) == sum(p.credit for p in parts)
    assert len(body) % 8 == 0


@given(st.data())
def test_no_byte_of_a_packed_body_can_change_unnoticed(data: st.DataObject) -> None:
    body = bytearray(packed(b"abc", b"defgh"))
    at = data.draw(st.integers(0, len(body) - 1))
    inside_payload = 40 <= at < 43 or 88 <= at < 93
    body[at] ^= data.draw(st.integers(1, 255))
    if inside_payload:
        return  # sealed, but without form of its own
    with pytest.raises(ProtocolError) as error:
        list(fr.read_packed(memoryview(bytes(body)), 4, 0, LABEL))
    assert error.value.party == 0


def test_a_part_must_be_canonical() -> None:
    tag = Tag(0, 0, 0, 1)
    total = 2 * fr.CHUNK + 5
    good = fr.pack_part(LABEL(tag, 2, 3), tag, 2, 3, 5, total)
    assert fr.read_part(good, 0, 0, 0, LABEL) == (tag, 2, 3, 5, total)
    for chunk, chunks, length, size in (
        (0, 1, 5, 6),
        (3, 3, 5, total),
        (2, 3, 6, total),
        (1, 2, 5, total),
        (0, 0, 0, 0),
    ):
        bad = fr.pack_part(LABEL(tag, chunk, chunks), tag, chunk, chunks, length, size)
        with pytest.raises(ProtocolError, match="malformed"):
            fr.read_part(bad, 0, 0, 0, LABEL)


def test_a_header_comes_back_and_its_checksum_covers_everything() -> None:
    body = b"some sealed bytes"
    aad = fr.pack_header(fr.DATA, 2, 1, 11, 12, 13, 14, 15, len(body))
    raw = fr.finish(aad, body)
    header = fr.read_header(raw)
    assert header[:9] == (fr.DATA, 2, 1, 11, 12, 13, 14, 15, len(body))
    assert header.aad == aad
    assert len(raw) == fr.HEADER_BYTES
    fr.check_crc(header, body)
    with pytest.raises(fr.UnprovenError) as error:
        fr.check_crc(header, b"some Sealed bytes")
    assert error.value.party == 2
    changed = fr.read_header(raw[:20] + b"\xff" + raw[21:])
    with pytest.raises(fr.UnprovenError):
        fr.check_crc(changed, body)


@pytest.mark.parametrize("at", [0, 4, 5, 43])
def test_what_is_no_frame_is_refused(at: int) -> None:
    raw = bytearray(fr.finish(fr.pack_header(fr.DATA, 2, 1, 0, 0, 0, 0, 0, 0)))
    raw[at] ^= 0x40
    with pytest.raises(ProtocolError):
        fr.read_header(bytes(raw))
