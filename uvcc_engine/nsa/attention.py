"""The NSA layer: one projection, compression, three branches, gates. How the branches are computed is dispatched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uvcc_engine.nsa import dispatch, kept
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.rope import first_positions, rotate
from uvcc_engine.nsa.shared_rows import SharedLayout
from uvcc_engine.nsa.visibility import Layout, layout_of

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
        """x [B, S, G, dim] -> [B, n_cmp, G, dim], every block of ``block`` at once.

        Neighbouring blocks share all but d tokens: the first layer is applied to the l / d strides of a block apart,
        each stride once, and its parts are added.
        """
        b, s, groups, dim = x.shape
        parts, d = self.l // self.d, self.d
        n = (s - self.l) // d + 1
        strides = x[:, : (n + parts - 1) * d].reshape(b, -1, d, groups, dim).transpose(2, 3)
        weight = self.up.weight.view(dim, parts, d * dim).transpose(0, 1).reshape(parts * dim, d * dim)
        upped = F.linear(strides.flatten(-2), weight).view(b, -1, groups, parts, dim).unbind(3)
        sums = strides.sum(3)
        bias = F.linear(self.position.flatten(), self.up.weight, self.up.bias)
        hidden, total = upped[0][:, :n] + bias, sums[:, :n]
        for i in range(1, parts):
            hidden, total = hidden + upped[i][:, i : i + n], total + sums[:, i : i + n]
        # Under autocast a GPU sums in 32 bits, and what meets the queries must have their type.
        return torch.add(self.down(F.gelu(hidden)), total, alpha=1.0 / self.l).to(x.dtype)

    def block(self, x: Tensor) -> Tensor:
        """x [..., l, dim] -> [..., dim]: one block, as written in eq. 7."""
        hidden = F.gelu(self.up((x + self.position).flatten(-2)))
        out: Tensor = x.mean(-2) + self.down(hidden)
        return out


@dataclass(frozen=True, slots=True)
class Projected:
    """What the branches work on, keys not yet rotated: token [B, S, H + 2G, dk] holds queries, selection and window
    keys; k_cmp, v_cmp, v_sel and v_win are [B, S, G, d]; gates [B, S, H, 3] in (0, 1), in the order of BRANCHES."""

    token: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    v_sel: Tensor
    v_win: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class Keyed:
    """q [B, S, H, dk]; keys and values [B, n, G, d] in the order of BRANCHES, the first None without a whole block."""

    q: Tensor
    k: kept.Triple
    v: kept.Triple


class NSAttention(nn.Module):
    """Native Sparse Attention over packed documents. One query projection, separate K and V for each branch."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        h, g = cfg.n_heads, cfg.n_kv_groups
        hidden = max(16, cfg.dim // 16)
        self._sizes = ((h + 2 * g) * cfg.d_k, g * cfg.d_k, g * cfg.d_v, g * cfg.d_v, g * cfg.d_v, hidden)
        self.project_in = nn.Linear(cfg.dim, sum(self._sizes), bias=False)
        self.phi_k = Compression(cfg.nsa, cfg.d_k)
        self.phi_v = Compression(cfg.nsa, cfg.d_v)
        self.gate_bias = nn.Parameter(torch.zeros(hidden))
        self.gate = nn.Linear(hidden, 3 * h)
        self.out = nn.Linear(h * cfg.d_v, cfg.dim, bias=False)

    def project(self, x: Tensor) -> Projected:
        """x [B, S, dim]."""
        b, s, _ = x.shape
        c = self.cfg
        token, k_cmp, v_cmp, v_sel, v_win, hidden = self.project_in(x).split(self._sizes, dim=-1)
        gates = torch.sigmoid(self.gate(F.silu(hidden + self.gate_bias)).view(b, s, c.n_heads, 3))
        k_cmp = k_cmp.view(b, s, c.n_kv_groups, c.d_k)
        v_cmp, v_sel, v_win = (v.view(b, s, c.n_kv_groups, c.d_v) for v in (v_cmp, v_sel, v_win))
        return Projected(token.view(b, s, -1, c.d_k), k_cmp, v_cmp, v_sel, v_win, gates)

    def heads(self, rotated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H, dk], selection keys and window keys [B, S, G, dk] of ``Projected.token``."""
        h, g = self.cfg.n_heads, self.cfg.n_kv_groups
        q, k_sel, k_win = torch.split(rotated, [h, g, g], dim=2)
        return q, k_sel, k_win

    def keys(self, p: Projected, layout: Layout) -> Keyed:
        """Queries, keys and values of the three branches as they are attended to: rotated, and compressed."""
        c = self.cfg
        table = first_positions(layout.s, c.d_k, c.rope_base, c.rope_scale, p.token.dtype, p.token.device)[:, None]
        q, k_sel, k_win = self.heads(rotate(p.token, table))
        k_cmp = v_cmp = None
        if layout.n_cmp:
            stride = c.nsa.d
            k_cmp = rotate(self.phi_k(p.k_cmp), table[: layout.n_cmp * stride : stride])
            v_cmp = self.phi_v(p.v_cmp)
        return Keyed(q, (k_cmp, k_sel, k_win), (v_cmp, p.v_sel, p.v_win))

    def mix(self, layout: Layout, keyed: Keyed, gates: Tensor) -> Tensor:
        """The gated sum of the branches, projected: [B, S, dim]."""
        out: Tensor = self.out(self._mixed(layout, keyed, gates).flatten(-2))
        return out

    @classmethod
    def _mixed(cls, layout: Layout, keyed: Keyed, gates: Tensor) -> Tensor:
        """[B, S, H, dv]."""
        q, k, v = keyed.q, keyed.k[1], keyed.v[1]
        way = dispatch.together(layout, q.dtype, k.shape[2], (k.shape[-1], v.shape[-1]))
        if way is not None:
            mixed: Tensor = way.mixed(q, keyed.k, keyed.v, gates, layout)
            return mixed
        return cls._gated(layout, dispatch.attend(layout, keyed.q, keyed.k, keyed.v), gates)

    @staticmethod
    def _gated(layout: Layout, branches: kept.Triple, gates: Tensor) -> Tensor:
        """[B, S, H, dv]."""
        o_cmp, o_sel, o_win = branches
        g_cmp, g_sel, g_win = (g[..., None] for g in gates.unbind(-1))
        y = torch.addcmul(o_sel * g_sel, o_win, g_win)
        if o_cmp is not None:
            y = torch.addcmul(y, o_cmp, g_cmp * layout.sees_cmp[..., None])
        return y

    def _shared(self, x: Tensor, layout: SharedLayout) -> tuple[Tensor, Tensor]:
        """``forward`` of this rank's tokens of rows that several share; every rank compresses all keys."""
        c, p = self.cfg, self.project(x)
        table = first_positions(layout.s, c.d_k, c.rope_base, c.rope_scale, p.token.dtype, x.device)[:, None]
        q, k_sel, k_win = self.heads(rotate(p.token, table[layout.places]))
        own = torch.cat([p.k_cmp, k_sel, k_win, p.v_cmp, p.v_sel, p.v_win], -1)
        parts = torch.split(layout.whole(own), [c.d_k] * 3 + [c.d_v] * 3, -1)
        k_raw, k_sel, k_win, v_raw, v_sel, v_win = parts
        k_cmp = rotate(self.phi_k(k_raw), table[: layout.n_cmp * c.nsa.d : c.nsa.d])
        v_cmp, found, at = self.phi_v(v_raw), [], 0
        for part in layout.parts:
            n, m, mine = part.n_keys, part.n_cmp, slice(at, at + part.s)
            keys = (k_cmp[:, :m] if m else None, k_sel[:, :n], k_win[:, :n])
            values = (v_cmp[:, :m] if m else None, v_sel[:, :n], v_win[:, :n])
            found.append(self._mixed(part, Keyed(q[:, mine], keys, values), p.gates[:, mine]))
            at = mine.stop
        return self.out(torch.cat(found, 1).flatten(-2)), p.gates

    def forward(self, x: Tensor, doc_start: Tensor | Layout | SharedLayout | None = None) -> tuple[Tensor, Tensor]:
        """x [B, S, dim] -> (y [B, S, dim], gates [B, S, H, 3] for the gate metrics)."""
        if isinstance(doc_start, SharedLayout):
            return self._shared(x, doc_start)
        if isinstance(doc_start, Layout):
            layout = doc_start
        else:
            layout = layout_of(self.cfg.nsa, x.shape[1], x.device, doc_start)
        p = self.project(x)
        return self.mix(layout, self.keys(p, layout), p.gates), p.gates
