"""``bench nsa --tune``: which tiles, warps and load stages each kernel is fastest with on this GPU.

One kernel's choice is changed at a time, at M7C's shape and in the type of its training. The grid is small: every
candidate is compiled. Then the winner is tried in its other forms: with tiles by descriptors, where GPU and Triton have
them, and with masks of edges alone. Candidates that the GPU refuses (too much shared memory) drop out. It prints what
``uvcc_engine/nsa/kernels/measured_tiles.json`` holds for this compute capability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import triton
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.kernels import descriptors, tiles
from uvcc_engine.nsa.kernels.tiles import Tiles
from uvcc_engine.nsa.visibility import layout_of

GRID: Final[dict[str, tuple[Tiles, ...]]] = {
    "band.forward": tuple(
        Tiles(rows, keys, warps, stages)
        for rows, keys, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4))
        for stages in (2, 3, 4)
    ),
    "band.backward_q": tuple(
        Tiles(rows, keys, warps, stages)
        for rows, keys, warps in ((64, 64, 4), (128, 64, 8), (64, 32, 4), (128, 64, 4))
        for stages in (2, 3)
    ),
    "band.backward_kv": tuple(
        Tiles(rows, keys, warps, stages)
        for rows, keys, warps in ((64, 64, 4), (64, 128, 8), (32, 128, 4), (64, 64, 8), (64, 128, 4))
        for stages in (2, 3)
    ),
    "topk": tuple(Tiles(rows, 64, warps, stages) for rows in (32, 64, 128) for warps in (4, 8) for stages in (2, 3)),
    "selection.forward": tuple(
        Tiles(rows, 64, warps, stages) for rows in (64, 128) for warps in (4, 8) for stages in (2, 3)
    ),
    "selection.backward": tuple(Tiles(64, 64, warps, stages) for warps in (4, 8) for stages in (1, 2, 3)),
    "selection.slots": tuple(Tiles(rows, 64, warps, 3) for rows in (16, 32, 64) for warps in (2, 4, 8)),
}

DESCRIBED: Final = ("band.forward", "band.backward_q", "band.backward_kv", "selection.forward", "selection.backward")
MASKED: Final = ("band.forward", "band.backward_q", "band.backward_kv")


def forms(kernel: str, best: Tiles, *, descriptors: bool) -> tuple[Tiles, ...]:
    """The other forms of a kernel's winner: with descriptors, with masks of edges alone, with both."""
    tma = (False, True) if descriptors and kernel in DESCRIBED else (False,)
    edges = (False, True) if kernel in MASKED else (False,)
    every = (replace(best, tma=t, edges=e) for t in tma for e in edges)
    return tuple(one for one in every if one != best)


def chosen(asked: str) -> list[str]:
    """The kernels of a comma-separated list, or ``all``. Raises ConfigError for one that there is not."""
    names = list(GRID) if asked == "all" else asked.split(",")
    for name in names:
        if name not in GRID:
            raise ConfigError(f"unknown kernel {name!r}", f"one of: {', '.join(GRID)}")
    return names


def tune(names: Sequence[str], tokens: int, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Capability -> kernel -> winner, with the milliseconds of each winner and of the default said on the way."""
    work = TimedBranches(tokens, device)
    found: dict[str, Any] = {}
    major, minor = torch.cuda.get_device_capability(device)
    copies = major >= descriptors.SINCE and descriptors.there_are()
    for kernel in names:
        timed = sorted(_timings(kernel, GRID[kernel], work), key=lambda one: one[0])
        if timed:
            timed += _timings(kernel, forms(kernel, timed[0][1], descriptors=copies), work)
            timed.sort(key=lambda one: one[0])
        tiles.force(kernel, None)
        if not timed:
            continue
        best_ms, best = timed[0]
        default = next((ms for ms, one in timed if one == Tiles()), math.nan)
        tiles.force(kernel, best)  # the next kernels are measured beside it
        found[kernel] = best.to_json()
        say(f"{kernel}: {best} {best_ms:.3f} ms, default {default:.3f} ms, of {len(timed)}")
    for kernel in GRID:
        tiles.force(kernel, None)
    return {f"{major}.{minor}": found}


def _timings(kernel: str, candidates: tuple[Tiles, ...], work: TimedBranches) -> Iterator[tuple[float, Tiles]]:
    for one in candidates:
        tiles.force(kernel, one)
        try:
            yield work.milliseconds("backward" in kernel), one
        except triton.runtime.errors.OutOfResources:
            continue


class TimedBranches:
    """All three branches at M7C's shape, forward or backward."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        cfg = ModelConfig(n_layers=1)
        torch.manual_seed(0)

        def random(n: int, heads: int) -> Tensor:
            return torch.randn(1, n, heads, cfg.d_k, device=device, dtype=torch.bfloat16, requires_grad=True)

        self._layout = layout_of(cfg.nsa, tokens, device, None)
        lengths = self._layout.n_cmp, tokens, tokens
        self._q = random(tokens, cfg.n_heads)
        self._k = tuple(random(n, cfg.n_kv_groups) for n in lengths)
        self._v = tuple(random(n, cfg.n_kv_groups) for n in lengths)
        self._grad = torch.randn(1, tokens, cfg.n_heads, cfg.d_k, device=device, dtype=torch.bfloat16)

    def _forward(self) -> Tensor:
        k, v = self._k, self._v
        o_cmp, o_sel, o_win = dispatch.attend(self._layout, self._q, (k[0], k[1], k[2]), (v[0], v[1], v[2]))
        assert o_cmp is not None
        return o_cmp + o_sel + o_win

    def milliseconds(self, backward: bool) -> float:
        """The median of a few calls, by the device's own clock."""
        dispatch.force("triton")
        try:
            if not backward:
                with torch.no_grad():
                    return float(triton.testing.do_bench(self._forward, warmup=5, rep=30, return_mode="median"))
            y, leaves = self._forward(), (self._q, *self._k, *self._v)

            def back() -> object:
                return torch.autograd.grad(y, leaves, self._grad, retain_graph=True)

            return float(triton.testing.do_bench(back, warmup=5, rep=30, return_mode="median"))
        finally:
            dispatch.force(None)


def printed(found: dict[str, Any]) -> str:
    """As the file of winners is written."""
    return json.dumps(found, indent=1, sort_keys=True)
