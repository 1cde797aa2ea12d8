"""Compiled loops of the proofs: products of polynomials modulo 2, and sums under weights of zeros and ones.

Where the processor multiplies without carries (PCLMULQDQ) a product in GF(2^64) is one instruction and a reduction, and
sums of products are reduced once, at their end. Elsewhere the same products come from ordinary multiplications
(``binary_words``). Sums under weights take four rows at a time: their sixteen sums once, then one of them for each
coefficient (Arlazarov, Dinic, Kronrod, Faradzhev, 1970).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from uvcc_engine.contract.machine.compiler_units import compiler_knows
from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop

Words = NDArray[np.uint64]
_SWAPS: Final = np.array(
    [
        0x5555555555555555,
        0x3333333333333333,
        0x0F0F0F0F0F0F0F0F,
        0x00FF00FF00FF00FF,
        0x0000FFFF0000FFFF,
        0x00000000FFFFFFFF,
    ],
    dtype=np.uint64,
)


def processor_has(feature: str) -> bool:
    """Whether this is an x86-64 processor with such instructions, by LLVM's name for them, that is compiled for."""
    return compiler_knows((f"+{feature}",))


def multiplies_without_carries() -> bool:
    """Whether this processor has PCLMULQDQ."""
    return processor_has("pclmul")


@intrinsic
def _by_instruction(context: Any, a: Any, b: Any) -> Any:
    """(lower, upper) 64 coefficients of the product of two polynomials modulo 2."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, index = ir.IntType(64), ir.IntType(32)
        pair = ir.VectorType(word, 2)
        form = ir.FunctionType(pair, [pair, pair, ir.IntType(8)])
        multiply = builder.module.declare_intrinsic("llvm.x86.pclmulqdq", fnty=form)
        sides = [builder.insert_element(ir.Constant(pair, ir.Undefined), x, index(0)) for x in arguments]
        both = builder.call(multiply, [*sides, ir.Constant(ir.IntType(8), 0)])
        parts = [builder.extract_element(both, index(k)) for k in range(2)]
        return context.make_tuple(builder, signature.return_type, parts)

    pair_of_words: Any = types.UniTuple(types.uint64, 2)  # type: ignore[no-untyped-call]  # numba has no types
    return pair_of_words(types.uint64, types.uint64), build


@compiled_loop
def _low_product(x: Any, y: Any) -> Any:
    """``binary_words.carryless`` of two words."""
    h0, h1 = np.uint64(0x1111111111111111), np.uint64(0x2222222222222222)
    h2, h3 = np.uint64(0x4444444444444444), np.uint64(0x8888888888888888)
    a0, a1, a2, a3 = x & h0, x & h1, x & h2, x & h3
    b0, b1, b2, b3 = y & h0, y & h1, y & h2, y & h3
    return (
        (((a0 * b0) ^ (a1 * b3) ^ (a2 * b2) ^ (a3 * b1)) & h0)
        ^ (((a0 * b1) ^ (a1 * b0) ^ (a2 * b3) ^ (a3 * b2)) & h1)
        ^ (((a0 * b2) ^ (a1 * b1) ^ (a2 * b0) ^ (a3 * b3)) & h2)
        ^ (((a0 * b3) ^ (a1 * b2) ^ (a2 * b1) ^ (a3 * b0)) & h3)
    )


@compiled_loop
def _reversed_bits(x: Any) -> Any:
    """``binary_words.reversed_bits`` of a word."""
    for s in range(6):
        shift, low = np.uint64(1 << s), _SWAPS[s]
        x = ((x >> shift) & low) | ((x & low) << shift)
    return x


@compiled_loop
def by_multiplications(x: Any, y: Any) -> Any:
    """As ``_by_instruction``, on any processor."""
    high = _reversed_bits(_low_product(_reversed_bits(x), _reversed_bits(y))) >> np.uint64(1)
    return _low_product(x, y), high


wide_product: Any = _by_instruction if multiplies_without_carries() else by_multiplications


@intrinsic
def _inner_by_instruction(context: Any, a: Any, b: Any, count: Any) -> Any:
    """(lower, upper) coefficients of the sum of the products of ``count`` words of two arrays, modulo 2, two products
    to an instruction: numba has no type for the vectors, so the loop is written here."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, index = ir.IntType(64), ir.IntType(32)
        four = ir.VectorType(word, 4)
        form = ir.FunctionType(four, [four, four, ir.IntType(8)])
        multiply = builder.module.declare_intrinsic("llvm.x86.pclmulqdq.256", fnty=form)
        arrays = [
            builder.bitcast(context.make_array(kind)(context, builder, value).data, four.as_pointer())
            for kind, value in zip(signature.args[:2], arguments[:2], strict=True)
        ]
        end = builder.udiv(arguments[2], ir.Constant(word, 4))
        before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        none = ir.Constant(four, [0, 0, 0, 0])
        builder.cbranch(builder.icmp_unsigned("==", end, ir.Constant(word, 0)), after, body)
        builder.position_at_end(body)
        at, found = builder.phi(word), builder.phi(four)
        x, y = (builder.load(builder.gep(array, [at]), align=8) for array in arrays)
        summed: Any = found
        for lane in (0x00, 0x11):  # the lower words of each half, then the upper ones
            summed = builder.xor(summed, builder.call(multiply, [x, y, ir.Constant(ir.IntType(8), lane)]))
        following = builder.add(at, ir.Constant(word, 1))
        at.add_incoming(ir.Constant(word, 0), before)
        at.add_incoming(following, body)
        found.add_incoming(none, before)
        found.add_incoming(summed, body)
        builder.cbranch(builder.icmp_unsigned("<", following, end), body, after)
        builder.position_at_end(after)
        whole = builder.phi(four)
        whole.add_incoming(none, before)
        whole.add_incoming(summed, body)
        words = [builder.extract_element(whole, index(k)) for k in range(4)]
        parts = [builder.xor(words[0], words[2]), builder.xor(words[1], words[3])]
        return context.make_tuple(builder, signature.return_type, parts)

    pair_of_words: Any = types.UniTuple(types.uint64, 2)  # type: ignore[no-untyped-call]  # numba has no types
    return pair_of_words(a, b, types.uint64), build


