"""Comparison: carry-only addition over blocks of four bits, with a dealer, in three rounds.

A secret is ``u + v`` with ``u`` known to the dealer and ``v`` to both online parties (``roles``). For each 4-bit
block the dealer XOR-shares the thermometer code of its digit, ``T[k] = [u > k]``; the online parties, who both know
``v``, pick the entry ``k = 15 - v`` by themselves: ``T[k]`` is the block's carry (generate) and ``T[k-1] ^ T[k]``
tells whether it passes a carry on (propagate). Groups of ``m`` blocks are then merged in one round each: the online
parties open the generate and propagate bits under masks, and evaluate ``g3 ^ p3 (g2 ^ p2 (g1 ^ p1 g0))`` with the
dealer's shares of all products of masks (the function-dependent correlations of Damgard et al., "TinyTable", CRYPTO
2017, and of ABY2.0, USENIX Security 2021). All words are bit-sliced, 64 elements each.

Results are pair-shared (``PairBits``): the online parties hold XOR shares, the dealer nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.arithmetic import rt_kernels
from uvcc_engine.mpc.prg import Draws
from uvcc_engine.mpc.roles import Roles, online_part, roles
from uvcc_engine.mpc.runtime import Round, Runtime, Steps
from uvcc_engine.mpc.share import BoolShare, Share
from uvcc_engine.transcript import kinds

DEALER = 2
BLOCK = 4
_FULL = (4, 4)


@dataclass(frozen=True, slots=True, eq=False)
class PairBits:
    """``n`` secret bits, XOR-shared between the online parties of dealer ``d``; ``words`` is None at the dealer.

    ``shape`` is the shape of the bits; ``words`` is ``[..., ceil(shape[-1] / 64)]``, packed along the last axis.
    """

    d: int
    shape: torch.Size
    words: Tensor | None

    @property
    def n(self) -> int:
        return self.shape.numel()

    @property
    def word_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], -(-self.shape[-1] // 64))


def not_(rt: Runtime, b: PairBits) -> PairBits:
    """The complement. Local."""
    if b.words is None or not roles(rt, b.d).is_left:
        return b
    return replace(b, words=~b.words)


@dataclass(frozen=True, slots=True)
class Level:
    """How the masks of one merging step are laid out: all products of masks that its polynomial needs.

    Table: ``M0[S]`` over subsets ``S`` of the propagate masks ``1..m-1`` (entry 0 is the constant one), then for each
    ``j`` the products of generate mask ``j`` with subsets of the propagate masks above it, then (``carry_on``) the
    products of propagate mask 0 with all ``S``. ``singles`` are the entries that are one mask alone.
    """

    m: int
    generate: bool
    carry_on: bool
    singles: tuple[int, ...]
    products: tuple[int, ...]

    @property
    def entries(self) -> int:
        return 1 + len(self.singles) + len(self.products)

    @property
    def opened(self) -> int:
        """Bits that each online party opens per group."""
        return (self.m if self.generate else 0) + (self.m if self.carry_on else self.m - 1)


@lru_cache(maxsize=64)
def level(m: int, *, generate: bool, carry_on: bool) -> Level:
    """The layout for groups of ``m``; ``generate=False`` is a plain AND of ``m`` bits."""
    half = 1 << (m - 1)
    singles = [1 << k for k in range(m - 1)]
    at = half
    if generate:
        for j in range(m):
            singles.append(at)
            at += 1 << (m - 1 - j)
    if carry_on:
        singles.append(at)
        at += half
    products = sorted(set(range(1, at)) - set(singles))
    return Level(m, generate, carry_on, tuple(singles), tuple(products))


def _mask_table(plan: Level, single: Tensor) -> Tensor:
    """All products of masks from the single masks, in the layout's order. ``single``: ``[singles, ...]``."""
    m = plan.m
    table = torch.full_like(single[:1], -1)
    for k in range(m - 1):
        table = torch.cat([table, table & single[k]])
    parts = [table]
    at = m - 1
    if plan.generate:
        for j in range(m):
            parts.append(table[:: 1 << j] & single[at])
            at += 1
    if plan.carry_on:
        parts.append(table & single[at])
    return torch.cat(parts)


