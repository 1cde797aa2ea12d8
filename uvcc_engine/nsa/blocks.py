"""Block arithmetic shared by every path: visibility, overlap and selection.

Documents are packed in one row; ``doc_start[b, t]`` is the position where the document of token t begins, so a
token sees exactly the positions doc_start..t. Without packing it is all zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.nsa.config import NSAConfig


def doc_starts(doc_ids: Tensor) -> Tensor:
    """First position of each token's document. doc_ids [B, S], non-decreasing runs -> int64 [B, S]."""
    b, s = doc_ids.shape
    position = torch.arange(s, device=doc_ids.device).expand(b, s)
    changed = torch.ones_like(doc_ids, dtype=torch.bool)
    changed[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return torch.where(changed, position, 0).cummax(dim=1).values


def cmp_visible(cfg: NSAConfig, q_pos: Tensor, doc_start: Tensor, n_cmp: int) -> Tensor:
    """Whether compression block i lies wholly inside doc_start..q_pos. q_pos [S], doc_start [B, S] -> [B, S, n_cmp]."""
    first = torch.arange(n_cmp, device=q_pos.device) * cfg.d
    seen = first + cfg.l - 1 <= q_pos[:, None]
    return seen[None] & (first >= doc_start[..., None])


def overlap(cfg: NSAConfig, n_cmp: int, n_blocks: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Eq. 9 read spatially: strides shared by compression block i and selection block j. [n_cmp, n_blocks].

    For l=32, d=16, l_sel=64 a block weighs its five neighbours 1, 2, 2, 2, 1. (The printed formula, read literally,
    looks one selection block back.)
    """
    start_i = torch.arange(n_cmp, device=device) * cfg.d
    start_j = torch.arange(n_blocks, device=device) * cfg.l_sel
    left = torch.maximum(start_i[:, None], start_j[None])
    right = torch.minimum(start_i[:, None] + cfg.l, start_j[None] + cfg.l_sel)
    # all are multiples of d, so this is exact; a whole division here is what torch.compile cannot lower on CPUs
    return (right - left).clamp(min=0).to(dtype) / cfg.d


def block_candidates(cfg: NSAConfig, q_pos: Tensor, doc_start: Tensor, n_blocks: int) -> Tensor:
    """Selection blocks that hold at least one token a query may see. [B, S, n_blocks] bool."""
    j = torch.arange(n_blocks, device=q_pos.device)
    return (j <= q_pos[:, None] // cfg.l_sel)[None] & (j >= (doc_start // cfg.l_sel)[..., None])


def forced_blocks(cfg: NSAConfig, q_pos: Tensor, doc_start: Tensor, n_blocks: int) -> Tensor:
    """The document's first block and the two local ones (section 4.1 of the paper). [B, S, n_blocks] bool."""
    j = torch.arange(n_blocks, device=q_pos.device)
    local = q_pos[:, None] // cfg.l_sel
    near = (j == local) | (j == local - 1)
    return (near[None] | (j == (doc_start // cfg.l_sel)[..., None])) & block_candidates(cfg, q_pos, doc_start, n_blocks)


@torch.no_grad()
def select_blocks(cfg: NSAConfig, p_slc: Tensor, q_pos: Tensor, doc_start: Tensor) -> Tensor:
    """Eq. 11: the n_sel best blocks of each query and group, forced ones first, ties to the lower block.

    p_slc [B, G, S, n_blocks] -> bool [B, G, S, n_blocks]. Not differentiated.
    """
    n_blocks = p_slc.shape[-1]
    candidates = block_candidates(cfg, q_pos, doc_start, n_blocks)[:, None]
    if n_blocks <= cfg.n_sel:
        return candidates.expand_as(p_slc)
    forced = forced_blocks(cfg, q_pos, doc_start, n_blocks)[:, None]
    rank = p_slc.masked_fill(forced, torch.inf).masked_fill(~candidates, -torch.inf)
    best = torch.sort(rank, dim=-1, descending=True, stable=True).indices[..., : cfg.n_sel]
    chosen = torch.zeros_like(p_slc, dtype=torch.bool).scatter_(-1, best, True)
    return chosen & candidates


def token_mask(cfg: NSAConfig, blocks: Tensor, q_pos: Tensor, doc_start: Tensor, n_keys: int) -> Tensor:
    """Expand chosen blocks to tokens, clipped to doc_start..q_pos. [B, G, S, n_blocks] -> [B, G, S, n_keys] bool."""
    tokens = blocks.repeat_interleave(cfg.l_sel, dim=-1)[..., :n_keys]
    return tokens & causal_mask(q_pos, doc_start, n_keys)[:, None]


def causal_mask(q_pos: Tensor, doc_start: Tensor, n_keys: int) -> Tensor:
    """Keys a query may see at all. [B, S, n_keys] bool."""
    k = torch.arange(n_keys, device=q_pos.device)
    return (k <= q_pos[:, None])[None] & (k >= doc_start[..., None])


def window_mask(cfg: NSAConfig, q_pos: Tensor, doc_start: Tensor, n_keys: int) -> Tensor:
    """The last w visible keys, the query's own included. [B, S, n_keys] bool."""
    k = torch.arange(n_keys, device=q_pos.device)
    return causal_mask(q_pos, doc_start, n_keys) & (k > q_pos[:, None] - cfg.w)[None]
