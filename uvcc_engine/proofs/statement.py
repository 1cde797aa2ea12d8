"""From a step's notes to one statement per prover: weighed by public coins, an inner product of two vectors.

Party ``q`` proves what it sent to party ``q - 1`` (which knows component ``q`` of every share, as it does) or to party
``q + 1`` (which knows component ``q + 1``). Each equation is a sum of products of something that one of the two knows
and something that the other knows, of things that one of them knows alone, and of the message; all over Z_2^64:

``factor * (products of components) + zero share - z = 0``; for a truncation's dealer ``+ p + q`` instead of ``- z``

and whatever else was filed as such an equation of numbers (``mpc.foundation.bilinear_claims``). What else a truncation
sends are equations of bits (``proved_truncation``).

A matrix product's equation is weighed by ``u_i v_j`` (Freivalds, 1977), so that of ``X Y`` only ``u^T X`` and ``Y v``
are left: ``k`` entries instead of ``m k n``; of several products at once, such as those of attention's heads, as many
for each, with a ``u`` for each and one ``v`` for all, as slices of a larger product's rows have. Where the product's
patches are added up to images, the transpose of a convolution, ``v`` weighs pixels, and what is cut from ``v`` as
patches are cut weighs the product: an entry for each channel and position. All others are weighed in groups of as
many entries as the first fold takes: by one coin for the group and one for the place in it.
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
from uvcc_engine.proofs.folding import Fold, Sizes
from uvcc_engine.proofs.vectors import Arithmetic, Block, Equation, NumberBlock, merged

Sides = tuple[bool, bool]
"""Whose part of a statement the prover gathers, who holds both: that of the party before it, of the one after it."""


@dataclass(slots=True)
class ProverStatement:
    """``<u, v> + before + after = 0``: blocks with the sides that this party holds, and its own summands ``[d]``.

    ``places`` ``[fold, width]``: what the places of the first fold weigh, where that is left to the verifiers.
    """

    blocks: list[Block] = field(default_factory=list)
    before: Tensor | None = None
    after: Tensor | None = None
    places: Tensor | None = None


@dataclass(slots=True)
class _Gathered:
    """The same before what is alike is one block; ``*_places``: summands by their place in a group ``[d, fold]``."""

    equations: list[Equation] = field(default_factory=list)
    elements: list[NumberBlock] = field(default_factory=list)
    before: Tensor | None = None
    after: Tensor | None = None
    before_places: Tensor | None = None
    after_places: Tensor | None = None
    columns: dict[int, SharedColumns] = field(default_factory=dict)  # by what slices of one product have in common


class _Weights:
    """The public coins of one equation over a shape, and what they make of a tensor of that shape."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size, fold: Fold) -> None:
        """``fold``: by which groups of entries are folded first."""
        self._at, self._fold = at, fold
        self.rows = coins.words(-(-shape.numel() // self._fold.size))

    def grouped(self, x: Tensor) -> Tensor:
        """``[groups, fold]``, zeros at the end; for a ternary fold ``[fold, groups]``."""
        flat, short = x.reshape(-1), -x.numel() % self._fold.size
        whole = torch.nn.functional.pad(flat, (0, short)) if short else flat
        return whole.reshape(self._fold.size, -1) if self._fold.ternary else whole.reshape(-1, self._fold.size)

    def by_place(self, x: Tensor) -> Tensor:
        """``[d, fold]``: of every place in a group the sum of its entries, weighed by their groups' coins."""
        kernels, groups, degree = self._at.kernels, self.grouped(x), self._at.ring.degree
        if self._fold.ternary:
            return kernels.weigh_columns(groups, self.rows, degree).T
        return kernels.weigh(groups, self.rows, degree)

    def equation(self, terms: int, before: Sequence[Tensor] | None, after: Sequence[Tensor] | None) -> Equation:
        """The products of an equation: its factors on the two sides, as far as this party holds them."""
        sides = [None if one is None else [self.grouped(t) for t in one] for one in (before, after)]
        return Equation(terms, sides[0], sides[1], self.rows)


class _MatrixWeights:
    """The public coins ``u_i v_j`` of a matrix product (Freivalds)."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size, columns: Tensor | None = None) -> None:
        """``columns``: the coins ``v`` ``[n]`` where other products have drawn them."""
        self._at = at
        self.rows = coins.words(shape[0])
        self.columns = coins.words(shape[1]) if columns is None else columns

    def of(self, x: Tensor) -> Tensor:
        """``sum_ij u_i v_j x_ij`` ``[d]``."""
        return self._at.inner(self.from_left(x), self._at.ring.challenges(self.columns))

    def from_left(self, x: Tensor) -> Tensor:
        """``u^T x`` of ``[m, k]``: ``[k, d]``."""
        return self._weighed(x, self.rows)

    def from_right(self, y: Tensor) -> Tensor:
        """``y v`` of ``[k, n]``: ``[k, d]``."""
        return self._weighed(y.T, self.columns)

    def _weighed(self, x: Tensor, words: Tensor) -> Tensor:
        """The sum of the rows of ``x`` under these weights, ``[k, d]``; that of a transpose as it lies in memory."""
        if x.T.is_contiguous():
            return self._at.kernels.weigh_columns(x.T, words, self._at.ring.degree)
        return self._at.kernels.weigh(x.contiguous(), words, self._at.ring.degree).T.contiguous()


class SharedColumns:
    """The coins ``v`` of products with one right factor, and what they make of its components ``[k, n]``."""

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self.products: dict[int, Tensor] = {}  # by the component, which the step's notes keep


class _SliceWeights(_MatrixWeights):
    """Those of one slice of the rows of a larger product, which has one ``v`` for all of them."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size, shared: SharedColumns) -> None:
        super().__init__(at, coins, shape, shared.columns)
        self._shared = shared

    def from_right(self, y: Tensor) -> Tensor:
        """As before, once for all slices."""
        products = self._shared.products
        if id(y) not in products:
            products[id(y)] = super().from_right(y)
        return products[id(y)]


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
class Prover:
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
        """Component ``q + index`` of a share, in its shape."""
        return share.first if (self.q + index) % 3 == self.me else share.second

    def draw(self, notes: ProductNotes, index: int) -> Tensor:
        return notes.own if (self.q + index) % 3 == self.me else notes.following

    def sent(self, notes: ProductNotes) -> Tensor:
        """The prover's message, in the product's shape."""
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
    fold: Fold,
    sides: Sides | None = None,
) -> ProverStatement:
    """Prover ``q``'s statement over all products and equations of numbers, with what party ``me`` holds of it; to be
    folded by ``fold`` first. ``sides``: at the prover, what a verifier holds of it, as the prover knows it."""
    who, found = Prover(q, me, sides), _Gathered()
    places = coins.take(fold.size)
    if fold.ternary:
        places[0] = torch.nn.functional.one_hot(torch.tensor(0), at.ring.degree)  # it follows from the others
    for one in notes:
        _product(at, one, who, coins, fold, found)
    for claim in _numbers(claims, q):
        _equation(at, claim, who, coins, fold, found)
    if not found.equations and not found.elements:
        none = torch.zeros(1, at.ring.degree, dtype=torch.int64)
        found.elements.append(NumberBlock(none if who.before else None, none if who.after else None))
    if found.before_places is not None:
        found.before = _sum(found.before, at.ring.inner(found.before_places.T, places))
    if found.after_places is not None:
        found.after = _sum(found.after, at.ring.inner(found.after_places.T, places))
    blocks = merged(found.equations, found.elements, places, fold)
    return ProverStatement(blocks, found.before, found.after, places)


def _sum(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _add(found: _Gathered, weights: _Weights | _MatrixWeights, *, before: Tensor | None, after: Tensor | None) -> None:
    """Weigh what one verifier knows alone, of the shape of the equation."""
    if isinstance(weights, _Weights):
        if before is not None:
            found.before_places = _sum(found.before_places, weights.by_place(before))
        if after is not None:
            found.after_places = _sum(found.after_places, weights.by_place(after))
        return
    if before is not None:
        found.before = _sum(found.before, weights.of(before))
    if after is not None:
        found.after = _sum(found.after, weights.of(after))


def _product(
    at: Arithmetic, notes: ProductNotes, who: Prover, coins: PublicCoins, fold: Fold, found: _Gathered
) -> None:
    weights = _weights(at, notes, coins, fold, found)
    q, dealer = who.q, notes.dealer
    deals, to_next = dealer == q, dealer is not None and (dealer + 1) % 3 == q
    if who.before and not who.after:
        own = -who.draw(notes, 0)
        if notes.form == LINEAR:
            own = own + notes.factor * who.component(notes.x, 0)
        if deals:
            own = own + known(_truncation(notes).q)
        _add(found, weights, before=own if to_next or deals else own - who.sent(notes), after=None)
    if who.after and not who.before:
        own = who.draw(notes, 1)
        if deals:
            own = own + known(_truncation(notes).p)
        _add(found, weights, before=None, after=own - who.sent(notes) if to_next else own)
    if isinstance(weights, _MatrixWeights):
        _matrix(at, notes, who, weights, found, deals, to_next)
    elif notes.form in (ELEMENTWISE, SUMMED):
        _entries(notes, who, weights, found, deals, to_next)


def _weights(
    at: Arithmetic, notes: ProductNotes, coins: PublicCoins, fold: Fold, found: _Gathered
) -> _Weights | _MatrixWeights:
    """The coins of a product's equation, by what the product is."""
    if notes.form == PATCHES:
        return _PatchWeights(at, coins, notes)
    if notes.form != MATMUL:
        return _Weights(at, coins, notes.z.shape, fold)
    if notes.whole is None:
        return (_MatrixWeights if notes.z.dim() == 2 else _BatchWeights)(at, coins, notes.z.shape)
    if id(notes.whole) not in found.columns:
        found.columns[id(notes.whole)] = SharedColumns(coins.words(notes.z.shape[1]))
    return _SliceWeights(at, coins, notes.z.shape, found.columns[id(notes.whole)])


def _equation(
    at: Arithmetic, claim: BilinearClaim, who: Prover, coins: PublicCoins, fold: Fold, found: _Gathered
) -> None:
    weights = _Weights(at, coins, torch.Size(claim.shape), fold)
    own_before = None if who.after else claim.own(before=True)
    _add(found, weights, before=own_before, after=None if who.before else claim.own(before=False))
    before = claim.known_before() if who.before else None
    found.equations.append(weights.equation(claim.terms, before, claim.known_after() if who.after else None))


def _truncation(notes: ProductNotes) -> TruncationNotes:
    return known(notes.truncation)


def _matrix(
    at: Arithmetic,
    notes: ProductNotes,
    who: Prover,
    w: _MatrixWeights,
    found: _Gathered,
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
            found.before = _sum(found.before, at.inner(left, right) * notes.factor)
    if who.after:
        left, right = both(1)
        after = torch.cat([right, left])
        if not who.before and (deals or to_next):
            found.after = _sum(found.after, at.inner(left, right) * notes.factor)
    found.elements.append(NumberBlock(before, after))


def _entries(notes: ProductNotes, who: Prover, w: _Weights, found: _Gathered, deals: bool, to_next: bool) -> None:
    """The same entry by entry; of sums of products every summand is a term of the entry."""
    y, summed = known(notes.y), notes.form == SUMMED
    shape = notes.x.shape if summed else notes.z.shape

    def both(index: int) -> tuple[Tensor, Tensor]:
        return who.component(notes.x, index).expand(shape), who.component(y, index).expand(shape)

    def scaled(x: Tensor) -> Tensor:
        return x if notes.factor == 1 else x * notes.factor

    def terms(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (*x.unbind(-1), *y.unbind(-1)) if summed else (x, y)

    def alone(x: Tensor, y: Tensor) -> Tensor:
        """What one of the two verifiers knows of all products."""
        return scaled((x * y).sum(-1) if summed else x * y)

    before = after = None
    if who.before:
        x_part, y_part = both(0)
        before = terms(scaled(x_part), scaled(y_part))
        if not who.after and (notes.dealer is None or deals):
            _add(found, w, before=alone(x_part, y_part), after=None)
    if who.after:
        x_part, y_part = both(1)
        after = terms(y_part, x_part)
        if not who.before and (deals or to_next):
            _add(found, w, before=None, after=alone(x_part, y_part))
    found.equations.append(w.equation(2 * (notes.x.shape[-1] if summed else 1), before, after))
