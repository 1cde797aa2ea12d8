"""Words as polynomials modulo 2: products without carries, and sums over bits that meet.

Products are computed in ordinary products of words whose bits lie four apart (T. Pornin, BearSSL, ``ghash_ctmul64``):
at most sixteen ones meet in a column, and what the sixteenth carries falls out at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_HOLES: Final = (0x1111111111111111, 0x2222222222222222, 0x4444444444444444, 0x8888888888888888 - (1 << 64))
_SWAPS: Final = ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F),
                 (8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))  # fmt: skip


def carryless(x: Tensor, y: Tensor) -> Tensor:
    """The product of two polynomials modulo 2, its lower 64 coefficients. Shapes broadcast."""
    xs, ys = [x & hole for hole in _HOLES], [y & hole for hole in _HOLES]
    out: Tensor | None = None
    for place, hole in enumerate(_HOLES):
        parts = [xs[i] * ys[(place - i) % 4] for i in range(4)]
        part = (parts[0] ^ parts[1] ^ parts[2] ^ parts[3]) & hole
        out = part if out is None else out ^ part
    assert out is not None
    return out


def reversed_bits(x: Tensor) -> Tensor:
    """Bit i of every word to bit 63 - i. Any shape."""
    for shift, low in _SWAPS:
        x = ((x >> shift) & low) | ((x & low) << shift)
    return x


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Products in GF(2^64) = F_2[X] / (X^64 + X^4 + X^3 + X + 1). Shapes broadcast."""
    low = carryless(a, b)
    high = (reversed_bits(carryless(reversed_bits(a), reversed_bits(b))) >> 1) & ((1 << 63) - 1)
    over = ((high >> 63) & 1) ^ ((high >> 61) & 7) ^ ((high >> 60) & 15)
    low = low ^ high ^ (high << 1) ^ (high << 3) ^ (high << 4)
    return low ^ over ^ (over << 1) ^ (over << 3) ^ (over << 4)


def total(x: Tensor) -> Tensor:
    """The XOR over the first axis: ``[n, ...]`` to ``[...]``."""
    return torch.from_numpy(np.asarray(np.bitwise_xor.reduce(x.numpy(), axis=0)).reshape(x.shape[1:]))


def diagonals(pairs: Tensor) -> Tensor:
    """``[k, k]`` to ``[2 k - 1]``: entry ``k - 1 + i - j`` is the XOR of those at ``i, j``."""
    k = pairs.shape[0]
    found = torch.zeros(2 * k - 1, dtype=torch.int64)
    for j in range(k):
        found[k - 1 - j : 2 * k - 1 - j] ^= pairs[:, j]
    return found


CHUNK: Final = 512
"""Words that make eight blocks of 64: block ``b`` has every eighth of them, from word ``b`` on."""
_BITS: Final = 6  # halvings of 64 bits


def blocks_of(words: int) -> int:
    """How many blocks so many words have: whole chunks of them."""
    return -(-words // CHUNK) * (CHUNK // 64)


def turned(x: Tensor) -> Tensor:
    """Words ``[n]`` to ``[64, blocks]``: bit ``i`` of entry ``j, b`` is bit ``j`` of the ``i``-th word of block ``b``,
    zeros behind the last word."""
    blocks = blocks_of(len(x))
    chunks = torch.nn.functional.pad(x, (0, 64 * blocks - len(x))).reshape(-1, 64, CHUNK // 64)
    grid = chunks.permute(1, 0, 2).reshape(64, blocks)
    for shift, low in _SWAPS:  # Warren, "Hacker's Delight", section 7-3
        pairs = grid.reshape(64 // (2 * shift), 2, shift, blocks)
        one, other = pairs[:, 0], pairs[:, 1]
        changed = ((one >> shift) ^ other) & low
        grid = torch.stack([one ^ (changed << shift), other ^ changed], 1).reshape(64, blocks)
    return grid


def halved(x: Tensor, add: Callable[[Tensor, Tensor], Tensor] = torch.bitwise_xor) -> Tensor:
    """``[64, ...]`` to ``[729, ...]``, six times two halves to three: lower one, sum, upper one. ``add``: of what."""
    grid = x.reshape(*[2] * _BITS, *x.shape[1:])
    for axis in range(_BITS):
        low, high = grid.unbind(axis)
        grid = torch.stack([low, add(low, high), high], axis)
    return grid.reshape(-1, *x.shape[1:])


def joined(values: Tensor, sub: Callable[[Tensor, Tensor], Tensor] = torch.bitwise_xor) -> Tensor:
    """The coefficients ``[729, ...]`` of a product of which the products of all lower halves, sums and upper halves are
    known. ``sub``: of what."""
    grid = values.reshape(*[3] * _BITS, *values.shape[1:])
    for axis in range(_BITS):
        low, both, high = grid.unbind(axis)
        grid = torch.stack([low, sub(sub(both, low), high), high], axis)
    return grid.reshape(-1, *values.shape[1:])


def meeting_bits(u: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
    """Of each block and place of the halved sides the words ``[729, blocks]`` of the bits in which they meet, added up
    over the terms ``[n]``."""
    return total(torch.stack([halved(turned(one)) & halved(turned(other)) for one, other in zip(u, v, strict=True)]))


def byte_tables(weights: Tensor) -> Tensor:
    """``[8, 256]``: for every byte of a word, and what it may be, the XOR of the ``weights`` ``[64]`` of its bits."""
    tables = torch.zeros(8, 1, dtype=torch.int64)
    for bit in range(8):
        tables = torch.cat([tables, tables ^ weights.reshape(8, 8)[:, bit : bit + 1]], 1)
    return tables


def chosen_places(words: Tensor, tables: Tensor) -> Tensor:
    """For every word the XOR of the entries of its bytes in ``tables``. Shape of the words."""
    return total(torch.stack([tables[k][(words >> (8 * k)) & 255] for k in range(8)]))
