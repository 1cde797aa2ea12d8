"""Numbers cut into digits of eight bits for units that multiply bytes, and put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop

Words = NDArray[np.uint64]
Narrow = NDArray[Any]  # unsigned, of 4 bytes


@compiled_loop
def split_left(x: Words, out: NDArray[np.uint8], inner: int, first: int) -> None:
    """The digits of ``[m, k]``, lowest first: digit ``d`` of row ``i`` from ``out[i, d inner + first]`` on."""
    m, k = x.shape
    bias = np.uint64(0x8080808080808080)
    for i in range(m):
        for d in range(8):
            shift = np.uint64(8 * d)
            at = d * inner + first
            to = out[i, at : at + k]  # an index that cannot be negative lets the compiler use vectors
            for j in range(k):
                to[j] = np.uint8(((x[i, j] + bias) ^ bias) >> shift)


@compiled_loop
def split_columns(y: Words, out: NDArray[np.uint8], inner: int, first: int) -> None:
    """The same, highest first: of a right factor ``[n, k]`` whose columns lie in order."""
    n, k = y.shape
    bias = np.uint64(0x8080808080808080)
    for i in range(n):
        for d in range(8):
            shift = np.uint64(8 * (7 - d))
            at = d * inner + first
            to = out[i, at : at + k]
            for j in range(k):
                to[j] = np.uint8(((y[i, j] + bias) ^ bias) >> shift)


@compiled_loop
def split_right(y: Words, out: NDArray[np.uint8], inner: int, first: int) -> None:
    """``[k, n]`` to digits, highest first: those of row ``i`` in the rows ``d inner + first + i`` of ``out``."""
    k, n = y.shape
    bias = np.uint64(0x8080808080808080)
    for i in range(k):
        for d in range(8):
            shift = np.uint64(8 * (7 - d))
            to = out[d * inner + first + i]
            for j in range(n):
                to[j] = np.uint8(((y[i, j] + bias) ^ bias) >> shift)


@compiled_loop
def combine(a: Narrow, b: Narrow, c: Narrow, d: Narrow, e: Narrow, f: Narrow, g: Narrow, h: Narrow, out: Words) -> None:
    """``sum_s part_s 2^(8 s)``; only the lower bits of the upper parts count, so all may be unsigned."""
    for i in range(out.shape[0]):
        # the lower four are exact signed numbers: extend their sign
        low = (
            np.uint64(np.int64(np.int32(a[i])))
            + (np.uint64(np.int64(np.int32(b[i]))) << np.uint64(8))
            + (np.uint64(np.int64(np.int32(c[i]))) << np.uint64(16))
            + (np.uint64(np.int64(np.int32(d[i]))) << np.uint64(24))
        )
        high = (
            np.uint32(e[i])
            + (np.uint32(f[i]) << np.uint32(8))
            + (np.uint32(g[i]) << np.uint32(16))
            + (np.uint32(h[i]) << np.uint32(24))
        )
        out[i] = low + (np.uint64(high) << np.uint64(32))