class LevelMasks:
    """One party's shares of a level's mask table, ``[entries, groups, words]``, dealt in the round it is told to."""

    def __init__(self, draws: Draws, role: Roles, plan: Level, groups: tuple[int, ...]) -> None:
        self.plan = plan
        self.groups = groups
        n_single, n_product = len(plan.singles), len(plan.products)
        self.mine: Tensor | None = None
        right = draws.ring(role.with_right, n_single + n_product, *groups) if not role.is_left else None
        left = draws.ring(role.with_left, n_single, *groups) if not role.is_right else None
        self._dealt: Tensor | None = None
        if role.is_dealer:
            assert left is not None
            assert right is not None
            table = _mask_table(plan, left ^ right[:n_single])
            self._dealt = table[list(plan.products)] ^ right[n_single:]
        elif role.is_right:
            assert right is not None
            self.mine = self._table(right[:n_single], right[n_single:], 0)
        else:
            assert left is not None
            self.mine = self._table(left, torch.zeros(n_product, *groups, dtype=torch.int64, device=left.device), -1)

    def _table(self, single: Tensor, product: Tensor, one: int) -> Tensor:
        table = torch.full((self.plan.entries, *self.groups), one, dtype=torch.int64, device=single.device)
        table[list(self.plan.singles)] = single
        table[list(self.plan.products)] = product
        return table

    def deal(self, message: Round, role: Roles) -> None:
        if role.is_dealer:
            assert self._dealt is not None
            message.send(role.left, kinds.DEALER, self._dealt)
        elif role.is_left:
            message.want(role.d, kinds.DEALER, torch.int64, len(self.plan.products), *self.groups)

    def fill(self, dealt: Tensor) -> None:
        """The left party's dealt products of masks. Not needed before the opened bits arrive."""
        assert self.mine is not None
        self.mine[list(self.plan.products)] = dealt


