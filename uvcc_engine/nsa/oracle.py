"""NSA written straight from the equations, in float64, one query at a time. Slow on purpose: every path is held to it.

Source: arXiv 2502.11089v2, eqs. 1-2 (branches and gates), 7 (compression), 8-11 (selection), section 3.3.3 (window).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uvcc_engine.nsa.config import NSAConfig


@dataclass(frozen=True, slots=True)
class OracleOut:
    """out [S, H, dv]; chosen[t][g] = the selected block numbers, ascending."""

    out: Tensor
    chosen: list[list[list[int]]]


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One query [dk] over keys [n, dk]: (output [dv], probabilities [n])."""
    scores = (keys @ q) / math.sqrt(q.shape[-1])
    p = torch.softmax(scores, dim=-1)
    return p @ values, p


def nsa_oracle(
    cfg: NSAConfig,
    q: Tensor,
    k: dict[str, Tensor],
    v: dict[str, Tensor],
    gates: Tensor,
    phi_k: Callable[[Tensor], Tensor],
    phi_v: Callable[[Tensor], Tensor],
    rope: Callable[[Tensor, int], Tensor],
    doc_start: list[int] | None = None,
) -> OracleOut:
    """One sequence.

    q [S, H, dk] not yet rotated; k["cmp"|"sel"|"win"] [S, G, dk], v likewise [S, G, dv]; gates [S, H, 3] in the order
    cmp, sel, win; phi maps a block [l, dim] to [dim]; rope(x, position) rotates a vector. All float64.
    """
    s, heads, _ = q.shape
    groups = k["sel"].shape[1]
    per_group = heads // groups
    starts = doc_start or [0] * s
    out = torch.zeros(s, heads, v["sel"].shape[-1], dtype=torch.float64)
    chosen: list[list[list[int]]] = []
    for t in range(s):
        first = starts[t]
        visible = [i for i in range(cfg.n_cmp(s)) if i * cfg.d >= first and i * cfg.d + cfg.l - 1 <= t]
        row: list[list[int]] = []
        for g in range(groups):
            heads_of = range(g * per_group, (g + 1) * per_group)
            turned = {h: rope(q[t, h], t) for h in heads_of}
            importance = torch.zeros(cfg.n_blocks(s), dtype=torch.float64)
            if visible:  # keys and values are the group's: all its heads look at the same
                blocks = [slice(i * cfg.d, i * cfg.d + cfg.l) for i in visible]
                keys = torch.stack(
                    [rope(phi_k(k["cmp"][b, g]), i * cfg.d) for b, i in zip(blocks, visible, strict=True)]
                )
                values = torch.stack([phi_v(v["cmp"][b, g]) for b in blocks])
            for h in heads_of if visible else ():
                o, p = _attend(turned[h], keys, values)
                out[t, h] += gates[t, h, 0] * o
                for i, weight in zip(visible, p.tolist(), strict=True):
                    for j in range(cfg.n_blocks(s)):
                        shared = min(i * cfg.d + cfg.l, (j + 1) * cfg.l_sel) - max(i * cfg.d, j * cfg.l_sel)
                        importance[j] += weight * max(shared, 0) / cfg.d
            row.append(_choose(cfg, importance, t, first))
            tokens = [x for j in row[-1] for x in range(j * cfg.l_sel, (j + 1) * cfg.l_sel) if first <= x <= t]
            window = list(range(max(first, t - cfg.w + 1), t + 1))
            for branch, index, seen in (("sel", 1, tokens), ("win", 2, window)):
                keys = torch.stack([rope(k[branch][x, g], x) for x in seen])
                for h in heads_of:
                    o, _ = _attend(turned[h], keys, v[branch][seen, g])
                    out[t, h] += gates[t, h, index] * o
        chosen.append(row)
    return OracleOut(out, chosen)


def _choose(cfg: NSAConfig, importance: Tensor, t: int, first: int) -> list[int]:
    low, local = first // cfg.l_sel, t // cfg.l_sel
    forced = [j for j in dict.fromkeys((low, local - 1, local)) if low <= j <= local]
    others = sorted((j for j in range(low, local + 1) if j not in forced), key=lambda j: (-float(importance[j]), j))
    return sorted((forced + others)[: cfg.n_sel])
