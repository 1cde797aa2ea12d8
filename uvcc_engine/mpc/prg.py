"""Pairwise pseudo-random streams: AES-128 in counter mode (NIST SP 800-38A), one key per component.

Component ``c`` of every sharing is known to two parties, and so is the key of its stream; masks that both can compute
are never sent. The 16-byte counter block is ``epoch (4) | stream (2) | op (4) | block (6)``, big-endian, so a mask is
bound to the place in the program that uses it. The key itself is bound to ``sid_sub`` and the attempt number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.mpc.kernels.plain import wire_dtype

_BLOCK = 16
_MAX_BLOCKS = 1 << 40


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


def derive_key(secret: bytes, sid_sub: bytes, attempt: int, label: str) -> bytes:
    """AES-128 key for one stream: HKDF-SHA256 with salt ``sid_sub`` and the attempt number in the info (RFC 5869)."""
    info = b"UVCC_PRG_V1" + struct.pack("<I", attempt) + label.encode()
    return HKDF(algorithm=SHA256(), length=16, salt=sid_sub, info=info).derive(secret)


_zeros = bytes(1 << 12)


def _zero_bytes(count: int) -> memoryview:
    """A read-only run of zero bytes, grown once and shared by every draw."""
    global _zeros
    if len(_zeros) < count:
        _zeros = bytes(1 << (count - 1).bit_length())
    return memoryview(_zeros)[:count]


class Stream:
    """One keyed stream that refuses to give the same bytes twice."""

    def __init__(self, key: bytes, name: str) -> None:
        self._aes = algorithms.AES(key)
        self._name = name
        self._at = (-1, -1, -1, 0)

    def draw(self, epoch: int, stream: int, op: int, block: int, nbytes: int) -> Tensor:
        """``nbytes`` fresh bytes from counter ``block`` of operation ``op``: uint8 tensor.

        Positions must increase. ProtocolError if any of these bytes may have been given out before, since a mask that
        is used for two messages reveals their difference.
        """
        if (epoch, stream, op, block) < self._at:
            raise ProtocolError(
                f"mask reuse refused: stream {self._name} is at {self._at}, asked for {(epoch, stream, op, block)}",
                "start the next attempt; never run an epoch twice with one set of keys and changed inputs",
            )
        blocks = -(-nbytes // _BLOCK)
        if block + blocks > _MAX_BLOCKS:
            raise ProtocolError(f"operation {op} asks for more than {_MAX_BLOCKS} blocks of stream {self._name}")
        counter = struct.pack(">IHI", epoch, stream, op) + block.to_bytes(6, "big")
        # one block of slack: OpenSSL wants room for a block beyond the input
        out = torch.empty(nbytes + _BLOCK, dtype=torch.uint8)
        cipher = Cipher(self._aes, modes.CTR(counter)).encryptor()
        cipher.update_into(_zero_bytes(nbytes), out.numpy().data)
        self._at = (epoch, stream, op, block + blocks)
        return out[:nbytes]


class Draws:
    """The random numbers of one operation: pairwise streams by component, and the party's own."""

    def __init__(self, streams: dict[int, Stream], epoch: int, stream: int, op: int, device: torch.device) -> None:
        self._streams = streams
        self._place = (epoch, stream, op)
        self._block: dict[int, int] = {}
        self._device = device

    def _bytes(self, component: int, nbytes: int) -> Tensor:
        block = self._block.get(component, 0)
        self._block[component] = block + -(-nbytes // _BLOCK)
        return self._streams[component].draw(*self._place, block, nbytes)

    def ring(self, component: int, *shape: int) -> Tensor:
        """Uniform int64 tensor known to the two holders of ``component`` (``OWN``: to this party alone)."""
        count = 1
        for side in shape:
            count *= side
        return self._bytes(component, 8 * count).view(torch.int64).reshape(shape).to(self._device)

    def narrow(self, component: int, bits: int, *shape: int) -> Tensor:
        """Elements uniform modulo 2^``bits`` in the narrowest type that carries them; the bits above are random,
        too."""
        count = 1
        for side in shape:
            count *= side
        width = wire_dtype(bits)
        return self._bytes(component, count * width.itemsize).view(width).reshape(shape).to(self._device)


OWN = -1
