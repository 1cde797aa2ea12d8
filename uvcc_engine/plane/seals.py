"""Frames of a channel under a session's seal: from the plain pieces to the wire, and back to parts."""

from __future__ import annotations

from collections.abc import Callable

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.plane.channel import OutFrame
from uvcc_engine.plane.inbox import buffer
from uvcc_engine.plane.secure_session import SecureSession
from uvcc_engine.plane.timing import Outgoing


def seal(session: SecureSession, between: tuple[int, int, int], stream: int, frame: OutFrame) -> Outgoing:
    """``frame`` as it goes on the wire. ``between``: source, destination and the subsession's short name."""
    cls = fr.BULK if frame.bulk else fr.DATA
    length = fr.TAG_BYTES + (frame.credit + fr.TAG_BYTES if frame.bulk else frame.credit)
    generation, seq = frame.generation, frame.seq
    aad = fr.pack_header(cls, *between, session.id, stream, generation, seq, length)
    body: tuple[Buffer, ...]
    if frame.bulk:
        head, payload = frame.pieces
        sealed = buffer(len(payload) + fr.TAG_BYTES)  # not cleared first, as a new bytes object would be
        session.seal_into(generation, fr.nonce(stream, seq, 1), payload, aad, sealed)
        body = (session.seal(generation, fr.nonce(stream, seq), head, aad), sealed)
    else:
        body = (session.seal(generation, fr.nonce(stream, seq), b"".join(frame.pieces), aad),)
    key = (session.id, stream, seq, frame.tries)
    return Outgoing((fr.finish(aad, *body), *body), length + fr.HEADER_BYTES, 0, key)


def open_packed(
    session: SecureSession, header: fr.Header, body: memoryview, labeler: fr.Labeler
) -> tuple[bytes, list[fr.FramePart]]:
    """(digest, parts) of a DATA frame. UnprovenError if it is not the peer's, ProtocolError if it is not canonical."""
    plain = session.open(header, fr.nonce(header.stream, header.seq), body)
    parts = list(fr.read_packed(memoryview(plain), header.stream, header.src, labeler))
    return bytes(body[-fr.TAG_BYTES :]), parts


def open_bulk(
    session: SecureSession,
    header: fr.Header,
    body: memoryview,
    labeler: fr.Labeler,
    room: Callable[[Tag, int, int, int], memoryview] | None,
) -> tuple[bytes, list[fr.FramePart]]:
    """(digest, the one part) of a BULK frame, opened where ``room`` says (None: aside).

    Raises UnprovenError for a broken seal.
    """
    stream, seq, cut = header.stream, header.seq, fr.PART_BYTES + fr.TAG_BYTES
    if len(body) < cut + fr.TAG_BYTES:
        raise fr.UnprovenError("a bulk frame is cut short", party=header.src)
    head = session.open(header, fr.nonce(stream, seq), body[:cut])
    tag, chunk, chunks, length, total = fr.read_part(head, 0, stream, header.src, labeler)
    if length != len(body) - cut - fr.TAG_BYTES:
        raise fr.UnprovenError(f"a bulk frame of {tag} has another length than it says", party=header.src)
    into = buffer(length) if room is None else room(tag, chunk, chunks, total)
    session.open_into(header, fr.nonce(stream, seq, 1), body[cut:], into)
    digest = bytes(body[cut - fr.TAG_BYTES : cut]) + bytes(body[-fr.TAG_BYTES :])
    return digest, [fr.FramePart(tag, chunk, chunks, total, into)]
