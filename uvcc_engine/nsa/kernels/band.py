"""Compression and window in one kernel: both are bands of keys that a tile of queries sees, and share the query tile.

Key i stands for tokens i * STRIDE .. i * STRIDE + SPAN - 1. Query t sees it if it lies wholly inside start[t]..t and
ends within the last WINDOW tokens: stride d and span l for compression, 1 and 1 for the window. Softmax in base 2.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(base, n_stride, n, there, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows ``n`` of a matrix at ``base`` as [len(n), PADDED]; zeros where not ``there`` and beyond WIDTH."""
    d = tl.arange(0, PADDED)
    return tl.load(base + n[:, None] * n_stride + d[None], mask=there[:, None] & (d < WIDTH)[None], other=0)


@triton.jit
def seen(i, there, t, start, window, STRIDE: tl.constexpr, SPAN: tl.constexpr):
    """[len(t), len(i)]: which queries see which keys."""
    first = i * STRIDE
    last = first + SPAN - 1
    inside = (last[None] <= t[:, None]) & (first[None] >= start[:, None]) & (last[None] > (t - window)[:, None])
    return inside & there[None]


@triton.jit
def _attend(
    q, k, k_n, v, v_n, t, start, lo, hi, window, scale,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(o [BQ, DVP], lse [BQ]) of queries over keys lo..hi-1; zeros for a query that sees none."""
    top = tl.full([BQ], float("-inf"), ACC)
    total = tl.zeros([BQ], ACC)
    o = tl.zeros([BQ, DVP], ACC)
    for base in range(lo, hi, BN):
        i = base + tl.arange(0, BN)
        there = i < hi
        keys = rows_of(k, k_n, i, there, DK, DKP)
        s = tl.dot(q, tl.trans(keys), out_dtype=ACC, input_precision="ieee") * scale
        s = tl.where(seen(i, there, t, start, window, STRIDE, SPAN), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        values = rows_of(v, v_n, i, there, DV, DVP)
        total = total * shrink + tl.sum(p, 1)
        o = o * shrink[:, None] + tl.dot(p.to(values.dtype), values, out_dtype=ACC, input_precision="ieee")
        top = new
    none = total == 0
    total = tl.where(none, 1.0, total)
    return o / total[:, None], tl.where(none, 0.0, top + tl.log2(total))


@triton.jit
def _limits(q0, q1, first, window, n_cmp, STRIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr):
    """The compression blocks and the window keys that any of queries q0..q1-1 may see."""
    c_hi = tl.minimum(n_cmp, tl.maximum(q1 - SPAN + STRIDE, 0) // STRIDE)
    c_lo = tl.minimum(first // STRIDE // BN * BN, c_hi)
    w_lo = tl.maximum(tl.maximum(q0 - window + 1, first), 0)
    return c_lo, c_hi, w_lo


@triton.jit
def forward(
    q, kc, vc, kw, vw, starts, o_cmp, o_win, lse,
    q_b, q_s, q_h, kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g, starts_b,
    s, heads, n_cmp, window, scale, far,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. o_cmp, o_win [B, S, H, DV] and lse [2, B, H, S] are contiguous."""
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), row % heads
    g = h // PER
    q0 = tl.program_id(0) * BQ
    t = q0 + tl.arange(0, BQ)
    real = t < s
    first = tl.load(starts + b * starts_b + q0)
    start = tl.load(starts + b * starts_b + t, mask=real, other=0)
    tile = rows_of(q + b * q_b + h * q_h, q_s, t, real, DK, DKP)
    c_lo, c_hi, w_lo = _limits(q0, tl.minimum(q0 + BQ, s), first, window, n_cmp, STRIDE, SPAN, BN)
    o, z = _attend(
        tile, kc + b * kc_b + g * kc_g, kc_s, vc + b * vc_b + g * vc_g, vc_s, t, start, c_lo, c_hi, far, scale,
        STRIDE, SPAN, DK, DV, DKP, DVP, BQ, BN, ACC,
    )  # fmt: skip
    d = tl.arange(0, DVP)
    place = ((b * s + t[:, None]) * heads + h) * DV + d[None]
    fits = real[:, None] & (d < DV)[None]
    tl.store(o_cmp + place, o.to(o_cmp.dtype.element_ty), mask=fits)
    tl.store(lse + row.to(tl.int64) * s + t, z, mask=real)
    o, z = _attend(
        tile, kw + b * kw_b + g * kw_g, kw_s, vw + b * vw_b + g * vw_g, vw_s, t, start, w_lo,
        tl.minimum(q0 + BQ, s), window, scale, 1, 1, DK, DV, DKP, DVP, BQ, BN, ACC,
    )  # fmt: skip
    tl.store(o_win + place, o.to(o_win.dtype.element_ty), mask=fits)
    rows = tl.num_programs(1).to(tl.int64)
    tl.store(lse + (rows + row) * s + t, z, mask=real)


