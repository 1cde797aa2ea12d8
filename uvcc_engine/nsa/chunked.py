"""The three branches in bounded memory, in plain torch: for long rows where no kernel runs, and for gradients there.

Nothing of size S x S or S x n_cmp is kept. Compression works on tiles of queries and repeats its scores in the
backward pass. Selection runs over the key blocks and takes to each the queries that chose it, in tiles of fixed size,
as the kernels do (FSA, arXiv 2508.18224): a later token can only add rows behind those of earlier ones, so the bits of
earlier outputs do not depend on it. In 32 and 64 bits on a processor ``products`` does this, its own way.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.nsa import blocks, products, spans
from uvcc_engine.nsa.index import Inverse, invert, pool, top_blocks
from uvcc_engine.nsa.masked import sdpa
from uvcc_engine.nsa.part_of_keys import attend, slopes
from uvcc_engine.nsa.visibility import Layout

TILE: Final = 256  # queries at a time
CHOSEN_TILE: Final = 256  # queries of a block at a time
WINDOW_TILE: Final = 128  # queries at a time, whose windows overlap


def _tiles(s: int) -> list[tuple[int, int]]:
    return [(a, min(a + TILE, s)) for a in range(0, s, TILE)]


def _visible(layout: Layout, a: int, b: int, n: int) -> Tensor:
    """Which of the first n compression blocks queries a..b-1 see; a query that sees none sees all. [B', b - a, n]."""
    seen = blocks.cmp_visible(layout.cfg, layout.positions[a:b], layout.starts[:, a:b], n)
    return seen | ~seen.any(-1, keepdim=True)


class _Compressed(torch.autograd.Function):
    """q [B, G, h, S, dk], k/v [B, G, n_cmp, d] -> (o [B, G, h, S, dv], lse [B, G, h, S], chosen int32 or empty)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, chosen = [], [], []
        for a, b in _tiles(layout.s):
            n = max(1, layout.cfg.n_cmp(layout.first + b))
            score = _scores(q[..., a:b, :], k[..., :n, :], _visible(layout, a, b, n))
            z = score.logsumexp(-1, keepdim=True)
            p = (score - z).exp()
            out.append(p.to(v.dtype) @ v[:, :, None, :n])
            lse.append(z[..., 0])
            if layout.selects:
                wide = layout.cfg.n_blocks(layout.first + b)
                rank = pool(layout.cfg, p.sum(2), wide)
                chosen.append(top_blocks(layout.cfg, rank, layout.positions[a:b], layout.starts[:, a:b]))
        o, z = torch.cat(out, -2), torch.cat(lse, -1)
        best = torch.cat(chosen, -2) if chosen else torch.empty(0, dtype=torch.int32, device=q.device)
        ctx.save_for_backward(q, k, v, o, z)
        ctx.layout = layout
        ctx.mark_non_differentiable(z, best)
        return o, z, best

    @staticmethod
    def backward(ctx: Any, do: Tensor, *unused: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        layout: Layout = ctx.layout
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        heads = q.shape[2]
        for a, b in _tiles(layout.s):
            n = max(1, layout.cfg.n_cmp(layout.first + b))
            biases = [_bias(seen, q[..., :1, :]).repeat(heads, 1) for seen in _visible(layout, a, b, n)]
            for row, group in itertools.product(*map(range, q.shape[:2])):
                at, keys = (row, group, slice(None), slice(a, b)), (row, group, slice(n))
                grad, x, y = (t[at].flatten(0, 1) for t in (do, q, o))
                bias = biases[row % len(biases)]
                on_q, on_k, on_v = slopes(grad, x, k[keys], v[keys], y, lse[at].flatten(), bias)
                dq[at] = on_q.reshape(dq[at].shape)
                dk[keys] += on_k
                dv[keys] += on_v
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """q [B, G, h, T, dk], k [B, G, n, dk], seen [B', T, n] -> float scores [B, G, h, T, n], -inf where not seen."""
    score: Tensor = (q * float(q.shape[-1]) ** -0.5) @ k[:, :, None].transpose(-1, -2)
    return score.to(torch.promote_types(score.dtype, torch.float32)).masked_fill(~seen[:, None, None], -torch.inf)


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, dk], k/v [B, n_cmp, G, d] -> (o [B, S, H, dv], what ``selected`` takes as chosen)."""
    if products.serves(q):
        return products.compressed(q, k_cmp, v_cmp, layout)
    b, s, heads, dk = q.shape
    groups = k_cmp.shape[2]
    grouped = q.view(b, s, groups, heads // groups, dk).permute(0, 2, 3, 1, 4)
    o, _, best = _Compressed.apply(grouped, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), layout)  # type: ignore[no-untyped-call]
    return o.permute(0, 3, 1, 2, 4).reshape(b, s, heads, -1), best if layout.selects else None


class _Selected(torch.autograd.Function):
    """q [B, G, S - skip, h, dk], k/v [B, G, n_keys, d], chosen int32 [B, G, S - skip, n_sel] -> o like q, of width dv.

    The queries are those behind the layout's first ``skip``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout, skip: int) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        inverse = invert(chosen, layout.n_blocks)
        o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        for at, tiles in _block_tiles(inverse, chosen.shape[-1], layout, skip):
            qs, ks, vs, os, zs = (x[at] for x in (q, k, v, o, lse))
            for t, live, keys, part_only in tiles:
                bias = _hidden(t + skip, keys, layout, at[0], q) if part_only else None
                part, z = attend(_rows(qs, t), ks[keys], vs[keys], bias)
                real, part, z = t[:live], part.view(*t.shape, *os.shape[1:])[:live], z.view(*t.shape, -1)[:live]
                before = zs.index_select(0, real)
                new = torch.logaddexp(before, z)
                grown = os.index_select(0, real).mul_((before - new).exp_()[..., None])
                os.index_copy_(0, real, grown.addcmul_(part, (z - new).exp_()[..., None]))
                zs.index_copy_(0, real, new)
        o = o.to(v.dtype)
        ctx.save_for_backward(q, k, v, chosen, o, lse)
        ctx.layout, ctx.inverse, ctx.skip = layout, inverse, skip
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, chosen, o, lse = ctx.saved_tensors
        layout: Layout = ctx.layout
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for at, tiles in _block_tiles(ctx.inverse, chosen.shape[-1], layout, ctx.skip):
            qs, ks, vs, os, zs, grads = (x[at] for x in (q, k, v, o, lse, do))
            on_qs, on_ks, on_vs = (x[at] for x in (dq, dk, dv))
            for t, live, keys, part_only in tiles:
                bias = _hidden(t + ctx.skip, keys, layout, at[0], q) if part_only else None
                grad, z = _rows(grads, t), zs.index_select(0, t).flatten()
                grad[live * do.shape[-2] :] = 0  # of the padding, which so adds nothing to any key
                on_q, on_k, on_v = slopes(grad, _rows(qs, t), ks[keys], vs[keys], _rows(os, t), z, bias)
                real, more = t[:live], on_q.reshape(*t.shape, *qs.shape[1:])[:live]
                on_qs.index_copy_(0, real, on_qs.index_select(0, real).add_(more))
                on_ks[keys] += on_k
                on_vs[keys] += on_v
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _rows(x: Tensor, t: Tensor) -> Tensor:
    """Rows t of x [S, h, d], one head behind another: [len(t) * h, d]."""
    return x.index_select(0, t).flatten(0, 1)


def _block_tiles(inverse: Inverse, n_sel: int, layout: Layout, skip: int) -> Any:
    """Yields (row, group) and its tiles, each block's one behind another: see ``_tiles_of``."""
    for row, by_group in enumerate(inverse.bounds()):
        for group, offset in enumerate(by_group):
            queries = inverse.entry[row, group].to(torch.int64) // n_sel
            yield (row, group), _tiles_of(offset, queries, layout, skip, row)


def _tiles_of(offset: list[int], queries: Tensor, layout: Layout, skip: int, row: int) -> Any:
    """Yields queries [CHOSEN_TILE] of a block, how many of them are real, the block's slice of keys, and whether some
    query does not see all of them. Those of block j are ``queries[offset[j] : offset[j + 1]]``.
    """
    size, n = layout.cfg.l_sel, len(offset) - 1
    cut = [(j, a) for j in range(n) for a in range(offset[j], offset[j + 1], CHOSEN_TILE)]
    if not cut:
        return
    lives = [min(CHOSEN_TILE, offset[j + 1] - a) for j, a in cut]
    begin, live = (torch.tensor(x, device=queries.device)[:, None] for x in ([a for _, a in cut], lives))
    slots = torch.arange(CHOSEN_TILE, device=queries.device)
    # padding takes the tile's first query: its scores are finite, its results are dropped
    t = queries[torch.where(slots < live, begin + slots, begin)]
    earliest = (t[:, 0] + layout.first + skip).tolist()
    starts = layout.starts[row % layout.starts.shape[0]]
    start = starts[t.gather(1, live - 1)[:, 0] + skip].tolist()
    for i, tile in enumerate(t.unbind()):
        keys = slice(cut[i][0] * size, min((cut[i][0] + 1) * size, layout.n_keys))
        yield tile, lives[i], keys, earliest[i] < keys.stop - 1 or start[i] > keys.start


def _hidden(places: Tensor, keys: slice, layout: Layout, row: int, q: Tensor) -> Tensor:
    """-inf where the layout's queries ``places`` do not see one of the keys, for each of their heads."""
    place = torch.arange(keys.start, keys.stop, device=q.device)
    first = layout.starts[row % layout.starts.shape[0]].index_select(0, places)
    return _bias((place <= (layout.first + places)[:, None]) & (place >= first[:, None]), q)


def _bias(seen: Tensor, q: Tensor) -> Tensor:
    """0 where seen [T, n], else -inf, for each of the h heads of q [..., h, d]: [T * h, n]."""
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
    return bias.repeat_interleave(q.shape[-2], 0)


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, layout: Layout) -> Tensor:
    """q [B, S, H, dk], k/v [B, S, G, d], chosen by ``compressed``, None where every block is -> [B, S, H, dv].

    Queries that have no more blocks than they may choose see all that causality allows.
    """
    if products.serves(q):
        return products.selected(q, k, v, chosen, layout)
    if chosen is None:
        return sdpa(q, k, v, layout.causal)
    b, s, heads, dk = q.shape
    groups = k.shape[2]
    early = spans.early(layout)
    out = []
    if early:
        n, mask = layout.first + early, None
        if layout.packed or layout.first:
            mask = blocks.causal_mask(layout.positions[:early], layout.starts[:, :early], n)[:, None]
        out.append(sdpa(q[:, :early], k[:, :n], v[:, :n], mask))
    if early < s:
        grouped = q[:, early:].view(b, s - early, groups, heads // groups, dk).transpose(1, 2)
        late = chosen[:, :, early:]
        o: Tensor = _Selected.apply(grouped, k.transpose(1, 2), v.transpose(1, 2), late, layout, early)  # type: ignore[no-untyped-call]
        out.append(o.transpose(1, 2).reshape(b, s - early, heads, -1))
    return torch.cat(out, 1)


class _Window(torch.autograd.Function):
    """q [B, S, G, h, dk], k/v [B, n_keys, G, d] -> o [B, S, G, h, dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        o = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for at, keys, bias in _bands(q, layout):
            part, z = attend(q[at].flatten(0, 1), k[keys], v[keys], bias)
            o[at], lse[at] = part.view(o[at].shape), z.view(lse[at].shape)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.layout = layout
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for at, keys, bias in _bands(q, ctx.layout):
            grad, x, y = (a[at].flatten(0, 1) for a in (do, q, o))
            on_q, on_k, on_v = slopes(grad, x, k[keys], v[keys], y, lse[at].flatten(), bias)
            dq[at] = on_q.reshape(dq[at].shape)
            dk[keys] += on_k
            dv[keys] += on_v
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def _bands(q: Tensor, layout: Layout) -> Any:
    """Yields where a tile of one row's and group's queries [B, S, G, h, dk] is, where its keys are, and their bias."""
    w = layout.cfg.w
    for a in range(0, layout.s, WINDOW_TILE):
        b = min(a + WINDOW_TILE, layout.s)
        low, high = max(0, layout.first + a - w + 1), layout.first + b
        q_pos, place = layout.positions[a:b, None], torch.arange(low, high, device=q.device)
        near = (place <= q_pos) & (place > q_pos - w)
        biases = [_bias(near & (place >= starts[a:b, None]), q) for starts in layout.starts]
        for row in range(q.shape[0]):
            for group in range(q.shape[2]):
                yield (row, slice(a, b), group), (row, slice(low, high), group), biases[row % len(biases)]


def window(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The last w tokens, tile by tile. q [B, S, H, dk], k/v [B, S, G, d] -> [B, S, H, dv]."""
    if products.serves(q):
        return products.window(q, k, v, layout)
    groups = k.shape[2]
    grouped = q.view(*q.shape[:2], groups, -1, q.shape[-1])
    o: Tensor = _Window.apply(grouped, k, v, layout)  # type: ignore[no-untyped-call]
    return o.flatten(2, 3)
