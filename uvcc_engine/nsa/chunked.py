"""The three branches in bounded memory, in plain torch: for long rows where no kernel runs, and for gradients there.

Nothing of size S x S or S x n_cmp is kept. Compression works on tiles of queries and repeats its scores in the
backward pass. Selection runs over the key blocks and takes to each the queries that chose it, in tiles of fixed size,
as the kernels do (FSA, arXiv 2508.18224): a later token can only add rows behind those of earlier ones, so the bits of
earlier outputs do not depend on it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.index import Inverse, invert, pool, top_blocks
from uvcc_engine.nsa.visibility import Layout

TILE: Final = 256  # queries at a time


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
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scale = q.shape[-1] ** -0.5
        for a, b in _tiles(layout.s):
            n = max(1, layout.cfg.n_cmp(layout.first + b))
            kn, vn = k[:, :, None, :n], v[:, :, None, :n]
            qt, dot = q[..., a:b, :], do[..., a:b, :]
            p = (_scores(qt, k[..., :n, :], _visible(layout, a, b, n)) - lse[..., a:b, None]).exp()
            delta = (dot * o[..., a:b, :]).sum(-1, keepdim=True)
            ds = p * (dot @ vn.transpose(-1, -2) - delta) * scale
            dq[..., a:b, :] = ds.to(q.dtype) @ kn
            dk[..., :n, :] += (ds.to(q.dtype).transpose(-1, -2) @ qt).sum(2)
            dv[..., :n, :] += (p.to(v.dtype).transpose(-1, -2) @ dot).sum(2)
        return dq, dk, dv, None


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """q [B, G, h, T, dk], k [B, G, n, dk], seen [B', T, n] -> float scores [B, G, h, T, n], -inf where not seen."""
    score: Tensor = (q * float(q.shape[-1]) ** -0.5) @ k[:, :, None].transpose(-1, -2)
    return score.to(torch.promote_types(score.dtype, torch.float32)).masked_fill(~seen[:, None, None], -torch.inf)


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, dk], k/v [B, n_cmp, G, d] -> (o [B, S, H, dv], chosen int32 [B, G, S, n_sel] or None)."""
    b, s, heads, dk = q.shape
    groups = k_cmp.shape[2]
    grouped = q.view(b, s, groups, heads // groups, dk).permute(0, 2, 3, 1, 4)
    o, _, best = _Compressed.apply(grouped, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), layout)  # type: ignore[no-untyped-call]
    return o.permute(0, 3, 1, 2, 4).reshape(b, s, heads, -1), best if layout.selects else None


class _Selected(torch.autograd.Function):
    """q [B, G, S, h, dk], k/v [B, G, S, d], chosen int32 [B, G, S, n_sel] -> o [B, G, S, h, dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        inverse = invert(chosen, layout.n_blocks)
        o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        top = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        total = torch.zeros_like(top)
        for at, t, live, keys in _block_tiles(inverse, chosen.shape[-1], layout):
            score = _block_scores(q[at][t], k[at][keys], t, keys, layout, at[0]).to(wide)
            before = top[at][t]
            new = torch.maximum(before, score.amax(-1))
            p, shrink = (score - new[..., None]).exp(), (before - new).exp()
            real, part = t[live], p.to(v.dtype) @ v[at][keys]
            top[at][real] = new[live]
            total[at][real] = (total[at][t] * shrink + p.sum(-1))[live]
            o[at][real] = (o[at][t] * shrink[..., None] + part)[live]
        o /= total[..., None]
        ctx.save_for_backward(q, k, v, chosen, o, top + total.log())
        ctx.layout, ctx.inverse = layout, inverse
        return o.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, chosen, o, lse = ctx.saved_tensors
        layout: Layout = ctx.layout
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (do * o).sum(-1)
        scale = q.shape[-1] ** -0.5
        for at, t, live, keys in _block_tiles(ctx.inverse, chosen.shape[-1], layout):
            score = _block_scores(q[at][t], k[at][keys], t, keys, layout, at[0]).to(lse.dtype)
            p = (score - lse[at][t][..., None]).exp().masked_fill(~live[:, None, None], 0.0)
            ds = p * (do[at][t] @ v[at][keys].T - delta[at][t][..., None]) * scale
            ds, p = ds.to(q.dtype), p.to(v.dtype)
            dk[at][keys] += ds.flatten(0, 1).T @ q[at][t].flatten(0, 1)
            dv[at][keys] += p.flatten(0, 1).T @ do[at][t].flatten(0, 1)
            dq[at][t[live]] += (ds @ k[at][keys])[live]
        return dq, dk, dv, None, None


def _block_tiles(inverse: Inverse, n_sel: int, layout: Layout) -> Any:
    """Yields ((row, group), queries [T], which of them are real [T], the block's slice of keys), T always TILE."""
    size = layout.cfg.l_sel
    slots = torch.arange(TILE, device=inverse.entry.device)
    for row, by_group in enumerate(inverse.bounds()):
        for group, offset in enumerate(by_group):
            entry = inverse.entry[row, group]
            for j in range(layout.n_blocks):
                for a in range(offset[j], offset[j + 1], TILE):
                    place = slots + a
                    live = place < offset[j + 1]
                    t = entry[place.clamp(max=entry.shape[0] - 1)].to(torch.int64) // n_sel
                    # padding takes the block's last query: its scores are finite, its results are dropped
                    t = torch.where(live, t, t[0])
                    yield (row, group), t, live, slice(j * size, min((j + 1) * size, layout.n_keys))


def _block_scores(q: Tensor, k: Tensor, t: Tensor, keys: slice, layout: Layout, row: int) -> Tensor:
    """q [T, h, dk] of queries t against one block's keys [n, dk] -> [T, h, n], -inf outside doc_start..t."""
    place = torch.arange(keys.start, keys.stop, device=q.device)
    first = layout.starts[row % layout.starts.shape[0]][t]
    seen = (place <= layout.first + t[:, None]) & (place >= first[:, None])
    score: Tensor = (q * float(q.shape[-1]) ** -0.5) @ k.T
    return score.masked_fill(~seen[:, None], -torch.inf)


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
    """q [B, S, H, dk], k/v [B, S, G, d], chosen int32 [B, G, S, n_sel] -> [B, S, H, dv]."""
    b, s, heads, dk = q.shape
    groups = k.shape[2]
    grouped = q.view(b, s, groups, heads // groups, dk).transpose(1, 2)
    o: Tensor = _Selected.apply(grouped, k.transpose(1, 2), v.transpose(1, 2), chosen, layout)  # type: ignore[no-untyped-call]
    return o.transpose(1, 2).reshape(b, s, heads, -1)


def window(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The last w tokens, tile by tile. q [B, S, H, dk], k/v [B, S, G, d] -> [B, S, H, dv]."""
    w, out = layout.cfg.w, []
    for a, b in _tiles(layout.s):
        low, high = max(0, layout.first + a - w + 1), layout.first + b
        q_pos, place = layout.positions[a:b, None], torch.arange(low, high, device=q.device)
        seen = ((place <= q_pos) & (place > q_pos - w))[None] & (place >= layout.starts[:, a:b, None])
        part = F.scaled_dot_product_attention(
            q[:, a:b].transpose(1, 2),
            k[:, low:high].transpose(1, 2),
            v[:, low:high].transpose(1, 2),
            attn_mask=seen[:, None],
            enable_gqa=True,
        )
        out.append(part.transpose(1, 2))
    return torch.cat(out, 1)
