"""A sealed box: only the addressed key opens it, and only the named sender can have made it.

The data owner seals inputs to parties; parties seal results to the owner. X25519 twice (the sender's static key and a
fresh ephemeral key, both with the recipient's static key), HKDF-SHA256,
ChaCha20-Poly1305: the authenticated one-way pattern "X" of the Noise framework (Perrin, 2018) with the two
agreements combined in one key derivation. Every box has its own ephemeral key, hence its own AEAD key, so the nonce
is constant. Layout: magic, LE32 header length, header (canonical JSON, authenticated), ciphertext.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.sealing import streamed_box
from uvcc_engine.sealing.box_keys import agreement_key, derive, sha256, wrap_key
from uvcc_engine.transcript.signing.identity import Identity

MAGIC: Final = b"UVCCBOX1"
_NONCE: Final = bytes(12)
_MAX_HEADER: Final = 1 << 16


def seal(plaintext: bytes, *, sender: Identity, to: str, about: dict[str, Any], entropy: bytes | None = None) -> bytes:
    """Seal ``plaintext`` to the X25519 public key ``to`` (hex).

    ``about`` travels in clear but authenticated. ``entropy`` (32 bytes) makes the box deterministic; it is bound to
    the plaintext and the recipient, so that two different boxes never share a key. Fresh randomness otherwise.
    """
    if entropy is None:
        agreement = os.urandom(32)
    else:
        agreement = derive(entropy, "box-ephemeral", sha256(plaintext, to.encode(), canonical(about)))
    ephemeral = Identity(bytes(32), agreement)  # only its X25519 half is used
    header = canonical(
        {
            "about": about,
            "ephemeral": ephemeral.public.x25519,
            "sender": sender.public.x25519,
            "to": to,
        }
    )
    peer, salt = agreement_key(to), sha256(header)
    key = wrap_key(sender.pair_secret(peer, salt, "box"), ephemeral.pair_secret(peer, salt, "box"))
    body = ChaCha20Poly1305(key).encrypt(_NONCE, plaintext, header)
    return MAGIC + struct.pack("<I", len(header)) + header + body


def unseal(box: bytes, *, recipient: Identity, sender: str) -> tuple[bytes | bytearray, dict[str, Any]]:
    """Open a box that ``sender`` (X25519 public key, hex) sealed to ``recipient``; returns (plaintext, about).

    Raises UnreadableError if it is not a box, VerificationError if it is for another recipient, by another sender, or
    was altered.
    """
    return open_with(box, box_key(box, recipient=recipient, sender=sender))


def box_key(box: bytes, *, recipient: Identity, sender: str) -> bytes:
    """The key of this one box, which its recipient may hand on; it opens no other box. Raises like :func:`unseal`."""
    if box.startswith(streamed_box.MAGIC):
        return streamed_box.content_key(box, recipient=recipient, sender=sender)
    header, start = _header(box)
    if header["to"] != recipient.public.x25519:
        raise VerificationError("sealed file", "it is for another recipient", "give each party its own file")
    if header["sender"] != sender:
        raise VerificationError("sealed file", "it is by another sender than the policy names", "seal it again")
    salt = sha256(box[len(MAGIC) + 4 : start])
    return wrap_key(*(recipient.pair_secret(agreement_key(k), salt, "box") for k in (sender, header["ephemeral"])))


def sender_of(box: bytes) -> str:
    """Whose key a box says that it was sealed with; true only once it opens. Raises UnreadableError for no box."""
    return str(_header(box)[0]["sender"])


def open_with(box: bytes, key: bytes) -> tuple[bytes | bytearray, dict[str, Any]]:
    """Open a box with its :func:`box_key`. Raises UnreadableError, VerificationError if it was altered."""
    if box.startswith(streamed_box.MAGIC):
        return streamed_box.open_with(box, key)
    header, start = _header(box)
    try:
        plain = ChaCha20Poly1305(key).decrypt(_NONCE, box[start:], box[len(MAGIC) + 4 : start])
    except InvalidTag:
        what = "it was altered, or is not by the sender it names"
        raise VerificationError("sealed file", what, "seal it again") from None
    return plain, header["about"]


def _header(box: bytes) -> tuple[dict[str, Any], int]:
    start = len(MAGIC) + 4
    if len(box) < start or box[: len(MAGIC)] != MAGIC:
        raise UnreadableError("not a sealed file", "make it with `uvcc-engine share`")
    (length,) = struct.unpack_from("<I", box, len(MAGIC))
    if length > _MAX_HEADER or len(box) < start + length + 16:
        raise UnreadableError("the sealed file is cut short", "copy it again")
    try:
        header = json.loads(box[start : start + length])
        fields = (header["to"], header["ephemeral"], header["sender"])
        if not all(isinstance(value, str) for value in fields) or not isinstance(header["about"], dict):
            raise ValueError("fields of other types")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableError(f"the sealed file has no readable header: {error}", "copy it again") from error
    return header, start + length
