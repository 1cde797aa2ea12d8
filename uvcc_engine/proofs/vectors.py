"""The two long vectors of a prover's statement, in blocks of one shape each, and what is computed of them.

The statement is ``<u, v> = t`` with ``u`` known to the prover and the party before it, ``v`` to the prover and the
party after it. A verifier holds its own side of every block only. A fold by ``L`` takes ``L`` neighbouring entries for
the coefficients of two polynomials, ``u(X) = sum u_l X^l`` and ``v(X) = sum v_l X^(L-1-l)``: the coefficient of
``X^(L-1)`` of ``sum u(X) v(X)`` is the inner product (Boyle, Gilboa, Ishai, Nof, CCS 2019, section 4.3, with that
coefficient in place of a sum over points).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.kernels.base import Kernels
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
        """``sum_i a_i b_i`` ``[d]`` of elements ``[n, d]``, or plain numbers ``[n, 1]`` on either side."""
        outer = self.product(a.T, b)
        return self.ring.collapsed(outer) if 1 not in outer.shape else self.widened(outer.reshape(-1))

    def widened(self, x: Tensor) -> Tensor:
        """Coefficients ``[..., 1 or d]`` as an element ``[..., d]``."""
        return torch.nn.functional.pad(x, (0, self.ring.degree - x.shape[-1]))


_OUTER = 1 << 20  # products of coefficients at a time


class Block(Protocol):
    """A stretch of both vectors."""

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """At the prover: this block's part of the ``2 fold - 1`` coefficients, ``[2 fold - 1, d]``."""

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        """``u(r)`` from the powers of ``r`` ``[fold, d]``: ``[n', d]``."""

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        """``v(r)``: the second vector folded at ``r``, as ``folded_before`` folds the first."""


def _grouped(x: Tensor, fold: int) -> Tensor:
    """``[n, ...]`` to ``[ceil(n / fold), fold, ...]``, zeros at the end."""
    short = -x.shape[0] % fold
    whole = torch.cat([x, torch.zeros(short, *x.shape[1:], dtype=torch.int64)]) if short else x
    return whole.reshape(-1, fold, *x.shape[1:])


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
        u, v = _grouped(known(self.before), used), _grouped(known(self.after), used)
        after = v.reshape(v.shape[0], -1)
        slab = max(1, _OUTER // (u.shape[2] * after.shape[1]))
        elements = torch.cat([_pairs(at, u[:, k : k + slab], after, used) for k in range(0, used, slab)])
        return torch.nn.functional.pad(_diagonals(elements), (0, 0, fold - used, fold - used))

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        used = min(len(powers), self.slots)
        return _folded(at, _grouped(known(self.before), used), powers[:used])

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        used = min(len(powers), self.slots)
        return _folded(at, _grouped(known(self.after), used), powers.flip(0)[:used])


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

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return at.product(known(self.before).reshape(-1, len(powers)), powers)

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        steps = at.ring.mul(self.places, powers.flip(0))
        v = known(self.after)
        found = at.product(v.reshape(-1, len(powers)), steps)
        return at.kernels.weigh_elements(found, self.rows.repeat(v.shape[0]), at.ring.tap)


def _pairs(at: Arithmetic, u: Tensor, after: Tensor, fold: int) -> Tensor:
    """``[slab, L, d]``: products of ``u`` ``[groups, slab, wide]`` and ``after`` ``[groups, L wide]`` over groups."""
    groups, slab, wide = u.shape
    outer = at.product(u.reshape(groups, -1).T, after)
    pairs = outer.reshape(slab, wide, fold, -1).permute(0, 2, 1, 3)
    if wide > 1 and pairs.shape[3] > 1:
        return at.ring.collapsed(pairs)
    return at.widened(pairs.reshape(slab, fold, -1))


def _diagonals(pairs: Tensor) -> Tensor:
    """``[L, L, d]`` products ``u_l v_l'`` to the coefficients ``l + L - 1 - l'``: ``[2 L - 1, d]``."""
    fold = pairs.shape[0]
    found = torch.zeros(2 * fold - 1, pairs.shape[2], dtype=torch.int64)
    for l_after in range(fold):
        first = fold - 1 - l_after
        found[first : first + fold] += pairs[:, l_after]
    return found


def _folded(at: Arithmetic, grouped: Tensor, powers: Tensor) -> Tensor:
    groups, fold, wide = grouped.shape
    steps = powers[:, None, :] if wide == 1 else at.ring.times(powers)
    return at.product(grouped.reshape(groups, fold * wide), steps.reshape(fold * wide, -1))


def merged(blocks: Sequence[Block]) -> list[Block]:
    """As few blocks as there are forms of them: what a block costs beside its entries is paid once.

    Equations by their number of terms, then elements.
    """
    found: list[Block] = []
    equations = [b for b in blocks if isinstance(b, EquationBlock)]
    by_terms: dict[int, list[EquationBlock]] = {}
    for block in equations:
        there = block.before if block.before is not None else known(block.after)
        by_terms.setdefault(there.shape[0], []).append(block)
    for _, same in sorted(by_terms.items()):
        both = _cat([b.before for b in same], 1), _cat([b.after for b in same], 1)
        found.append(EquationBlock(*both, torch.cat([b.rows for b in same]), same[0].places))
    if elements := [b for b in blocks if isinstance(b, NumberBlock)]:
        both = _cat([b.before for b in elements]), _cat([b.after for b in elements])
        found.append(NumberBlock(*both, elements[0].slots))
    return found


def _cat(sides: Sequence[Tensor | None], along: int = 0) -> Tensor | None:
    """None at a verifier that does not hold this side."""
    there = [side for side in sides if side is not None]
    return torch.cat(there, along) if there else None
