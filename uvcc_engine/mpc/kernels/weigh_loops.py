"""Compiled sums of numbers modulo 2^64 under weights whose bits are coefficients 0 and 1.

Four rows at a time have sixteen sums, of which every coefficient takes one: a quarter of the additions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.loop_cache import compiled_loop

Words = NDArray[np.uint64]
_TILE = 64
_STRIP: Final = 16  # columns


@compiled_loop
def _columns(weights: Words, degree: int, of: NDArray[np.uint8]) -> None:
    """``of`` [ceil(n / 4), degree]: bit ``c`` of four neighbouring weights as one number."""
    for block in range(of.shape[0]):
        for c in range(degree):
            found = 0
            for k in range(min(4, weights.shape[0] - 4 * block)):
                found |= int((weights[4 * block + k] >> np.uint64(c)) & np.uint64(1)) << k
            of[block, c] = found


@compiled_loop
def weigh(x: Words, weights: Words, out: Words) -> None:
    """``out`` [degree, n]: row ``c`` is the sum of the rows of ``x`` [m, n] whose weight [m] has bit ``c``."""
    degree, n = out.shape
    m = x.shape[0]
    of = np.empty(((m + 3) // 4, degree), dtype=np.uint8)
    _columns(weights, degree, of)
    sums = np.zeros((16, _TILE), dtype=np.uint64)
    found = np.empty((degree, _TILE), dtype=np.uint64)
    for first in range(0, n, _TILE):
        size = min(_TILE, n - first)
        found[:] = np.uint64(0)
        for block in range(of.shape[0]):
            for k in range(min(4, m - 4 * block)):
                half, row = 1 << k, x[4 * block + k, first : first + size]
                for i in range(half):
                    for j in range(size):
                        sums[half + i, j] = sums[i, j] + row[j]
            for c in range(degree):
                chosen = np.uint64(of[block, c])
                for j in range(size):
                    found[c, j] += sums[chosen, j]
        out[:, first : first + size] = found[:, :size]


@compiled_loop
def _add_sums(rows: Words, size: int, chosen: NDArray[np.uint8], sums: Words, found: Words) -> None:
    """Add to each row ``c`` of ``found`` the sum of those of at most four ``rows`` that ``chosen`` [degree] names."""
    for k in range(rows.shape[0]):
        half, row = 1 << k, rows[k]
        for i in range(half):
            for j in range(size):
                sums[half + i, j] = sums[i, j] + row[j]
    for c in range(found.shape[0]):
        number = np.uint64(chosen[c])
        for j in range(size):
            found[c, j] += sums[number, j]


@compiled_loop
def weigh_columns(x: Words, weights: Words, out: Words) -> None:
    """``out`` [m, degree]: column ``c`` is the sum of the columns of ``x`` [m, n] whose weight [n] has bit ``c``.

    A strip of columns at a time is turned, so that it and the sums stay in the processor's first cache.
    """
    m, n = x.shape
    degree = out.shape[1]
    of = np.empty(((n + 3) // 4, degree), dtype=np.uint8)
    _columns(weights, degree, of)
    sums = np.zeros((16, _TILE), dtype=np.uint64)
    found = np.empty((degree, _TILE), dtype=np.uint64)
    turned = np.empty((_STRIP, _TILE), dtype=np.uint64)
    for first in range(0, m, _TILE):
        size = min(_TILE, m - first)
        found[:] = np.uint64(0)
        for start in range(0, n, _STRIP):
            wide = min(_STRIP, n - start)
            for i in range(size):
                for j in range(wide):
                    turned[j, i] = x[first + i, start + j]
            for block in range((wide + 3) // 4):
                rows = turned[4 * block : min(4 * block + 4, wide)]
                _add_sums(rows, size, of[start // 4 + block], sums, found)
        for i in range(size):
            for c in range(degree):
                out[first + i, c] = found[c, i]
