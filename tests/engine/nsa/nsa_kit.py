"""Small attention layers, packed rows, and the oracle's answer for a whole layer."""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.nsa import blocks, dispatch
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.oracle import nsa_oracle
from uvcc_engine.nsa.rope import rope_tables, rotate

SMALL = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=12)
ODD = NSAConfig(l=8, d=8, l_sel=8, n_sel=4, w=5)


def small_layer(nsa: NSAConfig, seed: int = 0, **over: int) -> NSAttention:
    torch.manual_seed(seed)
    shape = {"dim": 24, "n_heads": 6, "n_kv_groups": 2, "d_k": 8, "d_v": 4, **over}
    return NSAttention(ModelConfig(vocab=16, n_layers=1, nsa=nsa, **shape)).double()


def docs(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def oracle_of(layer: NSAttention, x: Tensor, starts: Tensor | None) -> Tensor:
    cfg = layer.cfg
    p = layer.project(x)
    q, k_sel, k_win = p.token.split((cfg.n_heads, cfg.n_kv_groups, cfg.n_kv_groups), dim=2)
    k = {"cmp": p.k_cmp, "sel": k_sel, "win": k_win}
    v = {"cmp": p.v_cmp, "sel": p.v_sel, "win": p.v_win}

    def rope(vec: Tensor, pos: int) -> Tensor:
        table = rope_tables(torch.tensor(pos), cfg.d_k, base=cfg.rope_base, scale=cfg.rope_scale, dtype=vec.dtype)
        return rotate(vec, table)

    rows = []
    for b in range(x.shape[0]):
        result = nsa_oracle(
            cfg.nsa,
            q[b],
            {name: t[b] for name, t in k.items()},
            {name: t[b] for name, t in v.items()},
            p.gates[b],
            layer.phi_k.block,
            layer.phi_v.block,
            rope,
            starts[b].tolist() if starts is not None else None,
        )
        rows.append(layer.out(result.out.flatten(-2)))
    return torch.stack(rows)


def starts_of(*lengths: int) -> Tensor | None:
    """Where each token's document starts, [1, S]; None for a single document."""
    return blocks.doc_starts(docs(*lengths)) if len(lengths) > 1 else None


def results(path: str | None, layer: NSAttention, x: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Output and every gradient on one path; None is the oracle."""
    if path is None:
        y = oracle_of(layer, x, starts)
    else:
        dispatch.force(path)
        y = layer(x, starts)[0]
    weight = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    inputs = (x, *layer.parameters())
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True, materialize_grads=True)]


def edits_change_nothing_before(layer: NSAttention, s: int, starts: Tensor | None, places: list[int]) -> None:
    """Edit one token after another; every earlier output must keep its bits, and its own must change."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(1, s, layer.cfg.dim, generator=gen)
    with torch.no_grad():
        base = layer(x, starts)[0]
        for j in places:
            edited = x.clone()
            edited[0, j] += torch.randn(layer.cfg.dim, generator=gen)
            out = layer(edited, starts)[0]
            assert torch.equal(out[:, :j], base[:, :j]), j
            assert not torch.equal(out[:, j], base[:, j])
