"""Compiled sums of numbers modulo 2^64 under weights whose bits are coefficients 0 and 1.

Four rows at a time have sixteen sums, of which every coefficient takes one (Arlazarov, Dinic, Kronrod, Faradzhev,
1970). The sums of eight such blocks are made in the first cache, and those of some coefficients stay in the processor's
registers while they take theirs of all eight: a sum taken is then one instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proving import word_vectors as vectors
from uvcc_engine.mpc.kernels.proving.proof_loops import processor_has
from uvcc_engine.mpc.kernels.proving.word_vectors import WORD, constant, load, store

Words = NDArray[np.uint64]
_WIDE: Final = processor_has("avx512f")
LANES: Final = 8 if _WIDE else 4
VECTORS: Final = 2 if _WIDE else 1
"""Of a tile: twice as many sums as coefficients fit into 32 registers, once into 16."""
TILE: Final = LANES * VECTORS
TOGETHER: Final = 13
"""Coefficients whose sums stay in registers."""
ROW: Final = 8 * TILE
TABLE: Final = 16 * ROW
"""Bytes of a row of a tile, and of a block's sums."""
BLOCKS: Final = 8
"""Of four rows, whose sums lie in the first cache."""
_ROWS: Final = 4 * BLOCKS
_WIDTH: Final = 64  # columns
_OFFSET: Final = ir.IntType(16)


def store_sums(builder: Any, to: Any, rows: Sequence[Any]) -> None:
    """At an address the sixteen sums of four rows, each of some vectors."""
    for k in range(VECTORS):
        sums: list[Any] = [ir.Constant(vectors.vector_of(LANES), [0] * LANES)]
        for r in range(4):
            one = rows[VECTORS * r + k]
            sums += [builder.add(x, one) if i else one for i, x in enumerate(sums)]
        for i, x in enumerate(sums):
            store(builder, x, to, ROW * i + 8 * LANES * k)


@intrinsic
def _make_sums(context: Any, sums: Any, rows: Any, blocks: Any) -> Any:
    """At ``sums`` those of as many blocks, whose rows lie one behind the other."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, rows, blocks = arguments

        def step(block: Any, _: list[Any]) -> list[Any]:
            here = builder.add(rows, builder.mul(block, constant(4 * ROW)))
            four = [load(builder, here, vectors.vector_of(LANES), 8 * LANES * k) for k in range(4 * VECTORS)]
            store_sums(builder, builder.add(to, builder.mul(block, constant(TABLE))), four)
            return []

        vectors.repeated(builder, blocks, [], step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), build


@intrinsic
def _take_sums(context: Any, found: Any, sums: Any, of: Any, blocks: Any, line: Any) -> Any:
    """Add to ``TOGETHER`` rows of ``found`` those of the sums of ``blocks`` that ``of`` names, by their places in
    bytes: ``line`` bytes of them a block."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found, sums, of, blocks, line = arguments
        vector = vectors.vector_of(LANES)
        places = [(c, 8 * LANES * k) for c in range(TOGETHER) for k in range(VECTORS)]

        def step(block: Any, so_far: list[Any]) -> list[Any]:
            table = builder.add(sums, builder.mul(block, constant(TABLE)))
            names = builder.add(of, builder.mul(block, line))
            chosen = [
                builder.add(table, builder.zext(load(builder, names, _OFFSET, 2 * c), WORD)) for c in range(TOGETHER)
            ]
            return [
                builder.add(one, load(builder, chosen[c], vector, at))
                for one, (c, at) in zip(so_far, places, strict=True)
            ]

        before = [load(builder, found, vector, ROW * c + at) for c, at in places]
        for one, (c, at) in zip(vectors.repeated(builder, blocks, before, step), places, strict=True):
            store(builder, one, found, ROW * c + at)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


_make: Any = _make_sums  # numba's own types know nothing of their arguments
take: Any = _take_sums


