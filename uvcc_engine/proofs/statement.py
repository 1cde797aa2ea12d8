"""From a step's notes to one statement per prover: weighed by public coins, an inner product of two vectors.

Party ``q`` proves what it sent to party ``q - 1`` (which knows component ``q`` of every share, as it does) or to party
``q + 1`` (which knows component ``q + 1``). Each equation is a sum of products of something that one of the two knows
and something that the other knows, of things that one of them knows alone, and of the message; all over Z_2^64:

1. ``factor * (products of components) + zero share - z = 0``; for a dealer ``+ r - masked``, ``r = a + b - 2 (a & b)``.
2. the dealer: ``-lower - upper - (r >> s) - 2^(64-s) (k_left + k_right) = 0``.
3. the dealer: ``2^(64-s) (msb(r) - m_left - m_right) = 0``.
4. an online party: ``2^(64-s) (k + m [c >= 0] - part) = 0`` with its own ``k`` and ``m``.

and whatever else was filed as such an equation (``mpc.foundation.bilinear_claims``).

A matrix product's first equation is weighed by ``u_i v_j`` (Freivalds, 1977), so that of ``X Y`` only ``u^T X`` and ``Y
v`` are left: ``k`` entries instead of ``m k n``. All others are weighed entry by entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import NUMBERS, BilinearClaim
from uvcc_engine.mpc.foundation.claim_ledger import ELEMENTWISE, LINEAR, MATMUL, ProductNotes, TruncationNotes
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels.plain import shift_logical
from uvcc_engine.proofs.challenges import PublicCoins
from uvcc_engine.proofs.folding import SLOTS, Sizes
from uvcc_engine.proofs.vectors import Arithmetic, Block, MaskBlock, NumberBlock, WeightedBlock, merged


@dataclass(slots=True)
class ProverStatement:
    """``<u, v> + before + after = 0``: blocks with the sides that this party holds, and its own summands ``[d]``."""

    blocks: list[Block] = field(default_factory=list)
    before: Tensor | None = None
    after: Tensor | None = None


class _Weights:
    """The public coins of one equation over a shape, and what they make of a tensor of that shape."""

    def __init__(self, at: Arithmetic, coins: PublicCoins, shape: torch.Size, *, freivalds: bool) -> None:
        self._at = at
        self.rows = coins.take(shape[0] if freivalds else 0)
        self.columns = coins.take(shape[1] if freivalds else 0)
        self._flat = None if freivalds else coins.take(shape.numel())

    def of(self, x: Tensor) -> Tensor:
        """``sum w x`` ``[d]``."""
        if self._flat is not None:
            return self._at.by_small(x.reshape(1, -1), self._flat)[0]
        return self._at.inner(self._at.by_small(x.T, self.rows), self.columns)

    @property
    def flat(self) -> Tensor:
        """One weight per entry, ``[n, d]``."""
        if self._flat is None:
            ring = self._at.ring
            steps = torch.cat([ring.times(v) for v in self.columns], 1)  # [d, n d]
            self._flat = self._at.small_by(self.rows, steps).reshape(-1, ring.degree)
        return self._flat


@dataclass(slots=True)
class _Prover:
    """Whose statement is gathered, and by whom."""

    q: int
    me: int

    @property
    def before(self) -> bool:
        """Whether this party holds what the party before the prover does."""
        return self.me in (self.q, (self.q + 2) % 3)

    @property
    def after(self) -> bool:
        return self.me in (self.q, (self.q + 1) % 3)

    def component(self, share: Share, index: int) -> Tensor:
        """Component ``q + index`` of a share."""
        return share.first if (self.q + index) % 3 == self.me else share.second

    def draw(self, notes: ProductNotes, index: int) -> Tensor:
        return notes.own if (self.q + index) % 3 == self.me else notes.following

    def sent(self, notes: ProductNotes) -> Tensor:
        """The prover's message of equation 1."""
        if notes.truncation is not None and notes.dealer == self.q:
            return known(notes.truncation.masked)
        return notes.z if self.q == self.me else notes.received[self.q]