def merge_gen(
    role: Roles, masks: LevelMasks, g: Tensor | None, p: Tensor | None
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """Merge groups of ``m`` (generate, propagate) bits, lowest block first: one round.

    ``g``, ``p``: pair shares ``[m, groups, words]`` (None at the dealer; ``g`` None for a plain AND). Returns the
    groups' generate and propagate shares ``[groups, words]`` (None where not asked for). Each online party opens
    ``masks.plan.opened`` bits per group and element.
    """
    plan = masks.plan
    m = plan.m
    message = Round()
    if role.is_dealer:
        yield message
        return None, None
    table = masks.mine
    assert table is not None
    assert p is not None
    half = 1 << (m - 1)
    base = table[:half]
    gen_at = [half + (1 << m) - (1 << (m - j)) for j in range(m)]
    last = table[table.shape[0] - half :]
    own_masks = [table[i] for i in plan.singles]
    values = list(p[1:]) + (list(g) if plan.generate and g is not None else []) + ([p[0]] if plan.carry_on else [])
    closed = torch.stack([value ^ mask for value, mask in zip(values, own_masks, strict=True)])
    message.send(role.other, kinds.OPEN, closed)
    message.want(role.other, kinds.OPEN, torch.int64, *closed.shape)
    (theirs,) = yield message
    opened = closed ^ theirs
    g_out: Tensor | None = None
    p_out: Tensor | None = None
    if plan.generate:
        g_open = opened[m - 1 : 2 * m - 1]
        h = (g_open[0] & base) ^ table[gen_at[0] : gen_at[0] + half]
        for j in range(1, m):
            tail = table[gen_at[j] : gen_at[j] + (1 << (m - 1 - j))]
            h = (g_open[j] & base[:: 1 << j]) ^ tail ^ (opened[j - 1] & h[0::2]) ^ h[1::2]
        g_out = h[0]
    if plan.carry_on:
        q = (opened[-1] & base) ^ last
        for j in range(1, m):
            q = (opened[j - 1] & q[0::2]) ^ q[1::2]
        p_out = q[0]
    return g_out, p_out


def _thermometer(digit: Tensor) -> Tensor:
    """``[blocks, 4, words]`` bits of a digit, lowest first -> ``[15, blocks, words]``: ``[digit > k]``."""
    b0, b1, b2, b3 = (digit[:, i] for i in range(4))
    low = (b1 | b0, b1, b1 & b0)
    high_gt = (b3 | b2, b3, b3 & b2)
    high_eq = (~(b3 | b2), b2 & ~b3, b3 & ~b2, b3 & b2)
    out: list[Tensor] = []
    for a in range(4):
        above = high_gt[a] if a < 3 else None
        for one in low:
            here = high_eq[a] & one
            out.append(here if above is None else here | above)
        if above is not None:
            out.append(above)
    return torch.stack(out)


def _pick(table: Tensor, digit: Tensor, one: int) -> tuple[Tensor, Tensor]:
    """An online party's shares of (generate, propagate) per block from its share of the thermometer code.

    ``table`` ``[15, blocks, words]``, ``digit`` ``[blocks, 4, words]`` the public digit ``v``; entry ``k = 15 - v``.
    """
    edge = torch.full_like(table[:1], one)
    generate = torch.cat([table, torch.zeros_like(edge)])
    propagate = generate ^ torch.cat([edge, table])
    both = torch.stack([generate, propagate])
    for i in range(4):
        zero, other = both[:, 0::2], both[:, 1::2]
        both = zero ^ (~digit[:, i] & (zero ^ other))
    return both[0, 0], both[1, 0]


def carry_gen(
    rt: Runtime, dealer: int, planes: Tensor, fans: tuple[int, ...], extra: Tensor | None
) -> Steps[list[Tensor | None]]:
    """Carry out of the sum of two ``4 * prod(fans)``-bit numbers, one known to the dealer, one to both online parties.

    ``planes``: this party's number, ``[bits, words]``. ``extra`` (dealer: words; online: a tensor of the same shape or
    None) is a plane that the dealer shares along. Returns pair shares ``[carry, extra]``. 1 + len(fans) rounds.
    """
    role = roles(rt, dealer)
    draws = rt.draws()
    words = planes.shape[-1]
    blocks = planes.shape[0] // BLOCK
    digits = planes.reshape(blocks, BLOCK, words)
    right = draws.ring(role.with_right, 15 * blocks + 1, words) if not role.is_left else None
    masks: list[LevelMasks] = []
    groups = blocks
    for i, fan in enumerate(fans):
        if groups % fan:
            raise ConfigError(f"{groups} blocks do not form groups of {fan}")
        groups //= fan
        masks.append(LevelMasks(draws, role, level(fan, generate=True, carry_on=i + 1 < len(fans)), (groups, words)))
    message = Round()
    if role.is_dealer:
        assert right is not None
        plain = torch.cat(
            [_thermometer(digits).reshape(-1, words), torch.zeros_like(planes[:1]) if extra is None else extra[None]]
        )
        message.send(role.left, kinds.DEALER, plain ^ right)
    elif role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, 15 * blocks + 1, words)
    for one in masks:
        one.deal(message, role)
    got = yield message
    g: Tensor | None = None
    p: Tensor | None = None
    shared: Tensor | None = None
    if role.is_left:
        shared = got[0]
        for one, dealt in zip(masks, got[1:], strict=True):
            one.fill(dealt)
    elif role.is_right:
        shared = right
    if shared is not None:
        g, p = _pick(shared[:-1].reshape(15, blocks, words), digits, -1 if role.is_left else 0)
    for one in masks:
        if g is not None and p is not None:
            m = one.plan.m
            g = g.reshape(-1, m, words).transpose(0, 1)
            p = p.reshape(-1, m, words).transpose(0, 1)
        g, p = yield from merge_gen(role, one, g, p)
        if not role.is_dealer and p is None:
            p = g  # the last level gives no propagate bit
    return [None if g is None else g[0], None if shared is None else shared[-1]]


