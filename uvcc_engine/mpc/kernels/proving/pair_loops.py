"""The compiled sums of products of pairs of numbers modulo 2^64 under weights whose bits are coefficients 0 and 1.

As ``weigh_loops`` has it for numbers; a row of pairs is computed where its sums are made.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proving import word_vectors as vectors
from uvcc_engine.mpc.kernels.proving.weigh_loops import (
    BLOCKS,
    LANES,
    ROW,
    TABLE,
    TILE,
    TOGETHER,
    VECTORS,
    names_of,
    store_sums,
    take,
)
from uvcc_engine.mpc.kernels.proving.word_vectors import WORD, constant, load

Words = NDArray[np.uint64]
_NEAR: Final = 16  # blocks whose factors lie near them
PAIR_TILE: Final = TILE
"""Columns that are computed at a time: their number is a multiple of it."""


@intrinsic
def _make_sums(context: Any, sums: Any, u: Any, v: Any, terms: Any, term: Any) -> Any:
    """At ``sums`` the sixteen sums of four rows ``sum_t u_t v_t``: one number of ``u`` times a tile of ``v``, both one
    row behind the other, and ``term`` rows from term to term."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, u, v, terms, term = arguments
        vector = vectors.vector_of(LANES)

        def step(t: Any, found: list[Any]) -> list[Any]:
            new: list[Any] = []
            row = builder.mul(t, term)
            left = builder.add(u, builder.mul(row, constant(8)))
            right = builder.add(v, builder.mul(row, constant(ROW)))
            for r in range(4):
                factor = vectors.spread(builder, load(builder, left, WORD, 8 * r), LANES)
                for k in range(VECTORS):
                    other = load(builder, right, vector, ROW * r + 8 * LANES * k)
                    new.append(builder.add(found[len(new)], builder.mul(factor, other)))
            return new

        none = ir.Constant(vector, [0] * LANES)
        rows = vectors.repeated(builder, terms, [none] * (4 * VECTORS), step)
        store_sums(builder, to, rows)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


_make_four: Any = _make_sums  # numba's own types know nothing of its arguments


@compiled_loop
def _add_pairs(u: Words, v: Words, of: NDArray[np.uint16], found: Words) -> None:
    """Add the pairs of whole blocks, as ``of`` names their sums, to ``found`` [tiles, k, coefficients, TILE]."""
    terms, m, k = u.shape
    groups, line = found.shape[2] // TOGETHER, of.shape[1] * 2
    space = np.empty(BLOCKS * TABLE + 64, dtype=np.uint8)
    sums, of_at = (space.ctypes.data + 63) // 64 * 64, of.ctypes.data
    us, vs = np.empty((k, terms, 4 * _NEAR), dtype=np.uint64), np.empty((terms, 4 * _NEAR, TILE), dtype=np.uint64)
    for near in range(0, m, 4 * _NEAR):
        size = min(4 * _NEAR, m - near)
        for t in range(terms):
            for g in range(size):
                for i in range(k):
                    us[i, t, g] = u[t, near + g, i]
        for tile in range(k // TILE):
            for t in range(terms):
                for g in range(size):
                    vs[t, g] = v[t, near + g, TILE * tile : TILE * (tile + 1)]
            for i in range(k):
                u_at, v_at, to = us[i].ctypes.data, vs.ctypes.data, found[tile, i].ctypes.data
                for first in range(0, size // 4, BLOCKS):
                    count, names = min(BLOCKS, size // 4 - first), of_at + (near // 4 + first) * line
                    for b in range(count):
                        row = 4 * (first + b)
                        _make_four(sums + b * TABLE, u_at + 8 * row, v_at + ROW * row, terms, 4 * _NEAR)
                    for g in range(groups):
                        take(to + g * TOGETHER * ROW, sums, names + 2 * TOGETHER * g, count, line)
    space[0] = 0  # numba lets an array go after its last use, and does not know of its address


@compiled_loop
def weigh_pairs(u: Words, v: Words, weights: Words, out: Words) -> None:
    """See ``Kernels.weigh_pairs``, for rows of a multiple of ``TILE``."""
    terms, m, k = u.shape
    degree, whole = out.shape[0], m // 4
    coefficients = (degree + TOGETHER - 1) // TOGETHER * TOGETHER
    of = np.empty(((m + 3) // 4, coefficients), dtype=np.uint16)
    names_of(weights, of)
    found = np.zeros((k // TILE, k, coefficients, TILE), dtype=np.uint64)
    if whole:
        _add_pairs(u, v, of[:whole], found)
    if m % 4:
        last = np.zeros((2, terms, 4, k), dtype=np.uint64)
        last[0, :, : m % 4] = u[:, 4 * whole :]
        last[1, :, : m % 4] = v[:, 4 * whole :]
        _add_pairs(last[0], last[1], of[whole:], found)
    for i in range(k):
        for tile in range(k // TILE):
            out[:, i, tile * TILE : (tile + 1) * TILE] = found[tile, i, :degree]
