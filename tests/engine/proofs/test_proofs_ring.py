"""The Galois ring against a slow oracle, and what makes its challenges sound."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.cpu import CpuKernels
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.mpc.kernels.proving import (
    binary_words,
    bit_loops,
    element_loops,
    field_loops,
    pair_loops,
    polynomial_loops,
    proof_loops,
    weigh_loops,
)
from uvcc_engine.proofs.binary_field import LOW_TERMS, BinaryField
from uvcc_engine.proofs.folding import Fold
from uvcc_engine.proofs.galois_ring import TAPS, GaloisRing

M = 1 << 64


def _modulus(d: int) -> list[int]:
    h = [0] * (d + 1)
    for at in (0, d, TAPS[d]):
        h[at] = 1
    return h


def slow_mul(a: list[int], b: list[int], d: int) -> list[int]:
    """Product modulo ``h``, schoolbook, Python's integers."""
    wide = [0] * (2 * d)
    for (i, x), (j, y) in itertools.product(enumerate(a), enumerate(b)):
        wide[i + j] += x * y
    h = _modulus(d)
    for at in range(2 * d - 1, d - 1, -1):
        top = wide[at]
        for k in range(d + 1):
            wide[at - d + k] -= top * h[k]
    return [x % M for x in wide[:d]]


def _ints(x: Tensor) -> list[int]:
    return [int(v) % M for v in x]


def _random(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=gen)


@pytest.mark.parametrize("d", [2, 5, 7, 20, 47, 52])
def test_products_are_those_of_the_slow_oracle(d: int) -> None:
    ring, gen = GaloisRing(d), torch.Generator().manual_seed(d)
    a, b = _random(gen, 5, d), _random(gen, 5, d)
    slow = [slow_mul(_ints(x), _ints(y), d) for x, y in zip(a, b, strict=True)]
    assert [_ints(x) for x in ring.mul(a, b)] == slow
    assert _ints(ring.inner(a, b)) == [sum(column) % M for column in zip(*slow, strict=True)]
    assert [_ints(x) for x in a @ ring.times(b[0])] == [slow_mul(_ints(x), _ints(b[0]), d) for x in a]
    powers = ring.powers(a[0], 4)
    assert _ints(powers[0]) == [1] + [0] * (d - 1)
    assert _ints(powers[3]) == slow_mul(slow_mul(_ints(a[0]), _ints(a[0]), d), _ints(a[0]), d)
    assert _ints(ring.embedded(a[0, :1])[0]) == _ints(a[0, :1]) + [0] * (d - 1)


def _times_x(p: int, d: int) -> int:
    h = sum(1 << k for k, c in enumerate(_modulus(d)) if c)
    return (p << 1) ^ (h if (p << 1) >> d & 1 else 0)


def _binary_mul(a: int, b: int, d: int) -> int:
    found = 0
    while b:
        found ^= a if b & 1 else 0
        a, b = _times_x(a, d), b >> 1
    return found


def _binary_gcd(a: int, b: int) -> int:
    while b:
        while a and a.bit_length() >= b.bit_length():
            a ^= b << (a.bit_length() - b.bit_length())
        a, b = b, a
    return a


