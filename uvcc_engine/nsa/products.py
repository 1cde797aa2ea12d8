"""The branches on a processor in 32 or 64 bits: matrix products over tiles, with few passes between them.

All heads of a group are rows of one product; torch's own attention takes each head by itself, which costs most where
rows are short. Weights are powers of 2: unlike torch's exp, its exp2 is as fast where a score is hidden or far away.

Of selected blocks the two local ones are side by side and masked at their edges alone; the others are worked off block
by block, each with the queries that chose it (FSA, arXiv 2508.18224). Queries carry minus their reference, first the
logarithm of the local blocks' weights, as one more column and keys a 1, so that the product subtracts it too; values
carry a 1, so that the product sums the weights too. So a part needs no maximum, and is added to the others as it is.
Where a weight exceeds what the type holds, the query's reference is raised and its branch computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from uvcc_engine.nsa import spans
from uvcc_engine.nsa.index import Inverse, invert, pool, top_blocks
from uvcc_engine.nsa.spans import Tile
from uvcc_engine.nsa.visibility import Layout

TYPES: Final = frozenset({torch.float32, torch.float64})
DEVICES: Final = frozenset({"cpu"})
CHOSEN_TILE: Final = 128  # queries of a block at a time, the last ones padded
LOG2_E: Final = math.log2(math.e)
RANKED: Final = 256  # queries whose blocks are chosen at a time


def serves(q: Tensor) -> bool:
    """Whether these products are the way for queries q [B, S, H, dk]."""
    return q.dtype in TYPES and q.device.type in DEVICES


@dataclass(frozen=True, slots=True)
class Listed:
    """A block's keys and some of the queries that chose it, counted from the first that selects: ``t`` [CHOSEN_TILE],
    of which the first ``live`` count. ``bias`` [queries, 1, keys] where some query does not see every key, because its
    document begins among them.
    """

    t: Tensor
    live: int
    keys: slice
    bias: Tensor | None

    def hide(self, score: Tensor) -> None:
        """Make -inf of the scores [queries * heads, keys] of what is not seen."""
        if self.bias is not None:
            part = score.view(len(self.t), -1, score.shape[-1])
            part += self.bias


class Lists:
    """Chosen blocks but for the local ones, by row and group; ``chosen`` int32 [B, G, S - skip, n_sel]."""

    def __init__(self, chosen: Tensor, layout: Layout, skip: int) -> None:
        self._layout, self.skip, self._n_sel = layout, skip, chosen.shape[-1]
        local = layout.positions[skip:, None] // layout.cfg.l_sel
        self._inverse: Inverse = invert(chosen.masked_fill(chosen >= local - 1, -1), layout.n_blocks)
        self._bounds = self._inverse.bounds()

    def tiles(self, row: int, group: int) -> Iterator[Listed]:
        """Those of one row and group, block by block, in the order of the queries."""
        layout, size = self._layout, self._layout.cfg.l_sel
        offset = self._bounds[row][group]
        cut = [(j, a) for j in range(len(offset) - 1) for a in range(offset[j], offset[j + 1], CHOSEN_TILE)]
        if not cut:
            return
        queries = self._inverse.entry[row, group].to(torch.int64) // self._n_sel
        lives = [min(CHOSEN_TILE, offset[j + 1] - a) for j, a in cut]
        begin, live = (torch.tensor(x, device=queries.device)[:, None] for x in ([a for _, a in cut], lives))
        slots = torch.arange(CHOSEN_TILE, device=queries.device)
        # padding takes the tile's first query: its scores are finite, its results are dropped
        every = queries[torch.where(slots < live, begin + slots, begin)]
        starts = layout.starts[row % layout.starts.shape[0], self.skip :][every] if layout.packed else None
        latest = [0] * len(cut) if starts is None else starts.amax(1).tolist()
        for i, (t, (j, _)) in enumerate(zip(every.unbind(), cut, strict=True)):
            keys, bias = slice(j * size, min((j + 1) * size, layout.n_keys)), None
            if starts is not None and latest[i] > keys.start:
                hidden = torch.arange(keys.start, keys.stop, device=t.device) < starts[i][:, None]
                bias = torch.zeros(hidden.shape, device=t.device).masked_fill_(hidden, -torch.inf)[:, None]
            yield Listed(t, lives[i], keys, bias)


class Ranking:
    """Chooses the blocks of the queries from ``skip`` on while the compressed branch goes over its tiles."""

    def __init__(self, layout: Layout, rows: int, groups: int, skip: int) -> None:
        self._layout, self._rows, self._skip, self._begin = layout, rows, skip, skip
        self._places = rows * groups
        self._ranks: list[list[Tensor]] = [[] for _ in range(self._places)]
        self._found: list[Tensor] = []

    def see(self, place: int, tile: Tile, weight: Tensor, total: Tensor) -> None:
        """A tile's weights [queries * h, keys], which are used up, and their sums [queries * h, 1]."""
        if tile.end <= self._skip:
            return
        layout = self._layout
        by_group = weight.div_(total).view(tile.end - tile.begin, -1, weight.shape[-1]).sum(1)
        by_group = F.pad(by_group[max(0, self._skip - tile.begin) :], (tile.low, 0))
        self._ranks[place].append(pool(layout.cfg, by_group, layout.cfg.n_blocks(layout.first + tile.end)))
        if place == self._places - 1 and (tile.end == layout.s or tile.end - self._begin >= RANKED):
            self._choose(tile.end)

    def _choose(self, end: int) -> None:
        layout, queries = self._layout, slice(self._begin, end)
        wide = layout.cfg.n_blocks(layout.first + end)
        rank = torch.stack([torch.cat([F.pad(r, (0, wide - r.shape[-1])) for r in ranks]) for ranks in self._ranks])
        starts = layout.starts[:, queries]
        rank = rank.view(self._rows, -1, *rank.shape[1:])
        self._found.append(top_blocks(layout.cfg, rank, layout.positions[queries], starts))
        self._begin, self._ranks = end, [[] for _ in range(self._places)]

    def chosen(self) -> Tensor:
        """int32 [B, G, S - skip, n_sel]."""
        return torch.cat(self._found, -2)


