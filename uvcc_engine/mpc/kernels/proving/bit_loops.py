"""The compiled product of two polynomials over GF(2^64) whose coefficients are the bits of words.

Coefficient ``k`` adds up, over all words, a weight times the bits of ``u`` that meet bits of ``v`` at the distance
``63 - k``. Where the processor multiplies eight words without carries at a time, what meets stays in its registers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proving.field_loops import EIGHT_PRODUCTS
from uvcc_engine.mpc.kernels.proving.proof_loops import inner_words, reduced_product, wide_product

Words = NDArray[np.uint64]
_BLOCK = 256  # words
_LANES: Final = 8
_WORD: Final = ir.IntType(64)
_INDEX: Final = ir.IntType(32)
_EIGHT: Final = ir.VectorType(_WORD, _LANES)


def _halves(builder: Any, sums: Any) -> list[Any]:
    """The lower and the upper word of the sum of four products that lie side by side."""
    found = []
    for part in range(2):
        words = [builder.extract_element(sums, _INDEX(k)) for k in range(part, _LANES, 2)]
        found.append(builder.xor(builder.xor(words[0], words[1]), builder.xor(words[2], words[3])))
    return found


def _loop(builder: Any, count: Any, body_of: Any) -> Any:
    """The sum over ``count // 8`` vectors of what ``body_of`` makes of each place: two vectors, added up and joined."""
    end, none = builder.udiv(count, ir.Constant(_WORD, _LANES)), ir.Constant(_EIGHT, [0] * _LANES)
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("==", end, ir.Constant(_WORD, 0)), after, body)
    builder.position_at_end(body)
    at, sums = builder.phi(_WORD), [builder.phi(_EIGHT) for _ in range(2)]
    summed = [builder.xor(one, new) for one, new in zip(sums, body_of(at), strict=True)]
    following = builder.add(at, ir.Constant(_WORD, 1))
    at.add_incoming(ir.Constant(_WORD, 0), before)
    at.add_incoming(following, body)
    builder.cbranch(builder.icmp_unsigned("<", following, end), body, after)
    builder.position_at_end(after)
    ends = [builder.phi(_EIGHT) for _ in range(2)]
    for one, last, new in zip(sums, ends, summed, strict=True):
        for phi in (one, last):
            phi.add_incoming(none, before)
            phi.add_incoming(new, body)
    return builder.xor(*ends)


def _meeting(terms: int, *, upwards: bool) -> Any:
    """(lower, upper) coefficients of ``sum_i w_i met_i`` over the first ``count // 8 * 8`` words, before the reduction:
    ``met`` is the XOR, over the terms, of the first row shifted and the second one. numba has no type for the vectors,
    so the loop is written here."""

    @intrinsic
    def met(context: Any, rows: Any, weights: Any, shift: Any, count: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def start(kind: Any, value: Any) -> Any:
                return builder.bitcast(context.make_array(kind)(context, builder, value).data, _EIGHT.as_pointer())

            form = ir.FunctionType(_EIGHT, [_EIGHT, _EIGHT, ir.IntType(8)])
            multiply = builder.module.declare_intrinsic("llvm.x86.pclmulqdq.512", fnty=form)
            kind, factors = signature.args[0].dtype, start(signature.args[1], arguments[1])
            unpacked = cgutils.unpack_tuple(builder, arguments[0])  # type: ignore[no-untyped-call]  # numba has no types
            sides = [start(kind, one) for one in unpacked]
            first = builder.insert_element(ir.Constant(_EIGHT, ir.Undefined), arguments[2], _INDEX(0))
            shifts = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INDEX, _LANES), [0] * _LANES))

            def body(at: Any) -> list[Any]:
                def load(array: Any) -> Any:
                    return builder.load(builder.gep(array, [at]), align=8)

                found: Any = None
                for t in range(terms):
                    moved = (builder.shl if upwards else builder.lshr)(load(sides[2 * t]), shifts)
                    one = builder.and_(moved, load(sides[2 * t + 1]))
                    found = one if found is None else builder.xor(found, one)
                factor = load(factors)  # the lower words of each pair, then the upper ones
                return [builder.call(multiply, [found, factor, ir.Constant(ir.IntType(8), k)]) for k in (0x00, 0x11)]

            whole = _halves(builder, _loop(builder, arguments[3], body))
            return context.make_tuple(builder, signature.return_type, whole)

        pair_of_words: Any = types.UniTuple(types.uint64, 2)  # type: ignore[no-untyped-call]  # numba has no types
        return pair_of_words(rows, weights, types.uint64, types.uint64), build

    return met


_up_one, _up_two, _up_three = (_meeting(terms, upwards=True) for terms in (1, 2, 3))
_down_one, _down_two, _down_three = (_meeting(terms, upwards=False) for terms in (1, 2, 3))