@compiled_loop
def names_of(weights: Words, of: NDArray[np.uint16]) -> None:
    """``of`` [blocks, coefficients]: where the sum lies that bit ``c`` of four neighbouring weights asks for."""
    for block in range(of.shape[0]):
        for c in range(min(64, of.shape[1])):
            found = 0
            for k in range(min(4, weights.shape[0] - 4 * block)):
                found |= int((weights[4 * block + k] >> np.uint64(c)) & np.uint64(1)) << k
            of[block, c] = found * ROW


@compiled_loop
def _add_near(near: Words, of: NDArray[np.uint16], first: int, count: int, sums: Words, found: Words) -> None:
    """Add to ``found`` [coefficients, TILE] what ``count`` blocks from the ``first`` one on have, whose rows are
    ``near``."""
    line = 2 * of.shape[1]
    at, names, to = sums.ctypes.data, of.ctypes.data + first * line, found.ctypes.data
    _make(at, near.ctypes.data, count)
    for g in range(of.shape[1] // TOGETHER):
        take(to + g * TOGETHER * ROW, at, names + 2 * TOGETHER * g, count, line)


@compiled_loop
def _named(weights: Words, degree: int) -> Any:
    of = np.empty(((weights.shape[0] + 3) // 4, (degree + TOGETHER - 1) // TOGETHER * TOGETHER), dtype=np.uint16)
    names_of(weights, of)
    return of


@compiled_loop
def weigh(x: Words, weights: Words, begin: int, end: int, out: Words) -> None:
    """``out`` [degree, n]: row ``c`` is the sum of the rows of ``x`` [m, n] whose weight [m] has bit ``c``; the columns
    from ``begin`` to ``end``.

    Some tiles are read at a time, so that a row is read in pieces that the processor fetches well.
    """
    degree, m = out.shape[0], x.shape[0]
    of, tiles = _named(weights, degree), _WIDTH // TILE
    near, sums = np.zeros((tiles, _ROWS, TILE), dtype=np.uint64), np.empty((BLOCKS * 16, TILE), dtype=np.uint64)
    found = np.empty((tiles, of.shape[1], TILE), dtype=np.uint64)
    for left in range(begin, end, _WIDTH):
        found[:] = np.uint64(0)
        for start in range(0, m, _ROWS):
            high = min(_ROWS, m - start)
            for tile in range(tiles):
                first = left + tile * TILE
                size = min(TILE, end - first)
                if size > 0:
                    near[tile, :high, :size] = x[start : start + high, first : first + size]
            for tile in range(min(tiles, (end - left + TILE - 1) // TILE)):
                _add_near(near[tile], of, start // 4, (high + 3) // 4, sums, found[tile])
        for tile in range(tiles):
            first = left + tile * TILE
            size = min(TILE, end - first)
            if size > 0:
                out[:, first : first + size] = found[tile, :degree, :size]


@compiled_loop
def weigh_columns(x: Words, weights: Words, out: Words) -> None:
    """``out`` [m, degree]: column ``c`` is the sum of the columns of ``x`` [m, n] whose weight [n] has bit ``c``.

    Some columns at a time are turned, so that they and the sums stay in the processor's first cache.
    """
    (m, n), degree = x.shape, out.shape[1]
    of = _named(weights, degree)
    near, sums = np.zeros((_ROWS, TILE), dtype=np.uint64), np.empty((BLOCKS * 16, TILE), dtype=np.uint64)
    found = np.empty((of.shape[1], TILE), dtype=np.uint64)
    for first in range(0, m, TILE):
        size = min(TILE, m - first)
        found[:] = np.uint64(0)
        for start in range(0, n, _ROWS):
            wide = min(_ROWS, n - start)
            for i in range(size):
                for j in range(wide):
                    near[j, i] = x[first + i, start + j]
            _add_near(near, of, start // 4, (wide + 3) // 4, sums, found)
        for i in range(size):
            for c in range(degree):
                out[first + i, c] = found[c, i]