def sizes_of(notes: list[ProductNotes], claims: Sequence[BilinearClaim], q: int) -> Sizes:
    """The public sizes of prover ``q``'s blocks, as ``merged`` leaves them."""
    numbers, masks, elements = sum(one.terms * one.count for one in _numbers(claims, q)), dict[int, int](), 0
    for one in notes:
        if one.form == MATMUL:
            elements += 2 * one.x.shape[1]
        elif one.form == ELEMENTWISE:
            numbers += 2 * one.count
        if one.dealer == q:
            s = _truncation(one).s
            masks[s] = masks.get(s, 0) + one.count
        elif one.dealer is not None:
            numbers += one.count
    return Sizes((numbers,) if numbers else (), tuple(n for _, n in sorted(masks.items())), elements)


def _numbers(claims: Sequence[BilinearClaim], q: int) -> list[BilinearClaim]:
    return [one for one in claims if one.prover == q and one.algebra == NUMBERS]


def gather(
    at: Arithmetic,
    notes: list[ProductNotes],
    claims: Sequence[BilinearClaim],
    q: int,
    me: int,
    coins: PublicCoins,
) -> ProverStatement:
    """Prover ``q``'s statement over all products and equations of numbers, with what party ``me`` holds of it."""
    who, found = _Prover(q, me), ProverStatement()
    for one in notes:
        _product(at, one, who, coins, found)
    for claim in _numbers(claims, q):
        _equation(at, claim, who, coins, found)
    found.blocks = merged(found.blocks)
    return found


def _add(found: ProverStatement, who: _Prover, *, before: Tensor | None = None, after: Tensor | None = None) -> None:
    if before is not None and who.before:
        found.before = before if found.before is None else found.before + before
    if after is not None and who.after:
        found.after = after if found.after is None else found.after + after


def _product(at: Arithmetic, notes: ProductNotes, who: _Prover, coins: PublicCoins, found: ProverStatement) -> None:
    weights = _Weights(at, coins, notes.z.shape, freivalds=notes.form == MATMUL)
    q, dealer = who.q, notes.dealer
    deals, to_next = dealer == q, dealer is not None and (dealer + 1) % 3 == q
    if who.before:
        own = -who.draw(notes, 0)
        if notes.form == LINEAR:
            own = own + notes.factor * who.component(notes.x, 0)
        if deals:
            own = own + known(_truncation(notes).b)
        _add(found, who, before=weights.of(own if to_next else own - who.sent(notes)))
    if who.after:
        own = who.draw(notes, 1)
        if deals:
            own = own + known(_truncation(notes).a)
        _add(found, who, after=weights.of(own - who.sent(notes) if to_next else own))
    if notes.form == MATMUL:
        _matrix(at, notes, who, weights, found, deals, to_next)
    elif notes.form == ELEMENTWISE:
        _entries(at, notes, who, weights, found, deals, to_next)
    if deals:
        _dealt(at, notes, who, weights, coins, found)
    elif dealer is not None:
        _upper(at, notes, who, coins, found)


def _equation(at: Arithmetic, claim: BilinearClaim, who: _Prover, coins: PublicCoins, found: ProverStatement) -> None:
    weights = _Weights(at, coins, torch.Size(claim.shape), freivalds=False)
    before = after = None
    if who.before:
        before = torch.cat([t.reshape(-1) for t in claim.known_before()])
        _add(found, who, before=weights.of(claim.own(before=True)))
    if who.after:
        after = torch.cat([t.reshape(-1) for t in claim.known_after()])
        _add(found, who, after=weights.of(claim.own(before=False)))
    found.blocks.append(WeightedBlock(before, after, weights.flat.repeat(claim.terms, 1)))


def _truncation(notes: ProductNotes) -> TruncationNotes:
    return known(notes.truncation)


def _matrix(
    at: Arithmetic, notes: ProductNotes, who: _Prover, w: _Weights, found: ProverStatement, deals: bool, to_next: bool
) -> None:
    """The products of components of ``x [m, k]`` and ``y [k, n]``: ``u^T x`` and ``y v``, ``[k, d]`` each."""
    y = known(notes.y)

    def both(index: int) -> tuple[Tensor, Tensor]:
        x_part, y_part = who.component(notes.x, index), who.component(y, index)
        return at.by_small(x_part.T, w.rows), at.by_small(y_part, w.columns)

    before = after = None
    if who.before:
        left, right = both(0)
        before = torch.cat([left, right]) * notes.factor
        if notes.dealer is None or deals:
            _add(found, who, before=at.inner(left, right) * notes.factor)
    if who.after:
        left, right = both(1)
        after = torch.cat([right, left])
        if deals or to_next:
            _add(found, who, after=at.inner(left, right) * notes.factor)
    found.blocks.append(NumberBlock(before, after, slots=SLOTS))


