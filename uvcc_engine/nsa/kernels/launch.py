"""Launches of the band kernels and of the streaming top-k, with their gradients."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from uvcc_engine.nsa.kernels import band, topk
from uvcc_engine.nsa.kernels.descriptors import named
from uvcc_engine.nsa.kernels.tiles import tiles_for
from uvcc_engine.nsa.visibility import Layout

FAR: Final = 1 << 30  # a window that reaches everything


@dataclass(frozen=True, slots=True)
class Shape:
    """What every launch needs: sizes, the documents' starts, the softmax scale in base 2 and in base e."""

    b: int
    s: int
    heads: int
    groups: int
    dk: int
    dv: int
    starts: Tensor  # int32 [B', S]
    acc: torch.dtype

    @property
    def per(self) -> int:
        """Query heads of one group."""
        return self.heads // self.groups

    @property
    def natural(self) -> float:
        """The scale of scores before a softmax in base e: ``1 / sqrt(dk)``."""
        return 1.0 / math.sqrt(self.dk)

    @property
    def scale(self) -> float:
        """The scale of scores before a softmax in base 2."""
        return self.natural * math.log2(math.e)

    @property
    def starts_b(self) -> int:
        """The stride of ``starts`` along the batch: 0 where all rows share one layout."""
        return 0 if self.starts.shape[0] == 1 else self.s

    @property
    def widths(self) -> dict[str, Any]:
        """The sizes that kernels are compiled for: heads of a group, dk, dv, both padded, and the type of sums."""
        acc = tl.float64 if self.acc == torch.float64 else tl.float32
        return {"PER": self.per, "DK": self.dk, "DV": self.dv, "DKP": pad(self.dk), "DVP": pad(self.dv), "ACC": acc}


def pad(n: int) -> int:
    """Tensor cores want powers of two, 16 at least."""
    return max(16, 1 << (n - 1).bit_length())


