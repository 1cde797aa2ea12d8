"""A model whose ranks hold parts of every parameter: torch's ``fully_shard`` (FSDP2), and tensors in parts or whole.

What belongs to it is imported where it is used: every rank imports this module, few shard.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.torch_floor import version_of
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.nsa.outlines import shapes_alone
from uvcc_engine.train.dimensions.tensor_ranks import split_blocks

OLDEST_TOGETHER: Final = (2, 7)
"""The torch that ranks can compute a block together with: its ``parallelize_module`` sends nothing that all know."""


def shard(model: LanguageModel, device: torch.device, world: int, compress: str, tensor: int = 1) -> None:
    """Leave each rank a part of every parameter, block by block; ``compress`` bf16 halves what gradients send.

    ``tensor``: so many neighbouring ranks compute each block together, see ``tensor_ranks``. Raises ConfigError where
    this torch has no fully_shard.
    """
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        hint = "an image with torch 2.6 or newer, or ddp.shard: false"
        raise ConfigError(f"ddp.shard needs what torch {torch.__version__} does not have", hint) from error
    if tensor > 1:
        if (version_of(torch.__version__) or OLDEST_TOGETHER) < OLDEST_TOGETHER:
            what = f"ddp.tensor={tensor} needs what torch {torch.__version__} does not have"
            raise ConfigError(what, "an image with torch 2.7 or newer, or ddp.tensor: 1")
        both = init_device_mesh(device.type, (world // tensor, tensor), mesh_dim_names=("dp", "tensor"))
        both._flatten("all")  # one reduction over all of them, in one order, and not one for each dimension
        split_blocks(model, both["tensor"])
        mesh = both["dp"]
    else:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if compress == "bf16" else torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=_placed if tensor > 1 else None)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _placed(parameter: nn.Parameter) -> Any:
    """The dimension that data parallelism cuts: not the one that tensor ranks have parts of."""
    from torch.distributed.tensor import Shard

    cut = [place.dim for place in getattr(parameter, "placements", ()) if place.is_shard()]
    return Shard(1) if cut == [0] else None


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the model's parameters."""
    return hasattr(next(model.parameters()), "full_tensor")


def sync_after(model: nn.Module, last: bool) -> None:
    """Reduce a sharded model's gradients in the coming backward pass, or, unless it is the ``last``, only add them."""
    model.set_requires_gradient_sync(last)  # type: ignore[operator]  # fully_shard gave it this method


def part_again(model: nn.Module) -> None:
    """Leave each rank its parts after a forward pass that no backward pass follows: what stands outside the blocks is
    whole until then, under the parameters' names."""
    if hasattr(model, "reshard"):
        model.reshard()  # type: ignore[operator]  # fully_shard gave it this method


def whole(tensor: Tensor) -> Tensor:
    """A tensor that ranks hold in parts, gathered on all of them (a collective); any other as it is."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that ranks hold in parts; any other as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@torch.no_grad()
def assembled(model: LanguageModel) -> LanguageModel:
    """The model with whole parameters; itself, unless ranks hold parts: then a new one, made by all ranks together."""
    if not is_sharded(model):
        return model
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    with shapes_alone():
        made = LanguageModel(model.cfg)
    made.load_state_dict(weights, assign=True)
    return made


def reduced_as(model: nn.Module) -> str:
    """How a sharded model's gradients are sent: ``bf16``, or ``off`` for as they are."""
    policy = model._get_fsdp_state()._mp_policy  # type: ignore[operator]  # torch offers no public way
    return "bf16" if policy.reduce_dtype == torch.bfloat16 else "off"


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole ``tensor`` held as ``other`` is: in the same parts, on the same device. Every rank gives the same."""
    there = tensor.to(other.device)
    if not hasattr(other, "full_tensor"):
        return there
    from torch.distributed.tensor import distribute_tensor

    # each rank has read the whole tensor, so nothing is sent
    return distribute_tensor(there, other.device_mesh, other.placements, src_data_rank=None)  # type: ignore[attr-defined]