def padded(x: Share) -> Share:
    """Pad the last axis with zeros to a multiple of 64, so that bit planes pack along it."""
    short = -x.shape[-1] % 64
    return x.map(lambda t: torch.nn.functional.pad(t, (0, short))) if short else x


def drelu_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[PairBits]:
    """``[x >= 0]`` for every element, exact for all ``|x| < 2^63``: ``x.n`` pair-shared bits in one row.

    3 rounds; 53 bytes per element over the three parties (43 from the dealer, 10 between the online parties).
    """
    role = roles(rt, dealer)
    flat = padded(x.reshape(-1))
    value = (flat.lo + flat.hi) if role.is_dealer else online_part(rt, role, flat)
    planes = rt_kernels(rt).to_planes(value)
    top = planes[63].clone()
    planes[63] = 0 if role.is_dealer else -1  # bit 63 only passes the carry of the lower 63 on
    carry, theirs = yield from carry_gen(rt, dealer, planes, _FULL, top if role.is_dealer else None)
    if role.is_dealer:
        return PairBits(role.d, torch.Size((x.n,)), None)
    assert carry is not None
    assert theirs is not None
    words = carry ^ theirs
    if role.is_left:
        words = ~(words ^ top)
    return PairBits(role.d, torch.Size((x.n,)), words)


def and_gen(rt: Runtime, b: PairBits, *, fan: int = 9) -> Steps[PairBits]:
    """AND over the first axis of ``b`` in ``ceil(log_fan(len))`` rounds of at most ``fan`` inputs each."""
    role = roles(rt, b.d)
    m, rest = b.shape[0], b.shape[1:]
    words = b.words
    while m > 1:
        take = m if m <= fan else max(2, min(fan, round(m**0.5)))
        groups = -(-m // take)
        inner = (*rest[:-1], -(-rest[-1] // 64))
        masks = LevelMasks(rt.draws(), role, level(take, generate=False, carry_on=True), (groups, *inner))
        message = Round()
        masks.deal(message, role)
        p: Tensor | None = None
        if words is not None:
            short = groups * take - m
            if short:  # neutral ones
                fill = torch.full((short, *inner), -1 if role.is_left else 0, dtype=torch.int64, device=words.device)
                words = torch.cat([words, fill])
            p = words.reshape(groups, take, *inner).transpose(0, 1)
        _, words = yield from _and_level_gen(role, masks, message, p)
        m = groups
    return PairBits(b.d, rest, None if words is None else words[0])


def _and_level_gen(
    role: Roles, masks: LevelMasks, dealt: Round, p: Tensor | None
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """Deal and merge in one round: what is opened does not depend on the left party's dealt products."""
    inner = merge_gen(role, masks, None, p)
    request = next(inner)
    request.sends.extend(dealt.sends)
    request.wants.extend(dealt.wants)
    got = yield request
    if role.is_left:
        masks.fill(got.pop())
    try:
        inner.send(got)
    except StopIteration as done:
        result: tuple[Tensor | None, Tensor | None] = done.value
        return result
    raise AssertionError("one round expected")


def to_bool_share_gen(rt: Runtime, b: PairBits) -> Steps[BoolShare]:
    """Pair-shared bits to replicated XOR shares: 1 round, 2 bits per bit."""
    role = roles(rt, b.d)
    draws = rt.draws()
    shape = b.word_shape
    left = draws.ring(role.with_left, *shape) if not role.is_right else None
    right = draws.ring(role.with_right, *shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        yield message
        assert left is not None
        assert right is not None
        return BoolShare(right, left, b.n)
    assert b.words is not None
    mask = left if role.is_left else right
    assert mask is not None
    mine = b.words.reshape(shape) ^ mask
    message.send(role.other, kinds.LIFT, mine)
    message.want(role.other, kinds.LIFT, torch.int64, *shape)
    (theirs,) = yield message
    online = mine ^ theirs
    return BoolShare(mask, online, b.n) if role.is_left else BoolShare(online, mask, b.n)
