"""What is done to one row of floats after the other, all in the first-level cache.

Addresses are integers, lengths are counted in vectors; callers answer for the bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from uvcc_engine.nsa.loops.float_vectors import (
    FLOAT,
    LANES,
    PART,
    VECTOR,
    WORD,
    at,
    every,
    fused,
    intrinsic,
    load,
    loop,
    powers,
    reduced,
    spread,
    word,
)


@intrinsic
def row_peak(_: Any, row: Any, vectors: Any) -> Any:
    """The greatest of a row."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place = at(b, args[0], word(0), VECTOR)

        def greater(x: Any, y: Any) -> Any:
            return b.select(b.fcmp_ordered(">", x, y), x, y)

        return reduced(
            b, args[1], every(float("-inf")), lambda i, most: greater(load(b, b.gep(place, [i])), most), greater
        )

    return types.float32(types.intp, types.intp), generate


@intrinsic
def row_powers(_: Any, row: Any, vectors: Any, shift: Any) -> Any:
    """Makes 2^(x - shift) of each x of a row; returns their sum."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place, less = at(b, args[0], word(0), VECTOR), spread(b, args[2])

        def step(i: Any, total: Any) -> Any:
            here = b.gep(place, [i])
            found = powers(b, b.fsub(load(b, here), less))
            b.store(found, here, align=4)
            return b.fadd(total, found)

        return reduced(b, args[1], every(0.0), step, b.fadd)

    return types.float32(types.intp, types.intp, types.float32), generate


@intrinsic
def row_slopes(_: Any, score: Any, slope: Any, vectors: Any, shift: Any, share: Any, mean: Any) -> Any:
    """Makes p = 2^(x - shift) share of each x of a row of scores, and p (y - mean) of the y beside it."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, slopes = (at(b, x, word(0), VECTOR) for x in args[:2])
        less, share, mean = (spread(b, x) for x in args[3:])

        def step(i: Any, state: list[Any]) -> list[Any]:
            here, there = b.gep(scores, [i]), b.gep(slopes, [i])
            found = b.fmul(powers(b, b.fsub(load(b, here), less)), share)
            b.store(found, here, align=4)
            b.store(b.fmul(found, b.fsub(load(b, there), mean)), there, align=4)
            return []

        loop(b, args[2], [], step)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 3, *(types.float32,) * 3), generate


@intrinsic
def row_dot(_: Any, left: Any, right: Any, vectors: Any) -> Any:
    """The sum of the products of two rows."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, y = (at(b, one, word(0), VECTOR) for one in args[:2])

        def step(i: Any, total: Any) -> Any:
            return fused(b, load(b, b.gep(x, [i])), load(b, b.gep(y, [i])), total)

        return reduced(b, args[2], every(0.0), step, b.fadd)

    return types.float32(types.intp, types.intp, types.intp), generate


def _mixer(adds: bool) -> Any:
    @intrinsic
    def mixer(_: Any, to: Any, row: Any, vectors: Any, factor: Any) -> Any:
        """Sets, or adds, a row times a factor."""

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, y = (at(b, one, word(0), VECTOR) for one in args[:2])
            factor = spread(b, args[3])

            def step(i: Any, state: list[Any]) -> list[Any]:
                here, more = b.gep(x, [i]), load(b, b.gep(y, [i]))
                b.store(fused(b, more, factor, load(b, here)) if adds else b.fmul(more, factor), here, align=4)
                return []

            loop(b, args[2], [], step)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.float32), generate

    return mixer


row_set, row_add = _mixer(False), _mixer(True)


@intrinsic
def row_hide(_: Any, row: Any, vectors: Any, low: Any, high: Any) -> Any:
    """Makes minus infinity of a row's numbers before ``low`` and from ``high`` on."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place, kind = at(b, args[0], word(0), VECTOR), ir.VectorType(WORD, LANES)
        nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(PART, LANES), [0] * LANES)

        def all_of(value: Any) -> Any:
            return b.shuffle_vector(b.insert_element(nothing, value, ir.Constant(PART, 0)), nothing, first)

        low, high = all_of(args[2]), all_of(args[3])

        def step(i: Any, state: list[Any]) -> list[Any]:
            number = b.add(all_of(b.mul(i, word(LANES))), ir.Constant(kind, list(range(LANES))))
            seen = b.and_(b.icmp_signed(">=", number, low), b.icmp_signed("<", number, high))
            here = b.gep(place, [i])
            b.store(b.select(seen, load(b, here), every(float("-inf"))), here, align=4)
            return []

        loop(b, args[1], [], step)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 4), generate


@intrinsic
def get(_: Any, base: Any, index: Any) -> Any:
    """The float ``index`` at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return load(b, at(b, args[0], b.mul(args[1], word(4)), FLOAT))

    return types.float32(types.intp, types.intp), generate


@intrinsic
def put(_: Any, base: Any, index: Any, value: Any) -> Any:
    """Stores the float ``index`` at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[2], at(b, args[0], b.mul(args[1], word(4)), FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), generate
