"""The two long vectors of a prover's statement, in blocks of one shape each, and what is computed of them.

The statement is ``<u, v> = t`` with ``u`` known to the prover and the party before it, ``v`` to the prover and the
party after it. A verifier holds its own side of every block only. A fold by ``L`` takes ``L`` entries for
the coefficients of two polynomials (``folding.Fold``): of ``sum u(X) v(X)`` one coefficient, or some, are the inner
product (Boyle, Gilboa, Ishai, Nof, CCS 2019, section 4.3, with coefficients in place of a sum over points).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.threads import over_threads
from uvcc_engine.proofs.folding import SLOTS, Fold
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

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """``a_i @ b_i`` of integers modulo 2^64, one for each ``i``: ``[n, l, m]`` and ``[n, m, k]``."""
        return self.kernels.right_factor([b.contiguous()], 0)([a.contiguous()])

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i a_i b_i`` ``[d]`` of elements ``[n, d]``."""
        return self.ring.collapsed(self.product(a.T, b))


class Block(Protocol):
    """A stretch of both vectors."""

    def gram(self, at: Arithmetic, fold: Fold) -> Tensor:
        """At the prover: this block's part of the coefficients of a fold, ``[coefficients, d]``."""

    def left(self, fold: int) -> int:
        """Entries n' after a fold of so many."""

    def fold_before(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        """``u(r)`` from the powers of ``r`` ``[coefficients, d]``, to ``out`` ``[n', d]``."""

    def fold_after(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
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

    def gram(self, at: Arithmetic, fold: Fold) -> Tensor:
        used = min(fold.size, self.slots)
        u, v = spread(known(self.before), used), spread(known(self.after), used)

        def pairs(x: Tensor, y: Tensor) -> Tensor:
            return _wide_products(at, x, y)

        wide = at.kernels.multiply_elements(u, v)
        if wide is None:
            wide = convolved(pairs, u, v.flip(0), _LEAF, torch.add, torch.sub)
        return fold.of_elements(at.ring.reduced(wide))

    def left(self, fold: int) -> int:
        """See ``Block``."""
        return -(-len(known(self.after if self.before is None else self.before)) // min(fold, self.slots))

    def fold_before(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        used = min(fold.size, self.slots)
        out.copy_(_folded(at, spread(known(self.before), used), fold.elements_before(powers, used)))

    def fold_after(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        used = min(fold.size, self.slots)
        out.copy_(_folded(at, spread(known(self.after), used), fold.elements_after(powers, used)))


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """An equation of numbers before all with as many terms are one block: ``[groups, fold]`` for each term; ``[fold,
    groups]`` where the fold is ternary."""

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

    def gram(self, at: Arithmetic, fold: Fold) -> Tensor:
        pairs = at.kernels.weigh_pairs(known(self.before), known(self.after), self.rows, at.ring.degree)
        by_place = at.products(pairs.permute(2, 1, 0), at.ring.times(self.places))  # [after, before, d]
        return _diagonals(by_place.transpose(0, 1))

    def left(self, fold: int) -> int:
        """See ``Block``."""
        terms, groups, _ = known(self.after if self.before is None else self.before).shape
        return terms * groups

    def fold_before(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        out.copy_(at.product(known(self.before).reshape(-1, fold.size), fold.before(powers)))

    def fold_after(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        steps = at.ring.mul(self.places, fold.after(powers))
        v = known(self.after)
        found = at.product(v.reshape(-1, fold.size), steps)
        rows = self.rows if v.shape[0] == 1 else self.rows.repeat(v.shape[0])
        at.kernels.weigh_elements(found, rows, at.ring.tap, out)


@dataclass(frozen=True, slots=True, eq=False)
class TernaryBlock:
    """Entries ``w u_t v_t`` of numbers modulo 2^64, for a ternary fold: ``[fold, groups]`` for each term of a side.

    The public weight of a group, ``rows`` as words ``[groups]``, belongs to ``v``'s side; those of the places to the
    verifiers.
    """

    before: Sequence[Tensor] | None
    after: Sequence[Tensor] | None
    rows: Tensor

    def gram(self, at: Arithmetic, fold: Fold) -> Tensor:
        found = torch.zeros(fold.coefficients, at.ring.degree, dtype=torch.int64)
        products = at.kernels.ternary_numbers(known(self.before), known(self.after), self.rows, at.ring.degree)
        found[: fold.behind] = products
        return found

    def left(self, fold: int) -> int:
        """See ``Block``."""
        return len(self.rows) * len(known(self.after if self.before is None else self.before))

    def fold_before(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        for term, found in zip(known(self.before), out.reshape(-1, *self._folded_shape(at)), strict=True):
            found.copy_(self._folded(at, term, fold.before(powers)))

    def fold_after(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        for term, found in zip(known(self.after), out.reshape(-1, *self._folded_shape(at)), strict=True):
            at.kernels.weigh_elements(self._folded(at, term, fold.after(powers)), self.rows, at.ring.tap, found)

    def _folded_shape(self, at: Arithmetic) -> tuple[int, int]:
        return len(self.rows), at.ring.degree

    def _folded(self, at: Arithmetic, term: Tensor, factors: Tensor) -> Tensor:
        """``[groups, d]`` of ``[fold, groups]``, which is multiplied as it lies in memory."""
        return at.kernels.right_factor([factors.contiguous()], len(self.rows))([term.T])


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
    rows = torch.empty(groups, fold, d, dtype=torch.int64)

    def turn(start: int, stop: int) -> None:
        rows[start:stop].copy_(columns[:, start:stop].transpose(0, 1))

    over_threads(rows.numel(), groups, turn)
    return at.product(rows.reshape(groups, fold * d), at.ring.times(powers).reshape(fold * d, d))


def merged(equations: Sequence[Equation], elements: Sequence[NumberBlock], places: Tensor, fold: Fold) -> list[Block]:
    """As few blocks as there are forms of them: what a block costs beside its entries is paid once.

    Equations by their number of terms, then elements. ``places``: weights ``[fold, d]`` of all equations.
    """
    found: list[Block] = []
    for terms in sorted({one.terms for one in equations}):
        same = [one for one in equations if one.terms == terms]
        before, after = [one.before for one in same], [one.after for one in same]
        rows = torch.cat([one.rows for one in same])
        if fold.ternary:
            found.append(TernaryBlock(_side_by_side(before), _side_by_side(after), rows))
        else:
            found.append(EquationBlock(_stacked(before), _stacked(after), rows, places))
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


def _side_by_side(sides: Sequence[Sequence[Tensor] | None]) -> list[Tensor] | None:
    """``[fold, groups]`` for each term, as it lies in memory where there is one equation; None as before."""
    there = [side for side in sides if side is not None]
    if not there:
        return None
    return [same[0] if len(same) == 1 else _in_rows(same) for same in zip(*there, strict=True)]


def _in_rows(parts: Sequence[Tensor]) -> Tensor:
    """``[fold, groups]`` of several, the rows of each behind those of the one before."""
    found = torch.empty(parts[0].shape[0], sum(part.shape[1] for part in parts), dtype=torch.int64)

    def join(start: int, stop: int) -> None:
        torch.cat([part[start:stop] for part in parts], 1, out=found[start:stop])

    over_threads(found.numel(), found.shape[0], join)
    return found


def _cat(sides: Sequence[Tensor | None]) -> Tensor | None:
    """None at a verifier that does not hold this side."""
    there = [side for side in sides if side is not None]
    return torch.cat(there) if there else None
