"""Scores and top-n in one pass (eqs. 8 to 11): the importance of a block lives in registers and nowhere else.

The scores are computed a second time from the compression's logsumexp, pooled onto selection blocks, summed over the
heads of the group, and folded into a running list of the best. Nothing of size S x n_cmp or S x n_blocks is written.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from uvcc_engine.nsa.kernels.band import rows_of, seen


@triton.jit
def top_blocks(
    q, k, starts, lse, chosen,
    q_b, q_s, q_h, k_b, k_s, k_g, starts_b, s, origin, heads, groups, n_cmp, n_blocks, scale, far,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, RATIO: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    BQ: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """chosen int32 [B, G, S, N_SEL] of a tile of queries of one group: ascending, -1 at the end for none.

    A candidate is one 64-bit number: the bits of its score (not negative, so they order like it), then its block
    turned around, so that ties go to the lower block. Forced blocks score infinity. N_PAD blocks join at a time: the
    larger of the k-th best and the k-th worst newcomer, for every k, are the best of both.
    """
    row = tl.program_id(1)
    b, g = (row // groups).to(tl.int64), row % groups
    q0 = tl.program_id(0) * BQ
    t = q0 + tl.arange(0, BQ)
    real = t < s
    start = tl.load(starts + b * starts_b + t, mask=real, other=0)
    low, local = start // SIZE, (t + origin) // SIZE
    best = tl.full([BQ, N_PAD], -1, tl.int64)
    j_lo = tl.load(starts + b * starts_b + q0) // SIZE
    for j0 in range(j_lo, (tl.minimum(q0 + BQ, s) + origin - 1) // SIZE + 1, N_PAD):
        j = j0 + tl.arange(0, N_PAD)
        score = tl.zeros([BQ, N_PAD], ACC)
        for m in range(PER):
            h = g * PER + m
            tile = rows_of(q + b * q_b + h * q_h, q_s, t, real, DK, DKP)
            z = tl.load(lse + (b * heads + h) * s + t, mask=real, other=0)
            for n in tl.static_range(RATIO + PARTS - 1):
                i = j * RATIO - (PARTS - 1) + n
                there = (i >= 0) & (i < n_cmp)
                keys = rows_of(k + b * k_b + g * k_g, k_s, i, there, DK, DKP)
                x = tl.dot(tile, tl.trans(keys), out_dtype=ACC, input_precision="ieee") * scale
                live = seen(i, there, t + origin, start, far, STRIDE, SPAN)
                shared = min(n + 1, RATIO) - max(n - (PARTS - 1), 0)  # strides in common: 1, 2, 2, 2, 1
                score += shared * tl.exp2(tl.where(live, x - z[:, None], float("-inf")))
        bits = score.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
        near = (j[None] == local[:, None]) | (j[None] == local[:, None] - 1) | (j[None] == low[:, None])
        bits = tl.where(near, 0x7F800000, bits)
        key = (bits << 32) | (n_blocks - j)[None].to(tl.int64)
        key = tl.where((j[None] <= local[:, None]) & (j[None] >= low[:, None]), key, -1)
        best = tl.sort(tl.maximum(best, tl.sort(key)), descending=True)
    slot = tl.arange(0, N_PAD)
    number = (n_blocks - (best & 0xFFFFFFFF)).to(tl.int32)
    number = tl.sort(tl.where((best < 0) | (slot >= N_SEL)[None], n_blocks, number))
    number = tl.where(number == n_blocks, -1, number)
    place = (row.to(tl.int64) * s + t[:, None]) * N_SEL + slot[None]
    tl.store(chosen + place, number, mask=real[:, None] & (slot < N_SEL)[None])
