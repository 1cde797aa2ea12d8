"""The compiled product of two polynomials over GF(2^64) whose coefficients are rows of words.

Three products of halves for four (Karatsuba and Ofman, 1962), down to a few rows that are multiplied each with each.
One tile of columns goes through all halvings before the next, so the sums of halves stay in the processor's caches, and
halves that are no sums are not copied: a leaf knows the rows at which its two sides start. Where the processor
multiplies eight words without carries at a time, four rows are halved twice more in its registers, and the sums of
their nine products stay as they are until the end.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proving import word_vectors as vectors
from uvcc_engine.mpc.kernels.proving.field_loops import EIGHT_PRODUCTS
from uvcc_engine.mpc.kernels.proving.proof_loops import inner_words, reduced_product
from uvcc_engine.mpc.kernels.proving.word_vectors import EIGHT, constant, load, store

Words = NDArray[np.uint64]
_TILE = 256  # columns
_STRIP: Final = 64  # columns, where eight are multiplied at a time
_LEAF = 4  # rows
_NINE: Final = 9  # products of four rows with four, halved twice


@compiled_loop
def _add_halves(x: Words, start: int, half: int, to: int) -> None:
    """Rows ``to ..`` become the sums of the ``half`` rows from ``start`` on and of those behind them."""
    flat, width = x.reshape(-1), x.shape[1]
    low = flat[start * width : (start + half) * width]
    high = flat[(start + half) * width : (start + 2 * half) * width]
    out = flat[to * width : (to + half) * width]
    for j in range(out.shape[0]):
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
def planned(k: int, levels: int) -> Any:
    """The way through all leaves of ``k`` rows halved ``levels`` times: by leaf at which rows its two sides start and
    how many sums of halves there are by then, and of each sum where its two sides lie, how long, and where it goes."""
    leaves = 3**levels
    at, sums, count = np.zeros((leaves, 3), dtype=np.int64), np.zeros(((leaves - 1) // 2 + 1, 4), dtype=np.int64), 0
    starts = np.zeros((levels + 1, 2), dtype=np.int64)  # by level, where its rows of both sides start
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
                sums[count] = a, b, half, to
                count += 1
                starts[level + 1, 0], starts[level + 1, 1] = to, to
            else:  # the second side's coefficients run downwards
                starts[level + 1, 0] = a + digit * half
                starts[level + 1, 1] = b + (1 - digit) * half
        at[number] = starts[levels, 0], starts[levels, 1], count
    return at, sums


@compiled_loop
def _addplanned(us: Words, vs: Words, sums: Any, first: int, end: int) -> None:
    """The sums of halves before a leaf."""
    for a, b, half, to in sums[first:end]:
        _add_halves(us, a, half, to)
        _add_halves(vs, b, half, to)


@compiled_loop
def product_by_tiles(u: Words, v: Words, begin: int, end: int, out: Words) -> None:
    """See ``Kernels.binary_product``, of the columns from ``begin`` to ``end``; on any processor, for any number of
    rows."""
    k = u.shape[0]
    levels, leaf, leaves = 0, k, 1
    while leaf > _LEAF and leaf % 2 == 0:
        levels, leaf, leaves = levels + 1, leaf // 2, 3 * leaves
    lows = np.zeros((leaves, 2 * leaf - 1), dtype=np.uint64)
    highs = np.zeros((leaves, 2 * leaf - 1), dtype=np.uint64)
    us, vs = np.empty((2 * k, _TILE), dtype=np.uint64), np.empty((2 * k, _TILE), dtype=np.uint64)
    plan, sums = planned(k, levels)
    for first in range(begin, end, _TILE):
        size = min(_TILE, end - first)
        us[:k, :size] = u[:, first : first + size]
        vs[:k, :size] = v[:, first : first + size]
        done = 0
        for number in range(leaves):
            _addplanned(us, vs, sums, done, plan[number, 2])
            done = plan[number, 2]
            _multiply_leaf(us[:, :size], vs[:, :size], plan[number], leaf, lows[number], highs[number])
    for number in range(leaves):
        for i in range(2 * leaf - 1):
            lows[number, i] = reduced_product(lows[number, i], highs[number, i])
    out[:] = _joined(lows, levels)[0]


@intrinsic
def _add_nine(context: Any, sums: Any, u: Any, v: Any, row: Any, count: Any) -> Any:
    """Add to nine vectors of ``sums`` the products of four rows and four, ``row`` bytes apart, over ``count`` times
    eight columns: by halves and halves of them, lower, upper and their sum."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, u, v, row, count = arguments

        def halves(rows: list[Any]) -> list[Any]:
            a, b, c, d = rows
            lower, upper = builder.xor(a, c), builder.xor(b, d)
            return [a, b, builder.xor(a, b), c, d, builder.xor(c, d), lower, upper, builder.xor(lower, upper)]

        def step(at: Any, found: list[Any]) -> list[Any]:
            place, rows = builder.mul(at, constant(64)), []
            for start, order in ((u, (0, 1, 2, 3)), (v, (3, 2, 1, 0))):  # the second side's coefficients run downwards
                here = builder.add(start, place)
                rows.append([load(builder, builder.add(here, builder.mul(row, constant(r))), EIGHT) for r in order])
            new = []
            for one, x, y in zip(found, halves(rows[0]), halves(rows[1]), strict=True):
                parts = [vectors.carryless(builder, x, y, lane) for lane in (0x00, 0x11)]
                new.append(builder.xor(one, builder.xor(*parts)))
            return new

        before = [load(builder, sums, EIGHT, 64 * k) for k in range(_NINE)]
        for k, one in enumerate(vectors.repeated(builder, count, before, step)):
            store(builder, one, sums, 64 * k)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


