"""The compiled products of bits, 64 of them folded at once, under weights in GF(2^64).

A chunk of 512 words is eight blocks of 64, which lie side by side, so that eight words are computed at a time. Turned,
a block has for each of its 64 bits a word, whose bits are those of its words. Of its 64 rows ``ternary_loops`` makes
729, which are words again: of each one of ``u`` and of ``v`` one AND is weighed. See ``Kernels.ternary_bits``.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.proving.field_loops import EIGHT_PRODUCTS
from uvcc_engine.mpc.kernels.proving.proof_loops import inner_words, reduced_product
from uvcc_engine.mpc.kernels.proving.ternary_loops import NINE, ROW, halve_words, nine_products

Words = NDArray[np.uint64]
_CHUNK: Final = 512  # words
_SWAPS: Final = np.array(
    [0xFFFFFFFF, 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF, 0x0F0F0F0F0F0F0F0F, 0x3333333333333333, 0x5555555555555555],
    dtype=np.uint64,
)


@compiled_loop
def turn(x: Words, first: int, out: Words) -> None:
    """``out`` [512]: the chunk of ``x`` from ``first`` on, each of its blocks turned; zeros stand behind the last word.

    The transposition of Warren, "Hacker's Delight", section 7-3.
    """
    size = min(_CHUNK, x.shape[0] - first)
    out[:size] = x[first : first + size]
    out[size:] = np.uint64(0)
    half = 32
    for k in range(6):
        low, shift = _SWAPS[k], np.uint64(half)
        for start in range(0, 64, 2 * half):
            one, other = out[8 * start : 8 * (start + half)], out[8 * (start + half) : 8 * (start + 2 * half)]
            for i in range(one.shape[0]):
                changed = ((one[i] >> shift) ^ other[i]) & low
                other[i] ^= changed
                one[i] ^= changed << shift
        half //= 2


@compiled_loop
def _sums_of(words: Words, first: int, out: Words) -> None:
    """``out`` [27, 64]: a chunk turned and its upper three halvings."""
    chunk = np.empty(_CHUNK, dtype=np.uint64)
    turn(words, first, chunk)
    halve_words(chunk.reshape(8, 64), out)


_lower, _sum, _upper = (nine_products(digit, "xor", "and_") for digit in range(3))
_weigh_lower, _weigh_sum, _weigh_upper = (nine_products(digit, "xor", "and_", weighed=True) for digit in range(3))


@compiled_loop
def _sums_of_terms(
    a: Words, b: Words, c: Words, d: Words, e: Words, f: Words, terms: int, first: int, us: Words, vs: Words
) -> None:
    """``us`` and ``vs`` [3, 27, 64]: a chunk of both sides of up to three terms, turned and halved three times."""
    _sums_of(a, first, us[0])
    _sums_of(b, first, vs[0])
    if terms > 1:
        _sums_of(c, first, us[1])
        _sums_of(d, first, vs[1])
    if terms > 2:
        _sums_of(e, first, us[2])
        _sums_of(f, first, vs[2])


@compiled_loop
def meet_by_words(
    a: Words, b: Words, c: Words, d: Words, e: Words, f: Words, terms: int, weights: Words, sums: Words
) -> None:
    """Add to ``sums`` [729, 8], before their reduction, what up to three terms ``a b + c d + e f`` have at each place:
    they share their products with the weights. In each row lower and upper coefficients take turns. On any
    processor."""
    us, vs = np.empty((3, 27, 64), dtype=np.uint64), np.empty((3, 27, 64), dtype=np.uint64)
    met = np.empty((27, 8), dtype=np.uint64)
    for number in range((a.shape[0] + _CHUNK - 1) // _CHUNK):
        _sums_of_terms(a, b, c, d, e, f, terms, number * _CHUNK, us, vs)
        here, u, v, to = weights[8 * number : 8 * number + 8], us.ctypes.data, vs.ctypes.data, met.ctypes.data
        for k in range(27):
            place = 8 * ROW * k
            _lower(u + place, v + place, terms, to, to, ROW)
            _sum(u + place, v + place, terms, to, to + NINE, ROW)
            _upper(u + place, v + place, terms, to, to + 2 * NINE, ROW)
            for row in range(27):
                low, high = inner_words(met[row], here)
                sums[27 * k + row, 0] ^= low
                sums[27 * k + row, 1] ^= high
    us[0, 0, 0] = vs[0, 0, 0] = met[0, 0] = 0  # numba lets an array go after its last use, and does not know addresses


@compiled_loop
def _meet_by_vectors(
    a: Words, b: Words, c: Words, d: Words, e: Words, f: Words, terms: int, weights: Words, sums: Words
) -> None:
    """The same, eight words at a time."""
    us, vs = np.empty((3, 27, 64), dtype=np.uint64), np.empty((3, 27, 64), dtype=np.uint64)
    for number in range((a.shape[0] + _CHUNK - 1) // _CHUNK):
        _sums_of_terms(a, b, c, d, e, f, terms, number * _CHUNK, us, vs)
        here, u, v = weights.ctypes.data + number * ROW, us.ctypes.data, vs.ctypes.data
        for k in range(27):
            place, to = 8 * ROW * k, sums.ctypes.data + 27 * ROW * k
            _weigh_lower(u + place, v + place, terms, here, to, ROW)
            _weigh_sum(u + place, v + place, terms, here, to + NINE, ROW)
            _weigh_upper(u + place, v + place, terms, here, to + 2 * NINE, ROW)
    us[0, 0, 0] = vs[0, 0, 0] = 0


meet_bits: Any = _meet_by_vectors if EIGHT_PRODUCTS else meet_by_words


@compiled_loop
def reduce_sums(sums: Words, out: Words) -> None:
    """``out`` [n]: elements of their lower and upper coefficients, which take turns in ``sums`` [n, 8]."""
    for k in range(out.shape[0]):
        row = sums[k]
        out[k] = reduced_product(row[0] ^ row[2] ^ row[4] ^ row[6], row[1] ^ row[3] ^ row[5] ^ row[7])


@compiled_loop
def turned_sums(x: Words, weights: Words, out: Words) -> None:
    """See ``Kernels.turned_sums``."""
    chunk, sums = np.empty(_CHUNK, dtype=np.uint64), np.zeros((64, 2), dtype=np.uint64)
    for number in range((x.shape[0] + _CHUNK - 1) // _CHUNK):
        turn(x, number * _CHUNK, chunk)
        for j in range(64):
            low, high = inner_words(chunk[8 * j : 8 * j + 8], weights[8 * number : 8 * number + 8])
            sums[j, 0] ^= low
            sums[j, 1] ^= high
    for j in range(64):
        out[j] = reduced_product(sums[j, 0], sums[j, 1])


@compiled_loop
def block_weights(weights: Words, out: Words) -> None:
    """See ``Kernels.block_weights``."""
    one, low_terms = np.uint64(1), np.uint64(0x1B)
    rows = np.empty((64, 8), dtype=np.uint64)
    for first in range(0, out.shape[0], _CHUNK):
        rows[0] = weights[first // 64 : first // 64 + 8]
        for i in range(1, 64):
            before, here = rows[i - 1], rows[i]
            for lane in range(8):  # times X, modulo X^64 + X^4 + X^3 + X + 1
                word = before[lane]
                here[lane] = (word << one) ^ (low_terms & (np.uint64(0) - (word >> np.uint64(63))))
        size = min(_CHUNK, out.shape[0] - first)
        out[first : first + size] = rows.reshape(-1)[:size]