_by_four: Any = _inner_by_instruction  # numba's own types know nothing of its arguments


@compiled_loop
def _inner_by_halves(a: Words, b: Words) -> Any:
    """(lower, upper) coefficients of ``sum_i a_i b_i`` before their reduction; arrays without gaps."""
    low, high = _by_four(a, b, np.uint64(a.shape[0]))
    for i in range(a.shape[0] - a.shape[0] % 4, a.shape[0]):
        x, y = wide_product(a[i], b[i])
        low ^= x
        high ^= y
    return low, high


@compiled_loop
def inner_by_words(a: Words, b: Words) -> Any:
    """The same, one product at a time, on any processor."""
    low, high = np.uint64(0), np.uint64(0)
    for i in range(a.shape[0]):
        x, y = wide_product(a[i], b[i])
        low ^= x
        high ^= y
    return low, high


inner_words: Any = _inner_by_halves if processor_has("vpclmulqdq") and processor_has("pclmul") else inner_by_words


@compiled_loop
def reduced_product(low: Any, high: Any) -> Any:
    """A product modulo X^64 + X^4 + X^3 + X + 1."""
    s1, s3, s4 = np.uint64(1), np.uint64(3), np.uint64(4)
    over = (high >> np.uint64(63)) ^ (high >> np.uint64(61)) ^ (high >> np.uint64(60))
    low ^= high ^ (high << s1) ^ (high << s3) ^ (high << s4)
    return low ^ over ^ (over << s1) ^ (over << s3) ^ (over << s4)


@compiled_loop
def binary_powers(of: Words, out: Words) -> None:
    """``out`` [n]: the powers of the element ``of`` [1] from its 0th on."""
    out[0] = np.uint64(1)
    for i in range(1, out.shape[0]):
        low, high = wide_product(out[i - 1], of[0])
        out[i] = reduced_product(low, high)


