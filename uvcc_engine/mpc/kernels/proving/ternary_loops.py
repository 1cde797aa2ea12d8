"""What the compiled products of a ternary fold have in common, and those of numbers.

Six times two halves of 64 rows become three: lower one, sum, upper one (Karatsuba and Ofman, 1962). Three halvings are
done in memory, for eight columns at a time; the other three in the processor's registers, where of 27 times three rows
nine products at a time are made. See ``folding.Fold`` and ``Kernels.ternary_numbers``.
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
from uvcc_engine.mpc.kernels.proving.weigh_loops import weigh_columns
from uvcc_engine.mpc.kernels.proving.word_vectors import EIGHT, constant, load, store

Words = NDArray[np.uint64]
ROW: Final = 64
"""Bytes of a row: eight words."""
NINE: Final = 9 * ROW
"""Bytes of nine rows."""
_TERM: Final = 27 * 8 * ROW  # bytes of one side and term whose upper three halvings are done
_NEAR: Final = 128  # groups whose products lie near


def _halved(levels: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Of ``2^levels`` rows: where each goes among ``3^levels``, and which row is the sum of which two, in order."""
    places = [sum(3**k * 2 * (row >> k & 1) for k in range(levels)) for row in range(2**levels)]
    sums = []
    for level in range(levels):  # what has its first sum at this digit is the sum of two that have none from it on
        for to in range(3**levels):
            digits = [to // 3**k % 3 for k in range(levels)]
            if digits[level] == 1 and 1 not in digits[level + 1 :]:
                sums.append((to, to - 3**level, to + 3**level))
    return places, sums


_PLACES: Final = np.array(_halved(3)[0])
_SUMS: Final = np.array(_halved(3)[1])


@compiled_loop
def halve_words(x: Words, out: Words) -> None:
    """``out`` [27, n]: the rows of ``x`` [8, n] and their sums, halved three times; of words without carries."""
    for row in range(8):
        out[_PLACES[row]] = x[row]
    for k in range(_SUMS.shape[0]):
        to, one, other = out[_SUMS[k, 0]], out[_SUMS[k, 1]], out[_SUMS[k, 2]]
        for i in range(to.shape[0]):
            to[i] = one[i] ^ other[i]


@compiled_loop
def _halve_numbers(x: Words, out: Words) -> None:
    """The same of numbers."""
    for row in range(8):
        out[_PLACES[row]] = x[row]
    for k in range(_SUMS.shape[0]):
        to, one, other = out[_SUMS[k, 0]], out[_SUMS[k, 1]], out[_SUMS[k, 2]]
        for i in range(to.shape[0]):
            to[i] = one[i] + other[i]


def _nine_rows(builder: Any, at: Any, digit: int, add: Any) -> list[Any]:
    """Four of the eight rows at an address, lower half, sum or upper half by the digit, halved twice: nine vectors."""

    def row(number: int) -> Any:
        return load(builder, at, EIGHT, ROW * number)

    four = [add(row(k), row(4 + k)) if digit == 1 else row(2 * digit + k) for k in range(4)]
    places, sums = _halved(2)
    found: dict[int, Any] = dict(zip(places, four, strict=True))
    for to, one, other in sums:
        found[to] = add(found[one], found[other])
    return [found[k] for k in range(9)]


def nine_products(digit: int, add: str, multiply: str, *, weighed: bool = False) -> Any:
    """A loop's part: the products, added up over ``terms``, of nine rows of eight words of ``u`` and ``v``: those of
    that digit of the third halving. ``add`` and ``multiply``: as LLVM's builder has it for what the words are.

    They go to ``found``, one row ``step`` bytes behind the other; or, weighed without carries, are added to what is
    there. Until then they stay in the registers; numba has no type for the vectors, so this is written here.
    """

    @intrinsic
    def products(context: Any, u: Any, v: Any, terms: Any, weights: Any, found: Any, step: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            u, v, terms, weights, found, step = arguments
            plus, times = getattr(builder, add), getattr(builder, multiply)

            def term(t: Any, so_far: list[Any]) -> list[Any]:
                place = builder.mul(t, constant(_TERM))
                sides = [_nine_rows(builder, builder.add(side, place), digit, plus) for side in (u, v)]
                both = [times(one, other) for one, other in zip(*sides, strict=True)]
                return [plus(one, new) for one, new in zip(so_far, both, strict=True)]

            none = ir.Constant(EIGHT, [0] * 8)
            rows = vectors.repeated(builder, terms, [none] * 9, term)
            factors = load(builder, weights, EIGHT) if weighed else None
            to = found
            for row in rows:
                if factors is not None:
                    parts = [vectors.carryless(builder, row, factors, lanes) for lanes in (0x00, 0x11)]
                    row = builder.xor(load(builder, to, EIGHT), builder.xor(*parts))
                store(builder, row, to)
                to = builder.add(to, step)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), build

    return products


_lower, _sum, _upper = (nine_products(digit, "add", "mul") for digit in range(3))


@compiled_loop
def _numbers_near(x: Words, first: int, near: Words, out: Words) -> None:
    """``out`` [27, 64]: eight groups of ``x`` [64, groups] from ``first`` on, halved three times; zeros behind the
    last. ``near``: [64, 8]."""
    size = min(8, x.shape[1] - first)
    if size < 8:
        near[:] = np.uint64(0)
    for row in range(64):
        to, one = near[row], x[row, first : first + size]
        for lane in range(size):
            to[lane] = one[lane]
    _halve_numbers(near.reshape(8, 64), out)


@compiled_loop
def ternary_numbers(
    a: Words,
    b: Words,
    c: Words,
    d: Words,
    e: Words,
    f: Words,
    terms: int,
    weights: Words,
    begin: int,
    end: int,
    out: Words,
) -> None:
    """Add to ``out`` [729, degree], of each of the 729 products of sums of up to three terms ``a b + c d + e f``, each
    [64, groups], the sum over the groups from ``begin`` to ``end`` whose weight has the coefficient's bit; not yet
    joined to coefficients. All groups but the last are whole eights."""
    us, vs = np.empty((3, 27, 64), dtype=np.uint64), np.empty((3, 27, 64), dtype=np.uint64)
    near, products = np.zeros((64, 8), dtype=np.uint64), np.empty((729, _NEAR), dtype=np.uint64)
    weighed = np.empty(out.shape, dtype=np.uint64)
    u_at, v_at, to, step = us.ctypes.data, vs.ctypes.data, products.ctypes.data, 8 * _NEAR
    for first in range(begin, end, _NEAR):
        size = min(_NEAR, end - first)
        for place in range(0, size, 8):
            _numbers_near(a, first + place, near, us[0])
            _numbers_near(b, first + place, near, vs[0])
            if terms > 1:
                _numbers_near(c, first + place, near, us[1])
                _numbers_near(d, first + place, near, vs[1])
            if terms > 2:
                _numbers_near(e, first + place, near, us[2])
                _numbers_near(f, first + place, near, vs[2])
            for k in range(27):
                one, other, row = u_at + 8 * ROW * k, v_at + 8 * ROW * k, to + 8 * place + 27 * k * step
                _lower(one, other, terms, to, row, step)
                _sum(one, other, terms, to, row + 9 * step, step)
                _upper(one, other, terms, to, row + 18 * step, step)
        weigh_columns(products[:, :size], weights[first : first + size], weighed)
        for k in range(729):
            for column in range(out.shape[1]):
                out[k, column] += weighed[k, column]
    us[0, 0, 0] = vs[0, 0, 0] = 0  # numba lets an array go after its last use, and does not know of its address
