"""The compiled product of two polynomials over GF(2^64) whose coefficients are rows of words.

Three products of halves for four (Karatsuba and Ofman, 1962), down to a few rows that are multiplied each with each.
One tile of columns goes through all halvings before the next, so the sums of halves stay in the processor's caches, and
halves that are no sums are not copied: a leaf knows the rows at which its two sides start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proof_loops import inner_words, reduced_product

Words = NDArray[np.uint64]
_TILE = 256  # columns
_LEAF = 4  # rows


@compiled_loop
def _add_halves(x: Words, start: int, half: int, to: int, size: int) -> None:
    """Rows ``to ..`` become the sums of the ``half`` rows from ``start`` on and of those behind them."""
    for r in range(half):
        low, high, out = x[start + r], x[start + half + r], x[to + r]
        for j in range(size):
            out[j] = low[j] ^ high[j]


@compiled_loop
def _multiply_leaf(u: Words, v: Words, at: Any, leaf: int, lows: Words, highs: Words) -> None:
    """Add the products of the ``leaf`` rows of ``u`` and of ``v`` from ``at`` on, as ``binary_product`` orders them."""
    for d in range(1 - leaf, leaf):
        low, high = np.uint64(0), np.uint64(0)
        for j in range(max(0, -d), min(leaf, leaf - d)):
            x, y = inner_words(u[at[0] + j + d], v[at[1] + j])
            low ^= x
            high ^= y
        lows[leaf - 1 + d] ^= low
        highs[leaf - 1 + d] ^= high


@compiled_loop
def _joined(found: Words, levels: int) -> Any:
    """From the products of leaves, in threes of lower halves, upper halves and sums, to the whole one."""
    for _ in range(levels):
        half = (found.shape[1] + 1) // 2
        width = 2 * half - 1
        wider = np.zeros((found.shape[0] // 3, 4 * half - 1), dtype=np.uint64)
        for b in range(wider.shape[0]):
            low, high, both = found[3 * b], found[3 * b + 1], found[3 * b + 2]
            wider[b, :width] = low
            wider[b, 2 * half : 2 * half + width] = high
            for i in range(width):
                wider[b, half + i] ^= both[i] ^ low[i] ^ high[i]
        found = wider
    return found


@compiled_loop
def binary_product(u: Words, v: Words, out: Words) -> None:
    """See ``Kernels.binary_product``."""
    k, n = u.shape
    levels, leaf, leaves = 0, k, 1
    while leaf > _LEAF and leaf % 2 == 0:
        levels, leaf, leaves = levels + 1, leaf // 2, 3 * leaves
    lows = np.zeros((leaves, 2 * leaf - 1), dtype=np.uint64)
    highs = np.zeros((leaves, 2 * leaf - 1), dtype=np.uint64)
    us, vs = np.empty((2 * k, _TILE), dtype=np.uint64), np.empty((2 * k, _TILE), dtype=np.uint64)
    starts = np.zeros((levels + 1, 2), dtype=np.int64)  # by level, where its rows of both sides start
    for first in range(0, n, _TILE):
        size = min(_TILE, n - first)
        us[:k, :size] = u[:, first : first + size]
        vs[:k, :size] = v[:, first : first + size]
        for number in range(leaves):
            step = leaves
            for level in range(levels):  # the digits to base 3 say which half, or their sum, from the top
                step //= 3
                if number % step:
                    continue  # as at the leaf before
                half, digit = k >> (level + 1), (number // step) % 3
                a, b = starts[level, 0], starts[level, 1]
                if digit == 2:
                    to = 2 * k - 2 * half  # behind the rows of all levels above
                    _add_halves(us, a, half, to, size)
                    _add_halves(vs, b, half, to, size)
                    starts[level + 1, 0], starts[level + 1, 1] = to, to
                else:  # the second side's coefficients run downwards
                    starts[level + 1, 0] = a + digit * half
                    starts[level + 1, 1] = b + (1 - digit) * half
            _multiply_leaf(us[:, :size], vs[:, :size], starts[levels], leaf, lows[number], highs[number])
    for number in range(leaves):
        for i in range(2 * leaf - 1):
            lows[number, i] = reduced_product(lows[number, i], highs[number, i])
    out[:] = _joined(lows, levels)[0]