@intrinsic
def _add_eights(context: Any, x: Any, count: Any, to: Any) -> Any:
    """``count`` times eight words at ``x`` and as many behind them, added up at ``to``."""

    return types.void(*[types.intp] * 3), vectors.halves_joined("xor")


@intrinsic
def _fetch_ahead(context: Any, address: Any) -> Any:
    """What a strip of a row needs, for the next round."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors.fetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), build


_add_leaf: Any = _add_nine  # numba's own types know nothing of their arguments
_add_rows: Any = _add_eights
_fetch: Any = _fetch_ahead


@compiled_loop
def _product_by_eights(u: Words, v: Words, begin: int, end: int, out: Words) -> None:
    """The same, eight columns at a time; the rows are four times a power of two."""
    k, n = u.shape
    levels, leaves = 0, 1
    while k >> levels > _LEAF:
        levels, leaves = levels + 1, 3 * leaves
    sums = np.zeros((leaves * _NINE, 8), dtype=np.uint64)
    us, vs = np.empty((2 * k, _STRIP), dtype=np.uint64), np.empty((2 * k, _STRIP), dtype=np.uint64)
    (plan, halves), row = planned(k, levels), 8 * _STRIP
    sums_at, u_at, v_at = sums.ctypes.data, us.ctypes.data, vs.ctypes.data  # no array is touched further inwards
    for first in range(begin, end, _STRIP):
        size = min(_STRIP, end - first)
        us[:k, :size] = u[:, first : first + size]
        vs[:k, :size] = v[:, first : first + size]
        us[:k, size:] = np.uint64(0)
        vs[:k, size:] = np.uint64(0)
        done = 0
        for number in range(leaves):
            for one in range(done, plan[number, 2]):
                count, to = halves[one, 2] * (_STRIP // 8), row * halves[one, 3]
                _add_rows(u_at + row * halves[one, 0], count, u_at + to)
                _add_rows(v_at + row * halves[one, 1], count, v_at + to)
            if number < k:
                _fetch(u.ctypes.data + 8 * (n * number + first + _STRIP))
                _fetch(v.ctypes.data + 8 * (n * number + first + _STRIP))
            done = plan[number, 2]
            left, right = u_at + row * plan[number, 0], v_at + row * plan[number, 1]
            _add_leaf(sums_at + 64 * _NINE * number, left, right, row, _STRIP // 8)
    found = np.empty((leaves * _NINE, 1), dtype=np.uint64)
    for number in range(leaves * _NINE):
        one = sums[number]
        found[number, 0] = reduced_product(one[0] ^ one[2] ^ one[4] ^ one[6], one[1] ^ one[3] ^ one[5] ^ one[7])
    out[:] = _joined(found, levels + 2)[0]


binary_product: Any = _product_by_eights if EIGHT_PRODUCTS else product_by_tiles
"""Of rows that are four times a power of two."""
