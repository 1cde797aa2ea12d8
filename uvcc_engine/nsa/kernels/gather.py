"""Launches of the selection kernels: segments of queries, the work list of each, and the gradients."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from uvcc_engine.nsa.index import Inverse, invert
from uvcc_engine.nsa.kernels import selection
from uvcc_engine.nsa.kernels.descriptors import named
from uvcc_engine.nsa.kernels.launch import Shape, pad, shape_of, steps, strided
from uvcc_engine.nsa.kernels.tiles import SEGMENT, Tiles, tiles_for
from uvcc_engine.nsa.visibility import Layout

CHUNK: Final = 16  # tiles that share one load of their block, at least
CHUNK_ROWS: Final = 1024  # and rows of them: small tiles leave no more parts of gradients to be held and summed


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries t0 .. t0 + rows - 1: the queries of each block, cut into chunks. first [B, G, n_blocks + 1] counts the
    chunks before each block; block, begin [B, G, n_chunks] are a chunk's block (n_blocks = none) and first entry."""

    t0: int
    rows: int
    inverse: Inverse
    first: Tensor
    block: Tensor
    begin: Tensor

    @property
    def n_chunks(self) -> int:
        """How many chunks there are."""
        return self.block.shape[-1]


def _tile_rows(per: int, tiles: Tiles) -> int:
    """A tile holds whole queries: the next power of two if one alone has more heads than a tile has rows."""
    return max(tiles.rows, pad(per))


