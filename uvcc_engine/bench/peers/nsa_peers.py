"""Published NSA kernels, where they are installed, as functions of the same random inputs.

fla-org's takes groups of a power of two of at least 16 heads; XunhaoLai's pads smaller ones. So peers are measured at
16 heads a group. Both take one set of keys and values for all branches; ours keeps its three.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uvcc_engine.nsa.config import NSAConfig

AttentionPeer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [1, S, H, d], k and v [1, S, G, d] -> [1, S, H, d]."""


def find(cfg: NSAConfig) -> tuple[dict[str, AttentionPeer], list[str]]:
    """Name -> peer, and for each that is absent why."""
    found: dict[str, AttentionPeer] = {}
    absent: list[str] = []
    for name, module, make in (
        ("fla", "fla.ops.nsa.parallel", _fla),
        ("xunhaolai", "native_sparse_attention.ops", _xunhao_lai),
    ):
        try:
            there = importlib.import_module(module)
        except ImportError as e:
            absent.append(f"{name} ({e})")
            continue
        found[name] = make(there, cfg)
    return found, absent


def _fla(module: Any, cfg: NSAConfig) -> AttentionPeer:
    """All three branches: mean-pooled blocks of l_sel tokens, top-n, window."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate = torch.full(q.shape[:3], 1 / 3, dtype=q.dtype, device=q.device)
        more = {"block_counts": cfg.n_sel, "block_size": cfg.l_sel, "window_size": cfg.w}
        o: Tensor = module.parallel_nsa(q, k, v, g_cmp=gate, g_slc=gate, g_swa=gate, **more)
        return o

    return run


def _xunhao_lai(module: Any, cfg: NSAConfig) -> AttentionPeer:
    """Compression with overlap and top-n, then the chosen blocks; it has no window kernel of its own."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, d, groups = q.shape[1], q.shape[3], k.shape[2]
        ends = torch.tensor([0, s], dtype=torch.int32, device=q.device)
        weight = torch.full((groups, cfg.l * d, d), 1 / cfg.l, dtype=q.dtype, device=q.device)
        kc, ends_c = module.linear_compress(k[0], weight, ends, cfg.l, cfg.d, None)
        vc, _ = module.linear_compress(v[0], weight, ends, cfg.l, cfg.d, None)
        n = int(ends_c[-1])
        geometry = (cfg.l, cfg.d, cfg.l_sel, cfg.n_sel, ends, ends_c, s, n, None)
        o_cmp, best = module.compressed_attention(q[0], kc, vc, *geometry, 1, 2)
        o: Tensor = o_cmp + module.topk_sparse_attention(q[0], k[0], v[0], best, cfg.l_sel, ends, None)
        return o[None]

    return run
