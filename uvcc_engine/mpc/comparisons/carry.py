"""The carry of ``u + v`` with ``u`` known to a dealer and ``v`` to both online parties: the core of every comparison.

The numbers are cut into digits of ``k`` bits. For each digit the dealer XOR-shares the thermometer code of its own,
``T[j] = [u > j]``; the online parties, who both know ``v``, pick entry ``j = 2^k - 1 - v`` by themselves: ``T[j]`` is
the digit's carry (generate) and ``T[j-1] ^ T[j]`` tells whether it passes a carry on (propagate). Groups of ``m``
digits are then merged in one round each: the online parties open the generate and propagate bits under masks, and
evaluate ``g3 ^ p3 (g2 ^ p2 (g1 ^ p1 g0))`` with the dealer's shares of all products of masks (function-dependent
correlations as in Damgard et al., "TinyTable", CRYPTO 2017, and ABY2.0, USENIX Security 2021). All words are
bit-sliced, 64 elements each.

Everything that the dealer sends is known before ``v``: it is one message, in the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.prg import Draws
from uvcc_engine.mpc.foundation.roles import Roles, known, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.kernels.layout import Level, level
from uvcc_engine.transcript.formats import kinds


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """``groups`` neighbouring groups of one layout."""

    plan: Level
    groups: int

    @property
    def blocks(self) -> int:
        """How many blocks of digits these groups hold."""
        return self.plan.m * self.groups

    @property
    def n_single(self) -> int:
        """How many masked bits are opened."""
        return len(self.plan.singles) * self.groups

    @property
    def n_product(self) -> int:
        """How many products of masked bits are dealt."""
        return len(self.plan.products) * self.groups


CarryTree = tuple[tuple[GroupBatch, ...], ...]


@lru_cache(maxsize=64)
def tree(*fans: tuple[tuple[int, int], ...]) -> CarryTree:
    """Merging steps from (group size, groups) pairs per level, lowest digits first.

    The first group of a level never receives a carry, so nobody asks whether it passes one on.
    """
    return tuple(
        tuple(
            GroupBatch(level(m, generate=True, carry_on=not (at == 0 and n == 1)), n) for at, (m, n) in enumerate(one)
        )
        for one in fans
    )


@dataclass(slots=True)
class BatchMasks:
    """One party's part of a batch: shares of the single masks and of their products, ``[rows, groups, words]``."""

    batch: GroupBatch
    single: Tensor
    product: Tensor


def carry_protocol(
    rt: Runtime,
    dealer: int,
    k: int,
    steps: CarryTree,
    words: int,
    u: Tensor | None,
    v: Callable[[], Tensor],
    extra: Tensor | None,
) -> MpcProtocol[tuple[Tensor | None, Tensor | None]]:
    """Pair shares ``(carry, extra)``, each ``[words]`` (None at the dealer). 1 + len(steps) rounds.

    ``u`` (dealer) and ``v()`` (online, asked for after the first round) are bit planes ``[k * digits, words]``, lowest
    first; ``extra`` (dealer) is one more plane to share.
    """
    role = roles(rt, dealer)
    digits = sum(batch.blocks for batch in steps[0])
    rows = ((1 << k) - 1) * digits
    batches = [batch for one in steps for batch in one]
    n_product = sum(batch.n_product for batch in batches)
    n_single = sum(batch.n_single for batch in batches)
    draws = rt.draws()
    right = draws.ring(role.with_right, rows + 1 + n_single + n_product, words) if not role.is_left else None
    left = draws.ring(role.with_left, n_single, words) if not role.is_right else None
    message = Round()
    if role.is_dealer:
        dealt = _deal(rt, k, rows, batches, known(u), known(extra), known(left), known(right))
        message.send(role.left, kinds.DEALER, dealt)
        yield message
        for _ in steps:
            yield Round()
        return None, None
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, rows + 1 + n_product, words)
    got: list[Tensor] = yield message
    if role.is_left:
        masks = _masks(batches, known(left), got[0][rows + 1 :])
        table = got[0]
    else:
        table = known(right)
        masks = _masks(batches, None, table[rows + 1 :])
    one = -1 if role.is_left else 0
    g, p = rt.kernels.pick_digits(table[:rows], v(), k, one)
    at = 0
    for level_batches in steps:
        count = len(level_batches)
        g, p = yield from merge_protocol(rt, role, masks[at : at + count], g, p)
        at += count
    return g[0], table[rows]


