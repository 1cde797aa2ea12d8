"""Test vectors of a whole session between two parties: both HELLOs, both AUTHs, keys, and frames under them."""

from __future__ import annotations

import hashlib
from typing import Any, Final

SECRETS: Final = ("sign", "agree", "instance", "fresh")
"""What each party brings, 32 bytes (an instance: 16) each: SHA-256 of the words ``UVCC_VECTOR party N`` and this."""


def _secret(party: int, what: str) -> bytes:
    return hashlib.sha256(f"UVCC_VECTOR party {party} {what}".encode()).digest()


def session() -> str:
    """A handshake from its first byte, and what is said in the session that it leads to."""
    from docs.make.vectors import written
    from uvcc_engine.plane import acks, frame
    from uvcc_engine.plane.api import Tag
    from uvcc_engine.plane.channel import Acknowledgement
    from uvcc_engine.plane.secure_session import Handshake
    from uvcc_engine.transcript.signing.identity import Identity

    who = [Identity(_secret(p, "sign"), _secret(p, "agree")) for p in range(2)]
    sub = hashlib.sha256(b"a subsession").digest()
    cursors = acks.encode_cursors([(3, 0, 0)])

    def side(me: int) -> Handshake:
        drawn = {16: _secret(me, "instance")[:16], 32: _secret(me, "fresh")}
        return Handshake(me, 1 - me, sub, who[me], who[1 - me].public, lambda: cursors, lambda n: drawn[n])

    low, high = side(0), side(1)
    (hello_low,) = low.outgoing()
    hello_high, auth_high = high.on_hello(_body(hello_low), 0.0)
    low.on_hello(_body(hello_high), 0.0)
    greeting, (auth_low,) = low.on_auth(frame.read_header(auth_high), _body(auth_high))
    met, _ = high.on_auth(frame.read_header(auth_low), _body(auth_low))
    assert greeting is not None
    assert met is not None
    assert greeting.session.id == met.session.id

    label, tag = frame.Labeler(sub, 0, 1), Tag(epoch=2, stream=3, op=9, kind=2)
    payload = b"one message of a round"
    part = frame.pack_part(label(tag), tag, 0, 1, len(payload), len(payload)) + payload + frame.padding(len(payload))
    frames = {}
    for name, generation, seq in (("data", 0, 0), ("data of the next generation", 1, 1)):
        if generation:
            greeting.session.rekey()
        aad = _aad(frame.DATA, greeting.session.id, sub, 3, generation, seq, len(part))
        sealed = greeting.session.seal(generation, frame.nonce(3, seq), part, aad)
        frames[name] = {"plain": part.hex(), "frame": (frame.finish(aad, sealed) + sealed).hex()}
    said = acks.StreamCursors(Acknowledgement(3, 2, 1 << 20, ((4, 6),)), 2, 1)
    return written(
        "A session of parties 0 and 1 from its first byte (frames and sessions). Bytes in hex. Secrets are in the clear"
        " so that a reader can compute everything again; whoever lacks one of them must find no key.",
        sid_sub=sub.hex(),
        parties=[
            {
                "ed25519": who[p].public.ed25519,
                "x25519": who[p].public.x25519,
                "secrets": {"x25519": _secret(p, "agree").hex(), "fresh x25519": _secret(p, "fresh").hex()},
            }
            for p in range(2)
        ],
        cursors={"entries": [{"stream": 3, "expected": 0, "whole": 0}], "hex": cursors.hex()},
        hello_low=hello_low.hex(),
        hello_high=hello_high.hex(),
        auth_high=auth_high.hex(),
        auth_low=auth_low.hex(),
        session=greeting.session.id,
        frames=frames,
        tag={"epoch": 2, "stream": 3, "op": 9, "kind": 2},
        payload=payload.hex(),
        acknowledgement={
            "plain": acks.encode(0, [said]).hex(),
            "flags": 0,
            "stream": 3,
            "expected": 2,
            "limit": 1 << 20,
            "ranges": [[4, 6]],
            "numbered": 2,
            "committed": 1,
        },
    )


def _body(raw: bytes) -> bytes:
    from uvcc_engine.plane import frame

    return raw[frame.HEADER_BYTES :]


def _aad(cls: int, session_id: int, sub: bytes, stream: int, generation: int, seq: int, plain: int) -> Any:
    from uvcc_engine.plane import frame

    return frame.pack_header(cls, 0, 1, frame.sid64(sub), session_id, stream, generation, seq, plain + frame.TAG_BYTES)
