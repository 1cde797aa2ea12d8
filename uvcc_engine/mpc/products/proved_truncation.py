"""The truncation of ``truncation`` with a mask that can be proved: every message is a bilinear function of what the two
receivers know.

The dealer's mask ``r`` is the XOR of two words ``a`` and ``b`` of its streams with left and right, so ``r = a + b - 2
(a & b)`` and every bit of it is a bilinear function of a bit that left knows and one that right knows. Nothing more is
needed to state in products what the dealer must have sent: ``r >> s`` and ``msb(r)`` in two summands each (the bits are
those of a daBit: Rotaru, Wood, INDOCRYPT 2019; the proof of such statements in one inner product: Boyle, Gilboa, Ishai,
Nof, ASIACRYPT 2020). What ``truncation`` saves by letting the output components define the mask is spent here: the
right party is sent its component.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.claim_ledger import ProductNotes, TruncationNotes
from uvcc_engine.mpc.foundation.roles import assemble, known, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.foundation.share import Share
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
    rt: Runtime, notes: ProductNotes, s: int, f: int, dealer: int, *, opened: Opened | None = None
) -> MpcProtocol[Share]:
    """``sum z >> s`` of a product that is in the ledger, ``|sum z| < 2^62``; off by at most one unit, as there.

    2 rounds; 40 bytes + 3 elements modulo 2^s per output over the three parties (46 bytes for s <= 16).
    Shape of the product.
    """
    check_shift(s)
    z = notes.z
    rt.watch(z, parties=3, shift=s)
    role = roles(rt, dealer)
    draws, shape = rt.draws(), tuple(z.shape)
    notes.truncation = at = TruncationNotes(s)
    if not role.is_right:
        at.a = draws.ring(role.with_left, *shape)
        at.upper = draws.ring(role.with_left, *shape)
        at.k_left, at.m_left = draws.narrow(role.with_left, s, 2, *shape)
    if not role.is_left:
        at.b = draws.ring(role.with_right, *shape)
        at.k_right = draws.narrow(role.with_right, s, *shape)
    message = Round(proved=True)
    if role.is_dealer:
        r = known(at.a) ^ known(at.b)
        at.masked = z + r
        if opened is not None:
            opened.u = -r
        overflow = (known(at.k_left).to(torch.int64) + known(at.k_right).to(torch.int64)) << (64 - s)
        at.lower = -shift_logical(r, s) - known(at.upper) - overflow
        at.m_right = narrow(shift_logical(r, 63) - known(at.m_left).to(torch.int64), s)
        message.send(role.left, kinds.RESHARE, at.masked)
        message.send(role.right, kinds.RESHARE, at.masked)
        message.send(role.right, kinds.DEALER, at.lower)
        message.send(role.right, kinds.DEALER, to_wire(rt, at.m_right, s))
        yield message
        yield Round()
        return assemble(role, with_left=at.upper, with_right=at.lower, online=None, f=f)
    dtype, packed = wire_form(s, z.shape)
    message.send(role.other, kinds.RESHARE, z)
    message.want(role.d, kinds.RESHARE, torch.int64, *shape)
    if role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
        message.want(role.d, kinds.DEALER, dtype, *packed)
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    got: list[Tensor] = yield message
    at.masked, theirs = got[0], got[-1]
    notes.received[role.other] = theirs
    if role.is_right:
        at.lower, at.m_right = got[1], from_wire(got[2], s)
    at.opened = z + theirs + at.masked + OFFSET
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
    top = (part.to(torch.int64) + other.to(torch.int64)) << (64 - s)
    online = shift_logical(at.opened, s) - (1 << (62 - s)) + top
    return assemble(role, with_left=at.upper, with_right=at.lower, online=online, f=f)
