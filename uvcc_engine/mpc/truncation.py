"""Truncation with a dealer: two rounds together with the product it follows, error at most one unit, never in the top
bits.

An additively shared ``z`` with ``|z| < 2^62`` is opened to the two online parties under a mask that only the dealer
knows: ``c = z + 2^62 + r (mod 2^64)``. Then, for a shift ``s``,

    z >> s  =  (c >> s) - (r >> s) + 2^(64-s) * msb(r) * (1 - msb(c)) - 2^(62-s)   (+ 0 or 1)

because ``0 < z + 2^62 < 2^63``. (Escudero et al., CRYPTO 2020; Dalskov et al., USENIX Security 2021; Damgard et al.,
IEEE S&P 2019 for the mask bit.) Here ``r >> s`` is never sent: the dealer's two output components ``X`` and ``Y``
come from its pairwise streams and *define* the upper bits of the mask, ``r >> s = -(X + Y) mod 2^(64-s)``; what that
overflows, and the mask's top bit, concern only the upper ``s`` bits of the result and travel as numbers modulo
``2^s``.

The rounding is the sum of a floor and a carry that depends on the low bits of ``r``: the result is the floor, or one
above it, with expectation within 2^-s of the exact quotient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.prg import OWN, wire_dtype
from uvcc_engine.mpc.roles import Roles, assemble, roles
from uvcc_engine.mpc.runtime import Round, Runtime, Steps
from uvcc_engine.mpc.share import Share
from uvcc_engine.transcript import kinds

MAX_SHIFT = 50
_OFFSET = 1 << 62


def shift_logical(x: Tensor, s: int) -> Tensor:
    """``x >> s`` of the unsigned reading, on int64."""
    return (x >> s) & ((1 << (64 - s)) - 1) if s else x


def _narrow(x: Tensor, s: int) -> Tensor:
    """Reduce modulo 2^s for the wire: the carry above bit ``s`` would tell something of the mask."""
    width = wire_dtype(s)
    return x.to(width) if 8 * width.itemsize == s else (x & ((1 << s) - 1)).to(width)


def check_shift(s: int) -> None:
    if not 1 <= s <= MAX_SHIFT:
        raise ConfigError(
            f"a truncation by {s} bits", f"shifts lie between 1 and {MAX_SHIFT}: choose another f or scale"
        )


@dataclass(slots=True)
class Mask:
    """One party's part of a truncation mask: output components it knows, and its summands of the two corrections.

    ``left`` and ``right`` are the output components that the dealer shares with the left and the right party; ``k`` and
    ``m`` (online parties only) are summands, modulo 2^s, of the overflow of those components and of ``msb(r)``.
    """

    s: int
    shape: torch.Size
    left: Tensor | None
    right: Tensor | None
    k: Tensor | None = None
    m: Tensor | None = None


def _finish_gen(role: Roles, mask: Mask, c: Tensor | None, f: int) -> Steps[Share]:
    """From the opened ``c`` (online parties) to the replicated result: one round, 2 elements modulo 2^s per output.

    What the online parties exchange is masked by the overflow ``k``, uniform modulo 2^s to each of them.
    """
    s = mask.s
    message = Round()
    if role.is_dealer:
        yield message
        return assemble(role, with_left=mask.left, with_right=mask.right, online=None, f=f)
    assert c is not None
    assert mask.k is not None
    assert mask.m is not None
    part = mask.k + (1 - shift_logical(c, 63)) * mask.m
    message.send(role.other, kinds.RESHARE, _narrow(part, s))
    message.want(role.other, kinds.RESHARE, wire_dtype(s), *mask.shape)
    (theirs,) = yield message
    top = (part + theirs.to(torch.int64)) << (64 - s)
    online = shift_logical(c, s) - (1 << (62 - s)) + top
    return assemble(role, with_left=mask.left, with_right=mask.right, online=online, f=f)


def _halves(both: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    count = shape.numel()
    return both[:count].reshape(shape), both[count:].reshape(shape)


def truncate_product_gen(rt: Runtime, z: Tensor, s: int, f: int, dealer: int) -> Steps[Share]:
    """Additive product share ``z`` (already re-randomised by a zero share), ``|sum z| < 2^62`` -> share of ``sum z >>
    s``.

    The dealer adds the mask to its own ``z``. 2 rounds; 32 bytes + 4 elements modulo 2^s per output, over the three
    parties (40 bytes for s <= 16).
    """
    check_shift(s)
    role = roles(rt, dealer)
    draws = rt.draws()
    shape, count = z.shape, z.numel()
    left = draws.ring(role.with_left, *shape) if not role.is_right else None
    right = draws.ring(role.with_right, *shape) if not role.is_left else None
    mask = Mask(s, shape, left, right)
    if not role.is_left:
        mask.k, mask.m = _halves(draws.narrow(role.with_right, s, 2 * count), shape)
    message = Round()
    if role.is_dealer:
        assert left is not None
        assert right is not None
        assert mask.k is not None
        assert mask.m is not None
        total = -(left + right)
        r = (total << s) | draws.narrow(OWN, s, count).reshape(shape)
        # -(X + Y) = (r >> s) + 2^(64-s) k, so subtracting r >> s leaves X + Y + 2^(64-s) k
        dealt = torch.stack([shift_logical(total, 64 - s) - mask.k, shift_logical(r, 63) - mask.m])
        masked = z + r
        message.send(role.left, kinds.DEALER, _narrow(dealt, s))
        message.send(role.left, kinds.RESHARE, masked)
        message.send(role.right, kinds.RESHARE, masked)
        yield message
        return (yield from _finish_gen(role, mask, None, f))
    if role.is_left:
        message.want(role.d, kinds.DEALER, wire_dtype(s), 2, *shape)
    message.send(role.other, kinds.RESHARE, z)
    message.want(role.d, kinds.RESHARE, torch.int64, *shape)
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    got = yield message
    if role.is_left:
        mask.k, mask.m = got[0][0].to(torch.int64), got[0][1].to(torch.int64)
    return (yield from _finish_gen(role, mask, z + got[-2] + got[-1] + _OFFSET, f))


def truncate_pair_gen(rt: Runtime, z: Tensor | None, shape: torch.Size, s: int, f: int, dealer: int) -> Steps[Share]:
    """The same for a value that is pair-shared between the online parties (``z`` is None at the dealer).

    The halves of the mask come from the pairwise streams, and the dealer sends the component that fits them to the
    right party. 2 rounds; 24 bytes + 3 elements modulo 2^s per output.
    """
    check_shift(s)
    role = roles(rt, dealer)
    draws = rt.draws()
    count = shape.numel()
    mask = Mask(s, shape, None, None)
    half: dict[int, tuple[Tensor, Tensor]] = {}
    for component in (role.with_left, role.with_right):
        if role.is_dealer or component == role.mine:
            half[component] = (draws.ring(component, *shape), draws.narrow(component, s, 2 * count))
    if not role.is_right:
        mask.left = draws.ring(role.with_left, *shape)
    message = Round()
    if role.is_dealer:
        assert mask.left is not None
        (r_left, n_left), (r_right, n_right) = half[role.with_left], half[role.with_right]
        r = r_left + r_right
        (k_left, m_left), (k_right, _) = _halves(n_left, shape), _halves(n_right, shape)
        mask.right = -shift_logical(r, s) - mask.left - ((k_left + k_right) << (64 - s))
        message.send(role.right, kinds.DEALER, mask.right)
        message.send(role.right, kinds.DEALER, _narrow(shift_logical(r, 63) - m_left, s))
        yield message
        return (yield from _finish_gen(role, mask, None, f))
    assert z is not None
    mask.k, mask.m = _halves(half[role.mine][1], shape)
    masked = z + half[role.mine][0]
    if role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
        message.want(role.d, kinds.DEALER, wire_dtype(s), *shape)
    message.send(role.other, kinds.OPEN, masked)
    message.want(role.other, kinds.OPEN, torch.int64, *shape)
    got = yield message
    if role.is_right:
        mask.right, mask.m = got[0], got[1].to(torch.int64)
    return (yield from _finish_gen(role, mask, masked + got[-1] + _OFFSET, f))
