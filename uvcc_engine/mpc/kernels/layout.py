"""How things lie in memory and on the wire: the masks of a merging step, the types that carry numbers modulo 2^s.

Everything else in ``mpc`` may import this; it imports nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def broadcast_shape(a: torch.Size, b: torch.Size) -> torch.Size:
    """``torch.broadcast_shapes``, which takes a tenth of a millisecond and more. ValueError if they do not fit."""
    return a if a == b else torch.Size(np.broadcast_shapes(a, b))


def wire_dtype(bits: int) -> torch.dtype:
    """The narrowest integer type that carries values modulo 2^``bits``."""
    if bits <= 16:
        return torch.int16
    return torch.int32 if bits <= 32 else torch.int64


def narrow_word_count(count: int, bits: int) -> int:
    """Words that ``count`` values modulo 2^``bits`` fill."""
    each = 8 // wire_dtype(bits).itemsize
    return -(-count // each)


def narrow_words(x: Tensor, bits: int) -> Tensor:
    """Values modulo 2^``bits`` side by side in words ``[narrow_word_count]``; what lies above bit ``bits`` is zero."""
    values = x.reshape(-1).to(wire_dtype(bits))
    if bits < 8 * values.element_size():
        values = values & ((1 << bits) - 1)
    short = -values.numel() % (8 // values.element_size())
    return (torch.nn.functional.pad(values, (0, short)) if short else values.contiguous()).view(torch.int64)


@dataclass(frozen=True, slots=True)
class Patches:
    """How patches are cut from images ``[channels, height, width]`` that lie flat in rows: ``high`` times ``wide``
    pixels of every channel each, ``down`` and ``across`` pixels apart; with ``above`` lines of zeros above and below
    the image, and ``beside`` columns of them at its sides."""

    channels: int
    height: int
    width: int
    high: int
    wide: int
    down: int
    across: int
    above: int
    beside: int

    @property
    def lines(self) -> int:
        """Of patches, one below the other."""
        return (self.height + 2 * self.above - self.high) // self.down + 1

    @property
    def columns(self) -> int:
        """Of patches, one beside the other."""
        return (self.width + 2 * self.beside - self.wide) // self.across + 1

    @property
    def image(self) -> int:
        """Numbers of an image."""
        return self.channels * self.height * self.width

    @property
    def each(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.high * self.wide


@dataclass(frozen=True, slots=True)
class Level:
    """How the masks of one merging step are laid out: all products of masks that its polynomial needs.

    Table entries: ``M[S]`` over subsets ``S`` of the propagate masks ``1..m-1`` (entry 0 is the constant one), then
    (``generate``) for each ``j`` the products of generate mask ``j`` with subsets of the propagate masks above it,
    then (``carry_on``) the products of propagate mask 0 with all ``S``. ``singles`` are the entries that are one mask
    alone, in the order in which bits are opened: propagate 1..m-1, generate 0..m-1, propagate 0.
    """

    m: int
    generate: bool
    carry_on: bool
    singles: tuple[int, ...]
    products: tuple[int, ...]

    @property
    def entries(self) -> int:
        return 1 + len(self.singles) + len(self.products)


@lru_cache(maxsize=64)
def level(m: int, *, generate: bool, carry_on: bool) -> Level:
    """The layout for groups of ``m``; ``generate=False`` is a plain AND of ``m`` bits."""
    half = 1 << (m - 1)
    singles = [1 << k for k in range(m - 1)]
    at = half
    if generate:
        for j in range(m):
            singles.append(at)
            at += 1 << (m - 1 - j)
    if carry_on:
        singles.append(at)
        at += half
    products = sorted(set(range(1, at)) - set(singles))
    return Level(m, generate, carry_on, tuple(singles), tuple(products))
