"""From a step's notes to one statement per prover: weighed by public coins, an inner product of two vectors.

Party ``q`` proves what it sent to party ``q - 1`` (which knows component ``q`` of every share, as it does) or to party
``q + 1`` (which knows component ``q + 1``). Each equation is a sum of products of something that one of the two knows
and something that the other knows, of things that one of them knows alone, and of the message; all over Z_2^64:

``factor * (products of components) + zero share - z = 0``; for a dealer ``+ p + q - masked``

and whatever else was filed as such an equation of numbers (``mpc.foundation.bilinear_claims``). What else a truncation
sends are equations of bits (``proved_truncation``).

A matrix product's equation is weighed by ``u_i v_j`` (Freivalds, 1977), so that of ``X Y`` only ``u^T X`` and ``Y
v`` are left: ``k`` entries instead of ``m k n``; of several products at once, such as those of attention's heads, as
many for each, with a ``u`` for each and one ``v`` for all. Where the product's patches are added up to images, the
transpose of a convolution, ``v`` weighs pixels, and what is cut from ``v`` as patches are cut weighs the product: an
entry for each channel and position. All others are weighed in groups of as many entries as the first fold takes: by one
coin for the group and one for the place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import NUMBERS, BilinearClaim
from uvcc_engine.mpc.foundation.claim_ledger import (
    ELEMENTWISE,
    LINEAR,
    MATMUL,
    PATCHES,
    SUMMED,
    ProductNotes,
    TruncationNotes,
)
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.proofs.challenges import PublicCoins
from uvcc_engine.proofs.folding import Sizes
from uvcc_engine.proofs.vectors import Arithmetic, Block, EquationBlock, NumberBlock, merged

Sides = tuple[bool, bool]
"""Whose part of a statement the prover gathers, who holds both: that of the party before it, of the one after it."""


@dataclass(slots=True)
class ProverStatement:
    """``<u, v> + before + after = 0``: blocks with the sides that this party holds, and its own summands ``[d]``."""

    blocks: list[Block] = field(default_factory=list)
    before: Tensor | None = None
    after: Tensor | None = None


class _Weights:
    """The public coins of one equation over a shape, and what they make of a tensor of that shape."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size, places: Tensor) -> None:
        """``places``: ``[fold, d]``, those of all equations."""
        self._at, self._fold, self.places = at, len(places), places
        self.rows = coins.words(-(-shape.numel() // self._fold))

    def grouped(self, x: Tensor) -> Tensor:
        """``[groups, fold]``, zeros at the end."""
        return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % self._fold)).reshape(-1, self._fold)

    def of(self, x: Tensor) -> Tensor:
        """``sum w x`` ``[d]``."""
        by_place = self._at.kernels.weigh(self.grouped(x), self.rows, self._at.ring.degree)
        return self._at.ring.inner(by_place.T, self.places)

    def block(self, before: Sequence[Tensor] | None, after: Sequence[Tensor] | None) -> EquationBlock:
        """The products of an equation: its factors on the two sides, as far as this party holds them."""
        sides = [None if one is None else torch.stack([self.grouped(t) for t in one]) for one in (before, after)]
        return EquationBlock(sides[0], sides[1], self.rows, self.places)


class _MatrixWeights:
    """The public coins ``u_i v_j`` of a matrix product (Freivalds)."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size) -> None:
        self._at = at
        self.rows, self.columns = coins.words(shape[0]), coins.words(shape[1])

    def of(self, x: Tensor) -> Tensor:
        """``sum_ij u_i v_j x_ij`` ``[d]``."""
        return self._at.inner(self.from_left(x), self._at.ring.challenges(self.columns))

    def from_left(self, x: Tensor) -> Tensor:
        """``u^T x`` of ``[m, k]``: ``[k, d]``."""
        return self._at.kernels.weigh(x.contiguous(), self.rows, self._at.ring.degree).T.contiguous()

    def from_right(self, y: Tensor) -> Tensor:
        """``y v`` of ``[k, n]``: ``[k, d]``."""
        return self._at.kernels.weigh(y.T.contiguous(), self.columns, self._at.ring.degree).T.contiguous()


class _BatchWeights(_MatrixWeights):
    """The same of several products at once ``[.., m, k] @ [.., k, n]``, with coins for the rows of each."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size) -> None:
        super().__init__(at, coins, torch.Size((shape[:-1].numel(), shape[-1])))

    def of(self, x: Tensor) -> Tensor:
        """``sum_bij u_bi v_j x_bij`` ``[d]``."""
        columns = self._at.ring.challenges(self.columns)
        return self._at.inner(super().from_left(x.reshape(-1, x.shape[-1])), columns)

    def from_left(self, x: Tensor) -> Tensor:
        """``u_b^T x_b``, one product after the other: ``[products k, d]``."""
        parts, rows = x.reshape(-1, *x.shape[-2:]), self.rows.reshape(-1, x.shape[-2])
        weigh, degree = self._at.kernels.weigh, self._at.ring.degree
        return torch.cat([weigh(p.contiguous(), u.contiguous(), degree).T for p, u in zip(parts, rows, strict=True)])

    def from_right(self, y: Tensor) -> Tensor:
        """``y_b v``, one after the other: ``[products k, d]``."""
        return super().from_right(y.reshape(-1, y.shape[-1]))


