"""The NSA layer: projections, compression, three branches, gates. The masked-SDPA path lives here.

Exact on any device; memory O(S^2) bits for masks, so it is meant for short sequences and as the reference of the
kernels. Longer ones are dispatched by ``uvcc_engine.nsa.dispatch``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.rope import rope_tables, rotate

BRANCHES = ("cmp", "sel", "win")


class Compression(nn.Module):
    """phi of eq. 7: a block of l vectors with an intra-block position encoding -> one vector.

    An MLP over the flattened block plus the block's mean, so that it starts out as mean pooling.
    """

    def __init__(self, cfg: NSAConfig, dim: int) -> None:
        super().__init__()
        self.l, self.d = cfg.l, cfg.d
        self.position = nn.Parameter(torch.zeros(cfg.l, dim))
        self.up = nn.Linear(cfg.l * dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, G, dim] -> [B, n_cmp, G, dim]."""
        windows = x.unfold(1, self.l, self.d)  # [B, n_cmp, G, dim, l]
        return self.block(windows.transpose(-1, -2))

    def block(self, x: Tensor) -> Tensor:
        """x [..., l, dim] -> [..., dim]."""
        hidden = F.gelu(self.up((x + self.position).flatten(-2)))
        out: Tensor = x.mean(-2) + self.down(hidden)
        return out


class NSAttention(nn.Module):
    """Native Sparse Attention over packed documents. One query projection, separate K and V for each branch."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        h, g = cfg.n_heads, cfg.n_kv_groups
        self.q = nn.Linear(cfg.dim, h * cfg.d_k, bias=False)
        self.kv = nn.Linear(cfg.dim, 3 * g * (cfg.d_k + cfg.d_v), bias=False)
        self.phi_k = Compression(cfg.nsa, cfg.d_k)
        self.phi_v = Compression(cfg.nsa, cfg.d_v)
        hidden = max(16, cfg.dim // 16)
        self.gate = nn.Sequential(nn.Linear(cfg.dim, hidden), nn.SiLU(), nn.Linear(hidden, 3 * h))
        self.out = nn.Linear(h * cfg.d_v, cfg.dim, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        """x [B, S, dim] -> q [B, S, H, dk], k and v per branch [B, S, G, d], gates [B, S, H, 3] in (0, 1)."""
        b, s, _ = x.shape
        c = self.cfg
        q = self.q(x).view(b, s, c.n_heads, c.d_k)
        kv = self.kv(x).view(b, s, 3, c.n_kv_groups, c.d_k + c.d_v)
        k, v = kv.split((c.d_k, c.d_v), dim=-1)
        gates = torch.sigmoid(self.gate(x)).view(b, s, c.n_heads, 3)
        return q, list(k.unbind(2)), list(v.unbind(2)), gates

    def forward(self, x: Tensor, doc_start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, S, dim] -> (y [B, S, dim], gates [B, S, H, 3] for the gate metrics)."""
        b, s, _ = x.shape
        q, k, v, gates = self.project(x)
        position = torch.arange(s, device=x.device)
        cos, sin = rope_tables(
            position, self.cfg.d_k, base=self.cfg.rope_base, scale=self.cfg.rope_scale, dtype=x.dtype
        )
        cos, sin = cos[:, None], sin[:, None]
        q = rotate(q, cos, sin)
        k_sel, k_win = rotate(k[1], cos, sin), rotate(k[2], cos, sin)
        n_cmp = self.cfg.nsa.n_cmp(s)
        starts = doc_start if doc_start is not None else torch.zeros(b, s, dtype=torch.int64, device=x.device)
        o_cmp, p_cmp = None, None
        if n_cmp:
            k_cmp = rotate(
                self.phi_k(k[0]),
                cos[: n_cmp * self.cfg.nsa.d : self.cfg.nsa.d],
                sin[: n_cmp * self.cfg.nsa.d : self.cfg.nsa.d],
            )
            o_cmp, p_cmp = compressed_attention(self.cfg.nsa, q, k_cmp, self.phi_v(v[0]), position, starts)
        o_sel, o_win = selected_and_window(
            self.cfg.nsa, q, (k_sel, v[1]), (k_win, v[2]), p_cmp, position, starts, packed=doc_start is not None
        )
        y = gates[..., 1:2] * o_sel + gates[..., 2:3] * o_win
        if o_cmp is not None:
            y = y + gates[..., 0:1] * o_cmp
        return self.out(y.flatten(-2)), gates


def compressed_attention(
    cfg: NSAConfig, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, q_pos: Tensor, doc_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Eq. 8. q [B, S, H, dk], k_cmp/v_cmp [B, n_cmp, G, d] -> (o [B, S, H, dv], p [B, G, h, S, n_cmp]).

    The softmax runs over visible blocks only; a query that sees none gets zeros.
    """
    b, s, heads, dk = q.shape
    n_cmp, groups = k_cmp.shape[1], k_cmp.shape[2]
    grouped = q.view(b, s, groups, heads // groups, dk)
    scores = torch.einsum("bsghd,bngd->bghsn", grouped, k_cmp) * dk**-0.5
    visible = blocks.cmp_visible(cfg, q_pos, doc_start, n_cmp)[:, None, None]
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    p = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    p = p.masked_fill(~visible, 0.0)
    o = torch.einsum("bghsn,bngd->bsghd", p.to(v_cmp.dtype), v_cmp)
    return o.reshape(b, s, heads, -1), p


def importance(cfg: NSAConfig, p_cmp: Tensor, n_blocks: int) -> Tensor:
    """Eqs. 9 and 10: block importance per group. p_cmp [B, G, h, S, n_cmp] -> [B, G, S, n_blocks]."""
    weight = blocks.overlap(cfg, p_cmp.shape[-1], n_blocks, device=p_cmp.device, dtype=p_cmp.dtype)
    return p_cmp.detach().sum(2) @ weight


def selected_and_window(
    cfg: NSAConfig,
    q: Tensor,
    sel: tuple[Tensor, Tensor],
    win: tuple[Tensor, Tensor],
    p_cmp: Tensor | None,
    q_pos: Tensor,
    doc_start: Tensor,
    *,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    """Both token-level branches by masked SDPA. q [B, S, H, dk]; sel/win = (k, v) [B, S, G, d] -> two [B, S, H, dv]."""
    _, s, heads, _ = q.shape
    n_blocks, groups = cfg.n_blocks(s), sel[0].shape[2]
    everything = n_blocks <= cfg.n_sel  # then the selection is all that causality allows
    if everything and cfg.w >= s and not packed:
        both = _sdpa(torch.cat((q, q), 2), torch.cat((sel[0], win[0]), 2), torch.cat((sel[1], win[1]), 2), None)
        return both[:, :, :heads], both[:, :, heads:]
    if everything or p_cmp is None:
        sel_mask = blocks.causal_mask(q_pos, doc_start, s)[:, None]
    else:
        chosen = blocks.select_blocks(cfg, importance(cfg, p_cmp, n_blocks), q_pos, doc_start)
        sel_mask = blocks.token_mask(cfg, chosen, q_pos, doc_start, s).repeat_interleave(heads // groups, dim=1)
    o_sel = _sdpa(q, *sel, sel_mask)
    return o_sel, _sdpa(q, *win, blocks.window_mask(cfg, q_pos, doc_start, s)[:, None])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, S, H, d] layout around torch's SDPA; no mask means causal."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return o.transpose(1, 2)
