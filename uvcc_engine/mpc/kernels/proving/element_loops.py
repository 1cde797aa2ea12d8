"""The compiled product of two polynomials whose coefficients are elements of a Galois ring, before their reduction.

An element is four parts of 13 coefficients: of these and of the polynomial three products of halves stand for four
(Karatsuba and Ofman, 1962), down to 13 coefficients times 13, whose sums stay in the processor's registers. Eight
entries lie side by side; their sums are added up at the end. An element is weighed by four bits of a word at a time.
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
from uvcc_engine.mpc.kernels.proving.polynomial_loops import planned
from uvcc_engine.mpc.kernels.proving.proof_loops import processor_has
from uvcc_engine.mpc.kernels.proving.word_vectors import EIGHT, constant, load, store

Words = NDArray[np.uint64]
MULTIPLIES_EIGHT: Final = processor_has("avx512dq")
"""Whether the processor multiplies eight numbers at a time, and has registers for the sums."""
_PART: Final = 13
_PARTS: Final = 9
_WIDE: Final = 2 * _PART - 1
ELEMENT: Final = 4 * _PART
"""Coefficients of an element."""
_LANES: Final = 8
_FOUR: Final = ELEMENT // 8 * 64 + 64  # bytes of an element times X^3 at most, in whole vectors
_NEAR: Final = 64  # rows of eight elements that stay in the second cache


@intrinsic
def _add_products(context: Any, sums: Any, x: Any, y: Any) -> Any:
    """Add the product of 13 vectors and 13 to 25 vectors ``sums``, as coefficients."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, x, y = arguments
        found = [load(builder, sums, EIGHT, 64 * k) for k in range(_WIDE)]
        for i in range(_PART):
            one = load(builder, x, EIGHT, 64 * i)
            for j in range(_PART):
                found[i + j] = builder.add(found[i + j], builder.mul(one, load(builder, y, EIGHT, 64 * j)))
        for k, value in enumerate(found):
            store(builder, value, sums, 64 * k)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), build


@intrinsic
def _add_rows(context: Any, x: Any, count: Any, to: Any) -> Any:
    """``count`` vectors at ``x`` and as many behind them, added up at ``to``."""

    return types.void(*[types.intp] * 3), vectors.halves_joined("add")


_multiply_part: Any = _add_products  # numba's own types know nothing of their arguments
_add_halves: Any = _add_rows


@compiled_loop
def _turn(x: Words, first: int, out: Words) -> None:
    """``out`` [rows, 52, 8]: eight entries of ``x`` [rows, n, 52] from the ``first`` on; zeros behind the last."""
    size = min(_LANES, x.shape[1] - first)
    for r in range(x.shape[0]):
        for g in range(_LANES):
            if g < size:
                row = x[r, first + g]
                for c in range(ELEMENT):
                    out[r, c, g] = row[c]
            else:
                out[r, :, g] = np.uint64(0)


