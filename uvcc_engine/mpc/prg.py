"""Pairwise pseudo-random streams, one key per component: AES-128 in counter mode (NIST SP 800-38A) or ChaCha20 (RFC
8439).

Component ``c`` of every sharing is known to two parties, and so is the key of its stream; masks that both can compute
are never sent. The 16-byte counter block is ``epoch (4) | stream (2) | op (4) | block (6)``, big-endian, so a mask is
bound to the place in the program that uses it. The key itself is bound to ``sid_sub`` and the attempt number.
ChaCha20 takes the same fields (its 64-byte block number in the last six bytes) and is what a GPU computes by itself;
the parties of a session must choose alike.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.mpc.layout import wire_dtype

_STEP = 1 << 18
_ZEROS = memoryview(bytes(_STEP))


@dataclass(frozen=True, slots=True)
class PairKeys:
    """The 32-byte PRG keys of one party: shared with its previous and its next party, and its own.

    ``prev`` is the key of component ``party``, ``next`` that of component ``party + 1``. ``own`` never leaves the
    party.
    """

    prev: bytes
    next: bytes
    own: bytes

    def __post_init__(self) -> None:
        for label, key in (("prev", self.prev), ("next", self.next), ("own", self.own)):
            if len(key) != 32:
                raise ConfigError(f"PRG key {label!r} has {len(key)} bytes", "derive 32-byte keys from the identities")


def derive_key(secret: bytes, sid_sub: bytes, attempt: int, label: str, length: int = 16) -> bytes:
    """Key of one stream: HKDF-SHA256 with salt ``sid_sub`` and the attempt number in the info (RFC 5869)."""
    info = b"UVCC_PRG_V1" + struct.pack("<I", attempt) + label.encode()
    return HKDF(algorithm=SHA256(), length=length, salt=sid_sub, info=info).derive(secret)


class Stream:
    """One keyed stream that refuses to give the same bytes twice: AES-128 in counter mode."""

    key_bytes = 16
    block_bytes = 16
    _max_blocks = 1 << 40

    def __init__(self, key: bytes, name: str) -> None:
        self._key = key
        self._name = name
        self._at = (-1, -1, -1, 0)
        self._context: CipherContext | None = None

    def draw(self, epoch: int, stream: int, op: int, block: int, out: Tensor) -> None:
        """Fill ``out`` (contiguous, any type) with fresh bytes from counter ``block`` of operation ``op``.

        Positions must increase. ProtocolError if any of these bytes may have been given out before, since a mask that
        is used for two messages reveals their difference.
        """
        if (epoch, stream, op, block) < self._at:
            raise ProtocolError(
                f"mask reuse refused: stream {self._name} is at {self._at}, asked for {(epoch, stream, op, block)}",
                "start the next attempt; never run an epoch twice with one set of keys and changed inputs",
            )
        nbytes = out.numel() * out.element_size()
        blocks = -(-nbytes // self.block_bytes)
        if block + blocks > self._max_blocks:
            raise ProtocolError(f"operation {op} asks for more than {self._max_blocks} blocks of stream {self._name}")
        self._at = (epoch, stream, op, block + blocks)
        if nbytes:
            self._generate(struct.pack(">IHI", epoch, stream, op), block, out)

    def _generate(self, place: bytes, block: int, out: Tensor) -> None:
        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        _fill(self._at_counter(self._counter(place, block)), host.numpy().data.cast("B"))
        if host is not out:
            out.copy_(host)

    def _at_counter(self, counter: bytes) -> CipherContext:
        """The key's one context, set to a counter block: a new context would take longer than a short draw."""
        if self._context is None:
            self._context = self._cipher(counter).encryptor()
        else:
            self._context.reset_nonce(counter)
        return self._context

    def _counter(self, place: bytes, block: int) -> bytes:
        return place + block.to_bytes(6, "big")

    def _cipher(self, counter: bytes) -> Cipher[Any]:
        return Cipher(algorithms.AES(self._key), modes.CTR(counter))


class ChaChaStream(Stream):
    """The same with ChaCha20, which a GPU draws where the numbers are needed."""

    key_bytes = 32
    block_bytes = 64
    _max_blocks = 1 << 32  # the block counter's 32 bits; the two bytes above it stay zero

    def _generate(self, place: bytes, block: int, out: Tensor) -> None:
        if out.device.type == "cuda":
            from uvcc_engine.mpc.kernels.triton_ops import chacha20

            chacha20(self._key, bytes(2) + place, block, out)
        else:
            super()._generate(place, block, out)

    def _counter(self, place: bytes, block: int) -> bytes:
        return struct.pack("<I", block) + bytes(2) + place

    def _cipher(self, counter: bytes) -> Cipher[Any]:
        return Cipher(algorithms.ChaCha20(self._key, counter), mode=None)


STREAMS = {"aes": Stream, "chacha20": ChaChaStream}


def _fill(cipher: CipherContext, view: memoryview) -> None:
    """Key stream into ``view``, in steps that leave the zero input in the processor's cache."""
    try:
        for at in range(0, len(view), _STEP):
            part = view[at : at + _STEP]
            cipher.update_into(_ZEROS[: len(part)], part)
    except ValueError:  # older versions of the library want room for a block beyond the input
        if at:
            raise
        view[:] = cipher.update(bytes(len(view)))


class Draws:
    """The random numbers of one operation: pairwise streams by component, and the party's own."""

    def __init__(self, streams: dict[int, Stream], epoch: int, stream: int, op: int, device: torch.device) -> None:
        self._streams = streams
        self._place = (epoch, stream, op)
        self._block: dict[int, int] = {}
        self._device = device

    def _draw(self, component: int, out: Tensor) -> Tensor:
        nbytes = out.numel() * out.element_size()
        block = self._block.get(component, 0)
        stream = self._streams[component]
        self._block[component] = block + -(-nbytes // stream.block_bytes)
        stream.draw(*self._place, block, out)
        return out

    def ring(self, component: int, *shape: int, out: Tensor | None = None) -> Tensor:
        """Uniform int64 tensor known to the two holders of ``component`` (``OWN``: to this party alone).

        ``out``, contiguous and of that shape, takes the numbers in place.
        """
        return self._draw(component, torch.empty(shape, dtype=torch.int64, device=self._device) if out is None else out)

    def narrow(self, component: int, bits: int, *shape: int) -> Tensor:
        """Elements uniform modulo 2^``bits`` in the narrowest type that carries them; the bits above are random,
        too."""
        return self._draw(component, torch.empty(shape, dtype=wire_dtype(bits), device=self._device))


OWN = -1