def shape_of(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Shape:
    """q [B, S, H, dk], k/v [B, n, G, d]."""
    b, s, heads, dk = q.shape
    starts = layout.starts.to(torch.int32).contiguous()
    return Shape(b, s, heads, k.shape[2], dk, v.shape[3], starts, torch.promote_types(q.dtype, torch.float32))


def strided(x: Tensor) -> Tensor:
    """The kernels read any strides but that of the last dimension; the shape is kept."""
    return x if x.stride(-1) == 1 else x.contiguous()


def steps(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of the first three dimensions, one tensor after another."""
    return tuple(n for x in tensors for n in x.stride()[:3])


class _Bands(torch.autograd.Function):
    """q [B, S, H, dk], four [B, n, G, d] -> (o_cmp, o_win [B, S, H, dv], lse [2, B, H, S] in base 2)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kc: Tensor, vc: Tensor, kw: Tensor, vw: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, kc, vc, kw, vw = (strided(x) for x in (q, kc, vc, kw, vw))
        sh, cfg = shape_of(q, kc, vc, layout), layout.cfg
        o_cmp, o_win = (q.new_empty(sh.b, sh.s, sh.heads, sh.dv) for _ in range(2))
        lse = torch.empty(2, sh.b, sh.heads, sh.s, dtype=sh.acc, device=q.device)
        tile = tiles_for("band.forward", q)
        grid = (triton.cdiv(sh.s, tile.rows), sh.b * sh.heads)
        read, tma = named(tile.tma, tile.keys, kc, vc, kw, vw)
        band.forward[grid](
            q, *read, sh.starts, o_cmp, o_win, lse, *steps(q, kc, vc, kw, vw), sh.starts_b,
            sh.s, layout.first, sh.heads, kc.shape[1], cfg.w, sh.scale, FAR,
            STRIDE=cfg.d, SPAN=cfg.l, BQ=tile.rows, BN=tile.keys, TMA=tma, EDGES=tile.edges, **sh.widths, **tile.launch,
        )  # fmt: skip
        ctx.save_for_backward(q, kc, vc, kw, vw, o_cmp, o_win, lse)
        ctx.layout, ctx.shape = layout, sh
        ctx.mark_non_differentiable(lse)
        return o_cmp, o_win, lse

    @staticmethod
    def backward(ctx: Any, do_cmp: Tensor, do_win: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kw, vw, o_cmp, o_win, lse = ctx.saved_tensors
        sh, cfg = ctx.shape, ctx.layout.cfg
        do_cmp, do_win = do_cmp.contiguous(), do_win.contiguous()
        delta = torch.stack([_delta(do_cmp, o_cmp, sh), _delta(do_win, o_win, sh)])
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tile = tiles_for("band.backward_q", q)
        read, tma = named(tile.tma, tile.keys, kc, vc, kw, vw)
        common = {"BQ": tile.rows, "BN": tile.keys, "EDGES": tile.edges, **sh.widths, **tile.launch}
        band.backward_q[(triton.cdiv(sh.s, tile.rows), sh.b * sh.heads)](
            q, *read, sh.starts, do_cmp, do_win, lse, delta, dq, *steps(q, kc, vc, kw, vw), sh.starts_b,
            sh.s, ctx.layout.first, sh.heads, kc.shape[1], cfg.w, sh.scale, sh.natural, FAR, STRIDE=cfg.d, SPAN=cfg.l,
            TMA=tma, **common,
        )  # fmt: skip
        found: list[Tensor | None] = [dq]
        tile = tiles_for("band.backward_kv", q)
        common = {"BQ": tile.rows, "BN": tile.keys, "EDGES": tile.edges, **sh.widths, **tile.launch}
        sides = ((kc, vc, do_cmp, cfg.d, cfg.l, FAR), (kw, vw, do_win, 1, 1, cfg.w))
        for at, (k, v, do, stride, span, window) in enumerate(sides):
            n = k.shape[1]
            dk, dv = (torch.empty(sh.b, sh.heads, n, d, dtype=sh.acc, device=q.device) for d in (sh.dk, sh.dv))
            (queries, grads), tma = named(tile.tma, tile.rows, q, do)
            band.backward_kv[(triton.cdiv(n, tile.keys), sh.b * sh.heads)](
                queries, k, v, sh.starts, grads, lse[at], delta[at], dk, dv, *steps(q, k, v), sh.starts_b,
                sh.s, ctx.layout.first, sh.heads, n, window, sh.scale, sh.natural, STRIDE=stride, SPAN=span, TMA=tma,
                **common,
            )  # fmt: skip
            found += [_over_heads(dk, sh).to(k.dtype), _over_heads(dv, sh).to(v.dtype)]
        return *found, None


def _delta(do: Tensor, o: Tensor, sh: Shape) -> Tensor:
    """[B, H, S]."""
    return (do.to(sh.acc) * o.to(sh.acc)).sum(-1).transpose(1, 2).contiguous()


def _over_heads(grad: Tensor, sh: Shape) -> Tensor:
    """[B, H, n, D] -> [B, n, G, D]: query heads of a group share their keys."""
    return grad.view(sh.b, sh.groups, sh.per, *grad.shape[2:]).sum(2).transpose(1, 2)


@torch.no_grad()
def top_blocks_by_kernel(q: Tensor, k_cmp: Tensor, lse: Tensor, layout: Layout) -> Tensor:
    """lse [B, H, S] of the compression branch -> int32 [B, G, S, n_sel], as ``index.top_blocks`` gives it."""
    q, k_cmp, cfg = strided(q), strided(k_cmp), layout.cfg
    sh = shape_of(q, k_cmp, k_cmp, layout)
    chosen = torch.empty(sh.b, sh.groups, sh.s, cfg.n_sel, dtype=torch.int32, device=q.device)
    widths = {k: v for k, v in sh.widths.items() if k not in ("DV", "DVP")}
    tile = tiles_for("topk", q)
    topk.top_blocks[(triton.cdiv(sh.s, tile.rows), sh.b * sh.groups)](
        q, k_cmp, sh.starts, lse, chosen, *steps(q, k_cmp), sh.starts_b, sh.s, layout.first, sh.heads,
        sh.groups,
        k_cmp.shape[1], layout.n_blocks, sh.scale, FAR,
        STRIDE=cfg.d, SPAN=cfg.l, RATIO=cfg.l_sel // cfg.d, PARTS=cfg.l // cfg.d, SIZE=cfg.l_sel,
        N_SEL=cfg.n_sel, N_PAD=pad(cfg.n_sel), BQ=tile.rows, **widths, **tile.launch,
    )  # fmt: skip
    return chosen


def compressed_and_window(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_win: Tensor, v_win: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q [B, S, H, dk], the others [B, n, G, d] -> (o_cmp, o_win [B, S, H, dv], chosen [B, G, S, n_sel] or None)."""
    o_cmp, o_win, lse = _Bands.apply(q, k_cmp, v_cmp, k_win, v_win, layout)
    return o_cmp, o_win, top_blocks_by_kernel(q, k_cmp, lse[0], layout) if layout.selects else None