@compiled_loop
def binary_inner(a: Words, b: Words) -> Any:
    """``sum_i a_i b_i`` in GF(2^64)."""
    low, high = inner_words(a, b)
    return reduced_product(low, high)


@compiled_loop
def binary_diagonals(u: Words, v: Words, out: Words) -> None:
    """``out`` [b, 2 k - 1]: entry ``k - 1 + i - j`` is the sum of ``u_in v_jn`` of [b, k, n] each."""
    blocks, k, n = u.shape
    for b in range(blocks):
        for d in range(1 - k, k):
            low, high = np.uint64(0), np.uint64(0)
            first, last = max(0, -d), min(k, k - d)
            if n == 1:
                low, high = inner_words(u[b, first + d : last + d, 0], v[b, first:last, 0])
            else:
                for j in range(first, last):
                    x, y = inner_words(u[b, j + d], v[b, j])
                    low ^= x
                    high ^= y
            out[b, k - 1 + d] = reduced_product(low, high)


@compiled_loop
def weigh_elements(x: Words, weights: Words, tap: int, out: Words) -> None:
    """``out`` [n, d]: elements ``x`` of a Galois ring times the sums of powers that the bits of ``weights`` [n] say.

    The modulus is ``X^d + X^tap + 1``.
    """
    n, d = x.shape
    wide = np.empty(2 * d, dtype=np.uint64)
    for g in range(n):
        wide[:] = np.uint64(0)
        for c in range(d):
            if (weights[g] >> np.uint64(c)) & np.uint64(1):
                for j in range(d):
                    wide[c + j] += x[g, j]
        for j in range(2 * d - 2, d - 1, -1):  # X^j is -X^(j - d) - X^(j - d + tap)
            wide[j - d] -= wide[j]
            wide[j - d + tap] -= wide[j]
        out[g] = wide[:d]


@compiled_loop
def add_degrees(products: Words, out: Words) -> None:
    """Add to ``out`` [b, l + m - 1, d + e - 1] of ``products`` [b, l, d, m, e] what has the same sums of indices."""
    blocks, rows, degrees, columns, width = products.shape
    for b in range(blocks):
        for i in range(rows):
            for k in range(degrees):
                for j in range(columns):
                    to, row = out[b, i + j, k : k + width], products[b, i, k, j]
                    for n in range(width):
                        to[n] += row[n]


@compiled_loop
def multiply_wide(x: Words, y: Words, out: Words) -> None:
    """Add to ``out`` [b, 2 l - 1, 2 d - 1] the products of polynomials in two variables, ``x`` and ``y`` [b, l, n, d],
    summed over ``n``."""
    blocks, size, groups, d = x.shape
    for b in range(blocks):
        for i in range(size):
            for j in range(size):
                for n in range(groups):
                    other = y[b, j, n]
                    for k in range(d):
                        factor, to = x[b, i, n, k], out[b, i + j, k : k + d]
                        for e in range(d):
                            to[e] += factor * other[e]


@compiled_loop
def ring_multiply(a: Words, b: Words, tap: int, out: Words) -> None:
    """``out`` [n, d]: products of elements of a Galois ring, ``a`` and ``b`` [n, d], modulo ``X^d + X^tap + 1``."""
    n, d = out.shape
    wide = np.empty(2 * d, dtype=np.uint64)
    for g in range(n):
        wide[:] = np.uint64(0)
        for i in range(d):
            factor, other, to = a[g, i], b[g], wide[i : i + d]
            for j in range(d):
                to[j] += factor * other[j]
        for j in range(2 * d - 2, d - 1, -1):
            wide[j - d] -= wide[j]
            wide[j - d + tap] -= wide[j]
        out[g] = wide[:d]


@compiled_loop
def ring_powers(of: Words, tap: int, out: Words) -> None:
    """``out`` [n, d]: the powers of ``of`` [1, d] from its 0th on."""
    out[0] = np.uint64(0)
    out[0, 0] = np.uint64(1)
    for k in range(1, out.shape[0]):
        ring_multiply(out[k - 1 : k], of, tap, out[k : k + 1])
