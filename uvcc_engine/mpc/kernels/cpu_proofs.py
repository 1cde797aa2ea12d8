"""The kernels of the proofs on the CPU: compiled loops, and the work of each spread over threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.compiled_kernels import CompiledKernels, as_elements, as_flat, as_rows, one_word
from uvcc_engine.mpc.kernels.layout import broadcast_shape
from uvcc_engine.mpc.kernels.proving import binary_words
from uvcc_engine.mpc.kernels.threads import over_threads, summed

_TERMS = 3  # of bits that meet, which are weighed together
_ROWS = 4  # from which the rows of a product are halved, where they are a power of two
_HALVED = 16  # rows of elements from which halves of halves take less than products of matrices
_ABREAST = 8  # elements of a row that fill a vector
_NONE = torch.empty(0, dtype=torch.int64)
_EIGHTS = 64  # entries of a row that a part begins at multiples of: whole vectors, and whole strips of them
_CHUNK = 512  # words of bits that are turned at once
_GROUPS = 128  # that a ternary product takes at once
_PRODUCTS = 32  # operations on vectors for a word of bits that meets another
_FOURS = 4  # weights that are looked up together


class ProvingKernels(CompiledKernels):
    """Those kernels of ``kernels.base.Kernels`` that proofs use."""

    def binary_multiply(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape or not self._field(a.numel(), a, b):
            return super().binary_multiply(a, b)
        out = torch.empty_like(a)
        self._jit.binary_multiply(as_flat(a), as_flat(b), as_flat(out))
        return out

    def binary_powers(self, of: Tensor, count: int) -> Tensor:
        if not self._field(64 * count, of):
            return super().binary_powers(of, count)
        out = torch.empty(count, dtype=torch.int64)
        self._jit.binary_powers(as_flat(of), as_flat(out))
        return out

    def binary_inner(self, a: Tensor, b: Tensor) -> Tensor:
        if not self._field(a.numel(), a, b):
            return super().binary_inner(a, b)
        return one_word(self._jit.binary_inner(as_flat(a), as_flat(b)))

    def binary_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        if not self._field(x.numel(), x, factors):
            return super().binary_columns(x, factors)
        out = torch.empty(x.shape[1], dtype=torch.int64)
        work, given = x.numel(), (as_rows(x), as_flat(factors))

        def columns(start: int, stop: int) -> None:
            self._jit.binary_columns(*given, start, stop, as_flat(out))

        over_threads(work, x.shape[1], columns, _EIGHTS)
        return out

    def binary_diagonals(self, u: Tensor, v: Tensor) -> Tensor:
        if not self._field(u.numel(), u, v):
            return super().binary_diagonals(u, v)
        out = torch.empty(u.shape[0], 2 * u.shape[1] - 1, dtype=torch.int64)
        self._jit.binary_diagonals(u.numpy().view(np.uint64), v.numpy().view(np.uint64), as_rows(out))
        return out

    def binary_product(self, u: Tensor, v: Tensor) -> Tensor:
        if not self._field(u.numel(), u, v):
            return super().binary_product(u, v)
        if len(u) < _ROWS or len(u) & (len(u) - 1):
            return self.binary_diagonals(u.unsqueeze(0), v.unsqueeze(0))[0]
        work, sides = u.numel() * len(u).bit_length(), (as_rows(u), as_rows(v))

        def columns(start: int, stop: int, found: Tensor) -> None:
            self._jit.binary_product(*sides, start, stop, as_flat(found))

        out = torch.zeros(2 * len(u) - 1, dtype=torch.int64)
        return summed(work, u[0].numel(), out, columns, _EIGHTS, torch.bitwise_xor)

    def ternary_bits(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor) -> Tensor:
        if not self._field(64 * weights.numel(), *u, *v, weights):
            return super().ternary_bits(u, v, weights)
        flat, size = as_flat(weights), u[0].numel()

        def chunks(start: int, stop: int, found: Tensor) -> None:
            here = flat[start // 64 : -(-stop // _CHUNK) * _CHUNK // 64]
            for sides, terms in _by_terms(u, v):
                self._jit.meet_bits(*(as_flat(x)[start:stop] for x in sides), terms, here, as_rows(found))

        sums, out = torch.zeros(729, 8, dtype=torch.int64), torch.empty(729, dtype=torch.int64)
        sums = summed(_PRODUCTS * len(u) * size, size, sums, chunks, _CHUNK, torch.bitwise_xor)
        self._jit.reduce_sums(as_rows(sums), as_flat(out))
        return binary_words.joined(out)

    def turned_sums(self, x: Tensor, weights: Tensor) -> Tensor:
        if not self._field(x.numel(), x, weights):
            return super().turned_sums(x, weights)
        flat, words = as_flat(weights), as_flat(x)

        def chunks(start: int, stop: int, found: Tensor) -> None:
            here = flat[start // 64 : -(-stop // _CHUNK) * _CHUNK // 64]
            self._jit.turned_sums(words[start:stop], here, as_flat(found))

        out = torch.zeros(64, dtype=torch.int64)
        return summed(x.numel(), x.numel(), out, chunks, _CHUNK, torch.bitwise_xor)

    def block_weights(self, weights: Tensor, count: int) -> Tensor:
        if not self._field(count, weights):
            return super().block_weights(weights, count)
        out = torch.empty(count, dtype=torch.int64)
        flat, found = as_flat(weights), as_flat(out)

        def chunks(start: int, stop: int) -> None:
            self._jit.block_weights(flat[start // 64 : -(-stop // _CHUNK) * _CHUNK // 64], found[start:stop])

        over_threads(count, count, chunks, _CHUNK)
        return out

    def chosen_places(
        self, words: Tensor, weights: Tensor, factors: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        factors = _NONE if factors is None else factors
        out = torch.empty_like(words) if out is None else out
        if not self._field(words.numel(), words, weights, factors, out):
            return super().chosen_places(words, weights, factors if len(factors) else None, out)
        flat, rows, bits, found = as_flat(words), as_flat(factors), as_flat(weights), as_flat(out)

        def part(start: int, stop: int) -> None:
            self._jit.chosen_places(flat[start:stop], bits, rows[start:stop], found[start:stop])

        over_threads(4 * words.numel(), words.numel(), part, _EIGHTS)
        return out

    def weigh(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        if not self._field(x.numel(), x, weights):
            return super().weigh(x, weights, degree)
        out = torch.empty(degree, x.shape[1], dtype=torch.int64)
        given = as_rows(x), as_flat(weights)

        def columns(start: int, stop: int) -> None:
            self._jit.weigh(*given, start, stop, as_rows(out))

        over_threads(degree // _FOURS * x.numel(), x.shape[1], columns, _EIGHTS)
        return out

    def weigh_columns(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        if not self._field(x.numel(), x, weights):
            return super().weigh_columns(x, weights, degree)
        out = torch.empty(x.shape[0], degree, dtype=torch.int64)
        rows, words, found = as_rows(x), as_flat(weights), as_rows(out)

        def part(start: int, stop: int) -> None:
            self._jit.weigh_columns(rows[start:stop], words, found[start:stop])

        over_threads(degree // _FOURS * x.numel(), x.shape[0], part, _EIGHTS)
        return out

    def weigh_pairs(self, u: Tensor, v: Tensor, weights: Tensor, degree: int) -> Tensor:
        if not self._field(u.numel(), u, v, weights) or u.shape[2] % self._jit.PAIR_TILE:
            return super().weigh_pairs(u, v, weights, degree)
        out = torch.empty(degree, u.shape[2], u.shape[2], dtype=torch.int64)
        self._jit.weigh_pairs(*(t.numpy().view(np.uint64) for t in (u, v, weights, out)))
        return out

    def ternary_numbers(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor, degree: int) -> Tensor:
        if not self._field(64 * weights.numel(), *u, *v, weights):
            return super().ternary_numbers(u, v, weights, degree)
        groups, words = weights.numel(), as_flat(weights)

        def part(start: int, stop: int, found: Tensor) -> None:
            for sides, terms in _by_terms(u, v):
                self._jit.ternary_numbers(*map(as_rows, sides), terms, words, start, stop, as_rows(found))

        out = torch.zeros(729, degree, dtype=torch.int64)
        out = summed(729 * (len(u) + degree // _FOURS) * groups, groups, out, part, _GROUPS)
        return binary_words.joined(out, torch.sub)

    def weigh_elements(self, x: Tensor, weights: Tensor, tap: int, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        if not self._field(x.numel(), x, weights, out):
            return super().weigh_elements(x, weights, tap, out)
        by_fours = x.shape[1] == self._jit.ELEMENT and self._jit.MULTIPLIES_EIGHT
        weigh = self._jit.weigh_by_fours if by_fours else self._jit.weigh_elements
        rows, words, found = as_rows(x), as_flat(weights), as_rows(out)

        def part(start: int, stop: int) -> None:
            weigh(rows[start:stop], words[start:stop], tap, found[start:stop])

        over_threads(x.shape[1] // _FOURS * x.numel(), x.shape[0], part)
        return out

    def add_degrees(self, products: Tensor) -> Tensor:
        blocks, rows, d, columns, e = products.shape
        if not self._field(products.numel(), products):
            return super().add_degrees(products)
        out = torch.zeros(blocks, rows + columns - 1, d + e - 1, dtype=torch.int64)
        self._jit.add_degrees(products.numpy().view(np.uint64), out.numpy().view(np.uint64))
        return out

    def multiply_wide(self, x: Tensor, y: Tensor) -> Tensor:
        blocks, size, _, d = x.shape
        if not self._field(x.numel() * size, x, y):
            return super().multiply_wide(x, y)
        out = torch.zeros(blocks, 2 * size - 1, 2 * d - 1, dtype=torch.int64)
        self._jit.multiply_wide(*(t.contiguous().numpy().view(np.uint64) for t in (x, y, out)))
        return out

    def multiply_elements(self, u: Tensor, v: Tensor) -> Tensor | None:
        rows, count, d = u.shape
        if rows < _HALVED or rows & (rows - 1) or count < _ABREAST or not self._field(u.numel(), u, v):
            return None
        if d != self._jit.ELEMENT or not self._jit.MULTIPLIES_EIGHT:
            return None
        sides = [t.numpy().view(np.uint64) for t in (u, v)]

        def part(start: int, stop: int, found: Tensor) -> None:
            self._jit.multiply_elements(*sides, start, stop, as_rows(found))

        out = torch.zeros(2 * rows - 1, 2 * d - 1, dtype=torch.int64)
        return summed(d * d * rows * count, count, out, part, _EIGHTS)

    def ring_multiply(self, a: Tensor, b: Tensor, tap: int) -> Tensor:
        if not self._field(max(a.numel(), b.numel()), a):
            return super().ring_multiply(a, b, tap)
        shape = broadcast_shape(a.shape, b.shape)
        a, b = a.expand(shape).contiguous(), b.expand(shape).contiguous()
        out = torch.empty_like(a)
        self._jit.ring_multiply(as_elements(a), as_elements(b), tap, as_elements(out))
        return out

    def ring_powers(self, of: Tensor, count: int, tap: int) -> Tensor:
        if not self._field(count * of.numel(), of):
            return super().ring_powers(of, count, tap)
        out = torch.empty(count, of.shape[-1], dtype=torch.int64)
        self._jit.ring_powers(as_elements(of), tap, as_elements(out))
        return out


def _by_terms(u: Sequence[Tensor], v: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], int]]:
    """As many pairs of sides at a time as loops take, and how many they are: loops have so many arguments always."""
    for t in range(0, len(u), _TERMS):
        sides = [side for pair in zip(u[t : t + _TERMS], v[t : t + _TERMS], strict=True) for side in pair]
        yield sides + sides[-1:] * (2 * _TERMS - len(sides)), len(sides) // 2
