"""The three branches on FlexAttention: fused for any mask on CUDA, without writing a score matrix.

On a CPU torch has only the forward pass, computed as the formula says; tests hold that to the other paths. The block
masks are built from what is known (the band, the chosen blocks), never from an S x S mask; the two bands' are the same
for all layers and stay with the layout.

Keys are listed in blocks of a multiple of 128, whatever the size of a selection block: torch takes tiles of up to 128
keys on sm_90 and newer, forward and backward, and a tile must not be wider than a listed block.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from uvcc_engine.nsa.index import as_mask, pool, top_blocks
from uvcc_engine.nsa.visibility import Layout

TILE: Final = 128  # queries that share a list of key blocks
MOST_KERNELS: Final = 256  # compiled forms: shapes times masks
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this torch has what is used here: block masks that know the rows' lengths (2.6 and newer)."""
    return "seq_lengths" in inspect.signature(BlockMask.from_kv_blocks).parameters


@lru_cache(maxsize=1)
def compiled() -> Any:
    """The fused kernels of every mask and shape that comes. Past torch's own limit of eight of them it would go on
    without fusing, silently, with a score matrix that no GPU holds: a training has three masks, forward and backward,
    for the batches of training and of evaluation."""
    from torch._dynamo import config

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.7
    setattr(config, limit, max(getattr(config, limit), MOST_KERNELS))
    return torch.compile(flex_attention, dynamic=False)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, dk], k/v [B, n, G, d] -> (o [B, S, H, dv], lse [B, H, S] in base e if asked for)."""
    call = compiled() if q.device.type == "cuda" else flex_attention
    found = call(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=True, **_asks(lse)
    )
    o, z = (found[0], getattr(found[1], "lse", found[1])) if lse else (found, None)
    return o.transpose(1, 2), z


def _asks(lse: bool) -> dict[str, Any]:
    """How the logsumexp is asked for: by ``AuxRequest``, and before there was one (2.9) by a flag."""
    request = getattr(torch_flex, "AuxRequest", None)
    if request is None:
        return {"return_lse": lse}
    return {"return_aux": request(lse=True) if lse else None}


def _mask(there: Tensor, size: int, keys: int, layout: Layout, mod: MaskMod) -> BlockMask:
    """``there`` [B, H, query tiles, key blocks]: what any query of a tile may see; ``mod`` says exactly what."""
    count = there.sum(-1, dtype=torch.int32)
    order = there.to(torch.int8).argsort(stable=True, dim=-1, descending=True).to(torch.int32)
    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=(TILE, size), mask_mod=mod, seq_lengths=(layout.s, keys))


def _tiles(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """First and last query of each tile, and the first position that any of them sees [B', tiles]."""
    low = torch.arange(0, layout.s, TILE, device=layout.device)
    return low, (low + TILE - 1).clamp(max=layout.s - 1), layout.starts[:, low]


def band_mask(layout: Layout, stride: int, span: int, window: int, n: int) -> BlockMask:
    """Key i stands for tokens i * stride .. i * stride + span - 1, seen inside start..t if it ends after t - window.

    One for all layers of a forward pass, and between steps without packing.
    """
    band = (stride, span, window, n)
    if band not in layout.band_masks:
        with torch.inference_mode(False), torch.no_grad():  # made in an evaluation, it serves the next step, too
            layout.band_masks[band] = _new_band_mask(layout, *band)
    found: BlockMask = layout.band_masks[band]
    return found


def _new_band_mask(layout: Layout, stride: int, span: int, window: int, n: int) -> BlockMask:
    starts, rows = layout.starts, layout.starts.shape[0]

    def mod(b: Tensor, h: Tensor, q: Tensor, i: Tensor) -> Tensor:
        last = i * stride + span - 1
        return (last <= q) & (i * stride >= starts[b % rows, q]) & (last > q - window)

    low, high, first = _tiles(layout)
    begin = torch.arange(0, n, TILE, device=layout.device)
    end = (begin + TILE).clamp(max=n) - 1  # the last key of each block
    near = (begin * stride + span - 1 <= high[:, None]) & (end * stride + span - 1 > low[:, None] - window)
    there = near[None] & ((end * stride)[None, None] >= first[..., None])
    return _mask(there[:, None], TILE, n, layout, mod)


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, dk], k/v [B, n_cmp, G, d] -> (o [B, S, H, dv], chosen int32 [B, G, S, n_sel] or None)."""
    cfg = layout.cfg
    mask = band_mask(layout, cfg.d, cfg.l, 1 << 30, k_cmp.shape[1])
    o, lse = attend_blocks(q, k_cmp, v_cmp, mask, lse=layout.selects)
    return o, None if lse is None else _choose(q, k_cmp, lse, layout)


@torch.no_grad()
def _choose(q: Tensor, k: Tensor, lse: Tensor, layout: Layout) -> Tensor:
    """Eqs. 9 to 11 from the logsumexp, a tile of queries at a time."""
    b, s, heads, dk = q.shape
    groups, cfg, found = k.shape[2], layout.cfg, []
    step = 4 * TILE
    for low in range(0, s, step):
        high = min(low + step, s)
        n, wide = max(1, cfg.n_cmp(high)), cfg.n_blocks(high)
        rows = q[:, low:high].reshape(b, high - low, groups, heads // groups, dk)
        score = torch.einsum("bqghd,bngd->bghqn", rows, k[:, :n]).float() * dk**-0.5
        z = lse[:, :, low:high].view(b, groups, -1, high - low, 1)
        seen = layout.cmp_visible[:, None, None, low:high, :n]
        p = (score - z).exp().masked_fill(~seen, 0.0).sum(2)
        found.append(top_blocks(cfg, pool(cfg, p, wide), layout.positions[low:high], layout.starts[:, low:high]))
    return torch.cat(found, 2)


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
    """q [B, S, H, dk], k/v [B, S, G, d], chosen int32 [B, G, S, n_sel] -> [B, S, H, dv]."""
    per, size, rows, starts = q.shape[2] // k.shape[2], layout.cfg.l_sel, layout.starts.shape[0], layout.starts
    blocks = as_mask(chosen, layout.n_blocks)

    def mod(b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
        return blocks[b, h // per, t, i // size] & (i <= t) & (i >= starts[b % rows, t])

    wide = math.lcm(size, TILE)  # keys of a listed block: whole selection blocks, and whole tiles
    each = wide // size
    padded = torch.nn.functional.pad(blocks, (0, -layout.n_blocks % each, 0, -layout.s % TILE))
    there = padded.reshape(*padded.shape[:2], -1, TILE, padded.shape[-1] // each, each).any(-1).any(3)
    return attend_blocks(q, k, v, _mask(there.repeat_interleave(per, 1), wide, layout.s, layout, mod))[0]


def window(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The last w tokens. q [B, S, H, dk], k/v [B, S, G, d] -> [B, S, H, dv]."""
    return attend_blocks(q, k, v, band_mask(layout, 1, 1, layout.cfg.w, layout.s))[0]
