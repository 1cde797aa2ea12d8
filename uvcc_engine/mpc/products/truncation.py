"""Truncation with a dealer: two rounds together with the product it follows, error at most one unit, never in the top
bits.

An additively shared ``z`` with ``|z| < 2^62`` is opened to the two online parties under a mask that only the dealer
knows: ``c = z + 2^62 + r (mod 2^64)``. Then, for a shift ``s``,

    z >> s  =  (c >> s) - (r >> s) + 2^(64-s) * msb(r) * (1 - msb(c)) - 2^(62-s)   (+ 0 or 1)

because ``0 < z + 2^62 < 2^63``. (Escudero et al., CRYPTO 2020; Dalskov et al., USENIX Security 2021; Damgard et al.,
IEEE S&P 2019 for the mask bit.) The dealer's output components ``X``, which the left knows, and ``Y``, which the right
knows, share ``-(r >> s)``; the mask's top bit concerns only the upper ``s`` bits of the result and travels as a number
modulo ``2^s``. There are two masks:

- *Of the dealer's streams*: ``X`` and ``Y`` are drawn and *define* its upper bits, ``r >> s = -(X + Y) mod 2^(64-s)``;
  what that overflows travels beside the top bit, and the dealer sends ``z_d + r`` to both. What it deals for a
  comparison that starts from what is opened depends on no data.
- *The dealer's own summand* ``z_d`` of the product, uniform to either online party by the zero share in it, with lower
  bits that it draws: it shows ``t = z_d + low mod 2^s`` to both, and ``r = t - z_d``. ``X`` is drawn, ``Y`` is sent.
  That is fewer bytes. Where masks are zero the result lies in two components, not in the online one alone, which the
  twins of trainings in plain integers tell from each other.

The rounding is the sum of a floor and a carry that depends on the low bits of ``r``: the result is the floor, or one
above it, with expectation within 2^-s of the exact quotient. As with every rounding of this kind, the functionality
includes the masked ``c``: it says nothing of ``z``, but whoever knows ``c`` and is later shown the result itself learns
how likely that result was to be rounded up. Open results of further computation, not single products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation.claim_ledger import TruncationNotes
from uvcc_engine.mpc.foundation.prg import OWN
from uvcc_engine.mpc.foundation.roles import Places, Roles, assemble, known, places, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels.layout import wire_dtype
from uvcc_engine.mpc.kernels.plain import narrow, shift_logical
from uvcc_engine.transcript.formats import kinds

MAX_SHIFT = 50
OWN_FROM: float = (
    1 << 16
)  # outputs from which the bytes matter more than that a result without masks lies in one component
OFFSET = 1 << 62


def check_shift(s: int) -> None:
    """Raises ConfigError for a shift, in bits, by which no truncation is possible."""
    if not 1 <= s <= MAX_SHIFT:
        raise ConfigError(
            f"a truncation by {s} bits", f"shifts lie between 1 and {MAX_SHIFT}: choose another f or scale"
        )


def refuse_unproved(rt: Runtime) -> None:
    """Raises ConfigError where products are proved, and this one did not go through the ledger."""
    if rt.ledger is not None:
        raise ConfigError("a product that was summed up before its truncation has no proof", "verify: off")


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
    value. ``truncation``: where it is proved, what it deals, of which right has its part after the first round.
    """

    u: Tensor | None = None
    v: Tensor | None = None
    truncation: TruncationNotes | None = None


