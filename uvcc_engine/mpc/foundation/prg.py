"""Pairwise pseudo-random streams, one key per component: AES-128 in counter mode (NIST SP 800-38A) or ChaCha20 (RFC
8439).

Component ``c`` of every sharing is known to two parties, and so is the key of its stream; masks that both can compute
are never sent. The 16-byte counter block is ``epoch (4) | stream (2) | op (4) | piece (2) | block (4)``, big-endian, so
a mask is bound to the place in the program that uses it. The key itself is bound to ``sid_sub`` and the attempt number.
A draw takes one piece of the counter after the other, of at most 256 KiB, and blocks count from 2: so a piece is what
AES-GCM (NIST SP 800-38D, section 7.1) makes of as many zeros. Some processors and versions of OpenSSL compute that
twice as fast as plain counter mode, others half as fast: each process takes what is quicker for it. ChaCha20 takes the
same fields (one piece a draw, 64-byte blocks from 0) and is what a GPU computes by itself; the parties of a session
must choose alike.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.mpc.kernels.layout import wire_dtype

_PIECE = 1 << 18  # bytes; so few that the zeros stay in the processor's cache
_ZEROS = memoryview(bytes(_PIECE))
_PIECES = 1 << 16  # of an operation: their number has two bytes
_FIRST = (2).to_bytes(4, "big")  # the block at which AES-GCM begins
TAG = 16  # bytes that AES-GCM writes behind a piece, which the next piece or nobody's memory takes
_WITH_ROOM = 1 << 13  # bytes of a draw from which it gets memory for that tag


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
    piece_bytes = _PIECE

    def __init__(self, key: bytes, name: str) -> None:
        self._key = key
        self._name = name
        self._at = (-1, -1, -1, 0)
        self._context: CipherContext | None = None
        self._gcm: AESGCM | None = None
        self.timed = False
        self.seconds = 0.0  # of processor time, while it is measured

    def draw(self, epoch: int, stream: int, op: int, piece: int, out: Tensor, room: Tensor | None = None) -> int:
        """Fill ``out`` (contiguous, any type) with fresh bytes from ``piece`` of operation ``op`` on; returns the next.

        ``room``: flat memory that begins with ``out`` and goes on for 16 bytes. Positions must increase. ProtocolError
        if any of these bytes may have been given out before, since a mask that is used for two messages reveals their
        difference. Raises ProtocolError where a mask would be drawn a second time.
        """
        nbytes = out.numel() * out.element_size()
        after = self.reserve((epoch, stream, op), piece, nbytes)
        if nbytes and not self.timed:
            self.generate((epoch, stream, op), piece, out, room)
        elif nbytes:
            begun = time.thread_time()
            self.generate((epoch, stream, op), piece, out, room)
            self.seconds += time.thread_time() - begun
        return after

    def reserve(self, place: tuple[int, int, int], piece: int, nbytes: int) -> int:
        """Take ``nbytes`` from ``piece`` of an operation (epoch, stream, op) on, which are given to nobody else; the
        next piece. Raises ProtocolError as :meth:`draw`."""
        if (*place, piece) < self._at:
            raise ProtocolError(
                f"mask reuse refused: stream {self._name} is at {self._at}, asked for {(*place, piece)}",
                "start the next attempt; never run an epoch twice with one set of keys and changed inputs",
            )
        after = piece + max(1, -(-nbytes // self.piece_bytes))
        if after > _PIECES:
            raise ProtocolError(f"operation {place[2]} asks for more than {_PIECES} pieces of stream {self._name}")
        self._at = (*place, after)
        return after

    def twin(self) -> Stream:
        """Another one with this key, whose :meth:`generate` another thread may use."""
        return type(self)(self._key, self._name)

    def generate(self, place: tuple[int, int, int], piece: int, out: Tensor, room: Tensor | None) -> None:
        """Fill ``out`` (of any shape, not empty) with what :meth:`draw` gives there, without taking it: for who
        reserves it."""
        self._generate(struct.pack(">IHI", *place), piece, out, room)

    def _generate(self, place: bytes, piece: int, out: Tensor, room: Tensor | None) -> None:
        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        size = host.numel() * host.element_size()
        memory = (host if room is None else room).numpy().data.cast("B")
        self._fill(place, piece, memory, size)
        if host is not out:
            out.copy_(host)

    def _fill(self, place: bytes, piece: int, memory: memoryview, size: int) -> None:
        """``size`` bytes into ``memory``, which may be longer."""
        for at in range(0, size, _PIECE):
            count = min(_PIECE, size - at)
            nonce = place + piece.to_bytes(2, "big")
            if count >= _WITH_ROOM and at + count + TAG <= len(memory) and gcm_is_quicker():
                if self._gcm is None:
                    self._gcm = AESGCM(self._key)
                self._gcm.encrypt_into(nonce, _ZEROS[:count], None, memory[at : at + count + TAG])
            else:
                _key_stream(self._at_counter(nonce + _FIRST), memory[at : at + count])
            piece += 1

    def _at_counter(self, counter: bytes) -> CipherContext:
        """The key's one context, set to a counter block: a new context would take longer than a short draw."""
        if self._context is None:
            self._context = self._cipher(counter).encryptor()
        else:
            self._context.reset_nonce(counter)
        return self._context

    def _cipher(self, counter: bytes) -> Cipher[Any]:
        return Cipher(algorithms.AES(self._key), modes.CTR(counter))


