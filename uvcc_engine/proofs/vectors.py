"""The two long vectors of a prover's statement, in blocks of one shape each, and what is computed of them.

The statement is ``<u, v> = t`` with ``u`` known to the prover and the party before it, ``v`` to the prover and the
party after it. A verifier holds its own side of every block only. A fold by ``L`` takes ``L`` neighbouring entries for
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
from uvcc_engine.proofs.galois_ring import GaloisRing

_WORD = 64
_ROWS = 1 << 13  # of words at a time, so that their bits stay in the cache


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The ring, and the device's matrix product for what is long."""

    ring: GaloisRing
    kernels: Kernels

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` of integers modulo 2^64; numbers that are small on one side take half of the work."""
        if not a.numel() or not b.numel():
            return torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64)
        if _are_small(b):
            return self.by_small(a, b)
        if _are_small(a.T):
            return self.small_by(a, b)
        return self.kernels.right_factor([b.contiguous()], a.shape[0])([a.contiguous()])

    def by_small(self, a: Tensor, b: Tensor, bits: int = 64) -> Tensor:
        """``a @ b`` modulo 2^64 for ``b`` of small numbers (``[..., k, n]``, ``k |b| < 2^31``): two or three exact
        products of doubles, where ``product`` takes six. ``bits``: those that ``a`` can have, if it has no sign."""
        if not a.numel() or not b.numel():
            return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.int64)
        small = b.to(torch.float64)
        return sum_of_limbs(a, lambda limb: limb @ small, _limb_bits(a.shape[-1], b), bits)

    def small_by(self, a: Tensor, b: Tensor) -> Tensor:
        """The same with the small numbers on the left."""
        if not a.numel() or not b.numel():
            return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.int64)
        small = a.to(torch.float64)
        return sum_of_limbs(b, lambda limb: small @ limb, _limb_bits(a.shape[-1], a))

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i a_i b_i`` ``[d]`` of elements ``[n, d]``, or plain numbers ``[n, 1]`` on either side."""
        outer = self.product(a.T, b)
        return self.ring.collapsed(outer) if 1 not in outer.shape else self.widened(outer.reshape(-1))

    def widened(self, x: Tensor) -> Tensor:
        """Coefficients ``[..., 1 or d]`` as an element ``[..., d]``."""
        return torch.nn.functional.pad(x, (0, self.ring.degree - x.shape[-1]))


_OUTER = 1 << 20  # products of coefficients at a time
_LIMB, _WIDE_LIMB = 22, 32  # bits: a limb times 2^31, or 2^21, is exact as a double


def _are_small(x: Tensor) -> bool:
    """Whether ``by_small`` takes this right factor ``[k, n]``."""
    low, high = x.aminmax()
    return x.shape[0] * max(-int(low), int(high)) < 1 << 31


def _limb_bits(inner: int, small: Tensor) -> int:
    """How wide the limbs may be that are summed up ``inner`` times with ``small`` numbers."""
    low, high = small.aminmax()
    return _WIDE_LIMB if inner * max(-int(low), int(high)) < 1 << 21 else _LIMB


def sum_of_limbs(x: Tensor, of: Callable[[Tensor], Tensor], width: int = _LIMB, bits: int = _WORD) -> Tensor:
    """A linear function of ``x`` modulo 2^64, from its values for limbs of ``x`` as doubles.

    The shape is that of the function.
    """
    total: Tensor | None = None
    for start in range(0, bits, width):
        limb = x >> start if start + width >= bits else (x >> start) & ((1 << width) - 1)
        part = of(limb.to(torch.float64)).to(torch.int64)
        part = part << start if start else part
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


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
class WeightedBlock:
    """Entries ``w u v`` of numbers modulo 2^64 ``[n]`` and public weights ``[n, d]`` of small coefficients: the weights
    belong to ``v``'s side."""

    before: Tensor | None
    after: Tensor | None
    weights: Tensor

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        u, v, w = (_grouped(x, fold) for x in (known(self.before), known(self.after), self.weights))
        pairs = torch.empty(fold, fold, at.ring.degree, dtype=torch.int64)
        for l_after in range(fold):
            pairs[:, l_after] = at.by_small((u * v[:, l_after, None]).T, w[:, l_after])
        return _diagonals(pairs)

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return at.product(_grouped(known(self.before), len(powers)), powers)

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        v, w = (_grouped(x, len(powers)) for x in (known(self.after), self.weights))
        total = torch.zeros(v.shape[0], at.ring.degree, dtype=torch.int64)
        for number, step in enumerate(at.ring.times(powers.flip(0))):
            total += at.small_by(w[:, number], step) * v[:, number, None]
        return total


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


@dataclass(frozen=True, slots=True, eq=False)
class MaskBlock:
    """What a truncation's mask takes: ``sum_e sum_k w_ek f_k(b_e & a_e)`` over words, ``f_k(x) = c_k (x >> s_k)``.

    ``a`` (``v``'s side) and ``b`` (``u``'s side) are words ``[n]``; ``weights``: (``[n, d]``, ``s_k``, ``c_k``). As an
    inner product it has ``64 n`` entries, one a bit. They are folded over the words of a group, each bit for itself, so
    the coefficients come from whole words; after it every group has 64 entries.
    """

    b: Tensor | None
    a: Tensor | None
    weights: Sequence[tuple[Tensor, int, int]]
    shift: int = 0

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        b, a = _grouped(known(self.b), fold), _grouped(known(self.a), fold)
        pairs = torch.zeros(fold, fold, at.ring.degree, dtype=torch.int64)
        grouped = [_grouped(weights, fold) for weights, _, _ in self.weights]
        for l_before in range(fold):
            both = b[:, l_before, None] & a
            for (_, shift, factor), small in zip(self.weights, grouped, strict=True):
                part = at.by_small(_shifted(both, shift).T, small[:, l_before], _WORD - shift)
                pairs[l_before] += part * factor
        return _diagonals(pairs)

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        fold, weighted = len(powers), []
        steps = at.ring.times(powers)
        for weights, shift, factor in self.weights:
            turned = at.small_by(_grouped(weights, fold).transpose(0, 1), steps).transpose(0, 1)
            weighted.append((turned * factor, shift))
        return _by_rows(
            _grouped(known(self.b), fold), at.ring.degree, lambda bits, rows: _weighted(at, bits, weighted, rows)
        )

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        turned = powers.flip(0)

        def fold_rows(bits: Tensor, rows: slice) -> Tensor:
            groups, fold, _ = bits.shape
            flat = bits.transpose(1, 2).reshape(groups * _WORD, fold)
            return at.small_by(flat, turned).reshape(groups, _WORD, -1)

        return _by_rows(_grouped(known(self.a), len(powers)), at.ring.degree, fold_rows)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> shift) & ((1 << (_WORD - shift)) - 1) if shift else x


def _by_rows(words: Tensor, degree: int, of: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """``[groups, fold]`` words, as bits ``[.., fold, 64]`` some rows at a time, to ``[groups * 64, d]``."""
    groups, fold = words.shape
    out = torch.empty(groups, _WORD, degree, dtype=torch.int64)
    step = max(1, _ROWS // fold)
    for start in range(0, groups, step):
        rows = slice(start, min(start + step, groups))
        out[rows] = of((words[rows].unsqueeze(-1) >> torch.arange(_WORD)) & 1, rows)
    return out.reshape(-1, degree)


def _weighted(at: Arithmetic, bits: Tensor, weighted: Sequence[tuple[Tensor, int]], rows: slice) -> Tensor:
    """``[groups, 64, d]``: for every bit ``i`` the sum over the group of ``bit * w * 2^(i - s)`` where ``i >= s``."""
    total = torch.zeros(bits.shape[0], _WORD, weighted[0][0].shape[-1], dtype=torch.int64)
    by_bit = bits.transpose(1, 2)
    for turned, shift in weighted:
        part = at.small_by(by_bit[:, shift:], turned[rows])
        total[:, shift:] += part << torch.arange(_WORD - shift)[None, :, None]
    return total


def merged(blocks: Sequence[Block]) -> list[Block]:
    """As few blocks as there are forms of them: what a block costs beside its entries is paid once.

    Weighted numbers, masks by the shift, then elements: the order of ``statement.sizes_of``.
    """
    found: list[Block] = []
    if weighted := [b for b in blocks if isinstance(b, WeightedBlock)]:
        both = _cat([b.before for b in weighted]), _cat([b.after for b in weighted])
        found.append(WeightedBlock(*both, torch.cat([b.weights for b in weighted])))
    masks = [b for b in blocks if isinstance(b, MaskBlock)]
    for shift in sorted({b.shift for b in masks}):
        of_shift = [b for b in masks if b.shift == shift]
        weights = [
            (torch.cat([w for w, _, _ in same]), same[0][1], same[0][2])
            for same in zip(*(b.weights for b in of_shift), strict=True)
        ]
        found.append(MaskBlock(_cat([b.b for b in of_shift]), _cat([b.a for b in of_shift]), weights, shift))
    if elements := [b for b in blocks if isinstance(b, NumberBlock)]:
        both = _cat([b.before for b in elements]), _cat([b.after for b in elements])
        found.append(NumberBlock(*both, elements[0].slots))
    return found


def _cat(sides: Sequence[Tensor | None]) -> Tensor | None:
    """None at a verifier that does not hold this side."""
    there = [side for side in sides if side is not None]
    return torch.cat(there) if there else None
