"""Chosen blocks as short lists: the best blocks of each query, and, turned around, the queries of each block.

Both directions are built with tensor operations of fixed shape, so nothing waits for the device, and both keep
ascending order, so what later tokens choose never moves an earlier query's place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.config import NSAConfig


def pool_weights(cfg: NSAConfig, device: torch.device | None = None) -> Tensor:
    """Strides that selection block j shares with compression block j * l_sel/d - (l/d - 1) + k, for every k.

    The columns of ``blocks.overlap`` are shifted copies of this: 1, 2, 2, 2, 1 for l=32, d=16, l_sel=64. float32.
    """
    parts, ratio = cfg.l // cfg.d, cfg.l_sel // cfg.d
    first = torch.arange(ratio + parts - 1, device=device) - (parts - 1)
    shared = (first + parts).clamp(max=ratio) - first.clamp(min=0)
    return shared.to(torch.float32)


def pool(cfg: NSAConfig, p: Tensor, n_blocks: int, weights: Tensor | None = None) -> Tensor:
    """Eq. 9 as a strided convolution: p [..., n_cmp] -> [..., n_blocks]. Equal to ``p @ blocks.overlap(...)``.

    ``weights``: those of ``pool_weights``, where they are known.
    """
    parts, ratio, n_cmp = cfg.l // cfg.d, cfg.l_sel // cfg.d, p.shape[-1]
    right = n_blocks * ratio - n_cmp
    padded = F.pad(p.reshape(-1, 1, n_cmp), (parts - 1, right))
    known = pool_weights(cfg, p.device) if weights is None else weights
    weight = known.to(p.dtype)[None, None]
    return F.conv1d(padded, weight, stride=ratio).view(*p.shape[:-1], n_blocks)


@torch.no_grad()
def top_blocks(cfg: NSAConfig, score: Tensor, q_pos: Tensor, doc_start: Tensor) -> Tensor:
    """Eq. 11 as numbers: score [B, G, S, n_blocks] -> int32 [B, G, S, n_sel], ascending, -1 at the end for none.

    The same choice as ``blocks.select_blocks``: forced blocks first, then the best, ties to the lower block.
    """
    n_blocks = score.shape[-1]
    forced = blocks.forced_blocks(cfg, q_pos, doc_start, n_blocks)[:, None]
    candidates = blocks.block_candidates(cfg, q_pos, doc_start, n_blocks)[:, None]
    return best_blocks(cfg, score, forced, candidates)


@torch.no_grad()
def best_blocks(cfg: NSAConfig, score: Tensor, forced: Tensor, candidates: Tensor) -> Tensor:
    """``top_blocks`` where it is known which blocks are forced, and which there are to choose from [B, 1, S, n]."""
    n_blocks = score.shape[-1]
    rank = score.float().clamp(min=0).masked_fill(forced, torch.inf)
    # a float that is not negative orders like its bits: 32 of them, then the block number turned around
    place = torch.arange(n_blocks, device=score.device)
    key = (rank.view(torch.int32).to(torch.int64) << 32) | (n_blocks - place)
    key = key.masked_fill(~candidates, -1)
    best = key.topk(min(cfg.n_sel, n_blocks), dim=-1).values
    number = torch.where(best < 0, n_blocks, n_blocks - (best & 0xFFFFFFFF))
    number = number.sort(dim=-1).values
    number = F.pad(number, (0, cfg.n_sel - number.shape[-1]), value=n_blocks)
    return number.masked_fill(number == n_blocks, -1).to(torch.int32)


def as_mask(chosen: Tensor, n_blocks: int) -> Tensor:
    """int32 [..., n_sel] with -1 for none -> bool [..., n_blocks]."""
    there = torch.zeros(*chosen.shape[:-1], n_blocks + 1, dtype=torch.bool, device=chosen.device)
    there.scatter_(-1, chosen.to(torch.int64).masked_fill(chosen < 0, n_blocks), True)
    return there[..., :-1]


@dataclass(frozen=True, slots=True)
class Inverse:
    """The queries of each block. ``entry`` [B, G, S * n_sel] int32: positions t * n_sel + slot in the choice, sorted by
    block, then t; those of block j are entry[offset[j] : offset[j + 1]]. offset [B, G, n_blocks + 1] int32."""

    entry: Tensor
    offset: Tensor

    def bounds(self) -> list[list[list[int]]]:
        """``offset`` as numbers; tensors without data, those of a memory estimate, name no query at all."""
        if isinstance(self.offset, FakeTensor):
            b, g, n = self.offset.shape
            return [[[0] * n for _ in range(g)] for _ in range(b)]
        found: list[list[list[int]]] = self.offset.tolist()
        return found


@torch.no_grad()
def invert(chosen: Tensor, n_blocks: int) -> Inverse:
    """chosen int32 [B, G, S, n_sel] -> the inverse; entries of no block are behind offset[n_blocks]."""
    flat = chosen.flatten(-2)
    keyed = flat.masked_fill(flat < 0, n_blocks)
    ordered = keyed.sort(dim=-1, stable=True)
    bounds = torch.arange(n_blocks + 1, device=chosen.device, dtype=keyed.dtype).expand(*keyed.shape[:-1], -1)
    offset = torch.searchsorted(ordered.values, bounds.contiguous())
    return Inverse(ordered.indices.to(torch.int32), offset.to(torch.int32))