@compiled_loop
def _meet(a: Words, b: Words, up: Any, down: Any, out: Words) -> None:
    """``a`` shifted upwards or downwards, and ``b``; one of the shifts is 0."""
    if up:
        for i in range(a.shape[0]):
            out[i] = (a[i] << up) & b[i]
    else:
        for i in range(a.shape[0]):
            out[i] = (a[i] >> down) & b[i]


@compiled_loop
def _meet_two(a: Words, b: Words, c: Words, d: Words, up: Any, down: Any, out: Words) -> None:
    """The sum of two such pairs."""
    if up:
        for i in range(a.shape[0]):
            out[i] = ((a[i] << up) & b[i]) ^ ((c[i] << up) & d[i])
    else:
        for i in range(a.shape[0]):
            out[i] = ((a[i] >> down) & b[i]) ^ ((c[i] >> down) & d[i])


@compiled_loop
def _meet_three(a: Words, b: Words, c: Words, d: Words, e: Words, f: Words, up: Any, down: Any, out: Words) -> None:
    """The sum of three."""
    if up:
        for i in range(a.shape[0]):
            out[i] = ((a[i] << up) & b[i]) ^ ((c[i] << up) & d[i]) ^ ((e[i] << up) & f[i])
    else:
        for i in range(a.shape[0]):
            out[i] = ((a[i] >> down) & b[i]) ^ ((c[i] >> down) & d[i]) ^ ((e[i] >> down) & f[i])


@compiled_loop
def meet_by_blocks(
    a: Words, b: Words, c: Words, d: Words, e: Words, f: Words, terms: int, weights: Words, sums: Words
) -> None:
    """Add to ``sums`` [127, 2], before their reduction, what up to three terms ``a b + c d + e f`` have for each
    coefficient (``Kernels.bit_diagonals``): they share their products with the weights. On any processor."""
    both = np.empty(_BLOCK, dtype=np.uint64)
    for start in range(0, a.shape[0], _BLOCK):
        end = min(start + _BLOCK, a.shape[0])
        here = weights[start:end]  # an index that cannot be negative lets the compiler use vectors
        x, y = a[start:end], b[start:end]
        for k in range(127):
            up, down = np.uint64(max(0, 63 - k)), np.uint64(max(0, k - 63))  # one of them is 0
            if terms == 1:
                _meet(x, y, up, down, both)
            elif terms == 2:
                _meet_two(x, y, c[start:end], d[start:end], up, down, both)
            else:
                _meet_three(x, y, c[start:end], d[start:end], e[start:end], f[start:end], up, down, both)
            low, high = inner_words(both[: end - start], here)
            sums[k, 0] ^= low
            sums[k, 1] ^= high


@compiled_loop
def _left_over(a: Words, b: Words, weights: Words, up: Any, down: Any) -> Any:
    """One term's sum over the words that fill no vector."""
    low, high = np.uint64(0), np.uint64(0)
    for i in range(a.shape[0] - a.shape[0] % 8, a.shape[0]):
        x, y = wide_product(((a[i] << up) >> down) & b[i], weights[i])
        low ^= x
        high ^= y
    return low, high


@compiled_loop
def _meet_by_vectors(
    a: Words, b: Words, c: Words, d: Words, e: Words, f: Words, terms: int, weights: Words, sums: Words
) -> None:
    """The same, eight words at a time."""
    for start in range(0, a.shape[0], _BLOCK):
        end = min(start + _BLOCK, a.shape[0])
        here, count, u, v = weights[start:end], np.uint64(end - start), a[start:end], b[start:end]
        w, x, y, z = c[start:end], d[start:end], e[start:end], f[start:end]
        for k in range(127):
            up, down = np.uint64(max(0, 63 - k)), np.uint64(max(0, k - 63))  # one of them is 0
            if terms == 3:
                rows = (u, v, w, x, y, z)
                low, high = _up_three(rows, here, up, count) if up else _down_three(rows, here, down, count)
            elif terms == 2:
                pairs = (u, v, w, x)
                low, high = _up_two(pairs, here, up, count) if up else _down_two(pairs, here, down, count)
            else:
                low, high = _up_one((u, v), here, up, count) if up else _down_one((u, v), here, down, count)
            sums[k, 0] ^= low
            sums[k, 1] ^= high
            for term in range(terms if (end - start) % 8 else 0):
                one, other = (u, v) if term == 0 else (w, x) if term == 1 else (y, z)
                low, high = _left_over(one, other, here, up, down)
                sums[k, 0] ^= low
                sums[k, 1] ^= high


meet_bits: Any = _meet_by_vectors if EIGHT_PRODUCTS else meet_by_blocks


@compiled_loop
def reduce_products(sums: Words, out: Words) -> None:
    """``out`` [n]: elements of their lower and upper coefficients ``sums`` [n, 2]."""
    for k in range(out.shape[0]):
        out[k] = reduced_product(sums[k, 0], sums[k, 1])
