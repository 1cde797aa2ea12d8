"""Checkpoints at rest: encrypted under a key that only the pod's identity can derive.

Equal plaintexts under one key give equal files, so that a rerun or a resume writes the same checkpoint byte for byte
and its hash may enter the transcript; to anybody without the key the files of different states are unrelated, and the
hash of one says nothing that could be tested against a guess of the state. The construction is deterministic
authenticated encryption (SIV: Rogaway and Shrimpton, 2006): the salt of the AEAD key is a MAC of the plaintext, so no
key ever meets two plaintexts and the nonce may be constant. Layout: magic, 32-byte salt, ChaCha20-Poly1305 ciphertext.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.sealing.box_keys import derive
from uvcc_engine.transcript.signing.identity import Identity

MAGIC: Final = b"UVCCREST1"
_LABEL: Final = "checkpoint"
_NONCE: Final = bytes(12)
_SALT: Final = 32


def state_name(rank: int) -> str:
    """Name of a rank's encrypted tensors in a checkpoint."""
    return f"rank{rank}.sealed"


def rest_key(identity: Identity, sid_job: bytes) -> bytes:
    """The 32-byte secret that this pod's checkpoints of a job are encrypted under."""
    return identity.own_secret(sid_job, _LABEL)


def encrypt(key: bytes, plain: bytes, about: str) -> bytes:
    """``plain`` encrypted and authenticated together with ``about``, which the reader must know."""
    bound = hashlib.sha256(about.encode()).digest()
    salt = hmac.digest(derive(key, "rest-salt"), bound + plain, "sha256")
    body = ChaCha20Poly1305(derive(key, "rest-key", salt)).encrypt(_NONCE, plain, MAGIC + bound)
    return MAGIC + salt + body


def decrypt(key: bytes, sealed: bytes, about: str) -> bytes:
    """The inverse of :func:`encrypt`.

    Raises UnreadableError if it is no such file, VerificationError if it was altered, moved or is another pod's.
    """
    start = len(MAGIC) + _SALT
    if len(sealed) < start + 16 or not sealed.startswith(MAGIC):
        raise UnreadableError("not an encrypted checkpoint", "use another checkpoint")
    salt, bound = sealed[len(MAGIC) : start], hashlib.sha256(about.encode()).digest()
    try:
        return ChaCha20Poly1305(derive(key, "rest-key", salt)).decrypt(_NONCE, sealed[start:], MAGIC + bound)
    except InvalidTag:
        what = f"the state of {about} does not open under this pod's key"
        raise VerificationError("checkpoint", what, "it was altered, or another pod wrote it") from None
