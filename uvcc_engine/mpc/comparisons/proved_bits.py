"""Secret bits every message of which can be proved: replicated XOR shares, ANDs, signs, and bits as numbers.

The bits of ``boolean`` lie between two parties, under correlations whose dealer nobody checks. Here a bit is shared
like a number, ``b = b_0 ^ b_1 ^ b_2`` with party ``i`` holding ``b_i`` and ``b_(i+1)`` (Araki et al., CCS 2016), and
every message is an equation between what its two other parties know (``foundation.bilinear_claims``).

The sign of ``x = u + v`` (``roles``): the dealer shares the bits of ``u = x_d + x_(d+1)``. That they are those bits is
an equation per bit, because the carries are ``u ^ x_d ^ x_(d+1)``: shared by the two online parties as ``u`` is, and
``carry' = carry ^ (x_d ^ carry)(x_(d+1) ^ carry)``. It shares the products of neighbouring bits of ``u``, too, so that
of each digit of two bits the online parties, who know ``v``, compute generate and propagate by themselves. These are
reshared, and merged pair by pair with ANDs (ABY3, Mohassel and Rindal, CCS 2018, has the same tree without digits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import BITS, BilinearClaim
from uvcc_engine.mpc.foundation.roles import Roles, assemble, known, mine_part, online_part, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.foundation.share import BoolShare, Share
from uvcc_engine.mpc.products.arithmetic import DEALER
from uvcc_engine.mpc.products.truncation import Opened
from uvcc_engine.transcript.formats import kinds

_HIGH = tuple(range(2, 63, 2))  # the upper bits of digits 1 to 31; bit 0 is digit 0
_LOW = tuple(range(1, 62, 2))
_DIGITS = 32
Sides = tuple[Sequence[Tensor] | None, Tensor | None]  # factors that a party knows, and its own summand


def claimed(
    rt: Runtime, prover: int, algebra: str, terms: int, shape: Sequence[int], before: Sides, after: Sides
) -> None:
    """File an equation over ``shape`` that ``prover`` will prove, if claims are filed."""
    if rt.ledger is not None:
        (us, own_before), (vs, own_after) = before, after
        rt.ledger.claim(BilinearClaim(prover, algebra, terms, tuple(shape), us, vs, own_before, own_after))


def and_proved_protocol(rt: Runtime, x: BoolShare, y: BoolShare) -> MpcProtocol[BoolShare]:
    """``x & y`` word by word, of one shape: 1 round, 3 bits per bit over the three parties."""
    draws, shape = rt.draws(), x.first.shape
    following, own = draws.ring(rt.next, *shape), draws.ring(rt.party, *shape)
    z = (x.first & (y.first ^ y.second)) ^ (x.second & y.first) ^ following ^ own
    message = Round(proved=True)
    message.send(rt.prev, kinds.RESHARE, z)
    message.want(rt.next, kinds.RESHARE, torch.int64, *shape)
    (theirs,) = yield message

    def before(first: bool) -> Sides:
        """What the party before a prover knows: its component ``q``, which is ``first`` at the prover itself."""
        a, b = (x.first, y.first) if first else (x.second, y.second)
        return (a, b), (a & b) ^ (own if first else following) ^ (z if first else theirs)

    def after(first: bool) -> Sides:
        a, b = (x.first, y.first) if first else (x.second, y.second)
        return (b, a), own if first else following

    nothing: Sides = (None, None)
    for q in range(3):
        # the prover holds its component q first and q + 1 second; the party before it has q second, the one after
        # it q + 1 first
        mine = before(True) if q == rt.party else before(False) if q == rt.next else nothing
        then = after(False) if q == rt.party else after(True) if q == rt.prev else nothing
        claimed(rt, q, BITS, 2, shape, mine, then)
    return BoolShare(z, theirs, x.n)


def rows_of(x: BoolShare, rows: Sequence[int] | slice) -> BoolShare:
    """Some rows of shared words ``[rows, words]``. Local."""
    at = rows if isinstance(rows, slice) else list(rows)
    return BoolShare(x.first[at], x.second[at], x.n)


def xor(x: BoolShare, y: BoolShare) -> BoolShare:
    """``x ^ y``, of one shape. Local."""
    return BoolShare(x.first ^ y.first, x.second ^ y.second, x.n)


def not_shared(rt: Runtime, x: BoolShare) -> BoolShare:
    """The complement: component 0 is inverted. Local. Shape of ``x``."""
    return BoolShare(~x.first if rt.party == 0 else x.first, ~x.second if rt.next == 0 else x.second, x.n)


def stacked(parts: Sequence[BoolShare]) -> BoolShare:
    """Rows of shared words below each other: ``[sum of rows, words]``. Local."""
    return BoolShare(torch.cat([p.first for p in parts]), torch.cat([p.second for p in parts]), parts[0].n)


def sign_proved_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[BoolShare]:
    """``[x >= 0]`` for every element, exact over all 64 bits, as replicated XOR shares: words ``[ceil(n / 64)]``.

    7 rounds, 49 bytes per element over the three parties.
    """
    role = roles(rt, dealer)
    flat = x.reshape(-1)
    parts = Summands(
        flat.n,
        of_left=lambda: flat.second if role.is_dealer else mine_part(role, flat),
        of_right=lambda: flat.first if role.is_dealer else mine_part(role, flat),
        online=lambda: online_part(rt, role, flat),
    )
    return (yield from sign_of_summands_protocol(rt, parts, dealer=dealer))


@dataclass(frozen=True, slots=True)
class Summands:
    """Of ``n`` numbers, each the sum of three parts: what dealer and left know, what dealer and right know (right after
    the first round), and what the online parties know after the first round."""

    n: int
    of_left: Callable[[], Tensor]
    of_right: Callable[[], Tensor]
    online: Callable[[], Tensor]


def sign_of_summands_protocol(rt: Runtime, parts: Summands, *, dealer: int = DEALER) -> MpcProtocol[BoolShare]:
    """``sign_proved_protocol`` of sums. Rounds and bytes as there."""
    role = roles(rt, dealer)
    table, v = yield from _dealt_protocol(rt, role, parts)
    return (yield from _sign_of_dealt_protocol(rt, role, table, v, parts.n))


def sign_of_truncated_protocol(rt: Runtime, opened: Opened, n: int, dealer: int) -> MpcProtocol[BoolShare]:
    """``[z > 0]`` as ``sign_proved_protocol`` has it, of a product of ``n`` numbers before its rounding, from what its
    truncation deals.

    To run beside the product (after it in ``par``), which fills ``opened``: 7 rounds of both, 41 bytes per element. The
    mask ``r`` of a proved truncation is dealt bit by bit, and ``z - 1 = v + ~r`` for the ``v`` that the online parties
    see. So the dealer shares the products of neighbouring bits alone.
    """
    role, at = roles(rt, dealer), known(opened.truncation)
    draws, words = rt.draws(), -(-n // 64)
    left = draws.ring(role.with_left, len(_HIGH), words) if not role.is_right else None
    right: Tensor | None = None
    message = Round(proved=True)
    if role.is_dealer:
        u = rt.kernels.to_planes(~-known(opened.u).reshape(-1))
        right = (u[list(_HIGH)] & u[list(_LOW)]) ^ known(left)
        message.send(role.right, kinds.DEALER, right)
    elif role.is_right:
        message.want(role.d, kinds.DEALER, torch.int64, len(_HIGH), words)
    got: list[Tensor] = yield message
    if role.is_right:
        (right,) = got
    table = (
        None if role.is_right else _with_bits(rt, ~(known(at.p) ^ (known(at.a) << 1)), known(left)),
        None if role.is_left else _with_bits(rt, known(at.q) ^ (known(at.b) << 1), known(right)),
    )
    _claim_neighbours(rt, role, table, words)
    v = None if role.is_dealer else rt.kernels.to_planes(known(opened.v).reshape(-1))
    return (yield from _sign_of_dealt_protocol(rt, role, table, v, n))


def _with_bits(rt: Runtime, bits: Tensor, products: Tensor) -> Tensor:
    """One party's share of a dealt number in words, over that of the products of its neighbouring bits in planes."""
    return torch.cat([rt.kernels.to_planes(bits.reshape(-1)), products])