def _deal(
    rt: Runtime, k: int, rows: int, batches: Sequence[GroupBatch], u: Tensor, extra: Tensor, left: Tensor, right: Tensor
) -> Tensor:
    """The dealer's message: its digits' tables, the extra plane and all products of masks, under the right's stream."""
    words = u.shape[-1]
    dealt = torch.empty(rows + 1 + sum(b.n_product for b in batches), words, dtype=torch.int64, device=u.device)
    rt.kernels.deal_digits(u, k, right[:rows], dealt[:rows])
    torch.bitwise_xor(extra, right[rows], out=dealt[rows])
    l_at, r_at, d_at = 0, rows + 1, rows + 1
    for batch in batches:
        s, q = batch.n_single, batch.n_product
        rt.kernels.mask_products(
            batch.plan,
            left[l_at : l_at + s].view(-1, batch.groups, words),
            right[r_at : r_at + s].view(-1, batch.groups, words),
            right[r_at + s : r_at + s + q].view(-1, batch.groups, words),
            dealt[d_at : d_at + q].view(-1, batch.groups, words),
        )
        l_at, r_at, d_at = l_at + s, r_at + s + q, d_at + q
    return dealt


def _masks(batches: Sequence[GroupBatch], single: Tensor | None, rest: Tensor) -> list[BatchMasks]:
    """Cut an online party's rows: the left has its singles apart, the right finds them before each batch's products."""
    out = []
    s_at = at = 0
    words = rest.shape[-1]
    for batch in batches:
        s, q = batch.n_single, batch.n_product
        if single is None:
            mine, at = rest[at : at + s], at + s
        else:
            mine, s_at = single[s_at : s_at + s], s_at + s
        out.append(
            BatchMasks(batch, mine.view(-1, batch.groups, words), rest[at : at + q].view(-1, batch.groups, words))
        )
        at += q
    return out


def merge_protocol(
    rt: Runtime, role: Roles, masks: Sequence[BatchMasks], g: Tensor, p: Tensor
) -> MpcProtocol[tuple[Tensor, Tensor]]:
    """An online party's merging step: (generate, propagate) shares ``[blocks, words]`` to those of the groups. 1
    round."""
    words = p.shape[-1]
    closed = torch.empty(sum(m.batch.n_single for m in masks), words, dtype=torch.int64, device=p.device)
    at = block = 0
    for m in masks:
        size, blocks = m.batch.n_single, m.batch.blocks
        view = closed[at : at + size].view(m.single.shape)
        rt.kernels.close(m.batch.plan, g[block : block + blocks], p[block : block + blocks], m.single, view)
        at, block = at + size, block + blocks
    message = Round()
    message.send(role.other, kinds.OPEN, closed)
    message.want(role.other, kinds.OPEN, torch.int64, *closed.shape)
    (theirs,) = yield message
    one = -1 if role.is_left else 0
    groups = sum(m.batch.groups for m in masks)
    out = torch.empty(2, groups, words, dtype=torch.int64, device=p.device)
    at = group = 0
    for m in masks:
        size = m.batch.n_single
        opened = (closed[at : at + size] ^ theirs[at : at + size]).view(m.single.shape)
        place = slice(group, group + m.batch.groups)
        rt.kernels.merge(m.batch.plan, opened, m.single, m.product, one, out[0, place], out[1, place])
        at, group = at + size, group + m.batch.groups
    return out[0], out[1]


def and_level_protocol(
    rt: Runtime, dealer: int, plan: Level, groups: int, words: int, p: Tensor | None
) -> MpcProtocol[Tensor | None]:
    """AND of ``plan.m`` pair-shared bits each: ``[groups * m, words]`` to ``[groups, words]``. 1 round.

    The dealt products are needed only after the opening, so both travel in the same round.
    """
    role = roles(rt, dealer)
    n_single, n_product = len(plan.singles), len(plan.products)
    draws: Draws = rt.draws()
    right = draws.ring(role.with_right, n_single + n_product, groups, words) if not role.is_left else None
    left = draws.ring(role.with_left, n_single, groups, words) if not role.is_right else None
    message = Round()
    if role.is_dealer:
        both = known(right)
        dealt = torch.empty(n_product, groups, words, dtype=torch.int64, device=both.device)
        rt.kernels.mask_products(plan, known(left), both[:n_single], both[n_single:], dealt)
        message.send(role.left, kinds.DEALER, dealt)
        yield message
        return None
    single = known(left) if role.is_left else known(right)[:n_single]
    closed = torch.empty_like(single)
    rt.kernels.close(plan, None, known(p), single, closed)
    message.send(role.other, kinds.OPEN, closed)
    message.want(role.other, kinds.OPEN, torch.int64, *closed.shape)
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, n_product, groups, words)
    got: list[Tensor] = yield message
    product = got[1] if role.is_left else known(right)[n_single:]
    out = torch.empty(groups, words, dtype=torch.int64, device=closed.device)
    rt.kernels.merge(plan, closed ^ got[0], single, product, -1 if role.is_left else 0, None, out)
    return out
