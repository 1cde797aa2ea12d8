"""Compression and window in one kernel: both are bands of keys that a tile of queries sees, and share the query tile.

Key i stands for tokens i * STRIDE .. i * STRIDE + SPAN - 1. Query t sees it if it lies wholly inside start[t]..t and
ends within the last WINDOW tokens: stride d and span l for compression, 1 and 1 for the window. Softmax in base 2.

TMA: what the loops read is named by descriptors of [B, heads, n, D] and copied by the device's own unit. EDGES: tiles
that every query sees whole are not masked. Both give the same bits; which is faster is measured.
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
def of_head(x, x_b, x_h, b, h, TMA: tl.constexpr):
    """Where ``tile_of`` finds the rows of one head: a pointer to them, or the descriptor, which has all heads."""
    if not TMA:
        x += b * x_b + h * x_h
    return x


@triton.jit
def tile_of(
    x, n_stride, b, h, base, there,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows base..base + ROWS - 1 as [ROWS, PADDED]; zeros beyond the last and, of pointers, where not ``there``."""
    if TMA:
        rows = x.load([b.to(tl.int32), h.to(tl.int32), base, 0]).reshape(ROWS, PADDED)
    else:
        rows = rows_of(x, n_stride, base + tl.arange(0, ROWS), there, WIDTH, PADDED)
    return rows


