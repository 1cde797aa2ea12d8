"""The three branches by dense arithmetic under masks: exact on any device, memory O(S^2), meant for short rows.

This is the path that the float64 oracle proves, and the one that every other path is compared with.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.visibility import Layout

_NARROW: Final = 32


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8. q [B, S, H, dk], k_cmp/v_cmp [B, n_cmp, G, d], bias [B', n_cmp, h*S] (h = H / G query heads a group).

    Returns (o [B, S, H, dv], p [B, G, h, S, n_cmp]). A row whose bias hides nothing is softmaxed over everything.
    """
    b, s, heads, dk = q.shape
    n_cmp, groups = k_cmp.shape[1], k_cmp.shape[2]
    h = heads // groups
    rows = q.view(b, s, groups, h, dk).permute(0, 2, 3, 1, 4).reshape(b * groups, h * s, dk)
    keys = k_cmp.transpose(1, 2).reshape(b * groups, n_cmp, dk)
    values = v_cmp.transpose(1, 2).reshape(b * groups, n_cmp, -1)
    if bias.shape[0] > 1:
        bias = bias.repeat_interleave(groups, dim=0)
    bias, wide = bias.to(q.dtype), torch.promote_types(q.dtype, torch.float32)
    if n_cmp < _NARROW:  # torch's softmax is ten times slower over a last dimension shorter than a vector register
        scores = torch.baddbmm(bias, keys, rows.transpose(1, 2), alpha=dk**-0.5)
        p = torch.softmax(scores, dim=1, dtype=wide).transpose(1, 2)
    else:
        scores = torch.baddbmm(bias.transpose(1, 2), rows, keys.transpose(1, 2), alpha=dk**-0.5)
        p = torch.softmax(scores, dim=-1, dtype=wide)
    o = torch.bmm(p.to(values.dtype), values).view(b, groups, h, s, -1)
    # a view also where p is transposed: its strides allow splitting the outer dimensions
    return o.permute(0, 3, 1, 2, 4).reshape(b, s, heads, -1), p.view(b, groups, h, s, n_cmp)


def importance(cfg: NSAConfig, p_cmp: Tensor, n_blocks: int) -> Tensor:
    """Eqs. 9 and 10: block importance per group. p_cmp [B, G, h, S, n_cmp] -> [B, G, S, n_blocks]."""
    weight = blocks.overlap(cfg, p_cmp.shape[-1], n_blocks, device=p_cmp.device, dtype=p_cmp.dtype)
    return p_cmp.detach().sum(2) @ weight


def choose(layout: Layout, p_cmp: Tensor) -> Tensor:
    """Eq. 11: the chosen blocks as [B, G, S, n_blocks] bool."""
    score = importance(layout.cfg, p_cmp, layout.n_blocks)
    return blocks.select_blocks(layout.cfg, score, layout.positions, layout.starts)


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, layout: Layout) -> Tensor:
    """q [B, S, H, dk], k/v [B, S, G, d], chosen [B, G, S, n_blocks] (None = every block) -> [B, S, H, dv]."""
    if chosen is None:
        return sdpa(q, k, v, layout.causal)
    mask = blocks.token_mask(layout.cfg, chosen, layout.positions, layout.starts, layout.n_keys)
    return sdpa(q, k, v, mask.repeat_interleave(q.shape[2] // k.shape[2], dim=1))


def window(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The last w tokens. q [B, S, H, dk], k/v [B, S, G, d] -> [B, S, H, dv]."""
    return sdpa(q, k, v, layout.window)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, S, H, d] layout around torch's SDPA; no mask means causal."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return o.transpose(1, 2)
