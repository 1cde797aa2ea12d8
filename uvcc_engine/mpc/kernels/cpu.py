"""Kernels on the CPU: numpy and torch for small tensors, compiled loops for large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.gemm import gemm
from uvcc_engine.mpc.kernels.layout import Level, broadcast_shape, wire_dtype
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.mpc.kernels.proving import binary_words

COMPILE_FROM = 1 << 14  # elements; below, loading the compiled code would cost more than it saves
_WORDS = COMPILE_FROM // 64
_BITS_FROM = 1  # words from which loops that are there already beat a dozen torch operations
_FIELD_FROM = 1 << 12  # elements of a binary field from which the compiled product is worth its loading
_SUMS_FROM = 1 << 11  # elements, for sums and shifts
_TERMS = 3  # of bits that meet, which are weighed together
_ROWS = 4  # from which the rows of a product are halved, where they are a power of two
_HALVED = 16  # rows of elements from which halves of halves take less than products of matrices
_ABREAST = 8  # elements of a row that fill a vector
_NONE = torch.empty(0, dtype=torch.int64)


class CpuKernels(PlainKernels):
    """``kernels.base.Kernels`` for the CPU."""

    @property
    def _jit(self) -> Any:
        """The compiled loops, or None while there are none."""
        return LOOPS.get()

    def _fast(self, size: int, enough: int, once_there: int, *tensors: Tensor) -> bool:
        """Whether to take a compiled loop: from ``enough`` on, and from ``once_there`` on if they are loaded."""
        if size < once_there or (size < enough and LOOPS.found is None):
            return False
        return all(t.is_contiguous() for t in tensors) and self._jit is not None

    def _sums(self, size: int, *tensors: Tensor) -> bool:
        return self._fast(size, COMPILE_FROM, _SUMS_FROM, *tensors)

    def _bits(self, words: int, *tensors: Tensor) -> bool:
        return self._fast(words, _WORDS, _BITS_FROM, *tensors)

    def mul(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        first = xs[0]
        same = all(t.shape == first.shape for t in (*xs, *ys))
        if not same or not self._sums(first.numel(), *xs, *ys):
            return super().mul(xs, ys)
        out = torch.empty_like(first)
        a, b, c, d = _flat(first), _flat(ys[0]), _flat(xs[-1]), _flat(ys[-1])
        self._jit.cross(len(xs), a, b, c, d, _flat(out))
        return out

    def right_factor(self, ys: Sequence[Tensor], rows: int) -> RightFactor:
        return gemm.right_factor(ys, rows)

    def blind(self, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        if self._sums(z.numel(), z, plus, minus):
            self._jit.blind(_flat(z), factor, _flat(plus), _flat(minus))
            return z
        return super().blind(z, factor, plus, minus)

    def mul_blinded(
        self,
        first: bool,
        second: bool,
        x: tuple[Tensor, Tensor],
        y: tuple[Tensor, Tensor],
        factor: int,
        plus: Tensor,
        minus: Tensor,
    ) -> Tensor:
        given = (*x, *y, plus, minus)
        if any(t.shape != plus.shape for t in given) or not self._sums(plus.numel(), *given):
            return super().mul_blinded(first, second, x, y, factor, plus, minus)
        out = torch.empty_like(plus)
        self._jit.mul_blinded(first, second, *map(_flat, given), factor, _flat(out))
        return out

    def truncate_deal(
        self, z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
    ) -> tuple[Tensor, Tensor]:
        if not self._sums(z.numel(), z, left, right, k, m, low):
            return super().truncate_deal(z, left, right, k, m, low, s)
        masked = torch.empty_like(z)
        dealt = torch.empty((2, *z.shape), dtype=wire_dtype(s))
        self._jit.truncate_deal(
            _flat(z), _flat(left), _flat(right), _flat(k), _flat(m), _flat(low), s, _flat(masked), _rows(dealt)
        )
        return masked, dealt

    def truncate_deal_own(
        self, z: Tensor, left: Tensor, drawn: Tensor, more: Tensor, low: Tensor, s: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self._sums(z.numel(), z, left, drawn, more, low):
            return super().truncate_deal_own(z, left, drawn, more, low, s, out)
        dealt = torch.empty((2, *z.shape), dtype=wire_dtype(s))
        right = torch.empty_like(z) if out is None else out
        given = (_flat(z), _flat(left), _rows(drawn), _flat(more), _flat(low))
        self._jit.truncate_deal_own(*given, s, _rows(dealt), _flat(right))
        return dealt, right

    def truncate_open(
        self, z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, s: int, bits: int = 64
    ) -> tuple[Tensor, Tensor]:
        if not self._sums(z.numel(), z, a, b, k, m):
            return super().truncate_open(z, a, b, k, m, s, bits)
        c, part = torch.empty_like(z), torch.empty_like(k)
        self._jit.truncate_open(_flat(z), _flat(a), _flat(b), _flat(k), _flat(m), bits, _flat(c), _flat(part))
        return c, part

    def truncate_close(self, c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None = None) -> Tensor:
        if not self._sums(c.numel(), c, part, theirs):
            return super().truncate_close(c, part, theirs, s, out)
        if out is None:
            out = torch.empty_like(c)
        self._jit.truncate_close(_flat(c), _flat(part), _flat(theirs), s, _flat(out))
        return out

    def to_planes(self, x: Tensor, bits: int = 64) -> Tensor:
        flat = x.contiguous().reshape(-1)
        words = -(-flat.numel() // 64)
        if self._sums(flat.numel(), flat):
            out = torch.empty((bits, words), dtype=torch.int64)
            self._jit.to_planes(flat.numpy(), out.numpy())
            return out
        raw = np.zeros((words * 64, 8), dtype=np.uint8)
        raw[: flat.numel()] = flat.numpy().view(np.uint8).reshape(-1, 8)
        used = np.unpackbits(raw[:, : -(-bits // 8)], axis=1, bitorder="little")[:, :bits]
        packed = np.packbits(np.ascontiguousarray(used.T), axis=1, bitorder="little")
        return torch.from_numpy(packed.view(np.int64))

    def bits_to_ints(self, words: Tensor, n: int) -> Tensor:
        raw = words.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(raw, axis=-1, count=n, bitorder="little")
        return torch.from_numpy(bits.astype(np.int64))

    def _field(self, size: int, *tensors: Tensor) -> bool:
        return self._fast(size, _FIELD_FROM, _BITS_FROM, *tensors)

    def binary_multiply(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape or not self._field(a.numel(), a, b):
            return super().binary_multiply(a, b)
        out = torch.empty_like(a)
        self._jit.binary_multiply(_flat(a), _flat(b), _flat(out))
        return out

    def binary_powers(self, of: Tensor, count: int) -> Tensor:
        if not self._field(64 * count, of):
            return super().binary_powers(of, count)
        out = torch.empty(count, dtype=torch.int64)
        self._jit.binary_powers(_flat(of), _flat(out))
        return out

    def binary_inner(self, a: Tensor, b: Tensor) -> Tensor:
        if not self._field(a.numel(), a, b):
            return super().binary_inner(a, b)
        return _word(self._jit.binary_inner(_flat(a), _flat(b)))

    def binary_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        if not self._field(x.numel(), x, factors):
            return super().binary_columns(x, factors)
        out = torch.empty(x.shape[1], dtype=torch.int64)
        self._jit.binary_columns(_rows(x), _flat(factors), _flat(out))
        return out

    def binary_diagonals(self, u: Tensor, v: Tensor) -> Tensor:
        if not self._field(u.numel(), u, v):
            return super().binary_diagonals(u, v)
        out = torch.empty(u.shape[0], 2 * u.shape[1] - 1, dtype=torch.int64)
        self._jit.binary_diagonals(u.numpy().view(np.uint64), v.numpy().view(np.uint64), _rows(out))
        return out

    def binary_product(self, u: Tensor, v: Tensor) -> Tensor:
        if not self._field(u.numel(), u, v):
            return super().binary_product(u, v)
        if len(u) < _ROWS or len(u) & (len(u) - 1):
            return self.binary_diagonals(u.unsqueeze(0), v.unsqueeze(0))[0]
        out = torch.empty(2 * len(u) - 1, dtype=torch.int64)
        self._jit.binary_product(_rows(u), _rows(v), _flat(out))
        return out

    def ternary_bits(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor) -> Tensor:
        if not self._field(64 * weights.numel(), *u, *v, weights):
            return super().ternary_bits(u, v, weights)
        sums, out = torch.zeros(729, 8, dtype=torch.int64), torch.empty(729, dtype=torch.int64)
        for sides, terms in _by_terms(u, v):
            self._jit.meet_bits(*map(_flat, sides), terms, _flat(weights), _rows(sums))
        self._jit.reduce_sums(_rows(sums), _flat(out))
        return binary_words.joined(out)

    def turned_sums(self, x: Tensor, weights: Tensor) -> Tensor:
        if not self._field(x.numel(), x, weights):
            return super().turned_sums(x, weights)
        out = torch.empty(64, dtype=torch.int64)
        self._jit.turned_sums(_flat(x), _flat(weights), _flat(out))
        return out

    def block_weights(self, weights: Tensor, count: int) -> Tensor:
        if not self._field(count, weights):
            return super().block_weights(weights, count)
        out = torch.empty(count, dtype=torch.int64)
        self._jit.block_weights(_flat(weights), _flat(out))
        return out

    def chosen_places(
        self, words: Tensor, weights: Tensor, factors: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        factors = _NONE if factors is None else factors
        out = torch.empty_like(words) if out is None else out
        if not self._field(words.numel(), words, weights, factors, out):
            return super().chosen_places(words, weights, factors if len(factors) else None, out)
        self._jit.chosen_places(_flat(words), _flat(weights), _flat(factors), _flat(out))
        return out

    def weigh(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        if not self._field(x.numel(), x, weights):
            return super().weigh(x, weights, degree)
        out = torch.empty(degree, x.shape[1], dtype=torch.int64)
        self._jit.weigh(_rows(x), _flat(weights), _rows(out))
        return out

    def weigh_columns(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        if not self._field(x.numel(), x, weights):
            return super().weigh_columns(x, weights, degree)
        out = torch.empty(x.shape[0], degree, dtype=torch.int64)
        self._jit.weigh_columns(_rows(x), _flat(weights), _rows(out))
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
        out = torch.zeros(729, degree, dtype=torch.int64)
        for sides, terms in _by_terms(u, v):
            self._jit.ternary_numbers(*map(_rows, sides), terms, _flat(weights), _rows(out))
        return binary_words.joined(out, torch.sub)

    def weigh_elements(self, x: Tensor, weights: Tensor, tap: int, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        if not self._field(x.numel(), x, weights, out):
            return super().weigh_elements(x, weights, tap, out)
        by_fours = x.shape[1] == self._jit.ELEMENT and self._jit.MULTIPLIES_EIGHT
        weigh = self._jit.weigh_by_fours if by_fours else self._jit.weigh_elements
        weigh(_rows(x), _flat(weights), tap, _rows(out))
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
        out = torch.empty(2 * rows - 1, 2 * d - 1, dtype=torch.int64)
        self._jit.multiply_elements(*(t.numpy().view(np.uint64) for t in (u, v, out)))
        return out

    def ring_multiply(self, a: Tensor, b: Tensor, tap: int) -> Tensor:
        if not self._field(max(a.numel(), b.numel()), a):
            return super().ring_multiply(a, b, tap)
        shape = broadcast_shape(a.shape, b.shape)
        a, b = a.expand(shape).contiguous(), b.expand(shape).contiguous()
        out = torch.empty_like(a)
        self._jit.ring_multiply(_elements(a), _elements(b), tap, _elements(out))
        return out

    def ring_powers(self, of: Tensor, count: int, tap: int) -> Tensor:
        if not self._field(count * of.numel(), of):
            return super().ring_powers(of, count, tap)
        out = torch.empty(count, of.shape[-1], dtype=torch.int64)
        self._jit.ring_powers(_elements(of), tap, _elements(out))
        return out

    def pack(self, x: Tensor, size: int) -> Tensor:
        if not self._sums(x.numel(), x):
            return super().pack(x, size)
        out = torch.empty((*x.shape, size), dtype=torch.uint8)
        self._jit.pack(_flat(x), size, _flat(out))
        return out

    def select_deal(self, rho: Tensor, us: list[Tensor], right: Tensor) -> Tensor:
        if right.dim() != 2 or not self._sums(right.shape[-1], right, rho, *us):
            return super().select_deal(rho, us, right)
        out = torch.empty_like(right)
        self._jit.deal_bits(_flat(rho), _flat(right[0]), _flat(out[0]))
        for i, u in enumerate(us, 1):
            self._jit.deal_chosen(_flat(rho), _flat(u), _flat(right[i]), _flat(out[i]))
        return out

    def select(
        self, delta: Tensor, mine: list[Tensor], online: list[Tensor], dealt: Tensor, lead: int
    ) -> tuple[list[Tensor], Tensor]:
        if dealt.dim() != 2 or not self._sums(dealt.shape[-1], delta, dealt, *mine, *online):
            return super().select(delta, mine, online, dealt, lead)
        bits, own = _flat(delta), torch.empty_like(dealt[0])
        self._jit.choose_bits(bits, _flat(dealt[0]), lead, _flat(own))
        products = []
        for a, v, d in zip(mine, online, dealt[1:], strict=True):
            out = torch.empty_like(own)
            self._jit.choose(bits, _flat(a), _flat(v), _flat(d), _flat(own), _flat(out))
            products.append(out)
        return products, own

    def deal_digits(self, planes: Tensor, k: int, mask: Tensor, out: Tensor) -> None:
        if k == 3 and self._bits(planes.shape[-1], planes, mask, out):
            self._jit.deal_digits(planes.numpy(), mask.numpy(), out.numpy())
        else:
            super().deal_digits(planes, k, mask, out)

    def pick_digits(self, table: Tensor, planes: Tensor, k: int, one: int) -> tuple[Tensor, Tensor]:
        if k != 3 or not self._bits(planes.shape[-1], planes, table):
            return super().pick_digits(table, planes, k, one)
        g = torch.empty(planes.shape[0] // 3, planes.shape[1], dtype=torch.int64)
        p = torch.empty_like(g)
        self._jit.pick_digits(table.numpy(), planes.numpy(), one, g.numpy(), p.numpy())
        return g, p

    def mask_products(self, plan: Level, left: Tensor, right: Tensor, mask: Tensor, out: Tensor) -> None:
        if self._bits(out.shape[-1], left, right, mask, out):
            self._jit.mask_products(
                plan.m, plan.generate, plan.carry_on, left.numpy(), right.numpy(), mask.numpy(), out.numpy()
            )
        else:
            super().mask_products(plan, left, right, mask, out)

    def close(self, plan: Level, g: Tensor | None, p: Tensor, single: Tensor, out: Tensor) -> None:
        first = p if g is None else g
        if self._bits(p.shape[-1], first, p, single, out):
            self._jit.close(plan.m, plan.generate, plan.carry_on, first.numpy(), p.numpy(), single.numpy(), out.numpy())
        else:
            super().close(plan, g, p, single, out)

    def merge(
        self,
        plan: Level,
        opened: Tensor,
        single: Tensor,
        product: Tensor,
        one: int,
        g_out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        g_to, p_to = (opened[0] if out is None else out for out in (g_out, p_out))
        if not self._bits(opened.shape[-1], opened, single, product, g_to, p_to):
            super().merge(plan, opened, single, product, one, g_out, p_out)
            return
        self._jit.merge(
            plan.m,
            plan.generate and g_out is not None,
            plan.carry_on and p_out is not None,
            opened.numpy(),
            single.numpy(),
            product.numpy(),
            one,
            g_to.numpy(),
            p_to.numpy(),
        )


_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _flat(x: Tensor) -> Any:
    """The elements as a flat unsigned array on the same memory."""
    return x.numpy().reshape(-1).view(_UNSIGNED[x.element_size()])


def _rows(x: Tensor) -> Any:
    return x.numpy().reshape(x.shape[0], -1).view(_UNSIGNED[x.element_size()])


def _by_terms(u: Sequence[Tensor], v: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], int]]:
    """As many pairs of sides at a time as loops take, and how many they are: loops have so many arguments always."""
    for t in range(0, len(u), _TERMS):
        sides = [side for pair in zip(u[t : t + _TERMS], v[t : t + _TERMS], strict=True) for side in pair]
        yield sides + sides[-1:] * (2 * _TERMS - len(sides)), len(sides) // 2


def _word(x: Any) -> Tensor:
    """An unsigned word as a tensor ``[1]``."""
    return torch.from_numpy(np.array([x], dtype=np.uint64).view(np.int64))


def _elements(x: Tensor) -> Any:
    """``[n, d]`` unsigned words on the same memory."""
    return x.numpy().reshape(-1, x.shape[-1]).view(np.uint64)