def _sign_of_dealt_protocol(
    rt: Runtime, role: Roles, table: tuple[Tensor | None, Tensor | None], v: Tensor | None, n: int
) -> MpcProtocol[BoolShare]:
    """``[u + v >= 0]`` for the dealer's bits of ``u`` (``_dealt_protocol``) and planes of ``v``: 6 rounds."""
    generate, propagate = yield from _digits_protocol(rt, role, table, v, n)
    while len(generate.first) > 1:
        upper = rows_of(generate, slice(1, None, 2))
        lower = rows_of(generate, slice(0, None, 2))
        passing = rows_of(propagate, slice(0, None, 2))  # of digit 0 nobody asks, so row k is that of digit k + 1
        both = rows_of(propagate, slice(1, None, 2))
        left = stacked([passing, rows_of(passing, slice(1, None))])
        product = yield from and_proved_protocol(rt, left, stacked([lower, both]))
        count = len(upper.first)
        generate = xor(upper, rows_of(product, slice(0, count)))
        propagate = rows_of(product, slice(count, None))
    top = _top_bits(role, table, v, n)
    return not_shared(rt, xor(BoolShare(generate.first[0], generate.second[0], n), top))


def _dealt_protocol(
    rt: Runtime, role: Roles, parts: Summands
) -> MpcProtocol[tuple[tuple[Tensor | None, Tensor | None], Tensor | None]]:
    """The bits of ``u`` and the products of neighbours, ``[64 + 31, words]``: (left's share, right's share) as far as
    this party knows them, and the bit planes of ``v`` (online). 1 round, 95 bits per element."""
    draws, words = rt.draws(), -(-parts.n // 64)
    rows = 64 + len(_HIGH)
    left = draws.ring(role.with_left, rows, words) if not role.is_right else None
    right: Tensor | None = None
    a = b = v = None  # the planes of the summands of left and right, and the online parties' own
    message = Round(proved=True)
    if role.is_dealer:
        of_left, of_right = parts.of_left(), parts.of_right()
        a, b = rt.kernels.to_planes(of_left), rt.kernels.to_planes(of_right)
        u = rt.kernels.to_planes(of_left + of_right)
        right = torch.cat([u, u[list(_HIGH)] & u[list(_LOW)]]) ^ known(left)
        message.send(role.right, kinds.DEALER, right)
        yield message
    else:
        if role.is_right:
            message.want(role.d, kinds.DEALER, torch.int64, rows, words)
        got: list[Tensor] = yield message
        if role.is_left:
            a = rt.kernels.to_planes(parts.of_left())
        else:
            (right,) = got
            b = rt.kernels.to_planes(parts.of_right())
        v = rt.kernels.to_planes(parts.online())
    _claim_dealt(rt, role, (left, right), (a, b), words)
    return (left, right), v


def _claim_dealt(
    rt: Runtime,
    role: Roles,
    shares: tuple[Tensor | None, Tensor | None],
    planes: tuple[Tensor | None, Tensor | None],
    words: int,
) -> None:
    """The addition, a row for each carry from the lowest, which is zero, and then the products of neighbours."""

    def carries(share: Tensor, plane: Tensor) -> Sides:
        bits = share[:64]
        carry = bits ^ plane
        below = torch.zeros_like(carry)  # row i + 1 is about bit i; row 0 has no product
        below[1:] = carry[:-1]
        chosen = torch.zeros_like(carry)
        chosen[1:] = bits[:-1]
        return (chosen, below), carry ^ below ^ (below & chosen)

    nothing: Sides = (None, None)
    (left, right), (a, b) = shares, planes
    sums = carries(known(right), known(b)) if not role.is_left else nothing
    after = carries(known(left), known(a)) if not role.is_right else nothing
    claimed(rt, role.d, BITS, 2, (64, words), sums, after)
    _claim_neighbours(rt, role, shares, words)


def _claim_neighbours(rt: Runtime, role: Roles, shares: tuple[Tensor | None, Tensor | None], words: int) -> None:
    """That the dealt products are those of neighbouring bits."""

    def neighbours(share: Tensor, swapped: bool) -> Sides:
        high, low = share[list(_HIGH)], share[list(_LOW)]
        return ((low, high) if swapped else (high, low)), (high & low) ^ share[64:]

    nothing: Sides = (None, None)
    left, right = shares
    products = neighbours(known(right), False) if not role.is_left else nothing
    after = neighbours(known(left), True) if not role.is_right else nothing
    claimed(rt, role.d, BITS, 2, (len(_HIGH), words), products, after)


def _digits_protocol(
    rt: Runtime, role: Roles, table: tuple[Tensor | None, Tensor | None], v: Tensor | None, n: int
) -> MpcProtocol[tuple[BoolShare, BoolShare]]:
    """Generate ``[32, words]`` and propagate ``[31, words]`` (digits 1 to 31): 1 round, 126 bits per element."""
    left, right = table
    words = (known(left) if not role.is_right else known(right)).shape[-1]
    draws, rows = rt.draws(), 2 * _DIGITS - 1
    s_left = draws.ring(role.with_left, rows, words) if not role.is_right else None
    s_right = draws.ring(role.with_right, rows, words) if not role.is_left else None
    message = Round(proved=True)
    mine = theirs = online = None
    if not role.is_dealer:
        share, mask = (known(left), known(s_left)) if role.is_left else (known(right), known(s_right))
        parts = zip(_tables(share), _choices(known(v)), strict=True)
        mine = mask ^ _own(share, known(v) if role.is_left else None)
        for part, chosen in parts:
            mine ^= part & chosen
        message.send(role.other, kinds.RESHARE, mine)
        message.want(role.other, kinds.RESHARE, torch.int64, rows, words)
        (theirs,) = yield message
        online = mine ^ theirs
    else:
        yield message
    for prover in (role.left, role.right):
        _claim_digits(rt, role, prover, table, v, (s_left, s_right), mine if prover == rt.party else theirs, words)
    whole = assemble(role, with_left=s_left, with_right=s_right, online=online, f=0)
    return BoolShare(whole.first[:_DIGITS], whole.second[:_DIGITS], n), BoolShare(
        whole.first[_DIGITS:], whole.second[_DIGITS:], n
    )


def _tables(share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the dealer has dealt, by the three products of each row; ``_choices`` has the other factors.

    Generate ``v1 u1 ^ v0 (u1 u0) ^ v1 v0 u0``, propagate ``v0 u1 ^ v1 u0`` and what ``_own`` adds.
    """
    high, low, both = share[list(_HIGH)], share[list(_LOW)], share[64:]
    none = torch.zeros_like(high[:1])
    return (
        torch.cat([share[:1], high, high]),
        torch.cat([none, both, low]),
        torch.cat([none, low, torch.zeros_like(high)]),
    )


def _choices(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    high, low = v[list(_HIGH)], v[list(_LOW)]
    none = torch.zeros_like(high[:1])
    return (
        torch.cat([v[:1], high, low]),
        torch.cat([none, low, high]),
        torch.cat([none, high & low, torch.zeros_like(high)]),
    )


def _own(share: Tensor, v: Tensor | None) -> Tensor:
    """What a propagate bit has of the dealt products, and of ``v1 v0`` (the left party alone), ``[63, words]``."""
    found = torch.zeros(2 * _DIGITS - 1, share.shape[-1], dtype=torch.int64, device=share.device)
    found[_DIGITS:] = share[64:]
    if v is not None:
        found[_DIGITS:] ^= v[list(_HIGH)] & v[list(_LOW)]
    return found


def _claim_digits(
    rt: Runtime,
    role: Roles,
    prover: int,
    table: tuple[Tensor | None, Tensor | None],
    v: Tensor | None,
    masks: tuple[Tensor | None, Tensor | None],
    sent: Tensor | None,
    words: int,
) -> None:
    """An online party's message: the dealer knows its share and its mask, the other one ``v`` and the message."""
    is_left = prover == role.left
    share, mask = (table[0], masks[0]) if is_left else (table[1], masks[1])
    dealt: Sides = (None, None)
    seen: Sides = (None, None)
    if rt.party in (prover, role.d):
        dealt = _tables(known(share)), _own(known(share), None) ^ known(mask)
    if not role.is_dealer:
        own = known(sent).clone()
        if is_left:
            own[_DIGITS:] ^= known(v)[list(_HIGH)] & known(v)[list(_LOW)]
        seen = _choices(known(v)), own
    before, after = (dealt, seen) if is_left else (seen, dealt)
    claimed(rt, prover, BITS, 3, (2 * _DIGITS - 1, words), before, after)


def _top_bits(role: Roles, table: tuple[Tensor | None, Tensor | None], v: Tensor | None, n: int) -> BoolShare:
    """Bit 63 of ``u ^ v``: no message."""
    left, right = (None if t is None else t[63] for t in table)
    whole = assemble(role, with_left=left, with_right=right, online=None if v is None else v[63], f=0)
    return BoolShare(whole.first, whole.second, n)


def all_proved_protocol(rt: Runtime, x: BoolShare) -> MpcProtocol[BoolShare]:
    """AND over the first axis: words ``[m, ..., w]`` to ``[..., w]`` in ``ceil(log2 m)`` rounds."""
    while len(x.first) > 1:
        half = len(x.first) // 2
        rest = rows_of(x, slice(2 * half, None))
        x = stacked(
            [(yield from and_proved_protocol(rt, rows_of(x, slice(half)), rows_of(x, slice(half, 2 * half)))), rest]
        )
    return BoolShare(x.first[0], x.second[0], x.n)
