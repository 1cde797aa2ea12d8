"""Bits whose messages can be proved (``proved_bits``) as numbers, and numbers chosen by them.

A bit is ``b = t ^ w``: the dealer knows ``t``, two of the three components, and the online parties know ``w``, the
third. So ``b = t (1 - 2 w) + w`` once the dealer has shared ``t`` as a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.mpc.comparisons.proved_bits import Sides, claimed
from uvcc_engine.mpc.foundation.bilinear_claims import BITS
from uvcc_engine.mpc.foundation.roles import Roles, assemble, known, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import BoolShare, Share, placed
from uvcc_engine.mpc.products.arithmetic import DEALER, add, mul_protocol, scale_int, sub
from uvcc_engine.transcript.formats import kinds

_NOTHING: Final[Sides] = (None, None)


@dataclass(frozen=True, slots=True)
class DealtBits:
    """Bits of which the dealer has shared its part ``t`` as a number; None for what a party must not know."""

    shape: torch.Size
    t_left: Tensor | None
    t_right: Tensor | None
    w: Tensor | None


def numbers_proved_protocol(
    rt: Runtime, bits: BoolShare, *, dealer: int = DEALER, out: Share | None = None
) -> MpcProtocol[Share]:
    """Shared bits in rows of words to arithmetic ones (``f = 0``): ``[..., ceil(n / 64)]`` to ``[..., n]``. 2 rounds,
    24 bytes per bit."""
    role = roles(rt, dealer)
    parts = _parts(rt, bits)
    dealt = yield from _deal_protocol(rt, role, parts)
    return (yield from _numbers_protocol(rt, role, dealt, out))


def chosen_proved_protocol(
    rt: Runtime, bits: BoolShare, x: Share, *, dealer: int = DEALER, number: bool = False
) -> MpcProtocol[list[Share]]:
    """``b x``, for a bit of each entry of ``x`` of any scale, and ``b`` as a ``number`` if that is wanted. 2 rounds,
    56 bytes per entry, and 16 for the number: a round less than by the number, and 8 bytes more, or 24.

    ``b x = w x + t (x - 2 w x)``: the first product needs nobody's message before it.
    """
    role = roles(rt, dealer)
    first, second = parts = _parts(rt, bits)
    none = torch.zeros_like(first)
    w = None if role.is_dealer else second if role.is_left else first
    by_online = assemble(role, with_left=none, with_right=none, online=w, f=0)
    both: MpcProtocol[list[Any]] = par(_deal_protocol(rt, role, parts), mul_protocol(rt, x, by_online, dealer=dealer))
    dealt, by_w = yield from both
    by_dealer = assemble(role, with_left=dealt.t_left, with_right=dealt.t_right, online=none, f=0)
    steps = [mul_protocol(rt, sub(x, scale_int(by_w, 2)), by_dealer, dealer=dealer)]
    if number:
        steps.append(_numbers_protocol(rt, role, dealt, None))
    by_t, *numbers = yield from par(*steps)
    return [add(by_w, by_t), *numbers]


def _parts(rt: Runtime, bits: BoolShare) -> tuple[Tensor, Tensor]:
    """A party's two components of the bits, as whole numbers ``[..., n]``."""
    return rt.kernels.bits_to_ints(bits.first, bits.n), rt.kernels.bits_to_ints(bits.second, bits.n)


def _deal_protocol(rt: Runtime, role: Roles, parts: tuple[Tensor, Tensor]) -> MpcProtocol[DealtBits]:
    """Have the dealer share ``t`` as a number: 1 round, 8 bytes."""
    first, second = parts
    shape, draws = first.shape, rt.draws()
    t_left = draws.ring(role.with_left, *shape) if not role.is_right else None
    t_right: Tensor | None = None
    of_left, of_right = (second if role.is_dealer else first), (first if role.is_dealer else second)
    message = Round(proved=True)
    if role.is_dealer:
        t_right = (first ^ second) - known(t_left)
        message.send(role.right, kinds.DEALER, t_right)
    elif role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
    got: list[Tensor] = yield message
    if role.is_right:
        (t_right,) = got
    before, after = _NOTHING, _NOTHING
    if not role.is_left:  # t_left is one of two numbers that right can name, by left's component of the bit
        least = of_right - known(t_right)
        before = (least ^ (1 - of_right - known(t_right)),), least
    if not role.is_right:
        after = (-of_left,), t_left
    claimed(rt, role.d, BITS, 1, shape, before, after)
    return DealtBits(shape, t_left, t_right, None if role.is_dealer else second if role.is_left else first)


def _numbers_protocol(rt: Runtime, role: Roles, dealt: DealtBits, out: Share | None) -> MpcProtocol[Share]:
    """``t (1 - 2 w) + w`` of what was dealt: 1 round, 16 bytes."""
    draws, shape, w = rt.draws(), dealt.shape, dealt.w
    t_left, t_right = dealt.t_left, dealt.t_right
    s_left = draws.ring(role.with_left, *shape) if not role.is_right else None
    s_right = draws.ring(role.with_right, *shape) if not role.is_left else None
    message = Round(proved=True)
    mine = theirs = online = None
    if not role.is_dealer:
        share, mask = (known(t_left), known(s_left)) if role.is_left else (known(t_right), known(s_right))
        mine = share * (1 - 2 * known(w)) - mask
        if role.is_left:
            mine += known(w)
        message.send(role.other, kinds.RESHARE, mine)
        message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    got: list[Tensor] = yield message
    if not role.is_dealer:
        (theirs,) = got
        online = known(mine) + theirs
    for prover in (role.left, role.right):
        is_left = prover == role.left
        share_of, mask_of = (t_left, s_left) if is_left else (t_right, s_right)
        knows, seen = _NOTHING, _NOTHING
        if rt.party in (prover, role.d):
            least = known(share_of) - known(mask_of)  # what is sent where w is 0
            knows = (least ^ (int(is_left) - known(share_of) - known(mask_of)),), least
        if w is not None:
            seen = (-w,), mine if prover == rt.party else theirs
        claimed(rt, prover, BITS, 1, shape, *((knows, seen) if is_left else (seen, knows)))
    return placed(assemble(role, with_left=s_left, with_right=s_right, online=online, f=0), out)