class _Attended(torch.autograd.Function):
    """q [B, S, G, h, dk], k/v [B, n, G, d] -> (o [B, S, G, h, dv], and what ``ranking`` chose, or nothing)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[list[Tile]], lists: Lists | None, ranking: Ranking | None
    ) -> tuple[Tensor, Tensor]:
        o, lse = _side_by_side(q, k, v, tiles, ranking)
        if lists is not None:
            _with_lists(q, k, v, o, lse, lists)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.tiles, ctx.lists = tiles, lists
        best = torch.empty(0, dtype=torch.int32) if ranking is None else ranking.chosen()
        ctx.mark_non_differentiable(best)
        return o, best

    @staticmethod
    def backward(ctx: Any, do: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        dq, dk, dv = _slopes_side_by_side(do, q, k, v, o, lse, delta, ctx.tiles)
        if ctx.lists is not None:
            _slopes_of_lists(do, q, k, v, lse, delta, ctx.lists, (dq, dk, dv))
        dk *= scale_of(q)
        return dq, dk.transpose(1, 2), dv.transpose(1, 2), None, None, None


def scale_of(q: Tensor) -> float:
    """What scores of queries [..., dk] are multiplied by."""
    return 1.0 / math.sqrt(q.shape[-1])


def _places(q: Tensor) -> list[tuple[int, int]]:
    return [(row, group) for row in range(q.shape[0]) for group in range(q.shape[2])]


def by_group(k: Tensor, times: float) -> Tensor:
    """k [B, n, G, d] times so much: [B, G, n, d]."""
    return torch.mul(k.transpose(1, 2), times).contiguous()


def _side_by_side(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[list[Tile]], ranking: Ranking | None
) -> tuple[Tensor, Tensor]:
    """o [B, S, G, h, dv], and the logarithm, of base 2, of the sum of the weights [B, G, S, h]."""
    b, s, g, h, dk = q.shape
    o, lse = q.new_empty(b, s, g, h, v.shape[-1]), q.new_empty(b, g, s, h)
    places, scaled = _places(q), by_group(k, scale_of(q) * LOG2_E)
    for alike in zip(*tiles, strict=True):  # the rows' tiles of the same queries
        for number, (row, group) in enumerate(places):
            tile = alike[row % len(alike)]
            mine, keys = slice(tile.begin, tile.end), slice(tile.low, tile.high)
            score = torch.mm(q[row, mine, group].reshape(-1, dk), scaled[row, group, keys].T)
            tile.hide(score)
            peak = score.amax(-1, keepdim=True)
            total = score.sub_(peak).exp2_().sum(-1, keepdim=True)
            found, into = torch.mm(score, v[row, keys, group]), o[row, mine, group]
            torch.div(found.view(into.shape), total.view(-1, h, 1), out=into)
            if ranking is not None:
                ranking.see(number, tile, score, total)
            torch.add(peak.view(-1, h), total.log2_().view(-1, h), out=lse[row, group, mine])
    return o, lse


def _slopes_side_by_side(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, delta: Tensor, tiles: list[list[Tile]]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq like q, dk before it is scaled and dv [B, G, n, d]; ``delta`` [B, G, S, h], the sums of do * o, is filled."""
    b, _, g, h, dk = q.shape
    dq, scale = torch.empty_like(q, memory_format=torch.contiguous_format), scale_of(q)
    plain = by_group(k, scale)
    scaled = plain * LOG2_E
    on_k, on_v = torch.zeros_like(plain), q.new_zeros(b, g, *v.shape[1::2])
    for row, group in _places(q):
        for tile in tiles[row % len(tiles)]:
            mine, keys = slice(tile.begin, tile.end), slice(tile.low, tile.high)
            rows, slope = q[row, mine, group].reshape(-1, dk), do[row, mine, group].reshape(-1, v.shape[-1])
            out = o[row, mine, group].reshape(slope.shape)
            mean = torch.sum(slope * out, -1, keepdim=True)
            delta[row, group, mine] = mean.view(-1, h)
            p = torch.mm(rows, scaled[row, group, keys].T).sub_(lse[row, group, mine].reshape(-1, 1))
            tile.hide(p)
            p.exp2_()
            on_v[row, group, keys].addmm_(p.T, slope)
            on_p = torch.mm(slope, v[row, keys, group].T).sub_(mean).mul_(p)
            on_k[row, group, keys].addmm_(on_p.T, rows)
            into = dq[row, mine, group]
            into.copy_(torch.mm(on_p, plain[row, group, keys]).view(into.shape))
    return dq, on_k, on_v


