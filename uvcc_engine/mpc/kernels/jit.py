"""Fused loops compiled by numba and cached on disk. Each keeps to its caller's thread; ``threads`` spreads them.

Imported only when a tensor is large enough to repay it. Bit-plane loops work on blocks of 64 words, so that the inner
loop is a plain vector operation on data in the first-level cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.gemm.byte_loops import combine as combine
from uvcc_engine.mpc.kernels.gemm.byte_loops import split_columns as split_columns
from uvcc_engine.mpc.kernels.gemm.byte_loops import split_left as split_left
from uvcc_engine.mpc.kernels.gemm.byte_loops import split_right as split_right
from uvcc_engine.mpc.kernels.gemm.gemm_loops import LANES as LANES
from uvcc_engine.mpc.kernels.gemm.gemm_loops import ROWS as ROWS
from uvcc_engine.mpc.kernels.gemm.gemm_loops import gemm_multiply as gemm_multiply
from uvcc_engine.mpc.kernels.gemm.gemm_loops import gemm_right as gemm_right
from uvcc_engine.mpc.kernels.patch_loops import add_patches as add_patches
from uvcc_engine.mpc.kernels.patch_loops import cut_patches as cut_patches
from uvcc_engine.mpc.kernels.product_loops import blind as blind
from uvcc_engine.mpc.kernels.product_loops import cross as cross
from uvcc_engine.mpc.kernels.product_loops import mul_blinded as mul_blinded
from uvcc_engine.mpc.kernels.proving.bit_loops import block_weights as block_weights
from uvcc_engine.mpc.kernels.proving.bit_loops import meet_bits as meet_bits
from uvcc_engine.mpc.kernels.proving.bit_loops import reduce_sums as reduce_sums
from uvcc_engine.mpc.kernels.proving.bit_loops import turned_sums as turned_sums
from uvcc_engine.mpc.kernels.proving.element_loops import ELEMENT as ELEMENT
from uvcc_engine.mpc.kernels.proving.element_loops import MULTIPLIES_EIGHT as MULTIPLIES_EIGHT
from uvcc_engine.mpc.kernels.proving.element_loops import multiply_elements as multiply_elements
from uvcc_engine.mpc.kernels.proving.element_loops import weigh_by_fours as weigh_by_fours
from uvcc_engine.mpc.kernels.proving.field_loops import binary_columns as binary_columns
from uvcc_engine.mpc.kernels.proving.field_loops import binary_multiply as binary_multiply
from uvcc_engine.mpc.kernels.proving.field_loops import chosen_places as chosen_places
from uvcc_engine.mpc.kernels.proving.pair_loops import PAIR_TILE as PAIR_TILE
from uvcc_engine.mpc.kernels.proving.pair_loops import weigh_pairs as weigh_pairs
from uvcc_engine.mpc.kernels.proving.polynomial_loops import binary_product as binary_product
from uvcc_engine.mpc.kernels.proving.proof_loops import add_degrees as add_degrees
from uvcc_engine.mpc.kernels.proving.proof_loops import binary_diagonals as binary_diagonals
from uvcc_engine.mpc.kernels.proving.proof_loops import binary_inner as binary_inner
from uvcc_engine.mpc.kernels.proving.proof_loops import binary_powers as binary_powers
from uvcc_engine.mpc.kernels.proving.proof_loops import multiply_wide as multiply_wide
from uvcc_engine.mpc.kernels.proving.proof_loops import ring_multiply as ring_multiply
from uvcc_engine.mpc.kernels.proving.proof_loops import ring_powers as ring_powers
from uvcc_engine.mpc.kernels.proving.proof_loops import weigh_elements as weigh_elements
from uvcc_engine.mpc.kernels.proving.ternary_loops import ternary_numbers as ternary_numbers
from uvcc_engine.mpc.kernels.proving.weigh_loops import weigh as weigh
from uvcc_engine.mpc.kernels.proving.weigh_loops import weigh_columns as weigh_columns

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Narrow = NDArray[Any]  # unsigned, of 2, 4 or 8 bytes
_STEPS = np.array([32, 16, 8, 4, 2, 1], dtype=np.int64)
_LOWS = np.array(
    [
        0x00000000FFFFFFFF,
        0x0000FFFF0000FFFF,
        0x00FF00FF00FF00FF,
        0x0F0F0F0F0F0F0F0F,
        0x3333333333333333,
        0x5555555555555555,
    ],
    dtype=np.int64,
)
_BLOCK = 64
_LANES = 32


@compiled_loop
def to_planes(x: Ints, start: int, stop: int, out: Ints) -> None:
    """Bit transposition of 64 elements at a time (Warren, "Hacker's Delight", section 7-3), 32 such blocks abreast: the
    columns of ``out`` from ``start`` to ``stop``."""
    n = x.shape[0]
    bits = out.shape[0]
    a = np.empty((64, _LANES), dtype=np.uint64)
    for w in range(start, stop, _LANES):
        here = x[64 * w : min(64 * (w + _LANES), n)]
        lanes = min(_LANES, stop - w)
        if here.shape[0] < 64 * _LANES:
            a[:] = np.uint64(0)
        for lane in range(lanes):
            block = here[64 * lane : min(64 * lane + 64, here.shape[0])]
            for i in range(block.shape[0]):
                a[i, lane] = np.uint64(block[i])
        for s in range(6):
            j = _STEPS[s]
            low = np.uint64(_LOWS[s])
            shift = np.uint64(j)
            for base in range(0, 64, 2 * j):
                for k in range(base, base + j):
                    upper, lower = a[k], a[k + j]
                    for lane in range(_LANES):
                        t = ((upper[lane] >> shift) ^ lower[lane]) & low
                        lower[lane] ^= t
                        upper[lane] ^= t << shift
        for b in range(bits):
            to, done = out[b, w : w + lanes], a[b]
            for lane in range(lanes):
                to[lane] = np.int64(done[lane])


@compiled_loop
def deal_digits(planes: Ints, mask: Ints, start: int, stop: int, out: Ints) -> None:
    """``Kernels.deal_digits`` for digits of three bits: planes ``[3 d, w]`` into ``out`` ``[7 d, w]``, columns from
    ``start`` to ``stop``."""
    digits = planes.shape[0] // 3
    for d in range(digits):
        for w in range(start, stop):
            a, b, c = planes[3 * d, w], planes[3 * d + 1, w], planes[3 * d + 2, w]
            out[d, w] = mask[d, w] ^ (a | b | c)
            out[digits + d, w] = mask[digits + d, w] ^ (b | c)
            out[2 * digits + d, w] = mask[2 * digits + d, w] ^ ((a & b) | c)
            out[3 * digits + d, w] = mask[3 * digits + d, w] ^ c
            out[4 * digits + d, w] = mask[4 * digits + d, w] ^ (c & (a | b))
            out[5 * digits + d, w] = mask[5 * digits + d, w] ^ (c & b)
            out[6 * digits + d, w] = mask[6 * digits + d, w] ^ (a & b & c)


@compiled_loop
def pick_digits(table: Ints, planes: Ints, one: int, start: int, stop: int, g: Ints, p: Ints) -> None:
    """Digits of three bits: entry 7 - digit of the table ``[7 d, w]``, and its difference to the entry below.

    ``planes`` is ``[3 d, w]``; ``g`` and ``p`` are ``[d, w]``, of which columns from ``start`` to ``stop`` are filled.
    """
    digits = planes.shape[0] // 3
    for d in range(digits):
        for w in range(start, stop):
            a, b, c = planes[3 * d, w], planes[3 * d + 1, w], planes[3 * d + 2, w]
            t0, t1, t2 = table[d, w], table[digits + d, w], table[2 * digits + d, w]
            t3, t4 = table[3 * digits + d, w], table[4 * digits + d, w]
            t5, t6 = table[5 * digits + d, w], table[6 * digits + d, w]
            # entry 7 is zero; a set bit of the digit selects the even entry
            s0 = t1 ^ (a & (t0 ^ t1))
            s1 = t3 ^ (a & (t2 ^ t3))
            s2 = t5 ^ (a & (t4 ^ t5))
            s3 = a & t6
            r0 = s1 ^ (b & (s0 ^ s1))
            r1 = s3 ^ (b & (s2 ^ s3))
            g[d, w] = r1 ^ (c & (r0 ^ r1))
            s0 = t0 ^ (a & (one ^ t0))
            s1 = t2 ^ (a & (t1 ^ t2))
            s2 = t4 ^ (a & (t3 ^ t4))
            s3 = t6 ^ (a & (t5 ^ t6))
            r0 = s1 ^ (b & (s0 ^ s1))
            r1 = s3 ^ (b & (s2 ^ s3))
            p[d, w] = (r1 ^ (c & (r0 ^ r1))) ^ g[d, w]


@compiled_loop
def mask_products(
    m: int, generate: bool, carry_on: bool, left: Ints, right: Ints, mask: Ints, start: int, stop: int, out: Ints
) -> None:
    """See ``Kernels.mask_products``, for words from ``start`` to ``stop``; rows come in the order of
    ``Level.products``."""
    n_single, groups = left.shape[:2]
    half = 1 << (m - 1)
    single = np.empty((n_single, _BLOCK), dtype=np.int64)
    table = np.empty((half, _BLOCK), dtype=np.int64)
    for q in range(groups):
        for first in range(start, stop, _BLOCK):
            size = min(_BLOCK, stop - first)
            for s in range(n_single):
                for w in range(size):
                    single[s, w] = left[s, q, first + w] ^ right[s, q, first + w]
            row = 0
            for w in range(size):
                table[0, w] = -1
            for k in range(m - 1):
                for i in range(1 << k):
                    for w in range(size):
                        table[i + (1 << k), w] = table[i, w] & single[k, w]
            for i in range(3, half):
                if i & (i - 1):
                    for w in range(size):
                        out[row, q, first + w] = table[i, w] ^ mask[row, q, first + w]
                    row += 1
            if generate:
                for j in range(m):
                    for i in range(1, 1 << (m - 1 - j)):
                        for w in range(size):
                            out[row, q, first + w] = (table[i << j, w] & single[m - 1 + j, w]) ^ mask[row, q, first + w]
                        row += 1
            if carry_on:
                for i in range(1, half):
                    for w in range(size):
                        out[row, q, first + w] = (table[i, w] & single[n_single - 1, w]) ^ mask[row, q, first + w]
                    row += 1


@compiled_loop
def close(
    m: int, generate: bool, carry_on: bool, g: Ints, p: Ints, single: Ints, start: int, stop: int, out: Ints
) -> None:
    """Every (generate, propagate) bit of ``g``, ``p`` [m groups, words] that a group opens, XOR its mask ``single``.

    ``out`` is [singles, groups, words] as ``single``, of which words from ``start`` to ``stop`` are filled;
    ``generate`` and ``carry_on`` say which bits are opened.
    """
    n_single, groups = single.shape[:2]
    for q in range(groups):
        for j in range(1, m):
            for w in range(start, stop):
                out[j - 1, q, w] = p[q * m + j, w] ^ single[j - 1, q, w]
        if generate:
            for j in range(m):
                for w in range(start, stop):
                    out[m - 1 + j, q, w] = g[q * m + j, w] ^ single[m - 1 + j, q, w]
        if carry_on:
            for w in range(start, stop):
                out[n_single - 1, q, w] = p[q * m, w] ^ single[n_single - 1, q, w]


@compiled_loop
def merge(
    m: int,
    generate: bool,
    carry_on: bool,
    opened: Ints,
    single: Ints,
    product: Ints,
    one: int,
    start: int,
    stop: int,
    g_out: Ints,
    p_out: Ints,
) -> None:
    """See ``Kernels.merge``, for words from ``start`` to ``stop``: Horner over the digits, for every subset of the
    masks above at once."""
    n_single, groups = single.shape[:2]
    half = 1 << (m - 1)
    base = np.empty((half, _BLOCK), dtype=np.int64)
    h = np.empty((half, _BLOCK), dtype=np.int64)
    for q in range(groups):
        for first in range(start, stop, _BLOCK):
            size = min(_BLOCK, stop - first)
            row = 0
            for w in range(size):
                base[0, w] = one
            for k in range(m - 1):
                for w in range(size):
                    base[1 << k, w] = single[k, q, first + w]
            for i in range(3, half):
                if i & (i - 1):
                    for w in range(size):
                        base[i, w] = product[row, q, first + w]
                    row += 1
            if generate:
                for j in range(m):
                    for i in range(1 << (m - 1 - j)):
                        for w in range(size):
                            tail = single[m - 1 + j, q, first + w] if i == 0 else product[row, q, first + w]
                            value = (opened[m - 1 + j, q, first + w] & base[i << j, w]) ^ tail
                            if j:
                                value ^= (opened[j - 1, q, first + w] & h[2 * i, w]) ^ h[2 * i + 1, w]
                            h[i, w] = value
                        if i:
                            row += 1
                for w in range(size):
                    g_out[q, first + w] = h[0, w]
            if carry_on:
                for i in range(half):
                    for w in range(size):
                        tail = single[n_single - 1, q, first + w] if i == 0 else product[row, q, first + w]
                        h[i, w] = (opened[n_single - 1, q, first + w] & base[i, w]) ^ tail
                    if i:
                        row += 1
                for j in range(1, m):
                    for i in range(1 << (m - 1 - j)):
                        for w in range(size):
                            h[i, w] = (opened[j - 1, q, first + w] & h[2 * i, w]) ^ h[2 * i + 1, w]
                for w in range(size):
                    p_out[q, first + w] = h[0, w]


# Arithmetic runs on unsigned views: signed overflow would leave the compiler free to assume that it never happens.


@compiled_loop
def truncate_deal(
    z: Words,
    left: Words,
    right: Words,
    k: Narrow,
    m: Narrow,
    low: Narrow,
    s: int,
    masked: Words,
    first: Narrow,
    second: Narrow,
) -> None:
    """The dealer's ``masked`` ``z`` and both rows of corrections of a truncation by ``s`` bits: see ``truncation``.

    All vectors are [n].
    """
    shift, rest, top = np.uint64(s), np.uint64(64 - s), np.uint64(63)
    modulus = (np.uint64(1) << shift) - np.uint64(1)
    for i in range(z.shape[0]):
        total = np.uint64(0) - (left[i] + right[i])
        r = (total << shift) | (np.uint64(low[i]) & modulus)
        masked[i] = z[i] + r
        first[i] = (total >> rest) - np.uint64(k[i])
        second[i] = (r >> top) - np.uint64(m[i])


@compiled_loop
def truncate_deal_own(
    z: Words,
    left: Words,
    drawn: Narrow,
    top_drawn: Narrow,
    more: Narrow,
    low: Narrow,
    s: int,
    shown: Narrow,
    correction: Narrow,
    right: Words,
) -> None:
    """What the dealer shows, lower bits and a correction, and ``right`` where ``z`` is the mask: see ``truncation``.

    All vectors are [n].
    """
    shift, rest, top = np.uint64(s), np.uint64(64 - s), np.uint64(63)
    modulus = (np.uint64(1) << shift) - np.uint64(1)
    for i in range(z.shape[0]):
        seen = (z[i] + np.uint64(low[i])) & modulus
        r = seen - z[i]
        shown[i] = seen
        correction[i] = ((r >> top) - np.uint64(top_drawn[i])) & modulus
        right[i] = np.uint64(0) - ((r >> shift) + left[i] + ((np.uint64(drawn[i]) + np.uint64(more[i])) << rest))


@compiled_loop
def truncate_open(
    z: Words, a: Words, b: Words | Narrow, k: Narrow, m: Narrow, bits: int, c: Words, part: Narrow
) -> None:
    """``c = z + a + b + 2^62``, of ``b`` the lowest ``bits``, and ``part = k + m [c >= 0]``, each [n], at an online
    party."""
    one, top = np.uint64(1), np.uint64(63)
    offset = one << np.uint64(62)
    lowest = ~np.uint64(0) >> np.uint64(64 - bits)
    for i in range(z.shape[0]):
        value = z[i] + a[i] + (np.uint64(b[i]) & lowest) + offset
        c[i] = value
        # the top bit less one: all ones where it is clear
        part[i] = np.uint64(k[i]) + (np.uint64(m[i]) & ((value >> top) - one))


@compiled_loop
def truncate_close(c: Words, part: Narrow, theirs: Narrow, s: int, out: Words) -> None:
    """``out`` [n]: ``c`` shifted right by ``s`` bits, its upper bits corrected by both parties' parts."""
    shift, rest = np.uint64(s), np.uint64(64 - s)
    offset = np.uint64(1) << np.uint64(62 - s)
    for i in range(c.shape[0]):
        out[i] = (c[i] >> shift) - offset + ((np.uint64(part[i]) + np.uint64(theirs[i])) << rest)