class _PatchWeights(_MatrixWeights):
    """The same of the images ``[m, pixels]`` to which the patches of ``[m positions, k] @ [k, patch]`` add up."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, notes: ProductNotes) -> None:
        super().__init__(at, coins, notes.z.shape)
        self._cut, self._images = known(notes.cut), notes.z.shape[0]

    def from_left(self, x: Tensor) -> Tensor:
        """``u^T x`` of ``[m positions, k]``, by position: ``[positions k, d]``; of images ``[m, pixels]`` as before."""
        return super().from_left(x.reshape(self._images, -1))

    def from_right(self, y: Tensor) -> Tensor:
        """``y cut(v)`` of ``[k, patch]``, by position: ``[positions k, d]``."""
        patches = self._cut(self._at.ring.challenges(self.columns).T.contiguous())  # [d positions, patch]
        found = self._at.kernels.right_factor([y.T.contiguous()], patches.shape[0])([patches.contiguous()])
        return found.reshape(self._at.ring.degree, -1).T.contiguous()


@dataclass(slots=True)
class _Prover:
    """Whose statement is gathered, and by whom."""

    q: int
    me: int
    sides: Sides | None = None

    @property
    def before(self) -> bool:
        """Whether what the party before the prover holds is gathered."""
        return self.me in (self.q, (self.q + 2) % 3) if self.sides is None else self.sides[0]

    @property
    def after(self) -> bool:
        return self.me in (self.q, (self.q + 1) % 3) if self.sides is None else self.sides[1]

    def component(self, share: Share, index: int) -> Tensor:
        """Component ``q + index`` of a share."""
        return share.first if (self.q + index) % 3 == self.me else share.second

    def draw(self, notes: ProductNotes, index: int) -> Tensor:
        return notes.own if (self.q + index) % 3 == self.me else notes.following

    def sent(self, notes: ProductNotes) -> Tensor:
        """The prover's message."""
        if notes.truncation is not None and notes.dealer == self.q:
            return known(notes.truncation.masked)
        return notes.z if self.q == self.me else notes.received[self.q]


