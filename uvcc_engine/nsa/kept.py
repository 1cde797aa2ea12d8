"""All branches of short rows on a processor, gated, in one go: tile by tile, with the weights kept for the gradients.

As in ``products`` all heads of a group are rows of one product, and weights are powers of 2. A tile's queries are
fetched once for the three branches, their gates are applied to what is in the cache already, and with the weights at
hand the gradients take four products in place of five. What is kept grows with the square of the row, so longer rows
compute their weights again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.nsa import products, spans
from uvcc_engine.nsa.products import LOG2_E, by_group, scale_of
from uvcc_engine.nsa.spans import Tile
from uvcc_engine.nsa.visibility import Layout

Triple = tuple[Tensor | None, Tensor, Tensor]
Together = list[list[tuple[Tile, ...]]]
"""Of each row, the tiles of the same queries, one a branch."""

UP_TO: Final = 512  # keys a row: beyond it the weights are more than all else that a layer keeps
THREADS: Final = 1  # measured: several wait for each other at every product, and torch's own attention is as fast
KINDS: Final[tuple[spans.Kind, ...]] = ("cmp", "causal", "window")


def serves(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether this is the way for queries of a type: rows that are short, and in which no query selects."""
    if layout.n_keys > UP_TO or layout.selects or torch.get_num_threads() > THREADS:
        return False
    here = dtype in products.TYPES and layout.device.type in products.DEVICES
    return here and not torch.compiler.is_compiling()


def mixed(q: Tensor, keys: Triple, values: Triple, gates: Tensor, layout: Layout) -> Tensor:
    """The gated sum of the branches [B, S, H, dv]: q [B, S, H, dk], gates [B, S, H, 3], and keys and values
    [B, n, G, d] of the compressed, the selecting and the window branch, the first None without a whole block."""
    pairs, gates, by_heads = gated_pairs(q, keys, values, gates, layout)
    tiles = spans.together(layout, KINDS[-(len(pairs) // 2) :], by_heads.shape[3])
    o: Tensor = _Mixed.apply(by_heads, gates, tiles, *pairs)  # type: ignore[no-untyped-call]
    return o.flatten(2, 3)


def gated_pairs(
    q: Tensor, keys: Triple, values: Triple, gates: Tensor, layout: Layout
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Keys and values of the branches that are there, their gates [B, S, G, h, branches], and queries
    [B, S, G, h, dk]."""
    whole = (keys[0], values[0]) if keys[0] is not None and values[0] is not None else ()
    pairs = (*whole, keys[1], values[1], keys[2], values[2])
    if whole:  # a query that sees no block was given one
        seen = layout.sees_cmp[..., None].to(gates.dtype)
        gates = torch.cat([gates[..., :1] * seen, gates[..., 1:]], -1)
    n, (b, s, _, dk), groups = len(pairs) // 2, q.shape, keys[1].shape[2]
    return pairs, gates[..., -n:].view(b, s, groups, -1, n), q.view(b, s, groups, -1, dk)


@dataclass(frozen=True, slots=True)
class _Place:
    """The tiles of the same queries, one a branch, of one row and group: ``queries`` of the row, ``rows`` of queries
    and heads, and the keys of each branch."""

    row: int
    group: int
    queries: slice
    rows: slice
    tiles: tuple[Tile, ...]
    keys: tuple[slice, ...]


def _places(q: Tensor, tiles: Together) -> Iterator[_Place]:
    h = q.shape[3]
    for row in range(q.shape[0]):
        for group in range(q.shape[2]):
            for alike in tiles[row % len(tiles)]:
                begin, end = alike[0].begin, alike[0].end
                keys = tuple(slice(t.low, t.high) for t in alike)
                yield _Place(row, group, slice(begin, end), slice(begin * h, end * h), alike, keys)


class _Mixed(torch.autograd.Function):
    """q [B, S, G, h, dk], gates [B, S, G, h, branches], k/v [B, n, G, d] of each -> [B, S, G, h, dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, gates: Tensor, tiles: Together, *pairs: Tensor) -> Tensor:
        (b, s, g, h, dk), n, dv = q.shape, gates.shape[-1], pairs[1].shape[-1]
        scaled, values = [by_group(k, scale_of(q) * LOG2_E) for k in pairs[::2]], pairs[1::2]
        gate = gates.permute(4, 0, 2, 1, 3).reshape(n, b, g, s * h)
        y, total, read = q.new_empty(b, s, g, h, dv), torch.empty_like(gate), q.new_empty(n, b, g, s * h, dv)
        weights, keeps = [], any(ctx.needs_input_grad)
        for at in _places(q, tiles):
            here, mine = (slice(None), at.row, at.group, at.rows), q[at.row, at.queries, at.group].reshape(-1, dk)
            sums, found = total[here], read[here]
            for i, tile in enumerate(at.tiles):
                weight = torch.mm(mine, scaled[i][at.row, at.group, at.keys[i]].T)
                tile.hide(weight)
                weight.sub_(weight.amax(-1, keepdim=True)).exp2_()
                torch.sum(weight, -1, out=sums[i])
                torch.mm(weight, values[i][at.row, at.keys[i], at.group], out=found[i])
                if keeps:
                    weights.append(weight)
            parts, share = found.view(n, -1, h, dv), (gate[here] / sums).view(n, -1, h, 1)
            into = torch.mul(parts[0], share[0], out=y[at.row, at.queries, at.group])
            for i in range(1, n):
                into.addcmul_(parts[i], share[i])
        ctx.save_for_backward(q, gate, total, read, *pairs, *weights)
        ctx.tiles = tiles
        return y

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, gate, total, read, *rest = ctx.saved_tensors
        (_, s, g, h, dk), (n, b, _, _, dv) = q.shape, read.shape
        keys, values, weights = rest[: 2 * n : 2], rest[1 : 2 * n : 2], iter(rest[2 * n :])
        plain = [by_group(k, scale_of(q)) for k in keys]
        on_k, on_v = [torch.zeros_like(k) for k in plain], [v.new_zeros(b, g, v.shape[1], dv) for v in values]
        dq, on_gate = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(gate)
        for at in _places(q, ctx.tiles):
            here, mine = (slice(None), at.row, at.group, at.rows), q[at.row, at.queries, at.group].reshape(-1, dk)
            grad = do[at.row, at.queries, at.group].reshape(-1, dv)
            along = torch.div((grad * read[here]).sum(-1), total[here], out=on_gate[here])
            share = gate[here] / total[here]
            means, slopes = (along * share)[..., None], grad * share[..., None]
            on_q = torch.zeros_like(mine)
            for i, seen in enumerate(at.keys):
                weight, span = next(weights), (at.row, at.group, seen)
                # first what streams over the weights, which are no longer in the cache
                on_weight = torch.mm(slopes[i], values[i][at.row, seen, at.group].T).sub_(means[i]).mul_(weight)
                on_v[i][span].addmm_(weight.T, slopes[i])
                on_k[i][span].addmm_(on_weight.T, mine)
                on_q.addmm_(on_weight, plain[i][span])
            into = dq[at.row, at.queries, at.group]
            into.copy_(on_q.view(into.shape))
        found = [x.transpose(1, 2) for pair in zip(on_k, on_v, strict=True) for x in pair]
        for dk_i in found[::2]:
            dk_i *= scale_of(q)
        return dq, on_gate.view(n, b, g, s, h).permute(1, 3, 2, 4, 0), None, *found