def _extended(x: Tensor, last: Tensor | float) -> Tensor:
    """x [B, n, G, h, d] and a column ``last`` [B, G, n, h] more: [B, G, n, h * (d + 1)]."""
    b, n, g, h, d = x.shape
    out = x.new_empty(b, g, n, h, d + 1)
    out[..., :-1] = x.transpose(1, 2)
    out[..., -1] = last
    return out.view(b, g, n, -1)


def _with_lists(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lists: Lists) -> None:
    """Adds to ``_side_by_side``'s results those of the lists."""
    h, skip = q.shape[3], lists.skip
    q, late, most = q[:, skip:], o[:, skip:], lse[:, :, skip:]
    kx, vx = _extended(k[:, :, :, None] * (scale_of(q) * LOG2_E), 1.0), _extended(v[:, :, :, None], 1.0)
    qx = _extended(q, -most)
    sums = _listed(qx, kx, vx, _extended(late, 1.0), lists)
    raised = most.clone()
    if not isinstance(sums, FakeTensor) and not bool(
        sums.isfinite().all()
    ):  # a weight that is too great for the type, beside one that is not
        over = ~sums.view(*most.shape, -1).isfinite().all(-1)
        raised = torch.where(over, most + _listed_most(qx, kx, lists, h), most)
        weight = (most - raised).exp2_()
        first = _extended(late * weight.transpose(1, 2)[..., None], weight)
        sums = _listed(_extended(q, -raised), kx, vx, first, lists)
    sums = sums.view(*most.shape, -1)
    torch.div(sums[..., :-1], sums[..., -1:], out=late.transpose(1, 2))
    torch.add(raised, sums[..., -1].log2(), out=most)


def _listed(qx: Tensor, kx: Tensor, vx: Tensor, sums: Tensor, lists: Lists) -> Tensor:
    """Adds to ``sums`` [B, G, late, h * (dv + 1)] the lists' values and 1, weighted."""
    for row, group in itertools.product(*map(range, qx.shape[:2])):
        q, k, v, into = qx[row, group], kx[row, group], vx[row, group], sums[row, group]
        for part in lists.tiles(row, group):
            weight = torch.mm(q.index_select(0, part.t).view(-1, k.shape[-1]), k[part.keys].T)
            part.hide(weight)
            more = torch.mm(weight.exp2_(), v[part.keys]).view(len(part.t), -1)
            into.index_add_(0, part.t[: part.live], more[: part.live])
    return sums