@triton.jit
def put_rows(base, n_stride, n, there, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store what ``rows_of`` would read."""
    d = tl.arange(0, PADDED)
    place = base + n[:, None] * n_stride + d[None]
    tl.store(place, value.to(base.dtype.element_ty), mask=there[:, None] & (d < WIDTH)[None])


@triton.jit
def seen(i, there, t, start, window, STRIDE: tl.constexpr, SPAN: tl.constexpr):
    """[len(t), len(i)]: which queries see which keys."""
    first = i * STRIDE
    last = first + SPAN - 1
    inside = (last[None] <= t[:, None]) & (first[None] >= start[:, None]) & (last[None] > (t - window)[:, None])
    return inside & there[None]


@triton.jit
def all_seen(base, hi, t, start, window, STRIDE: tl.constexpr, SPAN: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr):
    """Whether queries t..t + BQ - 1, whose documents start at ``start`` at most, all see keys base..base + BN - 1."""
    reaches = (base * STRIDE >= start) & (base * STRIDE + SPAN - 1 > t + BQ - 1 - window)
    return reaches & ((base + BN - 1) * STRIDE + SPAN - 1 <= t) & (base + BN <= hi)


@triton.jit
def _product(a, b, ACC: tl.constexpr):
    """a b, accumulated in ACC and never in TF32."""
    return tl.dot(a, b, out_dtype=ACC, input_precision="ieee")


@triton.jit
def _place(heads, PER: tl.constexpr):
    """This program's row of [B, H], its batch, head and group."""
    row = tl.program_id(1)
    h = row % heads
    return row.to(tl.int64), (row // heads).to(tl.int64), h, h // PER


@triton.jit
def _queries(q, starts, t, s, q_b, q_s, q_h, starts_b, b, h, DK: tl.constexpr, DKP: tl.constexpr):
    """Which of queries ``t`` exist, where their documents start, and the queries themselves."""
    real = t < s
    start = tl.load(starts + b * starts_b + t, mask=real, other=0)
    return real, start, rows_of(q + b * q_b + h * q_h, q_s, t, real, DK, DKP)


@triton.jit
def _scores(
    q, keys, i, there, t, start, window, scale, whole,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, ACC: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """[len(t), len(i)]; -inf where a query does not see a key. EDGES: ``whole`` says that each sees every one."""
    s = _product(q, tl.trans(keys), ACC) * scale
    if EDGES:
        if not whole:
            s = tl.where(seen(i, there, t, start, window, STRIDE, SPAN), s, float("-inf"))
    else:
        s = tl.where(seen(i, there, t, start, window, STRIDE, SPAN), s, float("-inf"))
    return s


@triton.jit
def _score_slope(p, grad, values, delta, natural, ACC: tl.constexpr):
    """Gradient of the scores behind probabilities ``p``, given that of the output."""
    return p * (_product(grad, tl.trans(values), ACC) - delta[:, None]) * natural


@triton.jit
def _attend(
    q, k, k_n, v, v_n, b, g, t, t_lo, start, start_hi, lo, hi, window, scale,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """(o [BQ, DVP], lse [BQ]) of queries over keys lo..hi-1; zeros for a query that sees none."""
    top = tl.full([BQ], float("-inf"), ACC)
    total = tl.zeros([BQ], ACC)
    o = tl.zeros([BQ, DVP], ACC)
    for base in range(lo, hi, BN):
        i = base + tl.arange(0, BN)
        there = i < hi
        whole = all_seen(base, hi, t_lo, start_hi, window, STRIDE, SPAN, BQ, BN)
        keys = tile_of(k, k_n, b, g, base, there, DK, DKP, BN, TMA)
        s = _scores(q, keys, i, there, t, start, window, scale, whole, STRIDE, SPAN, ACC, EDGES)
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        values = tile_of(v, v_n, b, g, base, there, DV, DVP, BN, TMA)
        total = total * shrink + tl.sum(p, 1)
        o = o * shrink[:, None] + _product(p.to(values.dtype), values, ACC)
        top = new
    none = total == 0
    total = tl.where(none, 1.0, total)
    return o / total[:, None], tl.where(none, 0.0, top + tl.log2(total))


@triton.jit
def _tile(
    q, starts, s, origin, heads, n_cmp, window, q_b, q_s, q_h, starts_b, PER: tl.constexpr, STRIDE: tl.constexpr,
    SPAN: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """This program's place and queries, with the blocks c_lo..c_hi-1 and window keys w_lo..q1-1 that any may see, the
    first query's place, and where the last one's document starts.

    Query t stands at the row's place t + ``origin``.
    """
    row, b, h, g = _place(heads, PER)
    q0 = tl.program_id(0) * BQ
    q1 = tl.minimum(q0 + BQ, s) + origin
    t = q0 + tl.arange(0, BQ)
    real, start, tile = _queries(q, starts, t, s, q_b, q_s, q_h, starts_b, b, h, DK, DKP)
    first = tl.load(starts + b * starts_b + q0)
    last = tl.load(starts + b * starts_b + tl.minimum(q0 + BQ, s) - 1)
    c_hi = tl.minimum(n_cmp, tl.maximum(q1 - SPAN + STRIDE, 0) // STRIDE)
    c_lo = tl.minimum(first // STRIDE // BN * BN, c_hi)
    w_lo = tl.maximum(tl.maximum(q0 + origin - window + 1, first), 0)
    return row, b, h, g, t, real, start, tile, c_lo, c_hi, w_lo, q1, q0 + origin, last


@triton.jit
def forward(
    q, kc, vc, kw, vw, starts, o_cmp, o_win, lse,
    q_b, q_s, q_h, kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g, starts_b,
    s, origin, heads, n_cmp, window, scale, far,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. o_cmp, o_win [B, S, H, DV] and lse [2, B, H, S] are contiguous."""
    row, b, h, g, t, real, start, tile, c_lo, c_hi, w_lo, q1, t_lo, last = _tile(
        q, starts, s, origin, heads, n_cmp, window, q_b, q_s, q_h, starts_b, PER, STRIDE, SPAN, DK, DKP, BQ, BN
    )
    mine = (b * s * heads + h) * DV
    at = row * s + t
    o, z = _attend(
        tile, of_head(kc, kc_b, kc_g, b, g, TMA), kc_s, of_head(vc, vc_b, vc_g, b, g, TMA), vc_s, b, g,
        t + origin, t_lo, start, last, c_lo, c_hi, far, scale, STRIDE, SPAN, DK, DV, DKP, DVP, BQ, BN, ACC, TMA, EDGES,
    )  # fmt: skip
    put_rows(o_cmp + mine, heads * DV, t, real, o, DV, DVP)
    tl.store(lse + at, z, mask=real)
    o, z = _attend(
        tile, of_head(kw, kw_b, kw_g, b, g, TMA), kw_s, of_head(vw, vw_b, vw_g, b, g, TMA), vw_s, b, g,
        t + origin, t_lo, start, last, w_lo, q1, window, scale, 1, 1, DK, DV, DKP, DVP, BQ, BN, ACC, TMA, EDGES,
    )  # fmt: skip
    put_rows(o_win + mine, heads * DV, t, real, o, DV, DVP)
    tl.store(lse + tl.num_programs(1).to(tl.int64) * s + at, z, mask=real)


@triton.jit
def _slope(
    q, do, lse, delta, at, real, k, k_n, v, v_n, b, g, t, t_lo, origin, start, start_hi, lo, hi, window,
    scale, natural, dq, do_n, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """``dq`` plus what one band adds to the gradient of its queries; lse and delta are read at ``at``."""
    grad = rows_of(do, do_n, t, real, DV, DVP)
    z = tl.load(lse + at, mask=real, other=0)
    z_grad = tl.load(delta + at, mask=real, other=0)
    for base in range(lo, hi, BN):
        i = base + tl.arange(0, BN)
        there = i < hi
        whole = all_seen(base, hi, t_lo, start_hi, window, STRIDE, SPAN, BQ, BN)
        keys = tile_of(k, k_n, b, g, base, there, DK, DKP, BN, TMA)
        s = _scores(q, keys, i, there, t + origin, start, window, scale, whole, STRIDE, SPAN, ACC, EDGES)
        values = tile_of(v, v_n, b, g, base, there, DV, DVP, BN, TMA)
        ds = _score_slope(tl.exp2(s - z[:, None]), grad, values, z_grad, natural, ACC)
        dq += _product(ds.to(keys.dtype), keys, ACC)
    return dq


@triton.jit
def backward_q(
    q, kc, vc, kw, vw, starts, do_cmp, do_win, lse, delta, dq,
    q_b, q_s, q_h, kc_b, kc_s, kc_g, vc_b, vc_s, vc_g, kw_b, kw_s, kw_g, vw_b, vw_s, vw_g, starts_b,
    s, origin, heads, n_cmp, window, scale, natural, far,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """dq [B, S, H, DK] of both bands. do_* are contiguous [B, S, H, DV]; lse, delta [2, B, H, S]."""
    row, b, h, g, t, real, start, tile, c_lo, c_hi, w_lo, q1, t_lo, last = _tile(
        q, starts, s, origin, heads, n_cmp, window, q_b, q_s, q_h, starts_b, PER, STRIDE, SPAN, DK, DKP, BQ, BN
    )
    mine = (b * s * heads + h) * DV
    at = row * s + t
    found = tl.zeros([BQ, DKP], ACC)
    found = _slope(
        tile, do_cmp + mine, lse, delta, at, real, of_head(kc, kc_b, kc_g, b, g, TMA), kc_s,
        of_head(vc, vc_b, vc_g, b, g, TMA), vc_s, b, g, t, t_lo, origin, start, last, c_lo, c_hi, far, scale, natural,
        found, heads * DV, STRIDE, SPAN, DK, DV, DKP, DVP, BQ, BN, ACC, TMA, EDGES,
    )  # fmt: skip
    at += tl.num_programs(1).to(tl.int64) * s
    found = _slope(
        tile, do_win + mine, lse, delta, at, real, of_head(kw, kw_b, kw_g, b, g, TMA), kw_s,
        of_head(vw, vw_b, vw_g, b, g, TMA), vw_s, b, g, t, t_lo, origin, start, last, w_lo, q1, window, scale, natural,
        found, heads * DV, 1, 1, DK, DV, DKP, DVP, BQ, BN, ACC, TMA, EDGES,
    )  # fmt: skip
    put_rows(dq + (b * s * heads + h) * DK, heads * DK, t, real, found, DK, DKP)


@triton.jit
def backward_kv(
    q, k, v, starts, do, lse, delta, dk, dv,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, starts_b, s, origin, heads, n, window, scale, natural,
    PER: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """One head's part of dk [B, H, n, DK] and dv [B, H, n, DV] of one band, for one tile of keys."""
    row, b, h, g = _place(heads, PER)
    base = tl.program_id(0) * BN
    i = base + tl.arange(0, BN)
    there = i < n
    keys = rows_of(k + b * k_b + g * k_g, k_s, i, there, DK, DKP)
    values = rows_of(v + b * v_b + g * v_g, v_s, i, there, DV, DVP)
    grad_k, grad_v = tl.zeros([BN, DKP], ACC), tl.zeros([BN, DVP], ACC)
    q = of_head(q, q_b, q_h, b, h, TMA)
    do = of_head(do, s * heads * DV, DV, b, h, TMA)
    end = tl.minimum(s, (tl.minimum(base + BN, n) - 1) * STRIDE + SPAN - 1 + window - origin)
    for q0 in range(tl.maximum(base * STRIDE + SPAN - 1 - origin, 0), end, BQ):
        t = q0 + tl.arange(0, BQ)
        real = t < s
        start = tl.load(starts + b * starts_b + t, mask=real, other=0)
        tile = tile_of(q, q_s, b, h, q0, real, DK, DKP, BQ, TMA)
        grad = tile_of(do, heads * DV, b, h, q0, real, DV, DVP, BQ, TMA)
        z = tl.load(lse + row * s + t, mask=real, other=0)
        z_grad = tl.load(delta + row * s + t, mask=real, other=0)
        last = tl.load(starts + b * starts_b + tl.minimum(q0 + BQ, s) - 1)
        whole = all_seen(base, n, q0 + origin, last, window, STRIDE, SPAN, BQ, BN) & (q0 + BQ <= s)
        score = _scores(tile, keys, i, there, t + origin, start, window, scale, whole, STRIDE, SPAN, ACC, EDGES)
        p = tl.exp2(tl.where(real[:, None], score, float("-inf")) - z[:, None])
        grad_v += _product(tl.trans(p).to(grad.dtype), grad, ACC)
        ds = _score_slope(p, grad, values, z_grad, natural, ACC)
        grad_k += _product(tl.trans(ds).to(tile.dtype), tile, ACC)
    put_rows(dk + row * n * DK, DK, i, there, grad_k, DK, DKP)
    put_rows(dv + row * n * DV, DV, i, there, grad_v, DV, DVP)