def _entries(
    at: Arithmetic, notes: ProductNotes, who: _Prover, w: _Weights, found: ProverStatement, deals: bool, to_next: bool
) -> None:
    """The same entry by entry."""
    y, shape = known(notes.y), notes.z.shape

    def both(index: int) -> tuple[Tensor, Tensor]:
        parts = who.component(notes.x, index), who.component(y, index)
        return parts[0].expand(shape).reshape(-1), parts[1].expand(shape).reshape(-1)

    before = after = None
    if who.before:
        x_part, y_part = both(0)
        before = torch.cat([x_part, y_part]) * notes.factor
        if notes.dealer is None or deals:
            _add(found, who, before=w.of((x_part * y_part * notes.factor).reshape(shape)))
    if who.after:
        x_part, y_part = both(1)
        after = torch.cat([y_part, x_part])
        if deals or to_next:
            _add(found, who, after=w.of((x_part * y_part * notes.factor).reshape(shape)))
    found.blocks.append(WeightedBlock(before, after, torch.cat([w.flat, w.flat])))


def _dealt(
    at: Arithmetic, notes: ProductNotes, who: _Prover, first: _Weights, coins: PublicCoins, found: ProverStatement
) -> None:
    """The dealer's mask in equation 1, and equations 2 and 3."""
    t, shape = _truncation(notes), notes.z.shape
    s, top = t.s, 64 - t.s
    second, third = (_Weights(at, coins, shape, freivalds=False) for _ in range(2))
    if who.before:  # the right party's side
        b, k, m = known(t.b), known(t.k_right).to(torch.int64), known(t.m_right).to(torch.int64)
        _add(found, who, before=second.of(-known(t.lower) - shift_logical(b, s) - (k << top)))
        _add(found, who, before=third.of((shift_logical(b, 63) - m) << top))
    if who.after:  # the left party's
        a, k, m = known(t.a), known(t.k_left).to(torch.int64), known(t.m_left).to(torch.int64)
        _add(found, who, after=second.of(-known(t.upper) - shift_logical(a, s) - (k << top)))
        _add(found, who, after=third.of((shift_logical(a, 63) - m) << top))
    weights: tuple[tuple[Tensor, int, int], ...] = ()
    if who.before:
        weights = ((first.flat, 0, -2), (second.flat, s, 2), (third.flat, 63, _signed(-2 << top)))
    b_words = known(t.b).reshape(-1) if who.before else None
    a_words = known(t.a).reshape(-1) if who.after else None
    found.blocks.append(MaskBlock(b_words, a_words, weights, s))


def _signed(x: int) -> int:
    """A number modulo 2^64 as int64 holds it."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _upper(at: Arithmetic, notes: ProductNotes, who: _Prover, coins: PublicCoins, found: ProverStatement) -> None:
    """Equation 4 of an online party: the dealer knows ``k`` and ``m``, the other one ``[c >= 0]`` and the part."""
    t = _truncation(notes)
    top = 64 - t.s
    weights = _Weights(at, coins, notes.z.shape, freivalds=False)
    is_left = (known(notes.dealer) + 1) % 3 == who.q
    dealer_side = who.before if is_left else who.after
    online_side = who.after if is_left else who.before
    dealt = opened = None
    if dealer_side:
        k, m = (t.k_left, t.m_left) if is_left else (t.k_right, t.m_right)
        own = weights.of(known(k).to(torch.int64) << top)
        _add(found, who, before=own if is_left else None, after=None if is_left else own)
        dealt = (known(m).to(torch.int64) << top).reshape(-1)
    if online_side:
        part = known(t.part_left if is_left else t.part_right).to(torch.int64)
        own = weights.of(-(part << top))
        _add(found, who, before=None if is_left else own, after=own if is_left else None)
        opened = (known(t.opened) >= 0).to(torch.int64).reshape(-1)
    sides = (dealt, opened) if is_left else (opened, dealt)
    found.blocks.append(WeightedBlock(*sides, weights.flat))
