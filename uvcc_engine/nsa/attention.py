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
from uvcc_engine.nsa.rope import first_positions, rotate

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

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, S, dim] -> q [B, S, H, dk], k and v [B, S, 3, G, d] per branch, gates [B, S, H, 3] in (0, 1)."""
        b, s, _ = x.shape
        c = self.cfg
        q = self.q(x).view(b, s, c.n_heads, c.d_k)
        k, v = self.kv(x).split((3 * c.n_kv_groups * c.d_k, 3 * c.n_kv_groups * c.d_v), dim=-1)
        gates = torch.sigmoid(self.gate(x)).view(b, s, c.n_heads, 3)
        return q, k.view(b, s, 3, -1, c.d_k), v.view(b, s, 3, -1, c.d_v), gates

    def forward(self, x: Tensor, doc_start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, S, dim] -> (y [B, S, dim], gates [B, S, H, 3] for the gate metrics)."""
        b, s, _ = x.shape
        c, nsa = self.cfg, self.cfg.nsa
        q, k, v, gates = self.project(x)
        table = first_positions(s, c.d_k, c.rope_base, c.rope_scale, q.dtype, x.device)[:, None]
        q = rotate(q, table)
        k_token = rotate(k[:, :, 1:].flatten(2, 3), table)  # selection's groups, then the window's
        v_token = v[:, :, 1:].flatten(2, 3)
        starts = doc_start if doc_start is not None else torch.zeros(b, s, dtype=torch.int64, device=x.device)
        position = torch.arange(s, device=x.device)
        n_cmp = nsa.n_cmp(s)
        o_cmp, p_cmp = None, None
        if n_cmp:
            k_cmp = rotate(self.phi_k(k[:, :, 0]), table[: n_cmp * nsa.d : nsa.d])
            o_cmp, p_cmp = compressed_attention(nsa, q, k_cmp, self.phi_v(v[:, :, 0]), position, starts)
        both = selected_and_window(nsa, q, k_token, v_token, p_cmp, position, starts, packed=doc_start is not None)
        y = torch.einsum("bsjhd,bshj->bshd", both, gates[..., 1:])
        if o_cmp is not None:
            y = torch.addcmul(y, o_cmp, gates[..., 0:1])
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
    k: Tensor,
    v: Tensor,
    p_cmp: Tensor | None,
    q_pos: Tensor,
    doc_start: Tensor,
    *,
    packed: bool,
) -> Tensor:
    """Both token-level branches by masked SDPA.

    q [B, S, H, dk]; k and v [B, S, 2G, d], selection's groups first -> [B, S, 2, H, dv], selection first.
    """
    b, s, heads, _ = q.shape
    n_blocks, groups = cfg.n_blocks(s), k.shape[2] // 2
    everything = n_blocks <= cfg.n_sel or p_cmp is None  # then the selection is all that causality allows
    if everything and cfg.w >= s:  # and the window is the same: one call serves both
        mask = blocks.causal_mask(q_pos, doc_start, s)[:, None] if packed else None
        return _sdpa(q.repeat(1, 1, 2, 1), k, v, mask).reshape(b, s, 2, heads, -1)
    if everything:
        sel_mask = blocks.causal_mask(q_pos, doc_start, s)[:, None] if packed else None
    else:
        assert p_cmp is not None
        chosen = blocks.select_blocks(cfg, importance(cfg, p_cmp, n_blocks), q_pos, doc_start)
        sel_mask = blocks.token_mask(cfg, chosen, q_pos, doc_start, s).repeat_interleave(heads // groups, dim=1)
    o_sel = _sdpa(q, k[:, :, :groups], v[:, :, :groups], sel_mask)
    window = blocks.window_mask(cfg, q_pos, doc_start, s)[:, None]
    return torch.stack((o_sel, _sdpa(q, k[:, :, groups:], v[:, :, groups:], window)), dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, S, H, d] layout around torch's SDPA; no mask means causal."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return o.transpose(1, 2)