class ChaChaStream(Stream):
    """The same with ChaCha20, which a GPU draws where the numbers are needed."""

    key_bytes = 32
    piece_bytes = 1 << 38  # the block counter's 32 bits

    def _generate(self, place: bytes, piece: int, out: Tensor, room: Tensor | None) -> None:
        if out.device.type == "cuda":
            from uvcc_engine.mpc.kernels.triton_ops import chacha20

            chacha20(self._key, piece.to_bytes(2, "big") + place, 0, out)
        else:
            super()._generate(place, piece, out, room)

    def _fill(self, place: bytes, piece: int, memory: memoryview, size: int) -> None:
        context = self._at_counter(bytes(4) + piece.to_bytes(2, "big") + place)
        for at in range(0, size, _PIECE):
            _key_stream(context, memory[at : min(at + _PIECE, size)])

    def _cipher(self, counter: bytes) -> Cipher[Any]:
        return Cipher(algorithms.ChaCha20(self._key, counter), mode=None)


@lru_cache(maxsize=1)
def gcm_is_quicker() -> bool:
    """Whether AES-GCM gives a piece sooner here than plain counter mode, whose bytes are the same.

    Measured once a process, in half a millisecond of processor time.
    """
    memory = memoryview(bytearray(_PIECE + TAG))
    gcm, plain = AESGCM(bytes(16)), Cipher(algorithms.AES(bytes(16)), modes.CTR(bytes(16))).encryptor()

    def quickest(made: Callable[[], object]) -> float:
        taken = []
        for _ in range(4):  # the first one brings the code and the memory in
            begun = time.thread_time()
            made()
            taken.append(time.thread_time() - begun)
        return min(taken)

    with_tag = quickest(lambda: gcm.encrypt_into(bytes(12), _ZEROS, None, memory))
    return with_tag < quickest(lambda: _key_stream(plain, memory[:_PIECE]))


STREAMS = {"aes": Stream, "chacha20": ChaChaStream}


def _key_stream(cipher: CipherContext, view: memoryview) -> None:
    try:
        cipher.update_into(_ZEROS[: len(view)], view)
    except ValueError:  # older versions of the library want room for a block beyond the input
        view[:] = cipher.update(_ZEROS[: len(view)])


class Foretold(Protocol):
    """What may have been drawn before a program comes to it, by a thread or on a GPU's second stream
    (``drawn_ahead.ForetoldDraws``, ``drawn_beside.DrawnBeside``)."""

    met: int
    missed: int

    def begin(self, epoch: int) -> None:
        """Enter an epoch."""

    def take(self, component: int, op: int, piece: int, nbytes: int) -> Tensor | None:
        """The bytes of the program's next draw, if they lie ready."""


class Forecaster(Protocol):
    """Whoever draws ahead for the runtimes of one worker (``drawn_ahead.DrawAhead``, ``drawn_beside.DrawBeside``)."""

    @property
    def device(self) -> torch.device:
        """Where the numbers lie."""

    def forecast(self, streams: dict[int, Stream], stream: int) -> Foretold:
        """What lies ready for a runtime that draws from ``streams`` in the stream ``stream`` of its messages."""

    def settle(self) -> bool:
        """Wait until all that is foretold and has room is drawn; whether that came to be."""

    def close(self) -> None:
        """Draw nothing ahead any more."""


class Draws:
    """The random numbers of one operation: pairwise streams by component, and the party's own."""

    def __init__(
        self,
        streams: dict[int, Stream],
        epoch: int,
        stream: int,
        op: int,
        device: torch.device,
        foretold: Foretold | None = None,
    ) -> None:
        self._streams = streams
        self._foretold = foretold
        self._place = (epoch, stream, op)
        self._piece: dict[int, int] = {}
        self._device = device

    def _draw(self, component: int, out: Tensor, room: Tensor | None = None) -> Tensor:
        piece = self._piece.get(component, 0)
        self._piece[component] = self._streams[component].draw(*self._place, piece, out, room)
        return out

    def _fresh(self, component: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if count * dtype.itemsize < _WITH_ROOM:
            return self._draw(component, torch.empty(shape, dtype=dtype, device=self._device))
        if self._foretold is not None:
            nbytes, piece = count * dtype.itemsize, self._piece.get(component, 0)
            found = self._foretold.take(component, self._place[2], piece, nbytes)
            if found is not None:
                self._piece[component] = self._streams[component].reserve(self._place, piece, nbytes)
                return found.view(dtype).view(shape)
        if self._device.type != "cpu":
            return self._draw(component, torch.empty(shape, dtype=dtype, device=self._device))
        room = torch.empty(count + TAG // dtype.itemsize, dtype=dtype)
        return self._draw(component, room[:count].view(shape), room)

    def ring(self, component: int, *shape: int, out: Tensor | None = None) -> Tensor:
        """Uniform int64 tensor known to the two holders of ``component`` (``OWN``: to this party alone).

        ``out``, contiguous and of that shape, takes the numbers in place.
        """
        return self._fresh(component, torch.int64, shape) if out is None else self._draw(component, out)

    def narrow(self, component: int, bits: int, *shape: int) -> Tensor:
        """A tensor of that ``shape``, uniform modulo 2^``bits`` in the narrowest type that carries them.

        The bits above are random, too.
        """
        return self._fresh(component, wire_dtype(bits), shape)


OWN = -1
