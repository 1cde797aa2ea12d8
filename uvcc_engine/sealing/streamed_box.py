"""A sealed box for content that does not fit into memory, for one or more addressees: the pods of one party.

The content's key is fresh; for each addressee it is wrapped under two key agreements, as in ``box``. The content is cut
into pieces, each sealed under its number and whether it is the last (the STREAM construction of Hoang, Reyhanitabar,
Rogaway and Vizar, CRYPTO 2015): none can be left out, moved, or cut off at the end. Whoever can open the box could make
another one with the same key, so all addressees are of one domain. Layout: magic, LE32 header length, header (canonical
JSON), sealed pieces.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.sealing.box_keys import agreement_key, derive, sha256, wrap_key
from uvcc_engine.transcript.signing.identity import Identity

MAGIC: Final = b"UVCCBOX2"
PIECE: Final = 1 << 20
MOST_ADDRESSEES: Final = 1024
_TAG: Final = 16
_MAX_HEADER: Final = 1 << 20
_NO_NONCE: Final = bytes(12)
_SEAL_AGAIN: Final = "seal it again"


class BoxWriter:
    """Seals what is written to it. :meth:`close` seals the last piece: without it the box is cut short, and says so."""

    def __init__(self, out: BinaryIO, *, sender: Identity, to: Sequence[str], about: dict[str, Any]) -> None:
        """``to``: X25519 public keys (hex). ``about`` travels in clear but authenticated."""
        key, ephemeral = os.urandom(32), Identity(bytes(32), os.urandom(32))
        told = {"about": about, "ephemeral": ephemeral.public.x25519, "sender": sender.public.x25519, "to": list(to)}
        salt = sha256(canonical(told))
        wraps = []
        for one in to:
            peer = agreement_key(one)
            secrets = (sender.pair_secret(peer, salt, "box"), ephemeral.pair_secret(peer, salt, "box"))
            wraps.append(ChaCha20Poly1305(wrap_key(*secrets)).encrypt(_NO_NONCE, key, salt).hex())
        header = canonical({**told, "wraps": wraps})
        self._out, self._hash, self._number = out, Hash(SHA256()), 0
        self._left, self._filled = memoryview(bytearray(PIECE)), 0  # one buffer: a fresh one a piece costs as its copy
        self._sealed = memoryview(bytearray(PIECE + _TAG))
        self._cipher = ChaCha20Poly1305(derive(key, "box-stream", sha256(header)))
        self.size = 0
        self._put(MAGIC + struct.pack("<I", len(header)) + header)

    def write(self, data: bytes | memoryview) -> None:
        """Seal as much as makes whole pieces; the last of what is written waits for :meth:`close`."""
        view = memoryview(data)
        while self._filled + len(view) > PIECE:
            room = PIECE - self._filled
            if self._filled:
                self._left[self._filled :] = view[:room]
                self._piece(self._left, last=False)
                self._filled = 0
            else:
                self._piece(view[:room], last=False)
            view = view[room:]
        self._left[self._filled : self._filled + len(view)] = view
        self._filled += len(view)

    def close(self) -> str:
        """Seal the last piece; returns the SHA-256 of the whole box, in hex."""
        self._piece(self._left[: self._filled], last=True)
        return self._hash.finalize().hex()

    def _piece(self, plain: bytes | memoryview, *, last: bool) -> None:
        sealed = self._sealed[: len(plain) + _TAG]
        self._cipher.encrypt_into(_nonce(self._number, last), plain, None, sealed)
        self._put(sealed)
        self._number += 1

    def _put(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self._hash.update(data)
        self.size += len(data)


def content_key(box: bytes, *, recipient: Identity, sender: str) -> bytes:
    """The key of this one box. Raises UnreadableError; VerificationError: for another recipient, by another sender."""
    header, _ = _header(box)
    if header["sender"] != sender:
        raise VerificationError("sealed file", "it is by another sender than the policy names", _SEAL_AGAIN)
    if recipient.public.x25519 not in header["to"]:
        raise VerificationError("sealed file", "it is for another recipient", "give each party its own file")
    salt = sha256(canonical({k: v for k, v in header.items() if k != "wraps"}))
    try:
        wrapped = bytes.fromhex(header["wraps"][header["to"].index(recipient.public.x25519)])
        secrets = (recipient.pair_secret(agreement_key(k), salt, "box") for k in (sender, header["ephemeral"]))
        return ChaCha20Poly1305(wrap_key(*secrets)).decrypt(_NO_NONCE, wrapped, salt)
    except (InvalidTag, ValueError, IndexError):
        what = "it was altered, or is not by the sender it names"
        raise VerificationError("sealed file", what, _SEAL_AGAIN) from None


def open_with(box: bytes, key: bytes) -> tuple[bytearray, dict[str, Any]]:
    """(content, about) of a box by its :func:`content_key`. Raises UnreadableError, VerificationError: altered, cut."""
    header, start = _header(box)
    cipher = ChaCha20Poly1305(derive(key, "box-stream", sha256(box[len(MAGIC) + 4 : start])))
    plain = bytearray()
    try:
        for number, (piece, last) in enumerate(_pieces(memoryview(box)[start:])):
            plain += cipher.decrypt(_nonce(number, last), piece, None)
    except (InvalidTag, ValueError):
        what = "it was altered or cut short, or is not by the sender it names"
        raise VerificationError("sealed file", what, _SEAL_AGAIN) from None
    return plain, header["about"]


def _pieces(sealed: memoryview) -> Iterator[tuple[memoryview, bool]]:
    at = 0
    while True:
        end = min(at + PIECE + _TAG, len(sealed))
        yield sealed[at:end], end == len(sealed)
        if end == len(sealed):
            return
        at = end


def _nonce(number: int, last: bool) -> bytes:
    return struct.pack("<Q3xB", number, last)


def _header(box: bytes) -> tuple[dict[str, Any], int]:
    start = len(MAGIC) + 4
    if len(box) < start or box[: len(MAGIC)] != MAGIC:
        raise UnreadableError("not a sealed file", "make it with `uvcc owner share`")
    (length,) = struct.unpack_from("<I", box, len(MAGIC))
    if length > _MAX_HEADER or len(box) < start + length + _TAG:
        raise UnreadableError("the sealed file is cut short", "copy it again")
    try:
        header = json.loads(box[start : start + length])
        texts = (header["ephemeral"], header["sender"], *header["to"], *header["wraps"])
        if not all(isinstance(text, str) for text in texts) or not isinstance(header["about"], dict):
            raise ValueError("fields of other types")
        if len(header) != 5 or len(header["to"]) != len(header["wraps"]) or len(header["to"]) > MOST_ADDRESSEES:
            raise ValueError("not one wrapped key for each addressee")
        return header, start + length
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableError(f"the sealed file has no readable header: {error}", "copy it again") from error