def _listed_most(qx: Tensor, kx: Tensor, lists: Lists, h: int) -> Tensor:
    """By how much the greatest score of the lists exceeds what the queries carry, at least 0: [B, G, late, h]."""
    found = qx.new_zeros(*qx.shape[:3], h)
    for row, group in itertools.product(*map(range, qx.shape[:2])):
        q, k, most = qx[row, group], kx[row, group], found[row, group]
        for part in lists.tiles(row, group):
            score = torch.mm(q.index_select(0, part.t).view(-1, k.shape[-1]), k[part.keys].T)
            part.hide(score)
            real = part.t[: part.live]
            most[real] = torch.maximum(most[real], score.amax(-1).view(-1, h)[: part.live])
    return found


def _slopes_of_lists(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lists: Lists, sums: tuple[Tensor, ...]
) -> None:
    """Adds what the lists give to dq, and to dk and dv as ``_slopes_side_by_side`` gives them."""
    dq, dk, dv = sums
    skip = lists.skip
    qx, dox = _extended(q[:, skip:], -lse[:, :, skip:]), _extended(do[:, skip:], -delta[:, :, skip:])
    scale = scale_of(q)
    kx, vx, plain = (
        _extended(k[:, :, :, None] * (scale * LOG2_E), 1.0),
        _extended(v[:, :, :, None], 1.0),
        by_group(k, scale),
    )
    on_q = q.new_zeros(*qx.shape[:3], q.shape[3] * q.shape[4])
    for row, group in _places(q):
        by_query, by_do, into = qx[row, group], dox[row, group], on_q[row, group]
        for part in lists.tiles(row, group):
            mine, grad = by_query.index_select(0, part.t).view(-1, kx.shape[-1]), by_do.index_select(0, part.t)
            grad[part.live :] = 0  # of the padding, which so adds nothing to any key
            grad = grad.view(-1, vx.shape[-1])
            p = torch.mm(mine, kx[row, group, part.keys].T)
            part.hide(p)
            p.exp2_()
            dv[row, group, part.keys].addmm_(p.T, grad[:, :-1])
            on_p = torch.mm(grad, vx[row, group, part.keys].T).mul_(p)
            dk[row, group, part.keys].addmm_(on_p.T, mine[:, :-1])
            more = torch.mm(on_p, plain[row, group, part.keys]).view(len(part.t), -1)
            into.index_add_(0, part.t[: part.live], more[: part.live])
    dq[:, skip:] += on_q.view(q.shape[0], q.shape[2], -1, *q.shape[3:]).transpose(1, 2)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[list[Tile]], lists: Lists | None = None, ranking: Ranking | None = None
) -> tuple[Tensor, Tensor]:
    grouped = q.view(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    o, best = _Attended.apply(grouped, k, v, tiles, lists, ranking)  # type: ignore[no-untyped-call]
    return o.flatten(2, 3), best


def compressed(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, dk], k/v [B, n_cmp, G, d] -> (o [B, S, H, dv], chosen int32 [B, G, late, n_sel] or None).

    Late are the queries that have more blocks than they may choose.
    """
    h = q.shape[2] // k.shape[2]
    ranking = Ranking(layout, q.shape[0], k.shape[2], spans.early(layout)) if layout.selects else None
    o, best = _attended(q, k, v, spans.tiles(layout, "cmp", h), ranking=ranking)
    return o, best if layout.selects else None


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, layout: Layout) -> Tensor:
    """q [B, S, H, dk], k/v [B, S, G, d], chosen as ``compressed`` gives it -> [B, S, H, dv]."""
    h = q.shape[2] // k.shape[2]
    if chosen is None:
        return _attended(q, k, v, spans.tiles(layout, "causal", h))[0]
    lists = Lists(chosen, layout, spans.early(layout))
    return _attended(q, k, v, spans.tiles(layout, "local", h), lists)[0]


def window(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The last w tokens. q [B, S, H, dk], k/v [B, S, G, d] -> [B, S, H, dv]."""
    return _attended(q, k, v, spans.tiles(layout, "window", q.shape[2] // k.shape[2]))[0]