def _chunk(rows: int) -> int:
    """How many tiles of so many rows make a chunk."""
    return max(CHUNK, CHUNK_ROWS // rows)


def segments(chosen: Tensor, n_blocks: int, per: int, tiles: Tiles) -> list[Segment]:
    """The work lists of chosen int32 [B, G, S, n_sel] for such tiles; nothing waits for the device."""
    found = []
    rows = _tile_rows(per, tiles)
    size = _chunk(rows) * (rows // per)
    step = max(tiles.rows, SEGMENT // chosen.shape[0])
    for t0 in range(0, chosen.shape[2], step):
        part = chosen[:, :, t0 : t0 + step]
        inverse = invert(part, n_blocks)
        count = inverse.offset[..., 1:] - inverse.offset[..., :-1]
        first = F.pad(((count + size - 1) // size).cumsum(-1), (1, 0)).to(torch.int32)
        n_chunks = inverse.entry.shape[-1] // size + n_blocks
        number = torch.arange(n_chunks, device=chosen.device, dtype=torch.int32).expand(*first.shape[:-1], -1)
        block = torch.searchsorted(first, number.contiguous(), right=True) - 1
        begin = inverse.offset.gather(-1, block) + (number - first.gather(-1, block)) * size
        found.append(Segment(t0, part.shape[2], inverse, first, block.to(torch.int32), begin.to(torch.int32)))
    return found


class _Selected(torch.autograd.Function):
    """q [B, S, H, dk], k/v [B, S, G, d], chosen int32 [B, G, S, n_sel] -> o [B, S, H, dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
        q, k, v, chosen = strided(q), strided(k), strided(v), chosen.contiguous()
        sh = shape_of(q, k, v, layout)
        tiles, slots = tiles_for("selection.forward", q), tiles_for("selection.slots", q)
        work = segments(chosen, layout.n_blocks, sh.per, tiles)
        o = q.new_empty(sh.b, sh.s, sh.heads, sh.dv)
        lse = torch.empty(sh.b, sh.heads, sh.s, dtype=sh.acc, device=q.device)
        common = _constants(sh, layout, tiles)
        few = {name: common[name] for name in ("PER", "N_SEL", "DV", "DVP", "ACC")} | slots.launch
        read, tma = named(tiles.tma, common["BN"], k, v)
        for seg in work:
            entries = seg.inverse.entry.shape[-1]
            part_o = torch.empty(sh.b, sh.groups, entries, sh.per, sh.dv, dtype=sh.acc, device=q.device)
            part_lse = torch.empty(part_o.shape[:-1], dtype=sh.acc, device=q.device)
            selection.forward[(seg.n_chunks, sh.b * sh.groups)](
                q, *read, sh.starts, seg.inverse.entry, seg.inverse.offset, seg.block, seg.begin, part_o, part_lse,
                *steps(q, k, v), sh.starts_b, sh.s, layout.n_keys, seg.t0, sh.groups, layout.n_blocks, seg.n_chunks,
                entries, sh.scale, TMA=tma, **common, **tiles.launch,
            )  # fmt: skip
            selection.combine[_row_grid(seg, sh, slots)](
                chosen[:, :, seg.t0 :], part_o, part_lse, o, lse, *chosen.stride()[:2], sh.s, seg.t0, seg.rows,
                sh.groups, sh.heads, R=slots.rows, **few,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, chosen, o, lse)
        ctx.layout, ctx.shape, ctx.work, ctx.tiles = layout, sh, work, tiles
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, chosen, o, lse = ctx.saved_tensors
        sh: Shape = ctx.shape
        layout: Layout = ctx.layout
        do = do.contiguous()
        delta = (do.to(sh.acc) * o.to(sh.acc)).sum(-1).transpose(1, 2).contiguous()
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(sh.b, layout.n_keys, sh.groups, d, dtype=sh.acc, device=q.device) for d in (sh.dk, sh.dv))
        tiles, slots = tiles_for("selection.backward", q), tiles_for("selection.slots", q)
        common = _constants(sh, layout, ctx.tiles)  # whose work lists these are
        few = {name: common[name] for name in ("PER", "N_SEL", "DK", "DKP", "ACC")} | slots.launch
        read, tma = named(tiles.tma, common["BN"], k, v)
        for seg in ctx.work:
            entries, size = seg.inverse.entry.shape[-1], layout.cfg.l_sel
            part_dq = torch.empty(sh.b, sh.groups, entries, sh.per, sh.dk, dtype=sh.acc, device=q.device)
            part_dk, part_dv = (
                torch.empty(sh.b, sh.groups, seg.n_chunks, size, d, dtype=sh.acc, device=q.device)
                for d in (sh.dk, sh.dv)
            )
            selection.backward[(seg.n_chunks, sh.b * sh.groups)](
                q, *read, sh.starts, do, lse, delta, seg.inverse.entry, seg.inverse.offset, seg.block, seg.begin,
                part_dq, part_dk, part_dv, *steps(q, k, v), sh.starts_b, sh.s, layout.n_keys, seg.t0, sh.groups,
                sh.heads, layout.n_blocks, seg.n_chunks, entries, sh.scale, sh.natural, TMA=tma, **common,
                **tiles.launch,
            )  # fmt: skip
            selection.sum_slots[_row_grid(seg, sh, slots)](
                chosen[:, :, seg.t0 :], part_dq, dq, *chosen.stride()[:2], sh.s, seg.t0, seg.rows, sh.groups,
                sh.heads, R=slots.rows, **few,
            )  # fmt: skip
            for part, out in ((part_dk, dk), (part_dv, dv)):
                selection.add_chunks[(layout.n_blocks, sh.b * sh.groups)](
                    seg.first, part, out, layout.n_keys, sh.groups, layout.n_blocks, seg.n_chunks, SIZE=size,
                    D=out.shape[-1], DP=pad(out.shape[-1]), BN=pad(size), ACC=common["ACC"],
                )  # fmt: skip
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _constants(sh: Shape, layout: Layout, tiles: Tiles) -> dict[str, Any]:
    cfg, rows = layout.cfg, _tile_rows(sh.per, tiles)
    return {**sh.widths, "N_SEL": cfg.n_sel, "SIZE": cfg.l_sel, "M": rows, "BN": pad(cfg.l_sel), "CHUNK": _chunk(rows)}


def _row_grid(seg: Segment, sh: Shape, slots: Tiles) -> tuple[int, int]:
    return triton.cdiv(seg.rows * sh.per, slots.rows), sh.b * sh.groups


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
    """q [B, S, H, dk], k/v [B, S, G, d], chosen int32 [B, G, S, n_sel] -> [B, S, H, dv]."""
    o: Tensor = _Selected.apply(q, k, v, chosen, layout)
    return o
