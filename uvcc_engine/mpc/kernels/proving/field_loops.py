"""Compiled loops over elements of GF(2^64), eight at a time where the processor can.

Of eight products side by side the lower and the upper words are sorted by two instructions, and reduced together. A
word's bits are chosen by a matrix of bits: where the processor has products of such matrices (GFNI), bytes of the same
place lie side by side for them, and each of eight instructions takes one diagonal of the matrix's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proving import word_vectors as vectors
from uvcc_engine.mpc.kernels.proving.proof_loops import processor_has, reduced_product, wide_product
from uvcc_engine.mpc.kernels.proving.word_vectors import EIGHT, INDEX, constant, load, store

Words = NDArray[np.uint64]
EIGHT_PRODUCTS: Final = all(map(processor_has, ("pclmul", "vpclmulqdq", "avx512f")))
"""Whether eight words are multiplied without carries at a time."""
_MATRICES: Final = EIGHT_PRODUCTS and all(map(processor_has, ("gfni", "avx512bw", "avx512vbmi")))
_STRIP: Final = 64  # columns whose sums stay in the processor's registers
_BLOCK: Final = 256
_BYTES: Final = ir.VectorType(ir.IntType(8), 64)


def _shuffled(builder: Any, x: Any, y: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INDEX, len(places)), places))


def _reduced(builder: Any, even: Any, odd: Any) -> Any:
    """Eight elements in order from the products of every other pair: as ``reduced_product``."""
    low = _shuffled(builder, even, odd, [k // 2 * 2 + k % 2 * 8 for k in range(8)])
    high = _shuffled(builder, even, odd, [k // 2 * 2 + 1 + k % 2 * 8 for k in range(8)])

    def moved(x: Any, by: int, turn: Callable[..., Any]) -> Any:
        return turn(x, ir.Constant(EIGHT, [by] * 8))

    over = builder.xor(moved(high, 63, builder.lshr), moved(high, 61, builder.lshr))
    high = builder.xor(high, builder.xor(over, moved(high, 60, builder.lshr)))
    for by in (1, 3, 4):
        low = builder.xor(low, moved(high, by, builder.shl))
    return builder.xor(low, high)


def _multiplied(builder: Any, x: Any, y: Any) -> Any:
    """Eight products in the field."""
    return _reduced(builder, *(vectors.carryless(builder, x, y, lane) for lane in (0x00, 0x11)))


@intrinsic
def _multiply_eights(context: Any, out: Any, a: Any, b: Any, count: Any) -> Any:
    """``count`` times eight products."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, a, b, count = arguments

        def step(at: Any, _: list[Any]) -> list[Any]:
            place = builder.mul(at, constant(64))
            x, y = (load(builder, builder.add(one, place), EIGHT) for one in (a, b))
            store(builder, _multiplied(builder, x, y), builder.add(out, place))
            return []

        vectors.repeated(builder, count, [], step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build


@intrinsic
def _add_strip(context: Any, out: Any, x: Any, row: Any, factors: Any, rows: Any) -> Any:
    """64 columns of ``rows`` rows, which lie ``row`` bytes apart, times the rows' factors, added up."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, x, row, factors, rows = arguments

        def step(at: Any, sums: list[Any]) -> list[Any]:
            factor = vectors.spread(
                builder, load(builder, builder.add(factors, builder.mul(at, constant(8))), vectors.WORD), 8
            )
            here = builder.add(x, builder.mul(at, row))
            new: list[Any] = []
            vectors.fetch(builder, builder.add(here, constant(8 * _STRIP)))
            for k in range(_STRIP // 8):
                words = load(builder, here, EIGHT, 64 * k)
                for lane in (0x00, 0x01):
                    product = vectors.carryless(builder, words, factor, lane)
                    new.append(builder.xor(sums[len(new)], product))
            return new

        sums = vectors.repeated(builder, rows, [ir.Constant(EIGHT, [0] * 8)] * (_STRIP // 4), step)
        for k in range(_STRIP // 8):
            store(builder, _reduced(builder, *sums[2 * k : 2 * k + 2]), out, 64 * k)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


def _chosen(builder: Any, words: Any, matrices: list[Any]) -> Any:
    """The matrix of bits times each of eight words; ``matrices``: by how far a block's row and column lie apart."""
    form = ir.FunctionType(_BYTES, [_BYTES, _BYTES, ir.IntType(8)])
    multiply = builder.module.declare_intrinsic("llvm.x86.vgf2p8affineqb.512", fnty=form)
    turned = [8 * (k % 8) + k // 8 for k in range(64)]  # byte k // 8 of word k % 8: bytes of one place side by side
    one = builder.bitcast(words, _BYTES)
    sides, found = builder.bitcast(_shuffled(builder, one, one, turned), EIGHT), None
    for apart, matrix in enumerate(matrices):
        here = _shuffled(builder, sides, sides, [(k + apart) % 8 for k in range(8)]) if apart else sides
        product = builder.call(multiply, [builder.bitcast(here, _BYTES), matrix, ir.Constant(ir.IntType(8), 0)])
        found = product if found is None else builder.xor(found, product)
    return builder.bitcast(_shuffled(builder, found, found, turned), EIGHT)


def _choosing(*, weighed: bool) -> Any:
    @intrinsic
    def choose(context: Any, out: Any, x: Any, matrices: Any, weights: Any, count: Any) -> Any:
        """``count`` times eight words times the matrix of bits, and then, maybe, times their weights."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, x, matrices, weights, count = arguments
            blocks = [builder.bitcast(load(builder, matrices, EIGHT, 64 * k), _BYTES) for k in range(8)]

            def step(at: Any, _: list[Any]) -> list[Any]:
                place = builder.mul(at, constant(64))
                found = _chosen(builder, load(builder, builder.add(x, place), EIGHT), blocks)
                if weighed:
                    found = _multiplied(builder, found, load(builder, builder.add(weights, place), EIGHT))
                store(builder, found, builder.add(out, place))
                return []

            vectors.repeated(builder, count, [], step)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), build

    return choose


_multiply_all: Any = _multiply_eights  # numba's own types know nothing of their arguments
_add_all: Any = _add_strip
_choose_all, _choose_and_weigh = _choosing(weighed=False), _choosing(weighed=True)


@compiled_loop
def multiply_words(a: Words, b: Words, out: Words) -> None:
    """One product at a time, on any processor."""
    for i in range(out.shape[0]):
        low, high = wide_product(a[i], b[i])
        out[i] = reduced_product(low, high)


@compiled_loop
def _multiply_vectors(a: Words, b: Words, out: Words) -> None:
    """Eight at a time."""
    whole = out.shape[0] // 8
    if whole:
        _multiply_all(out.ctypes.data, a.ctypes.data, b.ctypes.data, whole)
    multiply_words(a[8 * whole :], b[8 * whole :], out[8 * whole :])


binary_multiply: Any = _multiply_vectors if EIGHT_PRODUCTS else multiply_words
"""See ``Kernels.binary_multiply``; flat arrays without gaps."""


@compiled_loop
def columns_by_words(x: Words, factors: Words, begin: int, end: int, out: Words) -> None:
    """One product at a time, on any processor."""
    k = x.shape[0]
    lows, highs = np.empty(_BLOCK, dtype=np.uint64), np.empty(_BLOCK, dtype=np.uint64)
    for first in range(begin, end, _BLOCK):
        size = min(_BLOCK, end - first)
        lows[:] = np.uint64(0)
        highs[:] = np.uint64(0)
        for row in range(k):
            for i in range(size):
                low, high = wide_product(x[row, first + i], factors[row])
                lows[i] ^= low
                highs[i] ^= high
        for i in range(size):
            out[first + i] = reduced_product(lows[i], highs[i])


@compiled_loop
def _columns_by_strips(x: Words, factors: Words, begin: int, end: int, out: Words) -> None:
    """Many columns at a time; the last ones of some twice."""
    k, n = x.shape
    if end - begin < _STRIP:
        columns_by_words(x, factors, begin, end, out)
        return
    for first in range(begin, end, _STRIP):
        at = 8 * min(first, end - _STRIP)
        _add_all(out.ctypes.data + at, x.ctypes.data + at, 8 * n, factors.ctypes.data, k)


binary_columns: Any = _columns_by_strips if EIGHT_PRODUCTS else columns_by_words
"""``out`` [n]: of every column of ``x`` [k, n] from ``begin`` to ``end`` the sum of its products with ``factors`` [k];
arrays without gaps."""


@compiled_loop
def choose_by_tables(words: Words, weights: Words, rows: Words, out: Words) -> None:
    """For every byte and what it may be the sum of its bits' weights, on any processor."""
    tables, byte = np.zeros((8, 256), dtype=np.uint64), np.uint64(255)
    for k in range(8):
        for bit in range(8):
            for i in range(1 << bit):
                tables[k, (1 << bit) + i] = tables[k, i] ^ weights[8 * k + bit]
    for i in range(words.shape[0]):
        word, found = words[i], np.uint64(0)
        for k in range(8):
            found ^= tables[k, np.int64((word >> np.uint64(8 * k)) & byte)]
        out[i] = found
    if rows.shape[0]:
        binary_multiply(out, rows, out)


@compiled_loop
def _choose_by_matrices(words: Words, weights: Words, rows: Words, out: Words) -> None:
    """By products of matrices of eight times eight bits."""
    matrices = np.zeros((8, 8), dtype=np.uint64)  # row r of blocks has its column r + apart at [apart, r]
    for apart in range(8):
        for r in range(8):
            for i in range(8):
                for j in range(8):
                    bit = (weights[(r + apart) % 8 * 8 + j] >> np.uint64(8 * r + i)) & np.uint64(1)
                    matrices[apart, r] |= bit << np.uint64(8 * (7 - i) + j)
    n, at = words.shape[0], matrices.ctypes.data
    whole, last, weight = n // 8, np.zeros(8, dtype=np.uint64), np.zeros(8, dtype=np.uint64)
    last[: n % 8] = words[8 * whole :]
    if rows.shape[0]:
        weight[: n % 8] = rows[8 * whole :]
        if whole:
            _choose_and_weigh(out.ctypes.data, words.ctypes.data, at, rows.ctypes.data, whole)
        _choose_and_weigh(last.ctypes.data, last.ctypes.data, at, weight.ctypes.data, 1)
    else:
        if whole:
            _choose_all(out.ctypes.data, words.ctypes.data, at, at, whole)
        _choose_all(last.ctypes.data, last.ctypes.data, at, at, 1)
    out[8 * whole :] = last[: n % 8]
    matrices[0, 0] = weight[0] = 0  # numba lets an array go after its last use, and does not know of its address


chosen_places: Any = _choose_by_matrices if _MATRICES else choose_by_tables
"""``out`` [n]: for every word the XOR of the ``weights`` [64] of its bits; times ``rows`` [n], or [0] for nothing."""
