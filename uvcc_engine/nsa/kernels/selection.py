"""Selection from the side of the keys (FSA, arXiv 2508.18224): a block is loaded once and meets the queries that chose
it, taken together from anywhere in the row, so that small head groups fill a tile without padding.

A work list cuts each block's queries into chunks; it is built from the inverse index and serves both directions. Each
(query, slot) has a place of its own for what its block contributes, summed afterwards in slot order: no atomics, so
the same bits every time, and a later token can never move an earlier one's sum. The queries are the last ``s`` of the
``n_keys`` places of a row.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from uvcc_engine.nsa.kernels.band import of_head, tile_of


@triton.jit
def _rows(entry, begin, end, PER: tl.constexpr, N_SEL: tl.constexpr, M: tl.constexpr):
    """A tile's rows: (place in the list of choices, query of the segment, head of the group, whether it is real)."""
    row = tl.arange(0, M)
    e = begin + row // PER
    live = (row < M // PER * PER) & (e < end)
    place = tl.load(entry + e, mask=live, other=0)
    return place, place // N_SEL, row % PER, live


@triton.jit
def _tile(base, s_stride, h_stride, t, h, live, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows (t, h) of a [S, H, WIDTH] tensor, gathered."""
    d = tl.arange(0, PADDED)
    at = t[:, None].to(tl.int64) * s_stride + h[:, None] * h_stride + d[None]
    return tl.load(base + at, mask=live[:, None] & (d < WIDTH)[None], other=0)


@triton.jit
def _scores(q, keys, t, start, live, j, n_keys, scale, SIZE: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr):
    n = tl.arange(0, BN)
    x = j * SIZE + n
    score = tl.dot(q, tl.trans(keys), out_dtype=ACC, input_precision="ieee") * scale
    inside = ((n < SIZE) & (x < n_keys))[None] & (x[None] <= t[:, None]) & (x[None] >= start[:, None]) & live[:, None]
    return tl.where(inside, score, float("-inf"))


@triton.jit
def forward(
    q, k, v, starts, entry, offset, block_of, begin_of, part_o, part_lse,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, starts_b,
    s, n_keys, t0, groups, n_blocks, n_chunks, n_entries, scale,
    PER: tl.constexpr, N_SEL: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """One chunk of one block's queries. part_o [B, G, entries, PER, DV], part_lse [B, G, entries, PER]."""
    row = tl.program_id(1).to(tl.int64)
    b, g = row // groups, row % groups
    j = tl.load(block_of + row * n_chunks + tl.program_id(0))
    if j < n_blocks:
        begin = tl.load(begin_of + row * n_chunks + tl.program_id(0))
        end = tl.minimum(begin + CHUNK * (M // PER), tl.load(offset + row * (n_blocks + 1) + j + 1))
        n = j * SIZE + tl.arange(0, BN)
        there = (n < n_keys) & (tl.arange(0, BN) < SIZE)
        keys = tile_of(of_head(k, k_b, k_g, b, g, TMA), k_s, b, g, j * SIZE, there, DK, DKP, BN, TMA)
        values = tile_of(of_head(v, v_b, v_g, b, g, TMA), v_s, b, g, j * SIZE, there, DV, DVP, BN, TMA)
        d = tl.arange(0, DVP)
        for at in range(begin, end, M // PER):
            place, t, h, live = _rows(entry + row * n_entries, at, end, PER, N_SEL, M)
            t += t0
            tile = _tile(q + b * q_b + g * PER * q_h, q_s, q_h, t, h, live, DK, DKP)
            start = tl.load(starts + b * starts_b + t, mask=live, other=0)
            score = _scores(tile, keys, t + (n_keys - s), start, live, j, n_keys, scale, SIZE, BN, ACC)
            top = tl.max(score, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(score - top[:, None])
            total = tl.sum(p, 1)
            total = tl.where(total == 0, 1.0, total)
            o = tl.dot(p.to(values.dtype), values, out_dtype=ACC, input_precision="ieee") / total[:, None]
            out = (row * n_entries + place) * PER + h
            tl.store(part_o + out[:, None] * DV + d[None], o, mask=live[:, None] & (d < DV)[None])
            tl.store(part_lse + out, top + tl.log2(total), mask=live)


@triton.jit
def combine(
    chosen, part_o, part_lse, o, lse, chosen_b, chosen_g, s, t0, rows, groups, heads,
    PER: tl.constexpr, N_SEL: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The slots of each (query, head) of a segment of ``rows`` queries: o [B, S, H, DV], lse [B, H, S]."""
    row = tl.program_id(1).to(tl.int64)
    b, g = row // groups, row % groups
    r = tl.program_id(0) * R + tl.arange(0, R)
    real = r < rows * PER
    t, h = r // PER, r % PER
    d = tl.arange(0, DVP)
    fits = real[:, None] & (d < DV)[None]
    top, total = tl.full([R], float("-inf"), ACC), tl.zeros([R], ACC)
    out = tl.zeros([R, DVP], ACC)
    for slot in range(N_SEL):
        live = real & (tl.load(chosen + b * chosen_b + g * chosen_g + t * N_SEL + slot, mask=real, other=-1) >= 0)
        at = ((row * rows + t) * N_SEL + slot) * PER + h
        z = tl.load(part_lse + at, mask=live, other=float("-inf"))
        new = tl.maximum(top, z)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, grow = tl.exp2(top - safe), tl.exp2(z - safe)
        part = tl.load(part_o + at[:, None] * DV + d[None], mask=live[:, None] & (d < DV)[None], other=0)
        total = total * shrink + grow
        out = out * shrink[:, None] + part * grow[:, None]
        top = new
    total = tl.where(total == 0, 1.0, total)
    place = ((b * s + t0 + t) * heads + g * PER + h).to(tl.int64)
    tl.store(o + place[:, None] * DV + d[None], (out / total[:, None]).to(o.dtype.element_ty), mask=fits)
    tl.store(lse + (b * heads + g * PER + h) * s + t0 + t, top + tl.log2(total), mask=real)


@triton.jit
def backward(
    q, k, v, starts, do, lse, delta, entry, offset, block_of, begin_of, part_dq, part_dk, part_dv,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, starts_b,
    s, n_keys, t0, groups, heads, n_blocks, n_chunks, n_entries, scale, natural,
    PER: tl.constexpr, N_SEL: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """As ``forward``: part_dq per (query, slot), part_dk and part_dv [B, G, chunks, SIZE, D] per chunk."""
    row = tl.program_id(1).to(tl.int64)
    b, g = row // groups, row % groups
    chunk = row * n_chunks + tl.program_id(0)
    j = tl.load(block_of + chunk)
    if j < n_blocks:
        begin = tl.load(begin_of + chunk)
        end = tl.minimum(begin + CHUNK * (M // PER), tl.load(offset + row * (n_blocks + 1) + j + 1))
        n = j * SIZE + tl.arange(0, BN)
        there = (n < n_keys) & (tl.arange(0, BN) < SIZE)
        keys = tile_of(of_head(k, k_b, k_g, b, g, TMA), k_s, b, g, j * SIZE, there, DK, DKP, BN, TMA)
        values = tile_of(of_head(v, v_b, v_g, b, g, TMA), v_s, b, g, j * SIZE, there, DV, DVP, BN, TMA)
        grad_k, grad_v = tl.zeros([BN, DKP], ACC), tl.zeros([BN, DVP], ACC)
        d, e = tl.arange(0, DKP), tl.arange(0, DVP)
        for at in range(begin, end, M // PER):
            place, t, h, live = _rows(entry + row * n_entries, at, end, PER, N_SEL, M)
            t += t0
            tile = _tile(q + b * q_b + g * PER * q_h, q_s, q_h, t, h, live, DK, DKP)
            grad = _tile(do + (b * s * heads + g * PER) * DV, heads * DV, DV, t, h, live, DV, DVP)
            start = tl.load(starts + b * starts_b + t, mask=live, other=0)
            mine = (b * heads + g * PER + h) * s + t
            z = tl.load(lse + mine, mask=live, other=0)
            score = _scores(tile, keys, t + (n_keys - s), start, live, j, n_keys, scale, SIZE, BN, ACC)
            p = tl.exp2(score - z[:, None])
            dp = tl.dot(grad, tl.trans(values), out_dtype=ACC, input_precision="ieee")
            ds = p * (dp - tl.load(delta + mine, mask=live, other=0)[:, None]) * natural
            grad_v += tl.dot(tl.trans(p).to(grad.dtype), grad, out_dtype=ACC, input_precision="ieee")
            grad_k += tl.dot(tl.trans(ds).to(tile.dtype), tile, out_dtype=ACC, input_precision="ieee")
            dq = tl.dot(ds.to(keys.dtype), keys, out_dtype=ACC, input_precision="ieee")
            out = (row * n_entries + place) * PER + h
            tl.store(part_dq + out[:, None] * DK + d[None], dq, mask=live[:, None] & (d < DK)[None])
        m = tl.arange(0, BN)
        at_n = (chunk * SIZE + m)[:, None]
        tl.store(part_dk + at_n * DK + d[None], grad_k, mask=(m < SIZE)[:, None] & (d < DK)[None])
        tl.store(part_dv + at_n * DV + e[None], grad_v, mask=(m < SIZE)[:, None] & (e < DV)[None])


@triton.jit
def sum_slots(
    chosen, part, dq, chosen_b, chosen_g, s, t0, rows, groups, heads,
    PER: tl.constexpr, N_SEL: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq [B, S, H, DK] of a segment from its slots."""
    row = tl.program_id(1).to(tl.int64)
    b, g = row // groups, row % groups
    r = tl.program_id(0) * R + tl.arange(0, R)
    real = r < rows * PER
    t, h = r // PER, r % PER
    d = tl.arange(0, DKP)
    fits = (d < DK)[None]
    out = tl.zeros([R, DKP], ACC)
    for slot in range(N_SEL):
        live = real & (tl.load(chosen + b * chosen_b + g * chosen_g + t * N_SEL + slot, mask=real, other=-1) >= 0)
        at = ((row * rows + t) * N_SEL + slot) * PER + h
        out += tl.load(part + at[:, None] * DK + d[None], mask=live[:, None] & fits, other=0)
    place = ((b * s + t0 + t) * heads + g * PER + h).to(tl.int64)
    tl.store(dq + place[:, None] * DK + d[None], out.to(dq.dtype.element_ty), mask=real[:, None] & fits)


@triton.jit
def add_chunks(
    first_of, part, out, n_keys, groups, n_blocks, n_chunks,
    SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add a segment's chunks of each block, in order, to ``out`` [B, n_keys, G, D] of type ACC."""
    row = tl.program_id(1).to(tl.int64)
    b, g = row // groups, row % groups
    j = tl.program_id(0)
    m, d = tl.arange(0, BN), tl.arange(0, DP)
    n = j * SIZE + m
    fits = ((m < SIZE) & (n < n_keys))[:, None] & (d < D)[None]
    place = ((b * n_keys + n[:, None]) * groups + g) * D + d[None]
    total = tl.load(out + place, mask=fits, other=0)
    lo = tl.load(first_of + row * (n_blocks + 1) + j)
    hi = tl.load(first_of + row * (n_blocks + 1) + j + 1)
    for c in range(lo, hi):
        total += tl.load(part + ((row * n_chunks + c) * SIZE + m[:, None]) * D + d[None], mask=fits, other=0)
    tl.store(out + place, total, mask=fits)