def sizes_of(notes: list[ProductNotes], claims: Sequence[BilinearClaim], q: int) -> Sizes:
    """The public sizes of prover ``q``'s blocks."""
    equations, elements = [(one.terms, one.count) for one in _numbers(claims, q)], 0
    for one in notes:
        if one.form == MATMUL:  # an entry for each column of x, in each of several products
            elements += 2 * one.x.shape[-1] * one.z.shape[:-2].numel()
        elif one.form == PATCHES:  # in each position of an image
            elements += 2 * one.x.shape[1] * (one.x.shape[0] // one.z.shape[0])
        elif one.form == ELEMENTWISE:
            equations.append((2, one.count))
        elif one.form == SUMMED:
            equations.append((2 * one.x.shape[-1], one.count))
    summed = not equations and not elements and bool(notes)  # sums alone: a zero stands for what is multiplied
    return Sizes(tuple(equations), elements + summed)


def _numbers(claims: Sequence[BilinearClaim], q: int) -> list[BilinearClaim]:
    return [one for one in claims if one.prover == q and one.algebra == NUMBERS]


def gather(
    at: Arithmetic,
    notes: list[ProductNotes],
    claims: Sequence[BilinearClaim],
    q: int,
    me: int,
    coins: PublicCoins,
    fold: int,
    sides: Sides | None = None,
) -> ProverStatement:
    """Prover ``q``'s statement over all products and equations of numbers, with what party ``me`` holds of it; to be
    folded by ``fold`` first. ``sides``: at the prover, what a verifier holds of it, as the prover knows it."""
    who, found = _Prover(q, me, sides), ProverStatement()
    places = coins.take(fold)
    for one in notes:
        _product(at, one, who, coins, places, found)
    for claim in _numbers(claims, q):
        _equation(at, claim, who, coins, places, found)
    if not found.blocks:
        none = torch.zeros(1, at.ring.degree, dtype=torch.int64)
        found.blocks.append(NumberBlock(none if who.before else None, none if who.after else None))
    found.blocks = merged(found.blocks)
    return found


def _add(found: ProverStatement, who: _Prover, *, before: Tensor | None = None, after: Tensor | None = None) -> None:
    if before is not None and who.before:
        found.before = before if found.before is None else found.before + before
    if after is not None and who.after:
        found.after = after if found.after is None else found.after + after


def _product(
    at: Arithmetic, notes: ProductNotes, who: _Prover, coins: PublicCoins, places: Tensor, found: ProverStatement
) -> None:
    weights = _weights(at, notes, coins, places)
    q, dealer = who.q, notes.dealer
    deals, to_next = dealer == q, dealer is not None and (dealer + 1) % 3 == q
    if who.before and not who.after:
        own = -who.draw(notes, 0)
        if notes.form == LINEAR:
            own = own + notes.factor * who.component(notes.x, 0)
        if deals:
            own = own + known(_truncation(notes).q)
        _add(found, who, before=weights.of(own if to_next else own - who.sent(notes)))
    if who.after and not who.before:
        own = who.draw(notes, 1)
        if deals:
            own = own + known(_truncation(notes).p)
        _add(found, who, after=weights.of(own - who.sent(notes) if to_next else own))
    if isinstance(weights, _MatrixWeights):
        _matrix(at, notes, who, weights, found, deals, to_next)
    elif notes.form in (ELEMENTWISE, SUMMED):
        _entries(notes, who, weights, found, deals, to_next)


def _weights(at: Arithmetic, notes: ProductNotes, coins: PublicCoins, places: Tensor) -> _Weights | _MatrixWeights:
    """The coins of a product's equation, by what the product is."""
    if notes.form == PATCHES:
        return _PatchWeights(at, coins, notes)
    if notes.form == MATMUL:
        return (_MatrixWeights if notes.z.dim() == 2 else _BatchWeights)(at, coins, notes.z.shape)
    return _Weights(at, coins, notes.z.shape, places)


def _equation(
    at: Arithmetic, claim: BilinearClaim, who: _Prover, coins: PublicCoins, places: Tensor, found: ProverStatement
) -> None:
    weights = _Weights(at, coins, torch.Size(claim.shape), places)
    if not who.after:
        _add(found, who, before=weights.of(claim.own(before=True)))
    if not who.before:
        _add(found, who, after=weights.of(claim.own(before=False)))
    before = claim.known_before() if who.before else None
    found.blocks.append(weights.block(before, claim.known_after() if who.after else None))


def _truncation(notes: ProductNotes) -> TruncationNotes:
    return known(notes.truncation)


def _matrix(
    at: Arithmetic,
    notes: ProductNotes,
    who: _Prover,
    w: _MatrixWeights,
    found: ProverStatement,
    deals: bool,
    to_next: bool,
) -> None:
    """The products of components of ``x [m, k]`` and ``y [k, n]``: ``u^T x`` and ``y v``, ``[k, d]`` each."""
    y = known(notes.y)

    def both(index: int) -> tuple[Tensor, Tensor]:
        return w.from_left(who.component(notes.x, index)), w.from_right(who.component(y, index))

    before = after = None
    if who.before:
        left, right = both(0)
        before = torch.cat([left, right]) * notes.factor
        if not who.after and (notes.dealer is None or deals):
            _add(found, who, before=at.inner(left, right) * notes.factor)
    if who.after:
        left, right = both(1)
        after = torch.cat([right, left])
        if not who.before and (deals or to_next):
            _add(found, who, after=at.inner(left, right) * notes.factor)
    found.blocks.append(NumberBlock(before, after))


def _entries(
    notes: ProductNotes, who: _Prover, w: _Weights, found: ProverStatement, deals: bool, to_next: bool
) -> None:
    """The same entry by entry; of sums of products every summand is a term of the entry."""
    y, summed = known(notes.y), notes.form == SUMMED
    shape = notes.x.shape if summed else notes.z.shape

    def both(index: int) -> tuple[Tensor, Tensor]:
        return who.component(notes.x, index).expand(shape), who.component(y, index).expand(shape)

    def terms(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (*x.unbind(-1), *y.unbind(-1)) if summed else (x, y)

    def alone(x: Tensor, y: Tensor) -> Tensor:
        """What one of the two verifiers knows of all products."""
        product = x * y
        return (product.sum(-1) if summed else product) * notes.factor

    before = after = None
    if who.before:
        x_part, y_part = both(0)
        before = terms(x_part * notes.factor, y_part * notes.factor)
        if not who.after and (notes.dealer is None or deals):
            _add(found, who, before=w.of(alone(x_part, y_part)))
    if who.after:
        x_part, y_part = both(1)
        after = terms(y_part, x_part)
        if not who.before and (deals or to_next):
            _add(found, who, after=w.of(alone(x_part, y_part)))
    found.blocks.append(w.block(before, after))
