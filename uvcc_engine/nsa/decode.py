"""One token at a time with caches, equal to prefill.

Each layer keeps what each branch reads; a baseline's one branch keeps all keys, or the last w. Reads per token are
n_cmp + n_sel * l_sel + w instead of the whole past (Table 4 of the paper): the chosen blocks are gathered, the rest of
the selection keys is not touched. Where Triton runs, one split-KV kernel reads all branches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.cache import BranchCache, LayerCache, Rows
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.index import pool, top_blocks
from uvcc_engine.nsa.model import LanguageModel, OneBranchAttention, TransformerBlock
from uvcc_engine.nsa.rope import rope_tables, rotate
from uvcc_engine.nsa.visibility import Layout, layout_of


@dataclass(slots=True)
class DecodeState:
    """Position and caches of a batch of sequences of equal length, one document each. ``reads`` counts keys read."""

    position: int = 0
    layers: list[LayerCache | BranchCache] = field(default_factory=list)
    reads: int = 0


def start(model: LanguageModel, batch: int) -> DecodeState:
    """Empty caches on the model's device."""
    weight = model.embed.weight
    g, dk, dv = model.cfg.n_kv_groups, model.cfg.d_k, model.cfg.d_v

    def empty(d: int, keep: int = 0) -> Rows:
        return Rows(torch.empty(batch, 0, g, d, device=weight.device, dtype=weight.dtype), keep)

    def layer() -> LayerCache | BranchCache:
        w = model.cfg.nsa.w
        if model.cfg.attention != "nsa":
            keep = w if model.cfg.attention == "window" else 0
            return BranchCache(empty(dk, keep), empty(dv, keep))
        return LayerCache(
            raw_k=empty(dk), raw_v=empty(dv), cmp_k=empty(dk), cmp_v=empty(dv),
            sel_k=empty(dk), sel_v=empty(dv), win_k=empty(dk, w), win_v=empty(dv, w),
        )  # fmt: skip

    return DecodeState(layers=[layer() for _ in model.blocks])


@torch.no_grad()
def prefill(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, DecodeState]:
    """A whole prompt at once. tokens [B, S] -> (logits of its last token [B, vocab], caches to go on from)."""
    state = start(model, tokens.shape[0])
    s = tokens.shape[1]
    layout = layout_of(model.cfg.nsa, s, tokens.device, None)
    x = model.embed(tokens)
    for block, cache in zip(model.blocks, state.layers, strict=True):
        assert isinstance(block, TransformerBlock)
        x = x + _read_all(block.attention, block.norm_a(x), cache, layout)
        x = x + block.down(F.gelu(block.up(block.norm_m(x))))
    state.position = s
    return F.linear(model.norm(x[:, -1]), model.embed.weight), state


def _read_all(layer: nn.Module, x: Tensor, cache: LayerCache | BranchCache, layout: Layout) -> Tensor:
    """One layer's attention for a prompt x [B, S, dim]; fills its empty cache."""
    if isinstance(cache, BranchCache):
        assert isinstance(layer, OneBranchAttention)
        q, k, v = layer.heads(x)
        cache.k.append(k)
        cache.v.append(v)
        return layer.mix(layout, q, k, v)
    assert isinstance(layer, NSAttention)
    p = layer.project(x)
    keyed = layer.keys(p, layout)
    done = layout.n_cmp * layout.cfg.d  # tokens that no later compressed block covers
    cache.raw_k.append(p.k_cmp[:, done:])
    cache.raw_v.append(p.v_cmp[:, done:])
    branches = cache.cmp_k, cache.cmp_v, cache.sel_k, cache.win_k, cache.sel_v, cache.win_v
    for rows, new in zip(branches, (keyed.k[0], keyed.v[0], *keyed.k[1:], *keyed.v[1:]), strict=True):
        if new is not None:
            rows.append(new)
    return layer.mix(layout, keyed, p.gates)


@torch.no_grad()
def step(model: LanguageModel, state: DecodeState, tokens: Tensor) -> Tensor:
    """Feed one token per sequence. tokens [B] -> logits [B, vocab]; advances ``state``."""
    x = model.embed(tokens)[:, None]
    for block, cache in zip(model.blocks, state.layers, strict=True):
        assert isinstance(block, TransformerBlock)
        if isinstance(cache, BranchCache):
            x = x + _attend_one(block.attention, block.norm_a(x), cache, state.position)
        else:
            assert isinstance(block.attention, NSAttention)
            x = x + attend(block.attention, block.norm_a(x), cache, state)
        x = x + block.down(F.gelu(block.up(block.norm_m(x))))
    state.position += 1
    return F.linear(model.norm(x), model.embed.weight)[:, 0]


def _attend_one(layer: nn.Module, x: Tensor, cache: BranchCache, t: int) -> Tensor:
    """A baseline's attention for the token at ``t``. x [B, 1, dim] -> [B, 1, dim]; grows the cache."""
    assert isinstance(layer, OneBranchAttention)
    q, k, v = layer.heads(x, t)
    cache.k.append(k)
    cache.v.append(v)
    out: Tensor = layer.out(one_query(q, cache.k.view, cache.v.view, None).flatten(-2))
    return out