@compiled_loop
def _take_part(x: Words, part: int, out: Words) -> None:
    """``out`` [rows.., 13, 8]: one of the nine parts of ``x`` [rows, 52, 8]: lower half, upper one, their sum, of
    each the same."""
    high, low = part // 3, part % 3
    for r in range(x.shape[0]):
        to = out[r].reshape(-1)
        to[:] = np.uint64(0)
        for k in range(4):  # the fourths that this part adds up
            if (high == 2 or high == k // 2) and (low == 2 or low == k % 2):
                one = x[r, _PART * k : _PART * (k + 1)].reshape(-1)
                for i in range(to.shape[0]):
                    to[i] += one[i]


@compiled_loop
def _multiply_parts(us: Words, vs: Words, plan: Any, halves: Any, sums: Words) -> None:
    """Add to ``sums`` [leaves, 25, 8] the products of all leaves of ``us`` and ``vs`` [2 rows, 13, 8]."""
    row, done = 64 * _PART, 0
    u_at, v_at, to = us.ctypes.data, vs.ctypes.data, sums.ctypes.data
    for number in range(plan.shape[0]):
        for one in range(done, plan[number, 2]):
            count, at = halves[one, 2] * _PART, row * halves[one, 3]
            _add_halves(u_at + row * halves[one, 0], count, u_at + at)
            _add_halves(v_at + row * halves[one, 1], count, v_at + at)
        done = plan[number, 2]
        _multiply_part(to + 64 * _WIDE * number, u_at + row * plan[number, 0], v_at + row * plan[number, 1])


@compiled_loop
def _joined(found: Words, step: int) -> Words:
    """``[b, w, e]`` to ``[b / 3, w + 2 step, e]``: lower product, upper one, and that of the sums, ``step`` apart."""
    wide = np.zeros((found.shape[0] // 3, found.shape[1] + 2 * step, found.shape[2]), dtype=np.uint64)
    for b in range(wide.shape[0]):
        for i in range(found.shape[1]):
            for e in range(found.shape[2]):
                low, high, both = found[3 * b, i, e], found[3 * b + 1, i, e], found[3 * b + 2, i, e]
                wide[b, i, e] += low
                wide[b, i + 2 * step, e] += high
                wide[b, i + step, e] += both - low - high
    return wide


@compiled_loop
def multiply_elements(u: Words, v: Words, begin: int, end: int, out: Words) -> None:
    """See ``Kernels.multiply_elements``; elements of 52 coefficients, the entries from ``begin`` to ``end``, of which
    all but the last of a row are whole eights."""
    rows = u.shape[0]
    levels = 0
    while 1 << levels < rows:
        levels += 1
    plan, halves = planned(rows, levels)
    leaves, near = plan.shape[0], max(1, _NEAR // rows)
    sums = np.zeros((_PARTS, leaves, _WIDE, _LANES), dtype=np.uint64)
    turned = np.empty((2, near, rows, ELEMENT, _LANES), dtype=np.uint64)
    both = np.empty((2, 2 * rows, _PART, _LANES), dtype=np.uint64)
    for start in range(begin, end, near * _LANES):
        count = min(near, (end - start + _LANES - 1) // _LANES)
        for k in range(count):
            _turn(u, start + k * _LANES, turned[0, k])
            _turn(v, start + k * _LANES, turned[1, k])
        for part in range(_PARTS):
            for k in range(count):
                _take_part(turned[0, k], part, both[0])
                _take_part(turned[1, k], part, both[1])
                _multiply_parts(both[0], both[1], plan, halves, sums[part])
    found = np.zeros((_PARTS * leaves, _WIDE, 1), dtype=np.uint64)
    for leaf in range(leaves):
        for part in range(_PARTS):
            for k in range(_WIDE):
                for g in range(_LANES):
                    found[leaf * _PARTS + part, k, 0] += sums[part, leaf, k, g]
    elements = _joined(_joined(found, _PART), 2 * _PART)
    found = elements.reshape(leaves, 1, 2 * ELEMENT - 1)
    for level in range(levels):
        found = _joined(found, 1 << level)
    out[:] = found[0]


@intrinsic
def _weigh_one(context: Any, padded: Any, weight: Any, sums: Any, wide: Any) -> Any:
    """At ``wide`` 104 coefficients of an element, which has eight zeros before and behind it, times the polynomial that
    52 bits of a word are. Four bits at a time take one of the sixteen sums of the element times 1, X, X^2 and X^3."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        padded, weight, sums, wide = arguments
        none, count = ir.Constant(EIGHT, [0] * 8), _FOUR // 64
        for k in range(count):
            chosen: list[Any] = [none]
            for power in range(4):
                one = load(builder, padded, EIGHT, 64 + 64 * k - 8 * power)
                chosen += [builder.add(x, one) if i else one for i, x in enumerate(chosen)]
            for i, x in enumerate(chosen):
                store(builder, x, sums, _FOUR * i + 64 * k)
        sides = [[none] * _PART, [none] * (_PART - 1)]  # from coefficient 0 on, and from 4 on
        for four in range(_PART):
            number = builder.and_(builder.lshr(weight, constant(4 * four)), constant(15))
            at, found = builder.add(sums, builder.mul(number, constant(_FOUR))), sides[four % 2]
            for k in range(count):
                found[four // 2 + k] = builder.add(found[four // 2 + k], load(builder, at, EIGHT, 64 * k))
        for start in (0, 64 * (_PART - 1)):
            store(builder, none, wide, start)
        for k, x in enumerate(sides[1]):
            store(builder, x, wide, 32 + 64 * k)
        for k, x in enumerate(sides[0]):
            store(builder, builder.add(x, load(builder, wide, EIGHT, 64 * k)), wide, 64 * k)
        return context.get_dummy_value()

    return types.void(types.intp, types.uint64, types.intp, types.intp), build


_weigh: Any = _weigh_one  # numba's own types know nothing of its arguments


@compiled_loop
def weigh_by_fours(x: Words, weights: Words, tap: int, out: Words) -> None:
    """As ``proof_loops.weigh_elements``, for elements of 52 coefficients."""
    padded, sums = np.zeros(ELEMENT + 16, dtype=np.uint64), np.empty(2 * _FOUR, dtype=np.uint64)
    wide = np.zeros(2 * ELEMENT, dtype=np.uint64)
    for g in range(x.shape[0]):
        padded[8 : 8 + ELEMENT] = x[g]
        _weigh(padded.ctypes.data, weights[g], sums.ctypes.data, wide.ctypes.data)
        low, high, end = out[g], wide[ELEMENT : 2 * ELEMENT - 1], wide[2 * ELEMENT - tap : 2 * ELEMENT - 1]
        for j in range(ELEMENT):
            low[j] = wide[j]
        for j in range(ELEMENT - 1):  # X^(52 + j) is -X^j - X^(j + tap)
            low[j] -= high[j]
        to = low[tap:]
        for j in range(ELEMENT - tap):
            to[j] -= high[j]
        for j in range(tap - 1):  # and what that leaves above is that again
            low[j] += end[j]
            to[j] += end[j]
