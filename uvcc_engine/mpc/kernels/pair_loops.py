"""The compiled sums of products of pairs of numbers modulo 2^64 under weights whose bits are coefficients 0 and 1.

Four rows at a time have sixteen sums, of which every coefficient takes one (Arlazarov, Dinic, Kronrod, Faradzhev,
1970). The sums of eight such blocks are made in the first cache, and those of some coefficients stay in the processor's
registers while they take theirs of all eight: a sum taken is then one instruction.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels import word_vectors as vectors
from uvcc_engine.mpc.kernels.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proof_loops import processor_has
from uvcc_engine.mpc.kernels.word_vectors import WORD, constant, load, store

Words = NDArray[np.uint64]
_WIDE: Final = processor_has("avx512f")
_LANES: Final = 8 if _WIDE else 4
_VECTORS: Final = 2 if _WIDE else 1  # twice as many sums as coefficients fit into 32 registers, once into 16
_TOGETHER: Final = 13  # coefficients
_ROW: Final = 8 * _LANES * _VECTORS  # bytes
_TABLE: Final = 16 * _ROW
_BLOCKS: Final = 8  # of four rows, whose sums lie in the first cache
_NEAR: Final = 16  # whose factors lie near them
_OFFSET: Final = ir.IntType(16)
PAIR_TILE: Final = _LANES * _VECTORS
"""Columns that are computed at a time: their number is a multiple of it."""


@intrinsic
def _make_sums(context: Any, sums: Any, u: Any, v: Any, terms: Any, term: Any) -> Any:
    """At ``sums`` the sixteen sums of four rows ``sum_t u_t v_t``: one number of ``u`` times a tile of ``v``, both one
    row behind the other, and ``term`` rows from term to term."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, u, v, terms, term = arguments
        vector = vectors.vector_of(_LANES)

        def step(t: Any, found: list[Any]) -> list[Any]:
            new: list[Any] = []
            row = builder.mul(t, term)
            left = builder.add(u, builder.mul(row, constant(8)))
            right = builder.add(v, builder.mul(row, constant(_ROW)))
            for r in range(4):
                factor = vectors.spread(builder, load(builder, left, WORD, 8 * r), _LANES)
                for k in range(_VECTORS):
                    other = load(builder, right, vector, _ROW * r + 8 * _LANES * k)
                    new.append(builder.add(found[len(new)], builder.mul(factor, other)))
            return new

        none = ir.Constant(vector, [0] * _LANES)
        rows = vectors.repeated(builder, terms, [none] * (4 * _VECTORS), step)
        for k in range(_VECTORS):
            sums: list[Any] = [none]
            for r in range(4):
                one = rows[_VECTORS * r + k]
                sums += [builder.add(x, one) if i else one for i, x in enumerate(sums)]
            for i, x in enumerate(sums):
                store(builder, x, to, _ROW * i + 8 * _LANES * k)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


