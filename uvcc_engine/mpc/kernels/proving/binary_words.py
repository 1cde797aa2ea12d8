"""Words as polynomials modulo 2: products without carries, and sums over bits that meet.

Products are computed in ordinary products of words whose bits lie four apart (T. Pornin, BearSSL, ``ghash_ctmul64``):
at most sixteen ones meet in a column, and what the sixteenth carries falls out at the top.
"""

from __future__ import annotations

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


def meeting_bits(u: Tensor, v: Tensor) -> Tensor:
    """``[127, n]``: bit ``j`` of row ``63 + i - j`` says of how many terms ``[terms, n]``, modulo 2, bit ``i`` of ``u``
    and bit ``j`` of ``v`` are both set."""
    rows = []
    for k in range(127):
        shifted = (u >> (k - 63)) & ((1 << (127 - k)) - 1) if k > 63 else u << (63 - k)
        rows.append(total(shifted & v))
    return torch.stack(rows)


def bit_diagonals(u: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """See ``Kernels.bit_diagonals``: a word is the element that its bits have as coefficients."""
    return total(multiply(meeting_bits(u, v), weights).T)


def byte_tables(weights: Tensor) -> Tensor:
    """``[8, 256]``: for every byte of a word, and what it may be, the XOR of the ``weights`` ``[64]`` of its bits."""
    tables = torch.zeros(8, 1, dtype=torch.int64)
    for bit in range(8):
        tables = torch.cat([tables, tables ^ weights.reshape(8, 8)[:, bit : bit + 1]], 1)
    return tables


def chosen_places(words: Tensor, tables: Tensor) -> Tensor:
    """For every word the XOR of the entries of its bytes in ``tables``. Shape of the words."""
    return total(torch.stack([tables[k][(words >> (8 * k)) & 255] for k in range(8)]))