@triton.jit
def _slope(
    q, do, lse, delta, k, k_n, v, v_n, t, start, lo, hi, window, scale, natural, dq,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``dq`` plus what one band adds to the gradient of its queries."""
    for base in range(lo, hi, BN):
        i = base + tl.arange(0, BN)
        there = i < hi
        keys = rows_of(k, k_n, i, there, DK, DKP)
        s = tl.dot(q, tl.trans(keys), out_dtype=ACC, input_precision="ieee") * scale
        s = tl.where(seen(i, there, t, start, window, STRIDE, SPAN), s, float("-inf"))
        p = tl.exp2(s - lse[:, None])
        values = rows_of(v, v_n, i, there, DV, DVP)
        dp = tl.dot(do, tl.trans(values), out_dtype=ACC, input_precision="ieee")
        ds = p * (dp - delta[:, None]) * natural
        dq += tl.dot(ds.to(keys.dtype), keys, out_dtype=ACC, input_precision="ieee")
    return dq


@triton.jit
def backward_q(
    q, kc, vc, kw, vw, starts, do_cmp, do_win, lse, delta, dq,
    q_b, q_s, q_h, kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g, starts_b,
    s, heads, n_cmp, window, scale, natural, far,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq [B, S, H, DK] of both bands. do_* are contiguous [B, S, H, DV]; lse, delta [2, B, H, S]."""
    row = tl.program_id(1)
    rows = tl.num_programs(1).to(tl.int64)
    b, h = (row // heads).to(tl.int64), row % heads
    g = h // PER
    q0 = tl.program_id(0) * BQ
    t = q0 + tl.arange(0, BQ)
    real = t < s
    first = tl.load(starts + b * starts_b + q0)
    start = tl.load(starts + b * starts_b + t, mask=real, other=0)
    tile = rows_of(q + b * q_b + h * q_h, q_s, t, real, DK, DKP)
    c_lo, c_hi, w_lo = _limits(q0, tl.minimum(q0 + BQ, s), first, window, n_cmp, STRIDE, SPAN, BN)
    mine = (b * s * heads + h) * DV
    found = tl.zeros([BQ, DKP], ACC)
    at = row.to(tl.int64) * s + t
    found = _slope(
        tile, rows_of(do_cmp + mine, heads * DV, t, real, DV, DVP),
        tl.load(lse + at, mask=real, other=0), tl.load(delta + at, mask=real, other=0),
        kc + b * kc_b + g * kc_g, kc_s, vc + b * vc_b + g * vc_g, vc_s, t, start, c_lo, c_hi, far, scale, natural,
        found, STRIDE, SPAN, DK, DV, DKP, DVP, BN, ACC,
    )  # fmt: skip
    at += rows * s
    found = _slope(
        tile, rows_of(do_win + mine, heads * DV, t, real, DV, DVP),
        tl.load(lse + at, mask=real, other=0), tl.load(delta + at, mask=real, other=0),
        kw + b * kw_b + g * kw_g, kw_s, vw + b * vw_b + g * vw_g, vw_s, t, start, w_lo,
        tl.minimum(q0 + BQ, s), window, scale, natural, found, 1, 1, DK, DV, DKP, DVP, BN, ACC,
    )  # fmt: skip
    d = tl.arange(0, DKP)
    place = ((b * s + t[:, None]) * heads + h) * DK + d[None]
    tl.store(dq + place, found.to(dq.dtype.element_ty), mask=real[:, None] & (d < DK)[None])


@triton.jit
def backward_kv(
    q, k, v, starts, do, lse, delta, dk, dv,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, starts_b, s, heads, n, window, scale, natural,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One head's part of dk [B, H, n, DK] and dv [B, H, n, DV] of one band, for one tile of keys."""
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), row % heads
    g = h // PER
    base = tl.program_id(0) * BN
    i = base + tl.arange(0, BN)
    there = i < n
    keys = rows_of(k + b * k_b + g * k_g, k_s, i, there, DK, DKP)
    values = rows_of(v + b * v_b + g * v_g, v_s, i, there, DV, DVP)
    grad_k, grad_v = tl.zeros([BN, DKP], ACC), tl.zeros([BN, DVP], ACC)
    mine = row.to(tl.int64) * s
    end = tl.minimum(s, (tl.minimum(base + BN, n) - 1) * STRIDE + SPAN - 1 + window)
    for q0 in range(base * STRIDE + SPAN - 1, end, BQ):
        t = q0 + tl.arange(0, BQ)
        real = t < s
        start = tl.load(starts + b * starts_b + t, mask=real, other=0)
        tile = rows_of(q + b * q_b + h * q_h, q_s, t, real, DK, DKP)
        grad = rows_of(do + (b * s * heads + h) * DV, heads * DV, t, real, DV, DVP)
        z = tl.load(lse + mine + t, mask=real, other=0)
        z_grad = tl.load(delta + mine + t, mask=real, other=0)
        score = tl.dot(tile, tl.trans(keys), out_dtype=ACC, input_precision="ieee") * scale
        live = seen(i, there, t, start, window, STRIDE, SPAN) & real[:, None]
        p = tl.exp2(tl.where(live, score, float("-inf")) - z[:, None])
        grad_v += tl.dot(tl.trans(p).to(grad.dtype), grad, out_dtype=ACC, input_precision="ieee")
        dp = tl.dot(grad, tl.trans(values), out_dtype=ACC, input_precision="ieee")
        ds = p * (dp - z_grad[:, None]) * natural
        grad_k += tl.dot(tl.trans(ds).to(tile.dtype), tile, out_dtype=ACC, input_precision="ieee")
    at = row.to(tl.int64) * n + i[:, None]
    d, e = tl.arange(0, DKP), tl.arange(0, DVP)
    tl.store(dk + at * DK + d[None], grad_k, mask=there[:, None] & (d < DK)[None])
    tl.store(dv + at * DV + e[None], grad_v, mask=there[:, None] & (e < DV)[None])
