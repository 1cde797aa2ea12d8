"""One query over everything that it reads, in one launch: compressed blocks, chosen blocks and window, split by keys.

Each program takes a stretch of keys of one branch (a chosen block is one) for all heads of a group and leaves its part
with its logsumexp; the parts of a branch are merged afterwards.
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

STRETCH: Final = 128  # keys of a program, at least


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
    tl.store(part_lse + place, tl.where(none, float("-inf"), top + tl.log2(total)), mask=h < PER)


@triton.jit
def split_kernel(
    q, kc, vc, ks, vs, kw, vw, chosen, part_o, part_lse, q_b, q_h,
    kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, ks_b, ks_s, ks_g, vs_b, vs_s, vs_g, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g,
    groups, n_cmp, n_sel, n_win, parts_cmp, n_parts, stretch_cmp, stretch_win, scale, SIZE: tl.constexpr,
    PER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    HP: tl.constexpr, BN: tl.constexpr, N_SEL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One stretch of keys of one branch, for one row and group: its part of the output, and the log of its sum."""
    at = tl.program_id(0)
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


def attend(
    q: Tensor, keys: tuple[Tensor, Tensor, Tensor], values: tuple[Tensor, Tensor, Tensor], chosen: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 1, H, dk]; keys and values [B, n, G, d] of cmp (n may be 0), sel, win; chosen int32 [B, G, 1, n_sel].

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
    q = strided(q)
    split_kernel[(sum(parts), b * groups)](
        q, kc, vc, ks, vs, kw, vw, chosen.contiguous(), part_o, part_lse, q.stride(0), q.stride(2),
        *steps(kc, vc, ks, vs, kw, vw), groups, kc.shape[1], ks.shape[1], kw.shape[1], parts[0], sum(parts),
        stretch[0], stretch[2], dk**-0.5 * math.log2(math.e), SIZE=size, PER=per, DK=dk, DV=dv, DKP=pad(dk),
        DVP=pad(dv), HP=pad(per), BN=64, N_SEL=n_sel, ACC=tl.float64 if acc == torch.float64 else tl.float32,
    )  # fmt: skip
    found = [_merge(o, z, q.dtype) for o, z in zip(part_o.split(parts, 2), part_lse.split(parts, 2), strict=True)]
    return found[0], found[1], found[2]


def _merge(part_o: Tensor, part_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """part_o [B, G, parts, PER, dv], part_lse [B, G, parts, PER] in base 2 -> [B, 1, G * PER, dv]."""
    b, g, _, per, dv = part_o.shape
    if part_o.shape[2] == 0:
        return part_o.new_zeros(b, 1, g * per, dv, dtype=dtype)
    weight = torch.softmax(part_lse * math.log(2), dim=2)
    return (part_o * weight[..., None]).sum(2).to(dtype).reshape(b, 1, g * per, dv)
