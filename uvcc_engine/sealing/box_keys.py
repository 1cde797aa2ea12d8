"""What both kinds of sealed boxes derive their keys by."""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

_NO_SIGNER: Final = Identity(bytes(32), bytes(32)).public.ed25519


def derive(secret: bytes, label: str, salt: bytes = b"") -> bytes:
    """32 bytes from ``secret`` for one purpose (HKDF-SHA256, RFC 5869)."""
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"UVCC_PRIVATE_V1|" + label.encode()).derive(secret)


def sha256(*parts: bytes | memoryview) -> bytes:
    """SHA-256 of the concatenation, without joining large buffers."""
    state = Hash(SHA256())
    for part in parts:
        state.update(part)
    return state.finalize()


def agreement_key(x25519: str) -> PublicIdentity:
    """An X25519 key as a peer to agree with; the signing half plays no part in an agreement. Raises UnreadableError."""
    return PublicIdentity(_NO_SIGNER, x25519)


def wrap_key(static: bytes, ephemeral: bytes) -> bytes:
    """The key of a box, or of what wraps its key, from both agreements."""
    return derive(static + ephemeral, "box-key")
