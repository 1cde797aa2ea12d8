"""Tensor parallelism of the language model: a few ranks compute each block together (Shoeybi et al. 2019, section 3).

Of a block's MLP each rank holds a part of both matrices (torch's ``parallelize_module``). Of attention each computes
some of the heads: whole key-value groups with their queries. The weights of attention are cut by ``fully_shard`` alone;
while a block computes, a rank reads the rows of its own heads. All are DTensors of one mesh with data parallelism, so
optimizer, gradient norm and checkpoints are those of a sharded model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.model import LanguageModel, OneBranchAttention
from uvcc_engine.nsa.outlines import shapes_alone
from uvcc_engine.nsa.visibility import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_blocks(model: LanguageModel, ranks: DeviceMesh) -> None:
    """Let ``ranks`` compute the blocks of ``model`` together; each must have made the same weights already.

    Key-value groups and the MLP's width are multiples of their number, which the config has checked.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, ranks, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
        assert isinstance(block.attention, NSAttention | OneBranchAttention)
        block.attention.forward = _OwnHeads(block.attention, ranks)  # type: ignore[method-assign, assignment]
    for module in model.modules():
        _replicate(module, ranks)
        if isinstance(module, nn.RMSNorm | nn.Embedding):
            module.register_forward_pre_hook(_entering(ranks))
            module.register_forward_hook(_leaving)


def _replicate(module: nn.Module, ranks: DeviceMesh) -> None:
    """Parameters of the module itself that no rank holds a part of become tensors that all ranks of the mesh hold."""
    from torch.distributed.tensor import DTensor, Replicate

    for name, p in list(module.named_parameters(recurse=False)):
        if not isinstance(p, DTensor):
            held = DTensor.from_local(p.detach(), ranks, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(held))


def _entering(ranks: DeviceMesh) -> Any:
    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor, Replicate

        return (DTensor.from_local(given[0], ranks, [Replicate()], run_check=False), *given[1:])

    return hook


def _leaving(module: nn.Module, given: tuple[Any, ...], made: Any) -> Any:
    return made.to_local()


class _OwnHeads:
    """Attention's forward pass on one of several tensor ranks: the same layer with fewer heads, and the sum of all."""

    def __init__(self, whole: NSAttention | OneBranchAttention, ranks: DeviceMesh) -> None:
        cfg, count = whole.cfg, ranks.size()
        self._whole, self._ranks = whole, ranks
        mine = replace(cfg, n_heads=cfg.n_heads // count, n_kv_groups=cfg.n_kv_groups // count)
        with shapes_alone():
            self._mine = type(whole)(mine)
        at = ranks.get_local_rank()
        heads, groups = _places(at, mine.n_heads), _places(at, mine.n_kv_groups)
        self._rows = {n: _rows(n, p.shape[0], cfg, heads, groups) for n, p in whole.named_parameters()}

    def __call__(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """x [B, S, dim], the same on all tensor ranks -> (y [B, S, dim], gates, of each rank's own heads)."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        ranks = self._ranks
        weights = {
            name: _taken(p.to_local(grad_placements=[Partial()]), self._rows[name])  # type: ignore[attr-defined]
            for name, p in self._whole.named_parameters()
        }
        entered = DTensor.from_local(x, ranks, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        y, gates = functional_call(self._mine, weights, (entered, layout))
        summed = DTensor.from_local(y, ranks, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        if gates is not None:  # for the metrics alone, which gather them
            gates = DTensor.from_local(gates.detach(), ranks, [Shard(2)], run_check=False)
        return summed.to_local(), gates


def _places(rank: int, count: int) -> range:
    return range(rank * count, (rank + 1) * count)


def _rows(name: str, length: int, cfg: ModelConfig, heads: range, groups: range) -> tuple[int, list[range]] | None:
    """Which rows (dimension 0) or columns (1) of a weight of attention belong to these heads; None for all of it.

    ``length``: how many rows the weight has. Those behind the heads' are what gates are made of, and belong to all.
    """
    h, g, dk, dv = cfg.n_heads, cfg.n_kv_groups, cfg.d_k, cfg.d_v
    if name == "out.weight":
        return 1, [range(heads.start * dv, heads.stop * dv)]
    parts = {
        "gate.weight": [(heads, h, 3)],
        "gate.bias": [(heads, h, 3)],
        "q.weight": [(heads, h, dk)],
        "kv.weight": [(groups, g, dk), (groups, g, dv)],
        "project_in.weight": [(heads, h, dk), *[(groups, g, dk)] * 3, *[(groups, g, dv)] * 3],
    }
    if name not in parts:
        return None
    found, start = [], 0
    for own, count, size in parts[name]:
        found.append(range(start + own.start * size, start + own.stop * size))
        start += count * size
    return 0, [*found, range(start, length)]


def _taken(weight: Tensor, of: tuple[int, list[range]] | None) -> Tensor:
    if of is None:
        return weight
    return torch.cat([weight.narrow(of[0], part.start, len(part)) for part in of[1]], of[0])
