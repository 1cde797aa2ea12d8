"""``uvcc-engine longctx``: one attention layer over a very long row: time, blocks read, memory.

The geometry is that of the older 64k demonstration (dim 512, 8 heads in 2 groups, w = 4096, n_sel = 8, RoPE positions
divided by 8), which needed a token-by-token pass. Inference only.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import route_of


@dataclass(frozen=True, slots=True)
class Reads:
    """Keys that all queries of one head group read together, by branch, and what dense causal attention would."""

    cmp: int
    sel: int
    win: int
    dense: int

    @property
    def total(self) -> int:
        """Keys of all three branches."""
        return self.cmp + self.sel + self.win


def reads(cfg: NSAConfig, s: int) -> Reads:
    """Counted from the geometry: compression blocks seen, tokens of the chosen blocks up to the query, the window."""
    t = torch.arange(s, dtype=torch.int64)
    cmp = ((t + 1 - cfg.l).div(cfg.d, rounding_mode="floor") + 1).clamp(min=0)
    local = t // cfg.l_sel + 1
    whole = torch.minimum(local, torch.tensor(cfg.n_sel)) - 1
    sel = whole * cfg.l_sel + t % cfg.l_sel + 1
    win = torch.minimum(t + 1, torch.tensor(cfg.w))
    return Reads(int(cmp.sum()), int(sel.sum()), int(win.sum()), s * (s + 1) // 2)


def measure(cfg: ModelConfig, s: int, device: torch.device, runs: int, seed: int) -> dict[str, Any]:
    """Time the layer over [1, s, dim]; memory is the process's or the GPU's peak above what was there before.

    Raises ArithmeticError for an output that is not finite.
    """
    torch.manual_seed(seed)
    layer = NSAttention(cfg).to(device).eval()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, s, cfg.dim, device=device, dtype=dtype)
    layer = layer.to(dtype)
    before = _memory_mib(device)
    seconds = []
    with torch.no_grad():
        for _ in range(runs):
            began = time.perf_counter()
            y = layer(x)[0]
            finite = bool(y.isfinite().all())  # waits for the device, too
            seconds.append(time.perf_counter() - began)
            if not finite:
                raise ArithmeticError("the output is not finite")
    found = reads(cfg.nsa, s)
    return {
        "S": s,
        "device": str(device),
        "route": route_of(cfg, s, device, dtype),
        "prefill_ms": 1e3 * min(seconds),
        "reads_cmp": found.cmp,
        "reads_sel": found.sel,
        "reads_win": found.win,
        "reads_total": found.total,
        "reads_dense": found.dense,
        "share_of_dense": found.total / found.dense,
        "blocks_read": s * cfg.nsa.n_sel,
        "peak_mib": _memory_mib(device) - before,
    }


def _memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv: list[str]) -> int:
    """``uvcc-engine longctx``: measure, print, and return the exit code.

    Raises ConfigError for a width that is no multiple of the heads.
    """
    parser = RaisingParser(prog="uvcc-engine longctx", description=__doc__)
    parser.add_argument("--S", type=int, default=65_536, help="tokens")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--w", type=int, default=4096)
    parser.add_argument("--n-sel", type=int, default=8)
    parser.add_argument("--rope-scale", type=float, default=8.0, help="positions are divided by it")
    parser.add_argument("--runs", type=natural, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.dim % args.heads:
        raise ConfigError(f"--dim {args.dim} is no multiple of --heads {args.heads}", "change one of them")
    cfg = ModelConfig(
        dim=args.dim,
        n_layers=1,
        n_heads=args.heads,
        n_kv_groups=args.groups,
        d_k=args.dim // args.heads,
        d_v=args.dim // args.heads,
        rope_scale=args.rope_scale,
        nsa=NSAConfig(w=args.w, n_sel=args.n_sel),
    )
    found = measure(cfg, args.S, torch.device(args.device), max(1, args.runs), seed=0)
    if args.json:
        json.dump(found, sys.stdout)
        print()
    else:
        print(f"S={found['S']} on {found['device']}, paths {found['route']}")
        print(f"prefill_time_ms {found['prefill_ms']:.0f}")
        parts = ", ".join(f"{name} {found[f'reads_{name}']:,}" for name in ("cmp", "sel", "win"))
        print(f"reads_total {found['reads_total']:,} keys a group ({parts}); {found['share_of_dense']:.1%} of dense")
        print(f"blocks selected {found['blocks_read']:,} a group; peak memory {found['peak_mib']:.0f} MiB")
    return 0