def wire_form(s: int, shape: torch.Size) -> tuple[torch.dtype, tuple[int, ...]]:
    """How numbers modulo 2^s travel: in 2, 4, 5, 6 or 7 bytes (as bytes from 5 on), whole words above 56 bits."""
    if 32 < s <= 56:
        return torch.uint8, (*shape, -(-s // 8))
    return wire_dtype(s), tuple(shape)


def to_wire(rt: Runtime, x: Tensor, s: int) -> Tensor:
    """Numbers modulo 2^s in their wire form, in the shape that ``wire_form`` names."""
    dtype, shape = wire_form(s, x.shape)
    return rt.kernels.pack(x, shape[-1]) if dtype is torch.uint8 else x


def part_to_wire(rt: Runtime, part: Tensor, s: int) -> Tensor:
    """An online party's part of the upper bits, less what lies above bit ``s`` in a wire form that is wider.

    The parts add up to ``(overflow + msb(r) [c >= 0]) mod 2^s``; without the modulus the carry would tell the mask's
    top bit, and with it the sign of the value, wherever the overflow is all ones or zero: for a shift by one bit, half
    of the time. Shape as of :func:`to_wire`.
    """
    hidden = part if s == part.element_size() * 8 else part & ((1 << s) - 1)
    return to_wire(rt, hidden, s)


def from_wire(x: Tensor, s: int) -> Tensor:
    """The inverse; what lies above bit ``s`` is of no meaning. Shape of what was sent."""
    if x.dtype is not torch.uint8:
        return x
    if x.device.type == "cpu":
        return _read_packed(x)
    words = torch.zeros(*x.shape[:-1], 8, dtype=torch.uint8, device=x.device)
    words[..., : x.shape[-1]] = x
    return words.view(torch.int64).squeeze(-1)


def _read_packed(x: Tensor) -> Tensor:
    """Overlapping 8-byte reads, one every ``x.shape[-1]`` bytes: what they read too much lies above the number."""
    size = x.numel()
    padded = torch.empty(size + 8, dtype=torch.uint8)
    padded[:size] = x.reshape(-1)
    padded[size:] = 0
    each = x.shape[-1]
    words = np.ndarray((size // each,), np.int64, padded.numpy().data, strides=(each,))
    return torch.from_numpy(words.copy()).view(x.shape[:-1])


def _finish_protocol(
    rt: Runtime,
    role: Roles,
    mask: Mask,
    masked: tuple[Tensor, Tensor, Tensor] | None,
    f: int,
    opened: Opened | None,
) -> MpcProtocol[Share]:
    """From the three summands of ``c`` (online parties) to the replicated result: 1 round, 2 elements modulo 2^s.

    What the online parties exchange is masked by the overflow ``k``, uniform modulo 2^s to each of them.
    """
    message = Round()
    if role.is_dealer:
        yield message
        return assemble(role, with_left=mask.left, with_right=mask.right, online=None, f=f)
    c, part = rt.kernels.truncate_open(*known(masked), known(mask.k), known(mask.m), mask.s)
    if opened is not None:
        opened.v = c - OFFSET
    dtype, shape = wire_form(mask.s, mask.shape)
    message.send(role.other, kinds.RESHARE, part_to_wire(rt, part, mask.s))
    message.want(role.other, kinds.RESHARE, dtype, *shape)
    (theirs,) = yield message
    return _close(rt, role, mask, c, part, from_wire(theirs, mask.s), f)


def _close(rt: Runtime, role: Roles, mask: Mask, c: Tensor, part: Tensor, theirs: Tensor, f: int) -> Share:
    online = rt.kernels.truncate_close(c, part, theirs, mask.s, mask.online)
    return assemble(role, with_left=mask.left, with_right=mask.right, online=online, f=f)


def _product_mask(
    rt: Runtime, role: Roles, z: Tensor, s: int, out: Share | None
) -> tuple[Mask, Tensor | None, Tensor | None]:
    """(mask, masked ``z``, corrections for the left) of a product; the tensors at the dealer alone."""
    draws = rt.draws()
    to = places(role, out)
    mask = Mask(
        s,
        z.shape,
        draws.ring(role.with_left, *z.shape, out=to.with_left) if not role.is_right else None,
        draws.ring(role.with_right, *z.shape, out=to.with_right) if not role.is_left else None,
        to.online,
    )
    if not role.is_left:
        mask.k, mask.m = draws.narrow(role.with_right, s, 2, *z.shape)
    if not role.is_dealer:
        return mask, None, None
    low = draws.narrow(OWN, s, *z.shape)
    left, right, k, m = known(mask.left), known(mask.right), known(mask.k), known(mask.m)
    masked, dealt = rt.kernels.truncate_deal(z, left, right, k, m, low, s)
    return mask, masked, dealt


def truncate_product_protocol(
    rt: Runtime, z: Tensor, s: int, f: int, dealer: int, *, opened: Opened | None = None, out: Share | None = None
) -> MpcProtocol[Share]:
    """Additive product share ``z`` (already re-randomised by a zero share), ``|sum z| < 2^62`` -> share of ``sum z >>
    s``.

    ``out`` takes the result in place (contiguous, of ``z``'s shape). 2 rounds; 32 bytes + 4 elements modulo 2^s per
    output, over the three parties (40 bytes for s <= 16). From ``OWN_FROM`` outputs on, if nothing starts from what is
    ``opened``, the dealer's own ``z`` is the mask: 24 bytes + 5 elements (34 bytes).
    """
    check_shift(s)
    refuse_unproved(rt)
    rt.watch(z, parties=3, shift=s)
    role = roles(rt, dealer)
    if opened is None and z.numel() >= OWN_FROM:
        return (yield from _truncate_own_protocol(rt, role, z, s, f, out))
    mask, masked, dealt = _product_mask(rt, role, z, s, out)
    message = Round()
    if role.is_dealer:
        if opened is not None:
            opened.u = z - known(masked)
        message.send(role.left, kinds.DEALER, to_wire(rt, known(dealt), s))
        message.send(role.left, kinds.RESHARE, known(masked))
        message.send(role.right, kinds.RESHARE, known(masked))
        yield message
        return (yield from _finish_protocol(rt, role, mask, None, f, opened))
    if role.is_left:
        dtype, shape = wire_form(s, z.shape)
        message.want(role.d, kinds.DEALER, dtype, 2, *shape)
    message.send(role.other, kinds.RESHARE, z)
    message.want(role.d, kinds.RESHARE, torch.int64, *z.shape)
    message.want(role.other, kinds.RESHARE, torch.int64, *z.shape)
    got: list[Tensor] = yield message
    if role.is_left:
        mask.k, mask.m = from_wire(got[0], s)
    return (yield from _finish_protocol(rt, role, mask, (z, got[-2], got[-1]), f, opened))


@dataclass(slots=True)
class OwnMask:
    """One party's part of a mask that is the dealer's own summand: ``r = shown - z``, with ``0 <= shown < 2^s``.

    ``left`` and ``right`` are the output components, of which the dealer sends the right one; ``k`` and ``m`` are as in
    :class:`Mask`. ``dealt`` is what the dealer sends besides: ``[2, ...]``, ``shown`` to both and ``m`` to the right.
    """

    left: Tensor | None = None
    right: Tensor | None = None
    dealt: Tensor | None = None
    shown: Tensor | None = None
    k: Tensor | None = None
    m: Tensor | None = None


def draw_own_mask(rt: Runtime, role: Roles, z: Tensor, s: int, to: Places) -> OwnMask:
    """What the party draws and, at the dealer, computes from its summand ``z`` of the product (any shape)."""
    draws = rt.draws()
    if role.is_right:
        return OwnMask(k=draws.narrow(role.with_right, s, *z.shape))
    left = draws.ring(role.with_left, *z.shape, out=to.with_left)
    drawn = draws.narrow(role.with_left, s, 2, *z.shape)
    if role.is_left:
        return OwnMask(left=left, k=drawn[0], m=drawn[1])
    more, low = draws.narrow(role.with_right, s, *z.shape), draws.narrow(OWN, s, *z.shape)
    dealt, right = rt.kernels.truncate_deal_own(z, left, drawn, more, low, s, to.with_right)
    return OwnMask(left=left, right=right, dealt=dealt)


def _truncate_own_protocol(
    rt: Runtime, role: Roles, z: Tensor, s: int, f: int, out: Share | None
) -> MpcProtocol[Share]:
    """See ``truncate_product_protocol``. The online parties learn ``c`` from both their summands and ``shown``."""
    to = places(role, out)
    mask = draw_own_mask(rt, role, z, s, to)
    message = Round()
    if role.is_dealer:
        deal_own_mask(rt, role, mask, s, message)
        yield message
        yield Round()
        return assemble(role, with_left=mask.left, with_right=mask.right, online=None, f=f)
    want_own_mask(role, z.shape, s, message)
    message.send(role.other, kinds.RESHARE, z)
    message.want(role.other, kinds.RESHARE, torch.int64, *z.shape)
    got: list[Tensor] = yield message
    take_own_mask(role, mask, got, s, to)
    c, part = rt.kernels.truncate_open(z, got[-1], known(mask.shown), known(mask.k), known(mask.m), s, s)
    second = Round()
    dtype, shape = wire_form(s, z.shape)
    second.send(role.other, kinds.RESHARE, part_to_wire(rt, part, s))
    second.want(role.other, kinds.RESHARE, dtype, *shape)
    (theirs,) = yield second
    online = rt.kernels.truncate_close(c, part, from_wire(theirs, s), s, to.online)
    return assemble(role, with_left=mask.left, with_right=mask.right, online=online, f=f)


def deal_own_mask(rt: Runtime, role: Roles, mask: OwnMask, s: int, message: Round) -> None:
    """Let the dealer send in ``message`` what the online parties want by :func:`want_own_mask`."""
    dealt = to_wire(rt, known(mask.dealt), s)
    message.send(role.left, kinds.RESHARE, dealt[0])
    message.send(role.right, kinds.RESHARE, known(mask.right))
    message.send(role.right, kinds.RESHARE, dealt)


def want_own_mask(role: Roles, size: torch.Size, s: int, message: Round) -> None:
    """Let an online party expect what the dealer has for it, for outputs of shape ``size``."""
    dtype, shape = wire_form(s, size)
    if role.is_left:
        message.want(role.d, kinds.RESHARE, dtype, *shape)
    else:
        message.want(role.d, kinds.RESHARE, torch.int64, *size)
        message.want(role.d, kinds.RESHARE, dtype, 2, *shape)


def take_own_mask(role: Roles, mask: OwnMask, got: list[Tensor], s: int, to: Places) -> None:
    """Complete an online party's ``mask`` by what it was sent (``got``, of the shapes of :func:`want_own_mask`)."""
    if role.is_left:
        mask.shown = from_wire(got[0], s)
    else:
        mask.right = got[0] if to.with_right is None else to.with_right.copy_(got[0])
        mask.shown, mask.m = from_wire(got[1], s)


def truncate_pair_protocol(
    rt: Runtime,
    z: Tensor | None,
    shape: torch.Size,
    s: int,
    f: int,
    dealer: int,
    *,
    opened: Opened | None = None,
) -> MpcProtocol[Share]:
    """The same for a value that is pair-shared between the online parties (``z`` is None at the dealer).

    The halves of the mask come from the pairwise streams, and the dealer sends the component that fits them to the
    right party. 2 rounds; 24 bytes + 3 elements modulo 2^s per output. Of the given shape.
    """
    check_shift(s)
    if z is not None:
        rt.watch(z, parties=2, shift=s)
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
        message.send(role.right, kinds.DEALER, to_wire(rt, narrow(shift_logical(r, 63) - n_left[1], s), s))
        if opened is not None:
            opened.u = -r
        yield message
        return (yield from _finish_protocol(rt, role, mask, None, f, opened))
    r_mine, n_mine = half[role.mine]
    mask.k, mask.m = n_mine
    masked = known(z) + r_mine
    if role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, *shape)
        dtype, packed = wire_form(s, shape)
        message.want(role.d, kinds.DEALER, dtype, *packed)
    message.send(role.other, kinds.OPEN, masked)
    message.want(role.other, kinds.OPEN, torch.int64, *shape)
    got: list[Tensor] = yield message
    if role.is_right:
        mask.right, mask.m = got[0], from_wire(got[1], s)
    return (yield from _finish_protocol(rt, role, mask, (masked, got[-1], torch.zeros_like(masked)), f, opened))
