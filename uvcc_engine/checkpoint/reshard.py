"""A model's state put together from the slices of one topology and cut up for another. Components alone, no torch.

State tensors are named ``kind.number`` (``weight.3``, ``velocity.3``), number being that of the weight in the whole
model; everything that is kept of a weight has the weight's shape and is split as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sharding.partition import Placed, join_weight, place_layers, slice_of, stage_layers, weights_of

Tensors = Mapping[str, Ring]


def join_state(model: ModelSpec, size: Topology, parts: Mapping[tuple[int, int], Tensors]) -> dict[str, Ring]:
    """The whole model's state from those of all its stages and tensor ranks, by (stage, tensor).

    Raises UnreadableError if a slice is missing or has another shape.
    """
    if size.stages * size.tensor == 1:
        return dict(parts[0, 0])
    placed = {one.weight: one for one in weights_of(place_layers(model, size.tensor)[0])}
    whole: dict[str, Ring] = {}
    for s in range(size.stages):
        for name in parts[s, 0]:
            try:
                slices = [parts[s, t][name] for t in range(size.tensor)]
                whole[name] = join_weight(placed[_number(name)], slices)
            except (KeyError, ValueError) as error:
                raise UnreadableError(f"the state lacks a slice of {name}", "use another checkpoint") from error
    return whole


def cut_state(model: ModelSpec, size: Topology, stage: int, tensor: int, whole: Tensors) -> dict[str, Ring]:
    """What one stage and tensor rank of ``size`` holds of the whole model's state.

    Raises ConfigError if the model cannot be cut up so: fewer heads, columns or rows than tensor ranks, fewer blocks
    than stages.
    """
    if size.stages * size.tensor == 1:
        return dict(whole)
    layers, _ = place_layers(model, size.tensor)
    mine = {one.weight: one for one in weights_of(stage_layers(model, layers, size.stages)[stage])}
    return {
        name: _slice(mine[_number(name)], size.tensor, tensor, value)
        for name, value in whole.items()
        if _number(name) in mine
    }


def _slice(placed: Placed, tensor: int, index: int, value: Ring) -> Ring:
    return np.ascontiguousarray(value[np.ix_(*slice_of(placed, tensor, index))])


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])
