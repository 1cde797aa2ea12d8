"""Products times a secret bit in the rounds of the product: the way back through a ReLU.

The truncation (``truncation``) opens ``c = z + 2^62 + r`` to the online parties and leaves ``z >> s`` as ``w + d0 + n
d1``: ``w`` and the bit ``n`` follow from ``c``, the dealer knows ``d0`` and ``d1`` from the mask alone. A replicated
bit is ``b = t + v`` with ``t`` known to the dealer and ``v`` to both online parties, and each online party knows its
own component of ``t``. So every term of ``(w + d0 + n d1) (t + v)`` is local to somebody, once the dealer has shared
``d0``, ``d1`` and ``d1 t`` between the online parties, which takes no round of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.selection import pair_to_share_protocol
from uvcc_engine.mpc.foundation.claim_ledger import MATMUL, PATCHES
from uvcc_engine.mpc.foundation.roles import Places, Roles, known, mine_part, online_part, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels.plain import narrow, shift_logical
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    Cut,
    LocalPart,
    additive_product,
    bilinear,
    form_protocol,
    matmul_local,
    mul_protocol,
)
from uvcc_engine.mpc.products.truncation import (
    check_shift,
    deal_own_mask,
    draw_own_mask,
    from_wire,
    refuse_unproved,
    take_own_mask,
    to_wire,
    want_own_mask,
    wire_form,
)
from uvcc_engine.transcript.formats import kinds


def matmul_gated_protocol(
    rt: Runtime, x: Share, y: Share, bit: Share, *, scale: float = 1.0, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``(x @ y) * scale * bit`` for arithmetic bits (``f = 0``) of the product's shape; the result keeps ``x.f``.

    2 rounds, as the product alone: 48 bytes + 4 elements modulo 2^s per output over the three parties (56 bytes for
    s <= 16, where product and choice one after the other take 64 and 3 rounds).
    """
    return (yield from _gated_protocol(rt, x, y, bit, matmul_local(rt, x), scale, dealer, MATMUL))


def product_gated_protocol(
    rt: Runtime,
    x: Share,
    y: Share,
    bit: Share,
    local: Callable[[Tensor, Tensor], Tensor],
    *,
    dealer: int = DEALER,
    cut: Cut | None = None,
) -> MpcProtocol[Share]:
    """The same for any bilinear ``local(x, y)``. ``cut``: see ``product_with_protocol``."""
    form = PATCHES if cut is not None else ""
    return (yield from _gated_protocol(rt, x, y, bit, bilinear(local), 1.0, dealer, form, cut))


def _gated_protocol(
    rt: Runtime,
    x: Share,
    y: Share,
    bit: Share,
    local: LocalPart,
    scale: float,
    dealer: int,
    form: str = "",
    cut: Cut | None = None,
) -> MpcProtocol[Share]:
    if bit.f:
        raise ConfigError(f"a gate at f={bit.f}", "give bits: integers, f = 0")
    if rt.ledger is not None:  # one after the other, as both are then proved: 3 rounds
        product = yield from form_protocol(rt, x, y, local, form, scale=scale, dealer=dealer, cut=cut)
        return (yield from mul_protocol(rt, product, bit, dealer=dealer))
    z, shift = additive_product(rt, x, y, local, scale, dealer)
    if z.shape != bit.shape:
        raise ConfigError(f"a gate of shape {tuple(bit.shape)} for a product of shape {tuple(z.shape)}")
    return (yield from truncate_gated_protocol(rt, z, bit, shift, x.f, dealer))


def truncate_gated_protocol(rt: Runtime, z: Tensor, bit: Share, s: int, f: int, dealer: int) -> MpcProtocol[Share]:
    """``bit`` times the truncation of an additive product share (see ``truncate_product_protocol``). 2 rounds.

    ``z`` and ``bit`` have one shape.
    """
    check_shift(s)
    refuse_unproved(rt)
    rt.watch(z, parties=3, shift=s)
    role = roles(rt, dealer)
    nowhere = Places()
    mask = draw_own_mask(rt, role, z, s, nowhere)
    draws = rt.draws()
    cover = draws.ring(role.with_left, *z.shape) if not role.is_right else None
    third = draws.narrow(role.with_left, s, *z.shape) if not role.is_right else None
    message = Round()
    y: Tensor | None = None
    if role.is_dealer:
        r, total = (known(mask.dealt)[0].to(z.dtype) & ((1 << s) - 1)) - z, bit.first + bit.second
        deal_own_mask(rt, role, mask, s, message)
        message.send(role.right, kinds.RESHARE, known(cover) - shift_logical(r, s) * total)
        message.send(role.right, kinds.RESHARE, to_wire(rt, narrow(total * shift_logical(r, 63) - known(third), s), s))
        yield message
    else:
        dtype, shape = wire_form(s, z.shape)
        want_own_mask(role, z.shape, s, message)
        if role.is_right:
            message.want(role.d, kinds.RESHARE, z.dtype, *z.shape)
            message.want(role.d, kinds.RESHARE, dtype, *shape)
        message.send(role.other, kinds.RESHARE, z)
        message.want(role.other, kinds.RESHARE, z.dtype, *z.shape)
        got: list[Tensor] = yield message
        take_own_mask(role, mask, got, s, nowhere)
        third, plus = (known(third), -known(cover)) if role.is_left else (from_wire(got[3], s), got[2])
        c, part = rt.kernels.truncate_open(z, got[-1], known(mask.shown), known(mask.k), known(mask.m), s, s)
        upper = known(mask.left if role.is_left else mask.right)
        y = _online(rt, role, bit, (c, part, upper, third), s).add_(plus)
    return (yield from pair_to_share_protocol(rt, y, z.shape, f, role.d))


def _online(rt: Runtime, role: Roles, bit: Share, seen: tuple[Tensor, Tensor, Tensor, Tensor], s: int) -> Tensor:
    """An online party's summand, less the dealer's: what is known to both online parties counts at the left."""
    c, part, upper, third = seen
    w = shift_logical(c, s) - (1 << (62 - s))
    v, mine = online_part(rt, role, bit), mine_part(role, bit)
    total = (upper + (part.to(w.dtype) << (64 - s))) * v
    total += w * (v + mine if role.is_left else mine)
    total += (third.to(w.dtype) & ~(c >> 63)) << (64 - s)
    return total
