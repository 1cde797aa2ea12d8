"""The two long vectors of a prover's statement, in blocks of one shape each, and what is computed of them.

The statement is ``<u, v> = t`` with ``u`` known to the prover and the party before it, ``v`` to the prover and the
party after it. A verifier holds its own side of every block only. A fold by ``L`` takes ``L`` entries for
the coefficients of two polynomials, ``u(X) = sum u_l X^l`` and ``v(X) = sum v_l X^(L-1-l)``: the coefficient of
``X^(L-1)`` of ``sum u(X) v(X)`` is the inner product (Boyle, Gilboa, Ishai, Nof, CCS 2019, section 4.3, with that
coefficient in place of a sum over points).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.proofs.folding import SLOTS
from uvcc_engine.proofs.galois_ring import GaloisRing


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The ring, and the device's matrix product for what is long."""

    ring: GaloisRing
    kernels: Kernels

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` of integers modulo 2^64."""
        if not a.numel() or not b.numel():
            return torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64)
        return self.kernels.right_factor([b.contiguous()], a.shape[0])([a.contiguous()])

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i a_i b_i`` ``[d]`` of elements ``[n, d]``."""
        return self.ring.collapsed(self.product(a.T, b))


class Block(Protocol):
    """A stretch of both vectors."""

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """At the prover: this block's part of the ``2 fold - 1`` coefficients, ``[2 fold - 1, d]``."""

    def left(self, fold: int) -> int:
        """Entries n' after a fold."""

    def fold_before(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        """``u(r)`` from the powers of ``r`` ``[fold, d]``, to ``out`` ``[n', d]``."""

    def fold_after(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        """``v(r)``: the second vector folded at ``r``, as ``fold_before`` folds the first."""


def spread(x: Tensor, fold: int) -> Tensor:
    """``[n, ...]`` to ``[fold, ceil(n / fold), ...]``, zeros at the end: entries that are folded lie in one column."""
    short = -x.shape[0] % fold
    whole = torch.cat([x, torch.zeros(short, *x.shape[1:], dtype=torch.int64)]) if short else x
    return whole.reshape(fold, -1, *x.shape[1:])


def joined(
    blocks: Sequence[Block], fold: int, following: int, width: int, fill: Callable[[Block, Tensor], None]
) -> Tensor:
    """What ``fill`` makes of blocks that are folded by ``fold``, ``[n', width]`` one after the other, zeros at the end
    to a multiple of ``following``: as ``spread`` takes them without a copy of its own."""
    sizes = [block.left(fold) for block in blocks]
    whole = torch.empty(sum(sizes) + -sum(sizes) % following, width, dtype=torch.int64)
    for block, part in zip(blocks, torch.split(whole[: sum(sizes)], sizes), strict=True):
        fill(block, part)
    whole[sum(sizes) :] = 0
    return whole


def convolved(
    pairs: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    leaf: int,
    add: Callable[[Tensor, Tensor], Tensor],
    sub: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The product of two polynomials ``[L, ...]``: ``[2 L - 1, ...]``, with three products of halves for four, down to
    ``leaf`` coefficients (Karatsuba and Ofman, 1962).

    ``pairs`` multiplies blocks ``[b, l, ...]`` of them to ``[b, 2 l - 1, ...]``.
    """
    sub = add if sub is None else sub
    x, y, length = x.unsqueeze(0), y.unsqueeze(0), x.shape[0]
    while x.shape[1] > leaf and x.shape[1] % 2 == 0:
        x, y = (_in_halves(side, add) for side in (x, y))
    found = pairs(x, y)
    while (half := (found.shape[1] + 1) // 2) < length:
        low, high, both = found.reshape(-1, 3, *found.shape[1:]).unbind(1)
        found = torch.zeros(low.shape[0], 4 * half - 1, *low.shape[2:], dtype=torch.int64)
        size = 2 * half - 1
        found[:, :size] = low
        found[:, 2 * half : 2 * half + size] = high
        middle = found[:, half : half + size]
        middle.copy_(add(middle, sub(sub(both, low), high)))
    return found[0]


def _in_halves(x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``[b, 2 h, ...]`` to ``[3 b, h, ...]``: lower half, upper half, their sum."""
    low, high = x.reshape(x.shape[0], 2, -1, *x.shape[2:]).unbind(1)
    return torch.stack([low, high, add(low, high)], 1).reshape(-1, *low.shape[1:])


_THIN = 8  # elements in a row up to which a product of matrices is not worth its preparation
_LEAF = 4  # rows of elements that are multiplied each with each


@dataclass(frozen=True, slots=True, eq=False)
class NumberBlock:
    """Entries ``[n, d]``: ``u`` before, ``v`` after. ``slots``: so many of them make the two polynomials at most, whose
    other coefficients are then zero.
    """

    before: Tensor | None
    after: Tensor | None
    slots: int = 1 << 16

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        used = min(fold, self.slots)
        u, v = spread(known(self.before), used), spread(known(self.after), used)

        def pairs(x: Tensor, y: Tensor) -> Tensor:
            return _wide_products(at, x, y)

        wide = at.kernels.multiply_elements(u, v)
        if wide is None:
            wide = convolved(pairs, u, v.flip(0), _LEAF, torch.add, torch.sub)
        return torch.nn.functional.pad(at.ring.reduced(wide), (0, 0, fold - used, fold - used))

    def left(self, fold: int) -> int:
        """See ``Block``."""
        return -(-len(known(self.after if self.before is None else self.before)) // min(fold, self.slots))

    def fold_before(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        used = min(len(powers), self.slots)
        out.copy_(_folded(at, spread(known(self.before), used), powers[:used]))

    def fold_after(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        used = min(len(powers), self.slots)
        out.copy_(_folded(at, spread(known(self.after), used), powers.flip(0)[:used]))


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """An equation of numbers before all with as many terms are one block: ``[groups, fold]`` for each term."""

    terms: int
    before: Sequence[Tensor] | None
    after: Sequence[Tensor] | None
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EquationBlock:
    """Entries ``w u_t v_t`` of numbers modulo 2^64: ``[terms, groups, fold]`` on each side, as wide as the first fold.

    The public weight of entry ``l`` of group ``g`` is ``rows_g places_l``, for all terms, and belongs to ``v``'s side:
    ``rows`` are challenges as words ``[groups]``, ``places`` challenges ``[fold, d]``.
    """

    before: Tensor | None
    after: Tensor | None
    rows: Tensor
    places: Tensor

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        pairs = at.kernels.weigh_pairs(known(self.before), known(self.after), self.rows, at.ring.degree)
        by_place = pairs.permute(2, 1, 0) @ at.ring.times(self.places)  # [after, before, d]
        return _diagonals(by_place.transpose(0, 1))

    def left(self, fold: int) -> int:
        """See ``Block``."""
        terms, groups, _ = known(self.after if self.before is None else self.before).shape
        return terms * groups

    def fold_before(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        out.copy_(at.product(known(self.before).reshape(-1, len(powers)), powers))

    def fold_after(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        steps = at.ring.mul(self.places, powers.flip(0))
        v = known(self.after)
        found = at.product(v.reshape(-1, len(powers)), steps)
        rows = self.rows if v.shape[0] == 1 else self.rows.repeat(v.shape[0])
        at.kernels.weigh_elements(found, rows, at.ring.tap, out)


def _wide_products(at: Arithmetic, x: Tensor, y: Tensor) -> Tensor:
    """Coefficients of ``sum_g x_g(X) y_g(X)`` for blocks ``[b, l, groups, d]``, elements not yet reduced:
    ``[b, 2 l - 1, 2 d - 1]``."""
    blocks, size, groups, d = x.shape
    if groups <= _THIN:
        return at.kernels.multiply_wide(x, y)
    left = x.transpose(2, 3).reshape(blocks, size * d, groups)
    right = y.transpose(1, 2).reshape(blocks, groups, size * d)
    outer = torch.stack([at.product(one, other) for one, other in zip(left, right, strict=True)])
    return at.kernels.add_degrees(outer.reshape(blocks, size, d, size, d))


def _diagonals(pairs: Tensor) -> Tensor:
    """``[L, L, d]`` products ``u_l v_l'`` to the coefficients ``l + L - 1 - l'``: ``[2 L - 1, d]``."""
    fold = pairs.shape[0]
    found = torch.zeros(2 * fold - 1, pairs.shape[2], dtype=torch.int64)
    for l_after in range(fold):
        first = fold - 1 - l_after
        found[first : first + fold] += pairs[:, l_after]
    return found


def _folded(at: Arithmetic, columns: Tensor, powers: Tensor) -> Tensor:
    """``sum_l powers_l x_lg`` of ``[fold, groups, d]``: ``[groups, d]``."""
    fold, groups, d = columns.shape
    return at.product(columns.transpose(0, 1).reshape(groups, fold * d), at.ring.times(powers).reshape(fold * d, d))


def merged(equations: Sequence[Equation], elements: Sequence[NumberBlock], places: Tensor) -> list[Block]:
    """As few blocks as there are forms of them: what a block costs beside its entries is paid once.

    Equations by their number of terms, then elements. ``places``: weights ``[fold, d]`` of all equations.
    """
    found: list[Block] = []
    for terms in sorted({one.terms for one in equations}):
        same = [one for one in equations if one.terms == terms]
        both = _stacked([one.before for one in same]), _stacked([one.after for one in same])
        found.append(EquationBlock(*both, torch.cat([one.rows for one in same]), places))
    if elements:
        both = _cat([b.before for b in elements]), _cat([b.after for b in elements])
        found.append(NumberBlock(*both, SLOTS) if equations else NumberBlock(*both))
    return found


def _stacked(sides: Sequence[Sequence[Tensor] | None]) -> Tensor | None:
    """``[terms, groups, fold]``; None at a verifier that does not hold this side."""
    there = [side for side in sides if side is not None]
    if not there:
        return None
    flat = [term for same in zip(*there, strict=True) for term in same]
    return torch.cat(flat).reshape(len(there[0]), -1, flat[0].shape[-1])


def _cat(sides: Sequence[Tensor | None]) -> Tensor | None:
    """None at a verifier that does not hold this side."""
    there = [side for side in sides if side is not None]
    return torch.cat(there) if there else None