@intrinsic
def _take_sums(context: Any, found: Any, sums: Any, of: Any, blocks: Any, line: Any) -> Any:
    """Add to ``_TOGETHER`` rows of ``found`` those of the sums of ``blocks`` that ``of`` names, by their places in
    bytes: ``line`` bytes of them a block."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found, sums, of, blocks, line = arguments
        vector = vectors.vector_of(_LANES)
        places = [(c, 8 * _LANES * k) for c in range(_TOGETHER) for k in range(_VECTORS)]

        def step(block: Any, so_far: list[Any]) -> list[Any]:
            table = builder.add(sums, builder.mul(block, constant(_TABLE)))
            names = builder.add(of, builder.mul(block, line))
            chosen = [
                builder.add(table, builder.zext(load(builder, names, _OFFSET, 2 * c), WORD)) for c in range(_TOGETHER)
            ]
            return [
                builder.add(one, load(builder, chosen[c], vector, at))
                for one, (c, at) in zip(so_far, places, strict=True)
            ]

        before = [load(builder, found, vector, _ROW * c + at) for c, at in places]
        for one, (c, at) in zip(vectors.repeated(builder, blocks, before, step), places, strict=True):
            store(builder, one, found, _ROW * c + at)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


_make_four: Any = _make_sums  # numba's own types know nothing of their arguments
_take: Any = _take_sums


@compiled_loop
def _names(weights: Words, of: NDArray[np.uint16]) -> None:
    """``of`` [blocks, coefficients]: where the sum lies that bit ``c`` of four neighbouring weights asks for."""
    for block in range(of.shape[0]):
        for c in range(min(64, of.shape[1])):
            found = 0
            for k in range(min(4, weights.shape[0] - 4 * block)):
                found |= int((weights[4 * block + k] >> np.uint64(c)) & np.uint64(1)) << k
            of[block, c] = found * _ROW


@compiled_loop
def _add_pairs(u: Words, v: Words, of: NDArray[np.uint16], found: Words) -> None:
    """Add the pairs of whole blocks, as ``of`` names their sums, to ``found`` [tiles, k, coefficients, PAIR_TILE]."""
    terms, m, k = u.shape
    groups, line = found.shape[2] // _TOGETHER, of.shape[1] * 2
    space = np.empty(_BLOCKS * _TABLE + 64, dtype=np.uint8)
    sums, of_at = (space.ctypes.data + 63) // 64 * 64, of.ctypes.data
    us, vs = np.empty((k, terms, 4 * _NEAR), dtype=np.uint64), np.empty((terms, 4 * _NEAR, PAIR_TILE), dtype=np.uint64)
    for near in range(0, m, 4 * _NEAR):
        size = min(4 * _NEAR, m - near)
        for t in range(terms):
            for g in range(size):
                for i in range(k):
                    us[i, t, g] = u[t, near + g, i]
        for tile in range(k // PAIR_TILE):
            for t in range(terms):
                for g in range(size):
                    vs[t, g] = v[t, near + g, PAIR_TILE * tile : PAIR_TILE * (tile + 1)]
            for i in range(k):
                u_at, v_at, to = us[i].ctypes.data, vs.ctypes.data, found[tile, i].ctypes.data
                for first in range(0, size // 4, _BLOCKS):
                    count, names = min(_BLOCKS, size // 4 - first), of_at + (near // 4 + first) * line
                    for b in range(count):
                        row = 4 * (first + b)
                        _make_four(sums + b * _TABLE, u_at + 8 * row, v_at + _ROW * row, terms, 4 * _NEAR)
                    for g in range(groups):
                        _take(to + g * _TOGETHER * _ROW, sums, names + 2 * _TOGETHER * g, count, line)
    space[0] = 0  # numba lets an array go after its last use, and does not know of its address


@compiled_loop
def weigh_pairs(u: Words, v: Words, weights: Words, out: Words) -> None:
    """See ``Kernels.weigh_pairs``, for rows of a multiple of ``PAIR_TILE``."""
    terms, m, k = u.shape
    degree, whole = out.shape[0], m // 4
    coefficients = (degree + _TOGETHER - 1) // _TOGETHER * _TOGETHER
    of = np.empty(((m + 3) // 4, coefficients), dtype=np.uint16)
    _names(weights, of)
    found = np.zeros((k // PAIR_TILE, k, coefficients, PAIR_TILE), dtype=np.uint64)
    if whole:
        _add_pairs(u, v, of[:whole], found)
    if m % 4:
        last = np.zeros((2, terms, 4, k), dtype=np.uint64)
        last[0, :, : m % 4] = u[:, 4 * whole :]
        last[1, :, : m % 4] = v[:, 4 * whole :]
        _add_pairs(last[0], last[1], of[whole:], found)
    for i in range(k):
        for tile in range(k // PAIR_TILE):
            out[:, i, tile * PAIR_TILE : (tile + 1) * PAIR_TILE] = found[tile, i, :degree]