@compiled_loop
def pack(x: Words, size: int, out: NDArray[np.uint8]) -> None:
    """The lowest ``size`` bytes of every number of ``[n]``, into ``[n size]``."""
    for i in range(x.shape[0]):
        for b in range(size):
            out[i * size + b] = np.uint8(x[i] >> np.uint64(8 * b))


@compiled_loop
def deal_bits(rho: Words, right: Words, out: Words) -> None:
    """``out`` [n]: the bits of the words ``rho`` [ceil(n / 64)] as numbers, less ``right``: the dealer's correction."""
    one = np.uint64(1)
    n = out.shape[0]
    for w in range((n + 63) >> 6):
        word, first = rho[w], 64 * w
        for j in range(min(64, n - first)):
            out[first + j] = ((word >> np.uint64(j)) & one) - right[first + j]


@compiled_loop
def deal_chosen(rho: Words, u: Words, right: Words, out: Words) -> None:
    """``out`` [n]: ``u`` where the bit of ``rho`` is 1 and 0 elsewhere, less ``right``: the dealer's correction."""
    zero, one = np.uint64(0), np.uint64(1)
    n = out.shape[0]
    for w in range((n + 63) >> 6):  # word by word, which the compiler turns into vectors
        word, first = rho[w], 64 * w
        for j in range(min(64, n - first)):
            out[first + j] = (u[first + j] & (zero - ((word >> np.uint64(j)) & one))) - right[first + j]


@compiled_loop
def choose_bits(delta: Words, dealt: Words, lead: int, own: Words) -> None:
    """An online party's share of ``delta ^ rho``."""
    one, two, leads = np.uint64(1), np.uint64(2), np.uint64(lead)
    n = own.shape[0]
    for w in range((n + 63) >> 6):
        word, first = delta[w], 64 * w
        for j in range(min(64, n - first)):
            d = (word >> np.uint64(j)) & one
            own[first + j] = (one - two * d) * dealt[first + j] + (d & leads)


@compiled_loop
def choose(delta: Words, mine: Words, online: Words, dealt: Words, own: Words, out: Words) -> None:
    """An online party's share of ``b (u + v)``."""
    zero, one, two = np.uint64(0), np.uint64(1), np.uint64(2)
    for i in range(out.shape[0]):
        d = (delta[i >> 6] >> np.uint64(i & 63)) & one
        out[i] = (mine[i] & (zero - d)) + (one - two * d) * dealt[i] + own[i] * online[i]
