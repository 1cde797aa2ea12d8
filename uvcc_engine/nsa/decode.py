"""One token at a time with caches, equal to prefill.

Each layer keeps what each branch reads: all compressed blocks, the raw tail that the next compressed block needs,
all selection keys (the blocks may be chosen from anywhere) and the last w window keys. Reads per token are
n_cmp + n_sel * l_sel + w instead of the whole past (Table 4 of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.masked import compressed, importance
from uvcc_engine.nsa.model import Block, LanguageModel
from uvcc_engine.nsa.rope import rope_tables, rotate


@dataclass(slots=True)
class LayerCache:
    """Caches of one layer; tensors are [B, n, G, d] and grow along n."""

    raw_k: Tensor
    raw_v: Tensor
    cmp_k: Tensor
    cmp_v: Tensor
    sel_k: Tensor
    sel_v: Tensor
    win_k: Tensor
    win_v: Tensor


@dataclass(slots=True)
class DecodeState:
    """Position and caches of a batch of sequences of equal length, one document each. ``reads`` counts keys read."""

    position: int = 0
    layers: list[LayerCache] = field(default_factory=list)
    reads: int = 0


def start(model: LanguageModel, batch: int) -> DecodeState:
    """Empty caches on the model's device."""
    weight = model.embed.weight
    g, dk, dv = model.cfg.n_kv_groups, model.cfg.d_k, model.cfg.d_v

    def empty(d: int) -> Tensor:
        return torch.empty(batch, 0, g, d, device=weight.device, dtype=weight.dtype)

    return DecodeState(layers=[LayerCache(*(empty(d) for d in (dk, dv) * 4)) for _ in model.blocks])


@torch.no_grad()
def step(model: LanguageModel, state: DecodeState, tokens: Tensor) -> Tensor:
    """Feed one token per sequence. tokens [B] -> logits [B, vocab]; advances ``state``."""
    x = model.embed(tokens)[:, None]
    for block, cache in zip(model.blocks, state.layers, strict=True):
        assert isinstance(block, Block)
        if not isinstance(block.attention, NSAttention):
            raise TypeError("decode is for NSA models; the dense baseline has no caches here")
        y = _attend(block.attention, block.norm_a(x), cache, state)
        x = x + y
        x = x + block.down(F.gelu(block.up(block.norm_m(x))))
    state.position += 1
    return F.linear(model.norm(x), model.embed.weight)[:, 0]


def _attend(layer: NSAttention, x: Tensor, cache: LayerCache, state: DecodeState) -> Tensor:
    cfg, nsa, t = layer.cfg, layer.cfg.nsa, state.position
    p = layer.project(x)
    gates = p.gates
    here = torch.tensor([t], device=x.device)
    table = rope_tables(here, cfg.d_k, base=cfg.rope_base, scale=cfg.rope_scale, dtype=p.token.dtype)[:, None]
    q, k_sel, k_win = layer.heads(rotate(p.token, table))
    cache.sel_k = torch.cat((cache.sel_k, k_sel), 1)
    cache.sel_v = torch.cat((cache.sel_v, p.v_sel), 1)
    cache.win_k = torch.cat((cache.win_k, k_win), 1)[:, -nsa.w :]
    cache.win_v = torch.cat((cache.win_v, p.v_win), 1)[:, -nsa.w :]
    _grow_compressed(layer, cache, p.k_cmp, p.v_cmp, t)
    start_of_doc = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
    n_blocks = nsa.n_blocks(t + 1)
    y = gates[..., 2:3] * _one_query(q, cache.win_k, cache.win_v, None)
    mask = None
    if cache.cmp_k.shape[1]:
        o, weights = compressed(q, cache.cmp_k, cache.cmp_v, torch.zeros(1, 1, 1, device=x.device, dtype=q.dtype))
        y = y + gates[..., 0:1] * o
        if n_blocks > nsa.n_sel:
            chosen = blocks.select_blocks(nsa, importance(nsa, weights, n_blocks), here, start_of_doc)
            mask = blocks.token_mask(nsa, chosen, here, start_of_doc, t + 1)
            mask = mask.repeat_interleave(cfg.n_heads // cfg.n_kv_groups, dim=1)
    state.reads += cache.cmp_k.shape[1] + min(n_blocks, nsa.n_sel) * nsa.l_sel + cache.win_k.shape[1]
    y = y + gates[..., 1:2] * _one_query(q, cache.sel_k, cache.sel_v, mask)
    out: Tensor = layer.out(y.flatten(-2))
    return out


def _grow_compressed(layer: NSAttention, cache: LayerCache, k: Tensor, v: Tensor, t: int) -> None:
    """Append the raw vectors; when they complete a block, compress it and drop what no later block needs."""
    cfg, nsa = layer.cfg, layer.cfg.nsa
    cache.raw_k, cache.raw_v = torch.cat((cache.raw_k, k), 1), torch.cat((cache.raw_v, v), 1)
    if nsa.n_cmp(t + 1) == nsa.n_cmp(t):
        return
    first = torch.tensor([t + 1 - nsa.l], device=k.device)
    table = rope_tables(first, cfg.d_k, base=cfg.rope_base, scale=cfg.rope_scale, dtype=k.dtype)[:, None]
    new_k = rotate(layer.phi_k(cache.raw_k[:, -nsa.l :]), table)
    cache.cmp_k = torch.cat((cache.cmp_k, new_k), 1)
    cache.cmp_v = torch.cat((cache.cmp_v, layer.phi_v(cache.raw_v[:, -nsa.l :])), 1)
    cache.raw_k, cache.raw_v = cache.raw_k[:, -(nsa.l - nsa.d) :], cache.raw_v[:, -(nsa.l - nsa.d) :]
    if nsa.l == nsa.d:
        cache.raw_k, cache.raw_v = cache.raw_k[:, :0], cache.raw_v[:, :0]


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, 1, H, dk] over k/v [B, n, G, d]; never is_causal, which would show one query the first key only."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    )
    return o.transpose(1, 2)
