"""Words as polynomials modulo 2: products without carries, and sums over pairs of bits.

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


def bit_pairs(u: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """``[64, 64]``: for bits ``i`` of ``u`` and ``j`` of ``v`` the XOR of the weights of all words ``[n]`` that have
    both set."""
    places = torch.arange(64)
    rows = -((u.unsqueeze(-1) >> places) & 1)
    columns = -((v.unsqueeze(-1) >> places) & 1) & weights.unsqueeze(-1)
    found = torch.empty(64, 64, dtype=torch.int64)
    for j in range(64):
        found[:, j] = torch.from_numpy(np.bitwise_xor.reduce((rows & columns[:, j, None]).numpy(), axis=0))
    return found