def attend(layer: NSAttention, x: Tensor, cache: LayerCache, state: DecodeState) -> Tensor:
    """One layer's attention for the token at ``state.position``. x [B, 1, dim] -> [B, 1, dim]; grows the cache."""
    cfg, nsa, t = layer.cfg, layer.cfg.nsa, state.position
    p = layer.project(x)
    here = torch.tensor([t], device=x.device)
    table = rope_tables(here, cfg.d_k, base=cfg.rope_base, scale=cfg.rope_scale, dtype=p.token.dtype)[:, None]
    q, k_sel, k_win = layer.heads(rotate(p.token, table))
    cache.raw_k.append(p.k_cmp)
    cache.raw_v.append(p.v_cmp)
    cache.sel_k.append(k_sel)
    cache.sel_v.append(p.v_sel)
    cache.win_k.append(k_win)
    cache.win_v.append(p.v_win)
    _compress(layer, cache, t)
    keys = cache.cmp_k.view, cache.sel_k.view, cache.win_k.view
    values = cache.cmp_v.view, cache.sel_v.view, cache.win_v.view
    chosen = choose(nsa, q, keys[0], t)
    state.reads += len(cache.cmp_k) + min(nsa.n_blocks(t + 1), nsa.n_sel) * nsa.l_sel + len(cache.win_k)
    if dispatch.decodes_by_kernel(x.device):
        from uvcc_engine.nsa.kernels import decode as kernel

        o_cmp, o_sel, o_win = kernel.attend(q, keys, values, chosen, nsa.l_sel)
    else:
        o_cmp, o_sel, o_win = branches(q, keys, values, chosen, nsa)
    g_cmp, g_sel, g_win = (g[..., None] for g in p.gates.unbind(-1))
    out: Tensor = layer.out((g_cmp * o_cmp + g_sel * o_sel + g_win * o_win).flatten(-2))
    return out


def _compress(layer: NSAttention, cache: LayerCache, t: int) -> None:
    """When token t completes a block, compress it and drop what no later block needs."""
    cfg, nsa = layer.cfg, layer.cfg.nsa
    if nsa.n_cmp(t + 1) == nsa.n_cmp(t):
        return
    first = torch.tensor([t + 1 - nsa.l], device=cache.raw_k.view.device)
    raw = cache.raw_k.view[:, -nsa.l :]
    table = rope_tables(first, cfg.d_k, base=cfg.rope_base, scale=cfg.rope_scale, dtype=raw.dtype)[:, None]
    cache.cmp_k.append(rotate(layer.phi_k(raw), table))
    cache.cmp_v.append(layer.phi_v(cache.raw_v.view[:, -nsa.l :]))
    for rows in (cache.raw_k, cache.raw_v):
        rows.drop_oldest(len(rows) - (nsa.l - nsa.d))


def choose(nsa: NSAConfig, q: Tensor, k_cmp: Tensor, t: int) -> Tensor:
    """Eqs. 8 to 11 for the query at t, which sees every compressed block: int32 [B, G, 1, n_sel], -1 for none."""
    b, _, heads, dk = q.shape
    groups, n_blocks = k_cmp.shape[2], nsa.n_blocks(t + 1)
    if n_blocks <= nsa.n_sel or not k_cmp.shape[1]:
        every = torch.arange(nsa.n_sel, dtype=torch.int32, device=q.device)
        return every.masked_fill(every >= n_blocks, -1).expand(b, groups, 1, -1)
    scores = torch.einsum("bghd,bngd->bghn", q.view(b, groups, heads // groups, dk), k_cmp) * dk**-0.5
    p = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).sum(2)
    here, zero = torch.tensor([t], device=q.device), torch.zeros(1, 1, dtype=torch.int64, device=q.device)
    return top_blocks(nsa, pool(nsa, p, n_blocks)[:, :, None], here, zero)


def branches(
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    values: tuple[Tensor, Tensor, Tensor],
    chosen: Tensor,
    nsa: NSAConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three outputs [B, 1, H, dv] in plain torch; the first is zero without a compressed block."""
    o_win = one_query(q, keys[2], values[2], None)
    o_cmp = one_query(q, keys[0], values[0], None) if keys[0].shape[1] else torch.zeros_like(o_win)
    n = keys[1].shape[1]
    inside = torch.arange(nsa.l_sel, device=q.device)
    place = (chosen[:, :, 0, :, None].to(torch.int64) * nsa.l_sel + inside).flatten(2)  # [B, G, n_sel * l_sel]
    there = (place >= 0) & (place < n)
    k, v = (gather_tokens(x, place.clamp(0, n - 1)) for x in (keys[1], values[1]))
    mask = there.repeat_interleave(q.shape[2] // k.shape[2], dim=1)[:, :, None]
    return o_cmp, one_query(q, k, v, mask), o_win


def gather_tokens(x: Tensor, place: Tensor) -> Tensor:
    """Tokens ``place`` [B, G, m] of x [B, n, G, d], each group its own: [B, m, G, d]."""
    return x.gather(1, place.transpose(1, 2)[..., None].expand(-1, -1, -1, x.shape[3]))


def one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, 1, H, dk] over k/v [B, n, G, d]; never is_causal, which would show one query the first key only."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    )
    return o.transpose(1, 2)
