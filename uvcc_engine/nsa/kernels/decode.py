"""One query over everything that it reads, in one launch: compressed blocks, chosen blocks and window, split by keys.

Each program takes a stretch of keys of one branch (a chosen block is one) for all heads of a group and leaves its part
with its logsumexp; a second launch merges the parts of each branch. How many keys there are is known to the host, or,
in storage of fixed size, to the device alone: then every launch is the same and a CUDA graph can hold it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from uvcc_engine.nsa.kernels.band import rows_of
from uvcc_engine.nsa.kernels.launch import pad, steps, strided
from uvcc_engine.nsa.kernels.tiles import tiles_for

STRETCH: Final = 128  # keys of a program, at least
PARTS: Final = 16  # parts that the merge reads at a time
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # the logsumexp of a part without keys: finite, so that none is no number


@triton.jit
def _part(
    q, k, v, chosen, part_o, part_lse, q_b, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    groups, n_keys, n_parts, at, stretch, local, scale, BLOCKS: tl.constexpr,
    PER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    HP: tl.constexpr, BN: tl.constexpr, N_SEL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Part ``at`` of all, the ``local``-th of its branch. BLOCKS: stretches are those of the chosen blocks."""
    row = tl.program_id(1).to(tl.int64)
    b, g = row // groups, row % groups
    h = tl.arange(0, HP)
    number = local
    if BLOCKS:
        number = tl.load(chosen + row * N_SEL + local)
    lo = number * stretch
    hi = tl.where(number < 0, lo, tl.minimum(lo + stretch, n_keys))
    tile = rows_of(q + b * q_b + g * PER * q_h, q_h, h, h < PER, DK, DKP)
    top, total = tl.full([HP], float("-inf"), ACC), tl.zeros([HP], ACC)
    o = tl.zeros([HP, DVP], ACC)
    for base in range(lo, hi, BN):
        i = base + tl.arange(0, BN)
        there = i < hi
        keys = rows_of(k + b * k_b + g * k_g, k_s, i, there, DK, DKP)
        values = rows_of(v + b * v_b + g * v_g, v_s, i, there, DV, DVP)
        s = tl.dot(tile, tl.trans(keys), out_dtype=ACC, input_precision="ieee") * scale
        s = tl.where(there[None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        o = o * shrink[:, None] + tl.dot(p.to(values.dtype), values, out_dtype=ACC, input_precision="ieee")
        top = new
    none = total == 0
    total = tl.where(none, 1.0, total)
    d = tl.arange(0, DVP)
    place = (row * n_parts + at) * PER + h
    tl.store(part_o + place[:, None] * DV + d[None], o / total[:, None], mask=(h < PER)[:, None] & (d < DV)[None])
    tl.store(part_lse + place, tl.where(none, NOTHING, top + tl.log2(total)), mask=h < PER)


@triton.jit
def split_kernel(
    q, kc, vc, ks, vs, kw, vw, chosen, counts, part_o, part_lse, q_b, q_h,
    kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, ks_b, ks_s, ks_g, vs_b, vs_s, vs_g, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g,
    groups, n_cmp, n_sel, n_win, parts_cmp, n_parts, stretch_cmp, stretch_win, scale, SIZE: tl.constexpr,
    PER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    HP: tl.constexpr, BN: tl.constexpr, N_SEL: tl.constexpr, ACC: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One stretch of keys of one branch, for one row and group: its part of the output, and the log of its sum.

    COUNTED: the three branches' keys are as many as ``counts`` says.
    """
    at = tl.program_id(0)
    if COUNTED:
        n_cmp, n_sel, n_win = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    if at < parts_cmp:
        _part(
            q, kc, vc, chosen, part_o, part_lse, q_b, q_h, kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, groups, n_cmp,
            n_parts, at, stretch_cmp, at, scale, False, PER, DK, DV, DKP, DVP, HP, BN, N_SEL, ACC,
        )  # fmt: skip
    elif at < parts_cmp + N_SEL:
        _part(
            q, ks, vs, chosen, part_o, part_lse, q_b, q_h, ks_b, ks_s, ks_g, vs_b, vs_s, vs_g, groups, n_sel,
            n_parts, at, SIZE, at - parts_cmp, scale, True, PER, DK, DV, DKP, DVP, HP, BN, N_SEL, ACC,
        )  # fmt: skip
    else:
        _part(
            q, kw, vw, chosen, part_o, part_lse, q_b, q_h, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g, groups, n_win,
            n_parts, at, stretch_win, at - parts_cmp - N_SEL, scale, False, PER, DK, DV, DKP, DVP, HP, BN, N_SEL, ACC,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    part_o, part_lse, o, n_parts, parts_cmp, PER: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    N_SEL: tl.constexpr, PP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """o [3, B, G, PER, DV] of one branch and one head of a row, from its parts; zeros where it has none."""
    at, branch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, h = at // PER, at % PER
    first = tl.where(branch == 0, 0, tl.where(branch == 1, parts_cmp, parts_cmp + N_SEL))
    end = tl.where(branch == 0, parts_cmp, tl.where(branch == 1, parts_cmp + N_SEL, n_parts))
    d = tl.arange(0, DVP)
    top, total, found = tl.full([1], NOTHING, ACC), tl.zeros([1], ACC), tl.zeros([DVP], ACC)
    for base in range(first, end, PP):
        i = base + tl.arange(0, PP)
        place = (row * n_parts + i) * PER + h
        z = tl.load(part_lse + place, mask=i < end, other=NOTHING)
        new = tl.maximum(top, tl.max(z, 0))
        weight, shrink = tl.where(i < end, tl.exp2(z - new), 0.0), tl.exp2(top - new)
        part = tl.load(part_o + place[:, None] * DV + d[None], mask=(i < end)[:, None] & (d < DV)[None], other=0)
        total = total * shrink + tl.sum(weight, 0)
        found = found * shrink + tl.sum(weight[:, None] * part, 0)
        top = new
    found = found / tl.where(total == 0, 1.0, total)
    where = (branch * tl.num_programs(0) + at) * DV + d
    tl.store(o + where, found.to(o.dtype.element_ty), mask=d < DV)


def attend(
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    values: tuple[Tensor, Tensor, Tensor],
    chosen: Tensor,
    size: int,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 1, H, dk]; keys and values [B, n, G, d] of cmp (n may be 0), sel, win; chosen int32 [B, G, 1, n_sel].

    ``counts`` int32 [3]: how many keys of each branch count, from the first on; without it all that there are.
    Returns each branch's output [B, 1, H, dv]; zeros where nothing is read.
    """
    b, _, heads, dk = q.shape
    groups, dv, n_sel = keys[1].shape[2], values[1].shape[3], chosen.shape[-1]
    per = heads // groups
    acc = torch.promote_types(q.dtype, torch.float32)
    stretch = [max(STRETCH, triton.next_power_of_2(-(-k.shape[1] // 64))) for k in keys]
    parts = [-(-keys[0].shape[1] // stretch[0]), n_sel, -(-keys[2].shape[1] // stretch[2])]
    part_o = torch.empty(b, groups, sum(parts), per, dv, dtype=acc, device=q.device)
    part_lse = torch.empty(part_o.shape[:-1], dtype=acc, device=q.device)
    (kc, ks, kw), (vc, vs, vw) = (tuple(strided(x) for x in side) for side in (keys, values))
    q, chosen = strided(q), chosen.contiguous()
    widths = {"PER": per, "DV": dv, "DVP": pad(dv), "N_SEL": n_sel}
    widths["ACC"] = tl.float64 if acc == torch.float64 else tl.float32
    tile = tiles_for("decode.split", q)
    split_kernel[(sum(parts), b * groups)](
        q, kc, vc, ks, vs, kw, vw, chosen, chosen if counts is None else counts, part_o, part_lse, q.stride(0),
        q.stride(2), *steps(kc, vc, ks, vs, kw, vw), groups, kc.shape[1], ks.shape[1], kw.shape[1], parts[0],
        sum(parts), stretch[0], stretch[2], dk**-0.5 * math.log2(math.e), SIZE=size, DK=dk, DKP=pad(dk),
        HP=pad(per), BN=tile.keys, COUNTED=counts is not None, **widths, **tile.launch,
    )  # fmt: skip
    o = torch.empty(3, b, 1, heads, dv, dtype=q.dtype, device=q.device)
    merge_kernel[(b * heads, 3)](part_o, part_lse, o, sum(parts), parts[0], PP=PARTS, **widths)
    return o[0], o[1], o[2]
