"""Pairwise pseudo-random streams: AES-128 in counter mode (NIST SP 800-38A), one key per component.

Component ``c`` of every sharing is known to two parties, and so is the key of its stream; masks that both can compute
are never sent. The 16-byte counter block is ``epoch (4) | stream (2) | op (4) | block (6)``, big-endian, so a mask is
bound to the place in the program that uses it. The key itself is bound to ``sid_sub`` and the attempt number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.mpc.kernels.plain import wire_dtype

_BLOCK = 16
_MAX_BLOCKS = 1 << 40
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


def derive_key(secret: bytes, sid_sub: bytes, attempt: int, label: str) -> bytes:
    """AES-128 key for one stream: HKDF-SHA256 with salt ``sid_sub`` and the attempt number in the info (RFC 5869)."""
    info = b"UVCC_PRG_V1" + struct.pack("<I", attempt) + label.encode()
    return HKDF(algorithm=SHA256(), length=16, salt=sid_sub, info=info).derive(secret)


class Stream:
    """One keyed stream that refuses to give the same bytes twice."""

    def __init__(self, key: bytes, name: str) -> None:
        self._aes = algorithms.AES(key)
        self._name = name
        self._at = (-1, -1, -1, 0)

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
        blocks = -(-nbytes // _BLOCK)
        if block + blocks > _MAX_BLOCKS:
            raise ProtocolError(f"operation {op} asks for more than {_MAX_BLOCKS} blocks of stream {self._name}")
        if nbytes:
            counter = struct.pack(">IHI", epoch, stream, op) + block.to_bytes(6, "big")
            cipher = Cipher(self._aes, modes.CTR(counter)).encryptor()
            _fill(cipher, out.numpy().data.cast("B"))
        self._at = (epoch, stream, op, block + blocks)


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
        self._block[component] = block + -(-nbytes // _BLOCK)
        if out.device.type != "cpu":
            host = torch.empty(out.shape, dtype=out.dtype)
            self._streams[component].draw(*self._place, block, host)
            return out.copy_(host)
        self._streams[component].draw(*self._place, block, out)
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
