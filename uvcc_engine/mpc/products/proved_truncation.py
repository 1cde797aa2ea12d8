"""The truncation of ``truncation`` with a mask that can be proved: every message is a bilinear function of what the two
receivers know.

The dealer's own summand ``z_d`` of the product is uniform to either online party, by the zero share in it, so it is
the mask: ``z_left + z_right = z + r`` with ``r = -z_d``, and nobody sends a masked value. The dealer writes ``r`` as
the sum of a word ``p`` of its stream with left and of ``q``, which it sends to right; that ``z_d + p + q`` is zero is
a linear equation beside the product's. Of the sum's carries everything else follows. The dealer shares the carries
out of every bit by XOR, as ``a`` with left and ``b`` with right, and that they are those of ``p + q`` is an equation
per bit: ``carry' = carry ^ (p ^ carry)(q ^ carry)``. Two top bits travel as numbers modulo 2^s: what the sum carries
out, and bit 63 of ``r = p ^ q ^ 2 carry``. A number that is one of two, by a bit, is an equation per bit as well. So
a truncation is proved in a binary field, where 64 entries are one word (Boyle, Gilboa, Ishai, Nof, ASIACRYPT 2020,
prove all such statements in one inner product), but for the product itself.

With ``c = z_left + z_right + 2^62 = z + p + q + 2^62`` known to the online parties, ``z = c - p - q + 2^64 w - 2^62``,
where ``w`` is what ``p + q`` carries out, and one more if ``r`` has its top bit and ``c`` has not. Each of the three is
shifted by itself, ``p`` rounded to the nearest, so nobody needs to send an output component: those of ``p`` and ``q``
have ``w`` 's masks.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import BITS, BilinearClaim
from uvcc_engine.mpc.foundation.claim_ledger import ProductNotes, TruncationNotes
from uvcc_engine.mpc.foundation.roles import Roles, assemble, known, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels.layout import narrow_word_count, narrow_words
from uvcc_engine.mpc.kernels.plain import narrow, shift_logical
from uvcc_engine.mpc.products.truncation import (
    OFFSET,
    Opened,
    check_shift,
    from_wire,
    part_to_wire,
    to_wire,
    wire_form,
)
from uvcc_engine.transcript.formats import kinds


def truncate_proved_protocol(
    rt: Runtime,
    notes: ProductNotes,
    s: int,
    f: int,
    dealer: int,
    *,
    opened: Opened | None = None,
    watched: bool = True,
) -> MpcProtocol[Share]:
    """``sum z / 2^s`` of a product that is in the ledger, ``|sum z| < 2^62``; right on average, and off by less than
    1.5 units.

    2 rounds; 32 bytes + 4 numbers modulo 2^s per output over the three parties (40 bytes for s <= 16), as a
    small one without proofs. Shape of the product. Not ``watched``: of a number beyond the range, some other one that
    is not used.
    """
    check_shift(s)
    z = notes.z
    if watched:
        rt.watch(z, parties=3, shift=s)
    role = roles(rt, dealer)
    draws, shape = rt.draws(), tuple(z.shape)
    notes.truncation = at = TruncationNotes(s)
    if opened is not None:
        opened.truncation = at
    if not role.is_right:
        at.p, at.a = draws.ring(role.with_left, *shape), draws.ring(role.with_left, *shape)
        at.k_left, at.m_left, at.w_left = draws.narrow(role.with_left, s, 3, *shape)
    if not role.is_left:
        at.w_right = draws.narrow(role.with_right, s, *shape)
    message = Round(proved=True)
    if role.is_dealer:
        dealt = _deal(at, z, opened)
        message.send(role.right, kinds.DEALER, known(at.q))
        message.send(role.right, kinds.DEALER, known(at.b))
        message.send(role.right, kinds.DEALER, to_wire(rt, dealt, s))
        at.k_right, at.m_right = dealt
        yield message
        yield Round()
        _claim_mask(rt, at, role, shape)
        _claim_parts(rt, at, role, z.numel())
        return assemble(role, with_left=_of_left(at), with_right=_of_right(at), online=None, f=f)
    dtype, packed = wire_form(s, z.shape)
    message.send(role.other, kinds.RESHARE, z)
    if role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
        two = wire_form(s, torch.Size((2, *shape)))
        message.want(role.d, kinds.DEALER, two[0], *two[1])
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    got: list[Tensor] = yield message
    theirs = got[-1]
    notes.received[role.other] = theirs
    if role.is_right:
        at.q, at.b = got[:2]
        at.k_right, at.m_right = from_wire(got[2], s)
    at.opened = z + theirs + OFFSET
    if opened is not None:
        opened.v = at.opened - OFFSET
    k, m = (at.k_left, at.m_left) if role.is_left else (at.k_right, at.m_right)
    part = narrow(known(k).to(torch.int64) + (known(m).to(torch.int64) & ~(at.opened >> 63)), s)
    message = Round(proved=True)
    message.send(role.other, kinds.RESHARE, part_to_wire(rt, part, s))
    message.want(role.other, kinds.RESHARE, dtype, *packed)
    (wire,) = yield message
    other = from_wire(wire, s)
    at.part_left, at.part_right = (part, other) if role.is_left else (other, part)
    _claim_mask(rt, at, role, shape)
    _claim_parts(rt, at, role, z.numel())
    top = (part.to(torch.int64) + other.to(torch.int64)) << (64 - s)
    online = shift_logical(at.opened, s) - (1 << (62 - s)) + top
    with_left, with_right = (_of_left(at), None) if role.is_left else (None, _of_right(at))
    return assemble(role, with_left=with_left, with_right=with_right, online=online, f=f)


def _deal(at: TruncationNotes, z: Tensor, opened: Opened | None) -> Tensor:
    """At the dealer: its mask's second summand, and right's summands of the two top bits modulo 2^s: ``[2, ...]``."""
    p, r = known(at.p), -z
    at.q = q = r - p
    carries = (p & q) | ((p | q) & ~r)
    at.b = carries ^ known(at.a)
    if opened is not None:
        opened.u = -r
    over = shift_logical(carries, 63)
    hidden = known(at.w_left).to(torch.int64) + known(at.w_right).to(torch.int64)
    k_right = narrow(over + hidden - known(at.k_left).to(torch.int64), at.s)
    return torch.stack([k_right, narrow(shift_logical(r, 63) - known(at.m_left).to(torch.int64), at.s)])


def _of_left(at: TruncationNotes) -> Tensor:
    """The output component that dealer and left have in common."""
    p, s = known(at.p), at.s
    rounded = shift_logical(p, s) + (shift_logical(p, s - 1) & 1)
    return -rounded - (known(at.w_left).to(torch.int64) << (64 - s))


def _of_right(at: TruncationNotes) -> Tensor:
    """The output component that dealer and right have in common."""
    return -shift_logical(known(at.q), at.s) - (known(at.w_right).to(torch.int64) << (64 - at.s))


def _claim_mask(rt: Runtime, at: TruncationNotes, role: Roles, shape: tuple[int, ...]) -> None:
    """The dealer's equations: every carry of its mask, and right's summands of the two top bits.

    ``k_right - w_right = w_left - k_left + w``, so left's ``w_left - k_left`` is one of two numbers that right can
    name, and left's share of the bit ``w`` says which, bit by bit; with ``-m_right = m_left - m`` it is the same.
    """
    s, before, after = at.s, _NOTHING, _NOTHING
    chosen_before, chosen_after = _NOTHING, _NOTHING
    if not role.is_left:
        q, b = known(at.q), known(at.b)
        below = b << 1
        other = q ^ below
        before = (other, below), b ^ below ^ (below & other)
        top = torch.stack([_top(b), _top(other)])
        of_right = torch.stack([known(at.k_right) - known(at.w_right), -known(at.m_right)])
        found = _either(of_right, torch.stack([-top[0], top[1]]), torch.stack([top[0] - 1, 1 - top[1]]), s)
        chosen_before = (found[0] ^ found[1],), found[0]
    if not role.is_right:
        p, a = known(at.p), known(at.a)
        below = a << 1
        other = p ^ below
        after = (other, below), a ^ below ^ (below & other)
        of_left = torch.stack([known(at.w_left) - known(at.k_left), known(at.m_left)])
        chosen_after = (narrow_words(-torch.stack([_top(a), _top(other)]), s),), narrow_words(of_left, s)
    ledger = known(rt.ledger)
    ledger.claim(BilinearClaim(role.d, BITS, 2, shape, before[0], after[0], before[1], after[1]))
    two = (narrow_word_count(2 * math.prod(shape), s),)
    ledger.claim(
        BilinearClaim(role.d, BITS, 1, two, chosen_before[0], chosen_after[0], chosen_before[1], chosen_after[1])
    )


def _claim_parts(rt: Runtime, at: TruncationNotes, role: Roles, numbers: int) -> None:
    """An online party's part is ``k`` or ``k + m``, which the dealer knows, and the sign of ``c`` says which."""
    count = (narrow_word_count(numbers, at.s),)
    for prover in (role.left, role.right):
        is_left = prover == role.left
        k, m, part = (at.k_left, at.m_left, at.part_left) if is_left else (at.k_right, at.m_right, at.part_right)
        dealt, seen = _NOTHING, _NOTHING
        if rt.party in (prover, role.d):
            least = narrow_words(known(k), at.s)
            dealt = (least ^ narrow_words(known(k) + known(m), at.s),), least
        if not role.is_dealer:
            seen = (narrow_words(~(known(at.opened) >> 63), at.s),), narrow_words(known(part), at.s)
        before, after = (dealt, seen) if is_left else (seen, dealt)
        known(rt.ledger).claim(BilinearClaim(prover, BITS, 1, count, before[0], after[0], before[1], after[1]))


_NOTHING: Final[tuple[tuple[Tensor, ...] | None, Tensor | None]] = (None, None)


def _top(x: Tensor) -> Tensor:
    """Bit 63 of every word, as 0 or 1."""
    return shift_logical(x, 63)


def _either(x: Tensor, first: Tensor, second: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """``x + first`` and ``x + second`` modulo 2^s, as words."""
    return narrow_words(x + first, s), narrow_words(x + second, s)
