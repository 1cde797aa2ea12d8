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
from uvcc_engine.mpc.kernels.plain import narrow, shift_logical, wire_dtype
from uvcc_engine.mpc.prg import OWN
from uvcc_engine.mpc.roles import Roles, assemble, known, places, roles
from uvcc_engine.mpc.runtime import Round, Runtime, Steps
from uvcc_engine.mpc.share import Share
from uvcc_engine.transcript import kinds

MAX_SHIFT = 50
_OFFSET = 1 << 62


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
    online: Tensor | None = None  # memory for the third component
    k: Tensor | None = None
    m: Tensor | None = None


@dataclass(slots=True)
class Opened:
    """What a truncation opens to the online parties, for a comparison that wants to start from it.

    ``u`` (dealer, from the start) and ``v`` (online parties, after the first round): ``u + v`` is the untruncated
    value.
    """

    u: Tensor | None = None
    v: Tensor | None = None


def _finish_gen(
    rt: Runtime, role: Roles, mask: Mask, masked: tuple[Tensor, Tensor, Tensor] | None, f: int, opened: Opened | None
) -> Steps[Share]:
    """From the three summands of ``c`` (online parties) to the replicated result: 1 round, 2 elements modulo 2^s.

    What the online parties exchange is masked by the overflow ``k``, uniform modulo 2^s to each of them.
    """
    message = Round()
    if role.is_dealer:
        yield message
        return assemble(role, with_left=mask.left, with_right=mask.right, online=None, f=f)
    c, part = rt.kernels.truncate_open(*known(masked), known(mask.k), known(mask.m), mask.s)
    if opened is not None:
        opened.v = c - _OFFSET
    message.send(role.other, kinds.RESHARE, part)
    message.want(role.other, kinds.RESHARE, part.dtype, *mask.shape)
    (theirs,) = yield message
    online = rt.kernels.truncate_close(c, part, theirs, mask.s, mask.online)
    return assemble(role, with_left=mask.left, with_right=mask.right, online=online, f=f)


def truncate_product_gen(
    rt: Runtime, z: Tensor, s: int, f: int, dealer: int, *, opened: Opened | None = None, out: Share | None = None
) -> Steps[Share]:
    """Additive product share ``z`` (already re-randomised by a zero share), ``|sum z| < 2^62`` -> share of ``sum z >>
    s``.

    The dealer adds the mask to its own ``z``. ``out`` takes the result in place (contiguous, of ``z``'s shape). 2
    rounds; 32 bytes + 4 elements modulo 2^s per output, over the three parties (40 bytes for s <= 16).
    """
    check_shift(s)
    role = roles(rt, dealer)
    draws = rt.draws()
    shape = z.shape
    to = places(role, out)
    mask = Mask(
        s,
        shape,
        draws.ring(role.with_left, *shape, out=to.with_left) if not role.is_right else None,
        draws.ring(role.with_right, *shape, out=to.with_right) if not role.is_left else None,
        to.online,
    )
    if not role.is_left:
        mask.k, mask.m = draws.narrow(role.with_right, s, 2, *shape)
    message = Round()
    if role.is_dealer:
        low = draws.narrow(OWN, s, *shape)
        masked, dealt = rt.kernels.truncate_deal(
            z, known(mask.left), known(mask.right), known(mask.k), known(mask.m), low, s
        )
        if opened is not None:
            opened.u = z - masked
        message.send(role.left, kinds.DEALER, dealt)
        message.send(role.left, kinds.RESHARE, masked)
        message.send(role.right, kinds.RESHARE, masked)
        yield message
        return (yield from _finish_gen(rt, role, mask, None, f, opened))
    if role.is_left:
        message.want(role.d, kinds.DEALER, wire_dtype(s), 2, *shape)
    message.send(role.other, kinds.RESHARE, z)
    message.want(role.d, kinds.RESHARE, torch.int64, *shape)
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    got: list[Tensor] = yield message
    if role.is_left:
        mask.k, mask.m = got[0]
    return (yield from _finish_gen(rt, role, mask, (z, got[-2], got[-1]), f, opened))


def truncate_pair_gen(rt: Runtime, z: Tensor | None, shape: torch.Size, s: int, f: int, dealer: int) -> Steps[Share]:
    """The same for a value that is pair-shared between the online parties (``z`` is None at the dealer).

    The halves of the mask come from the pairwise streams, and the dealer sends the component that fits them to the
    right party. 2 rounds; 24 bytes + 3 elements modulo 2^s per output.
    """
    check_shift(s)
    role = roles(rt, dealer)
    draws = rt.draws()
    mask = Mask(s, shape, None, None)
    half: dict[int, tuple[Tensor, Tensor]] = {}
    for component in (role.with_left, role.with_right):
        if role.is_dealer or component == role.mine:
            half[component] = (draws.ring(component, *shape), draws.narrow(component, s, 2, *shape))
    if not role.is_right:
        mask.left = draws.ring(role.with_left, *shape)
    message = Round()
    if role.is_dealer:
        (r_left, n_left), (r_right, n_right) = half[role.with_left], half[role.with_right]
        r = r_left + r_right
        overflow = (n_left[0].to(torch.int64) + n_right[0].to(torch.int64)) << (64 - s)
        mask.right = -shift_logical(r, s) - known(mask.left) - overflow
        message.send(role.right, kinds.DEALER, mask.right)
        message.send(role.right, kinds.DEALER, narrow(shift_logical(r, 63) - n_left[1], s))
        yield message
        return (yield from _finish_gen(rt, role, mask, None, f, None))
    r_mine, n_mine = half[role.mine]
    mask.k, mask.m = n_mine
    masked = known(z) + r_mine
    if role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
        message.want(role.d, kinds.DEALER, wire_dtype(s), *shape)
    message.send(role.other, kinds.OPEN, masked)
    message.want(role.other, kinds.OPEN, torch.int64, *shape)
    got: list[Tensor] = yield message
    if role.is_right:
        mask.right, mask.m = got[0], got[1]
    return (yield from _finish_gen(rt, role, mask, (masked, got[-1], torch.zeros_like(masked)), f, None))
