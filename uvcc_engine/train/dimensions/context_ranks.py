"""Context parallelism of the trainer: neighbouring ranks share rows, and gather each layer's keys and values.

Weights are whole on each of them (or shared out over all ranks by ``fully_shard``), so gradients are reduced over all
ranks as without it, and optimizer and checkpoints are the same. How a row is cut: ``uvcc_engine.nsa.shared_rows``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uvcc_engine.nsa.shared_rows import SharedRows


def context_of(device: torch.device, rank: int, world: int, ranks: int) -> SharedRows:
    """This rank's place among ``ranks`` neighbours. A collective of the whole world: it makes their groups."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (world // ranks, ranks), mesh_dim_names=("rows", "context"))
    group = mesh["context"].get_group()

    def gather(x: Tensor) -> Tensor:
        found: Tensor = _Gathered.apply(x, group, ranks)  # type: ignore[no-untyped-call]
        return found

    return SharedRows(rank % ranks, ranks, gather)


class _Gathered(torch.autograd.Function):
    """x of every rank [ranks, *x.shape]; backward each rank gets the sum of what all found for its own, in 32 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        ctx.group, ctx.dtype = group, x.dtype
        found = x.new_empty(ranks, *x.shape)
        dist.all_gather_into_tensor(found.flatten(0, 1), x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        mine = torch.empty_like(wide[0])
        dist.reduce_scatter_tensor(mine, wide.flatten(0, 1), group=ctx.group)
        return mine.to(ctx.dtype), None, None