@pytest.mark.parametrize("d", TAPS)
def test_every_modulus_is_irreducible_modulo_two(d: int) -> None:
    """Rabin's test: x^(2^d) = x, and x^(2^(d/p)) - x has no common factor with h for the primes p of d."""
    h = sum(1 << k for k, c in enumerate(_modulus(d)) if c)

    def frobenius(times: int) -> int:
        x = 2 if d > 1 else 0
        for _ in range(times):
            x = _binary_mul(x, x, d)
        return x

    assert frobenius(d) == 2
    for p in (p for p in range(2, d + 1) if d % p == 0 and all(p % q for q in range(2, p))):
        assert _binary_gcd(h, frobenius(d // p) ^ 2) == 1


def test_a_zero_divisor_times_a_unit_is_never_zero() -> None:
    """2^63 times any challenge but zero, and times any difference of two: over Z_2^64 half of them vanish."""
    ring = GaloisRing(5)
    everyone = ring.challenges(torch.arange(32))
    top = ring.embedded(torch.tensor([-(2**63)]))
    found = ring.mul(top, everyone)
    assert [bool((x != 0).any()) for x in found] == [False] + [True] * 31
    differences = everyone[:, None] - everyone[None]
    assert int((ring.mul(top, differences) == 0).all(-1).sum()) == 32


@pytest.mark.parametrize("error", [1, -(2**63), 2**62, 12345 << 40])
def test_a_polynomial_of_degree_k_has_at_most_k_roots_among_the_challenges(error: int) -> None:
    ring, gen = GaloisRing(6), torch.Generator().manual_seed(error & 0xFFFF)
    everyone = ring.challenges(torch.arange(64))
    for degree in (1, 2, 3, 6):
        roots = everyone[torch.randperm(64, generator=gen)[:degree]]
        values = ring.embedded(torch.full((64,), error))
        for root in roots:  # error (x - root_1) ... (x - root_k)
            values = ring.mul(values, everyone - root)
        assert int((values == 0).all(-1).sum()) == degree


def test_a_ring_without_a_known_modulus_is_refused() -> None:
    with pytest.raises(ConfigError, match="degree 8"):
        GaloisRing(8)


def _field_mul(a: int, b: int, degree: int) -> int:
    """Shift and add, Python's integers."""
    h = (1 << degree) | sum(1 << t for t in LOW_TERMS[degree])
    found = 0
    while b:
        found ^= a if b & 1 else 0
        a, b = a << 1, b >> 1
        a ^= h if a >> degree & 1 else 0
    return found


@pytest.mark.parametrize("degree", LOW_TERMS)
def test_products_in_a_binary_field_are_those_of_the_slow_oracle(degree: int) -> None:
    gen = torch.Generator().manual_seed(degree)
    for kernels in (PlainKernels(), CpuKernels()):
        field = BinaryField(degree, kernels)
        a, b = (field.within(_random(gen, 40)) for _ in range(2))
        assert _ints(field.mul(a, b)) == [_field_mul(x, y, degree) for x, y in zip(_ints(a), _ints(b), strict=True)]
        powers = field.powers(a[:1], 5)
        assert _ints(powers[:, 0])[:2] == [1, _ints(a)[0]]
        assert torch.equal(powers[4], field.mul(powers[1], powers[3]))


@pytest.mark.parametrize("degree", LOW_TERMS)
def test_every_binary_field_is_one(degree: int) -> None:
    """Rabin's test of its modulus, as above."""
    h = (1 << degree) | sum(1 << t for t in LOW_TERMS[degree])

    def frobenius(times: int) -> int:
        x = 2
        for _ in range(times):
            x = _field_mul(x, x, degree)
        return x

    assert frobenius(degree) == 2
    for p in (p for p in range(2, degree + 1) if degree % p == 0 and all(p % q for q in range(2, p))):
        assert _binary_gcd(h, frobenius(degree // p) ^ 2) == 1


def _words(*tensors: Tensor) -> list[Any]:
    """The same memory as the loops take it."""
    return [t.numpy().view(np.uint64) for t in tensors]


@pytest.mark.parametrize(("rows", "columns"), [(96, 70), (32, 300), (64, 9), (17, 3)])
def test_products_by_halves_are_those_of_each_row_with_each(rows: int, columns: int) -> None:
    """Rows that can be halved often, once or never, and columns that fill no tile."""
    gen = torch.Generator().manual_seed(5)
    u, v = _random(gen, rows, columns), _random(gen, rows, columns)
    expected = PlainKernels().binary_product(u, v)
    assert torch.equal(expected, CpuKernels().binary_diagonals(u.unsqueeze(0), v.unsqueeze(0))[0])
    assert torch.equal(expected, CpuKernels().binary_product(u, v))
    for loop in (polynomial_loops.product_by_tiles, polynomial_loops.binary_product)[: 1 + (rows in (32, 64))]:
        found = torch.empty(2 * rows - 1, dtype=torch.int64)
        loop(*_words(u, v), 0, columns, *_words(found))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 8, 21, 200])
def test_elements_of_the_field_are_the_same_eight_at_a_time(count: int) -> None:
    """Words that fill no vector or no strip, in what every processor has and in what this one has."""
    gen, plain = torch.Generator().manual_seed(count), PlainKernels()
    a, b, weights, none = _random(gen, count), _random(gen, count), _random(gen, 64), torch.empty(0, dtype=torch.int64)
    rows, factors, found = _random(gen, 5, count), _random(gen, 5), torch.empty(count, dtype=torch.int64)
    for multiply in (field_loops.multiply_words, field_loops.binary_multiply):
        multiply(*_words(a, b, found))
        assert torch.equal(found, plain.binary_multiply(a, b))
    for columns in (field_loops.columns_by_words, field_loops.binary_columns):
        columns(*_words(rows, factors), 0, count, *_words(found))
        assert torch.equal(found, plain.binary_columns(rows, factors))
    for choose in (field_loops.choose_by_tables, field_loops.chosen_places):
        choose(*_words(a, weights, none, found))
        assert torch.equal(found, plain.chosen_places(a, weights))
        choose(*_words(a, weights, b, found))
        assert torch.equal(found, plain.chosen_places(a, weights, b))
    assert torch.equal(found, plain.binary_multiply(plain.chosen_places(a, weights), b))


@pytest.mark.parametrize(("terms", "groups", "side"), [(1, 3, 16), (2, 70, 32), (3, 9, 16)])
@pytest.mark.parametrize("degree", [52, 20])
def test_pairs_are_weighed_in_tiles_as_in_one_product(terms: int, groups: int, side: int, degree: int) -> None:
    """Blocks of four rows that are full, or not, and coefficients that fill no register's turn."""
    gen = torch.Generator().manual_seed(groups)
    u, v, weights = _random(gen, terms, groups, side), _random(gen, terms, groups, side), _random(gen, groups)
    found = torch.empty(degree, side, side, dtype=torch.int64)
    pair_loops.weigh_pairs(*_words(u, v, weights, found))
    assert torch.equal(found, PlainKernels().weigh_pairs(u, v, weights, degree))


@pytest.mark.parametrize(("rows", "count"), [(1, 9), (2, 8), (16, 21)])
def test_products_of_elements_by_halves_are_those_of_each_with_each(rows: int, count: int) -> None:
    """Entries that fill no vector; more of them than are turned at a time."""
    gen = torch.Generator().manual_seed(rows)
    u, v = _random(gen, rows, count, 52), _random(gen, rows, count, 52)
    found = torch.empty(2 * rows - 1, 103, dtype=torch.int64)
    element_loops.multiply_elements(*_words(u, v), 0, u.shape[1], *_words(found))
    assert torch.equal(found, CpuKernels().multiply_wide(u.unsqueeze(0), v.flip(0).unsqueeze(0))[0])
    taken = CpuKernels().multiply_elements(u, v)
    assert taken is None if rows < 16 or not element_loops.MULTIPLIES_EIGHT else torch.equal(known(taken), found)
    assert PlainKernels().multiply_elements(u, v) is None
    elements, weights = u.reshape(-1, 52), _random(gen, rows * count)
    for weigh in (element_loops.weigh_by_fours, proof_loops.weigh_elements):
        weighed = torch.empty_like(elements)
        x, w, out = _words(elements, weights, weighed)
        weigh(x, w, TAPS[52], out)
        assert torch.equal(weighed, PlainKernels().weigh_elements(elements, weights, TAPS[52]))


_EXPONENTS = Fold(64, ternary=True).exponents


@pytest.mark.parametrize("words", [1300, 512, 77, 3])
@pytest.mark.parametrize("terms", [1, 2, 3, 5])
def test_bits_of_any_number_of_terms_meet_as_torch_has_it(terms: int, words: int) -> None:
    """More words than the loops take at a time, and words that fill no chunk, on any processor and on this one."""
    gen, plain = torch.Generator().manual_seed(terms), PlainKernels()
    u, v = list(_random(gen, terms, words)), list(_random(gen, terms, words))
    weights = _random(gen, binary_words.blocks_of(words))
    expected = plain.ternary_bits(u, v, weights)
    assert torch.equal(CpuKernels().ternary_bits(u, v, weights), expected)
    if terms <= 3:
        sides = [words for pair in zip(_words(*u), _words(*v), strict=True) for words in pair]
        for loop in (bit_loops.meet_by_words, bit_loops.meet_bits):
            sums, found = torch.zeros(729, 8, dtype=torch.int64), torch.empty(729, dtype=torch.int64)
            loop(*sides, *sides[:1] * (6 - 2 * terms), terms, *_words(weights, sums))
            bit_loops.reduce_sums(*_words(sums, found))
            assert torch.equal(binary_words.joined(found), expected)
    rows, sums = torch.empty(words, dtype=torch.int64), torch.empty(64, dtype=torch.int64)
    bit_loops.block_weights(*_words(weights, rows))
    bit_loops.turned_sums(*_words(u[0], weights, sums))
    assert torch.equal(rows, plain.block_weights(weights, words))
    assert torch.equal(sums, plain.turned_sums(u[0], weights))


def test_a_word_weighs_by_its_place_in_its_block() -> None:
    """A block is every eighth of 512 words: its i-th has the block's weight times X^i."""
    gen, plain = torch.Generator().manual_seed(9), PlainKernels()
    weights = _random(gen, 16)
    rows = _ints(plain.block_weights(weights, 1000))
    for n in (0, 7, 8, 503, 511, 512, 999):
        chunk, lane, i = n // 512, n % 8, n % 512 // 8
        assert rows[n] == _field_mul(int(weights[8 * chunk + lane]) % M, 1 << i, 64)


@pytest.mark.parametrize("terms", [1, 3, 4])
def test_a_ternary_fold_of_bits_is_the_product_at_every_coin_and_has_each_place_by_itself(terms: int) -> None:
    gen, words = torch.Generator().manual_seed(terms), 700
    u, v, coins = _random(gen, terms, words), _random(gen, terms, words), _random(gen, binary_words.blocks_of(words))
    for degree in (64, 31):
        field = BinaryField(degree, PlainKernels())
        at, powers = field.within(coins), field.word_powers(field.within(_random(gen, field.word_parts)))
        found, rows = field.ternary_bits(list(u), list(v), at, powers), field.words_weights(at, words, powers)
        r = field.powers(field.within(_random(gen, 1)), 729)[:, 0]
        sides = [[field.chosen(term, r[_EXPONENTS]) for term in side] for side in (u, v)]
        each = [field.mul(field.mul(x, y), rows) for x, y in zip(*sides, strict=True)]
        assert torch.equal(field.total(field.mul(found, r)), field.total(torch.stack(each).reshape(-1)))
        met = binary_words.total(u & v)
        for j in (0, 1, 37, 63):
            of_the_place = field.total(field.mul((met >> j) & 1, rows))
            assert int(found[2 * _EXPONENTS[j]]) == int(of_the_place)


@pytest.mark.parametrize(("terms", "groups"), [(1, 3), (2, 130), (3, 8), (5, 21)])
def test_a_ternary_fold_of_numbers_is_the_product_at_every_coin(terms: int, groups: int) -> None:
    """Groups that fill no vector; more of them than lie near; more terms than a loop takes."""
    gen, ring = torch.Generator().manual_seed(groups), GaloisRing(52)
    u, v = list(_random(gen, terms, 64, groups)), list(_random(gen, terms, 64, groups))
    weights = _random(gen, groups) & ((1 << 52) - 1)
    found = PlainKernels().ternary_numbers(u, v, weights, 52)
    CpuKernels().binary_multiply(_random(gen, 1 << 12), _random(gen, 1 << 12))  # loads the loops
    assert torch.equal(CpuKernels().ternary_numbers(u, v, weights, 52), found)
    r = ring.powers(ring.challenges(_random(gen, 1))[0], 729)
    sides = [[term.T @ r[_EXPONENTS] for term in side] for side in (u, v)]
    each = torch.stack([ring.mul(x, y) for x, y in zip(*sides, strict=True)]).sum(0)
    assert torch.equal(ring.mul(found, r).sum(0), ring.mul(each, ring.challenges(weights)).sum(0))
    by_place = torch.stack([x * y for x, y in zip(u, v, strict=True)]).sum(0) @ ring.challenges(weights)
    assert torch.equal(found[2 * _EXPONENTS], by_place)


def test_bits_meet_in_vectors_where_the_processor_has_them() -> None:
    """What the choice is made by; the loop that is not chosen is held to the same above."""
    with_them = all(map(proof_loops.processor_has, ("pclmul", "vpclmulqdq", "avx512f")))
    assert (bit_loops.meet_bits is not bit_loops.meet_by_words) == with_them
    assert (field_loops.binary_multiply is not field_loops.multiply_words) == with_them
    assert (polynomial_loops.binary_product is not polynomial_loops.product_by_tiles) == with_them


@pytest.mark.parametrize("degree", [64, 31, 7])
def test_sums_in_a_binary_field_are_those_of_the_slow_oracle(degree: int) -> None:
    gen = torch.Generator().manual_seed(degree)
    for kernels in (PlainKernels(), CpuKernels()):
        field = BinaryField(degree, kernels)
        u, v, factors = (field.within(_random(gen, *shape)) for shape in ((9, 5), (9, 5), (5,)))
        rows = [[_field_mul(x, f, degree) for x, f in zip(_ints(r), _ints(factors), strict=True)] for r in u]
        assert _ints(field.columns(u.T, factors)) == [functools.reduce(operator.xor, r) for r in rows]
        expected = [0] * 9
        for a, b in zip(u, v, strict=True):
            for (i, x), (j, y) in itertools.product(enumerate(_ints(a)), enumerate(_ints(b))):
                expected[4 + i - j] ^= _field_mul(x, y, degree)
        both = [torch.stack([side.T, torch.zeros_like(side.T)]) for side in (u, v)]
        assert [_ints(found) for found in field.diagonals(*both)] == [expected, [0] * 9]
        one, other = (side.T[:, :1].unsqueeze(0) for side in (u, v))
        assert field.total(field.diagonals(one, other)[0]) == field.mul(field.total(u[0]), field.total(v[0]))
        words, coins = _random(gen, 50), field.within(_random(gen, binary_words.blocks_of(50)))
        powers = field.word_powers(field.within(_random(gen, field.word_parts)))
        weights, places = field.words_weights(coins, 50, powers), field.within(_random(gen, 64))
        whole = 0
        for n, (word, weight) in enumerate(zip(_ints(words), _ints(weights), strict=True)):
            assert weight == _field_mul(int(coins[n % 8]) % M, int(powers[n // 8]) % M, degree)
            chosen = functools.reduce(operator.xor, (p for i, p in enumerate(_ints(places)) if word >> i & 1), 0)
            whole ^= _field_mul(chosen, weight, degree)
        assert _ints(field.weighed(words, coins, powers, places)) == [whole]


def test_products_without_carries_are_the_same_by_multiplications() -> None:
    gen = torch.Generator().manual_seed(3)
    u, v = _random(gen, 5000), _random(gen, 5000)
    product = PlainKernels().binary_multiply(u, v)
    assert torch.equal(product, CpuKernels().binary_multiply(u, v))
    for x, y in zip(_ints(u[:20]), _ints(v[:20]), strict=True):
        low, high = proof_loops.by_multiplications(np.uint64(x), np.uint64(y))
        whole = functools.reduce(operator.xor, (x << i for i in range(64) if y >> i & 1), 0)
        assert (int(high) << 64) | int(low) == whole


@pytest.mark.parametrize(("rows", "columns"), [(70, 130), (64, 16), (1, 5), (3, 18), (130, 1)])
def test_columns_are_weighed_in_strips_as_in_one_product(rows: int, columns: int) -> None:
    """Tiles and strips that are full, or not."""
    gen = torch.Generator().manual_seed(rows)
    x, weights = _random(gen, rows, columns), _random(gen, columns)
    found = torch.empty(rows, 52, dtype=torch.int64)
    weigh_loops.weigh_columns(*[t.numpy().view(np.uint64) for t in (x, weights, found)])
    assert torch.equal(found, PlainKernels().weigh_columns(x, weights, 52))


@pytest.mark.parametrize("kernels", [PlainKernels(), CpuKernels()])
@pytest.mark.parametrize("groups", [1, 4, 7])
def test_sums_under_weights_of_zeros_and_ones_are_those_of_a_product_of_matrices(kernels: Kernels, groups: int) -> None:
    gen, ring = torch.Generator().manual_seed(groups), GaloisRing(52)
    weights = _random(gen, groups) & ((1 << 52) - 1)
    wide = ring.challenges(weights)
    x = _random(gen, groups, 70)
    assert torch.equal(kernels.weigh(x, weights, 52), wide.T @ x)
    assert torch.equal(kernels.weigh_columns(x.T.contiguous(), weights, 52), x.T @ wide)
    u, v = _random(gen, 2, groups, 8), _random(gen, 2, groups, 8)
    pairs = kernels.weigh_pairs(u, v, weights, 52)
    assert torch.equal(pairs, torch.einsum("gc,tgi,tgj->cij", wide, u, v))
    products = _random(gen, 2, groups, 52, 2, 52)
    added = torch.zeros(2, groups + 1, 103, dtype=torch.int64)
    for i, k, j in itertools.product(range(groups), range(52), range(2)):
        added[:, i + j, k : k + 52] += products[:, i, k, j]
    assert torch.equal(kernels.add_degrees(products), added)
    x, y = _random(gen, 2, 3, groups, 52), _random(gen, 2, 3, groups, 52)
    each = torch.einsum("binc,bjne->bicje", x, y).contiguous()
    assert torch.equal(kernels.multiply_wide(x, y), kernels.add_degrees(each))
    elements = _random(gen, groups, 52)
    assert torch.equal(kernels.weigh_elements(elements, weights, TAPS[52]), ring.mul(elements, wide))
