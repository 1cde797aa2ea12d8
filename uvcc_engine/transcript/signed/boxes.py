"""Records at the relay under seal: signs of life for the consoles, orders for workers and consoles.

What is sealed was signed before (see ``orders``); a seal only keeps the relay, and whoever has a token for it, from
reading. A sign of life is sealed to the consoles' X25519 keys: a fresh key for each record, wrapped for every reader
(ephemeral-static agreement, HKDF-SHA256, ChaCha20-Poly1305). An order is sealed with a key that the run's workers and
consoles share. Both are padded, so their sizes tell nothing of their content. The relay sees the name of a record
(``beat/p0r0s0t0``, ``order/<random>``), who left it, when, and its padded size.
"""

from __future__ import annotations

import base64
import binascii
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from uvcc_engine.contract.errors import ConfigError

BEAT_STEP: Final = 6144  # a sign of life with its roots fits into one
ORDER_STEP: Final = 1024
MOST_READERS: Final = 16
_BEAT: Final = "UVCS1."
_ORDER: Final = "UVCO1."
_LENGTH: Final = struct.Struct("<I")
_NONCE: Final = bytes(12)
_WRAPPED: Final = 32 + 16
_MOST: Final = 64 << 10


def reader_of(key: Ed25519PrivateKey) -> X25519PrivateKey:
    """The reading key of whoever holds this signing key: derived, so there is nothing further to keep or to hand on."""
    return X25519PrivateKey.from_private_bytes(_derive(key.private_bytes_raw(), b"reader"))


def public_of(reader: X25519PrivateKey) -> str:
    """The public half as the workers get it (hex)."""
    return reader.public_key().public_bytes_raw().hex()


def read_keys(texts: Iterable[object]) -> list[bytes]:
    """Public keys out of their hex. Raises ConfigError."""
    found = []
    for text in texts:
        try:
            raw = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            raw = b""
        if len(raw) != 32:
            raise ConfigError(f"not the key of a reader: {str(text)[:70]!r}", "expected 64 hex digits")
        found.append(raw)
    if len(found) > MOST_READERS:
        raise ConfigError(f"{len(found)} readers of signs of life", f"{MOST_READERS} at most")
    return found


def read_seal(text: object) -> bytes:
    """The shared key of orders out of its hex; empty where there is none. Raises ConfigError."""
    if not text:
        return b""
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) != 32:
        raise ConfigError("not the key that orders are sealed with", "expected 64 hex digits")
    return found


def seal_to(text: str, readers: Sequence[bytes]) -> str:
    """``text`` for these readers only. Raises ConfigError if a reader's key is not usable."""
    ephemeral, key = X25519PrivateKey.generate(), os.urandom(32)
    public = ephemeral.public_key().public_bytes_raw()
    try:
        wraps = [_wrap_key(ephemeral.exchange(X25519PublicKey.from_public_bytes(r)), public, r) for r in readers]
    except ValueError as error:
        raise ConfigError("the key of a reader is not usable", "make its console's key anew") from error
    head = bytes([len(readers)]) + public + b"".join(ChaCha20Poly1305(w).encrypt(_NONCE, key, b"") for w in wraps)
    return _BEAT + _text(head + ChaCha20Poly1305(key).encrypt(_NONCE, _padded(text, BEAT_STEP), head))


def unseal(body: str, reader: X25519PrivateKey) -> str:
    """What was sealed to this reader; "" if it is for others or damaged. A text without a seal is returned as it is."""
    if not body.startswith(_BEAT):
        return body
    raw = _bytes(body[len(_BEAT) :])
    start = 33 + raw[0] * _WRAPPED if raw else 0
    if not raw or raw[0] > MOST_READERS or len(raw) < start + 16:
        return ""
    public, head = raw[1:33], raw[:start]
    try:
        shared = reader.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return ""
    wrap = ChaCha20Poly1305(_wrap_key(shared, public, reader.public_key().public_bytes_raw()))
    for at in range(33, start, _WRAPPED):
        try:
            key = wrap.decrypt(_NONCE, raw[at : at + _WRAPPED], b"")
            return _unpadded(ChaCha20Poly1305(key).decrypt(_NONCE, raw[start:], head))
        except InvalidTag:
            continue
    return ""


def seal_with(text: str, key: bytes) -> str:
    """``text`` for all who share ``key``."""
    nonce = os.urandom(12)
    return _ORDER + _text(nonce + _order_box(key).encrypt(nonce, _padded(text, ORDER_STEP), b""))


def unseal_with(body: str, key: bytes) -> str:
    """What was sealed with this key; "" if it was not. A text without a seal is returned as it is."""
    if not body.startswith(_ORDER):
        return body
    raw = _bytes(body[len(_ORDER) :])
    try:
        return _unpadded(_order_box(key).decrypt(raw[:12], raw[12:], b"")) if len(raw) >= 28 else ""
    except InvalidTag:
        return ""


def label(key: bytes, text: str) -> str:
    """A name for a record that says what it is about only to who has the key."""
    return _derive(key, b"label " + text.encode()).hex()[:24]


def _order_box(key: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(key, b"order"))


def _wrap_key(shared: bytes, ephemeral: bytes, reader: bytes) -> bytes:
    return _derive(shared, b"wrap" + ephemeral + reader)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"UVCC_RECORD_V1|" + purpose).derive(secret)


def _padded(text: str, step: int) -> bytes:
    plain = text.encode()
    return _LENGTH.pack(len(plain)) + plain + bytes(-(_LENGTH.size + len(plain)) % step)


def _unpadded(plain: bytes) -> str:
    (length,) = _LENGTH.unpack_from(plain)
    return plain[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "replace")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    if len(text) > _MOST:
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
