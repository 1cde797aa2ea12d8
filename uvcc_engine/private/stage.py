"""One pipeline stage of a model on one tensor rank: which layers it holds, how they are split, what they start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.arithmetic import public
from uvcc_engine.mpc.runtime import Runtime
from uvcc_engine.parallel.groups import Group
from uvcc_engine.private.data import Floats
from uvcc_engine.private.layers import ReluLayer
from uvcc_engine.private.models import Dense, LayerSpec, ModelSpec, Relu
from uvcc_engine.private.sharded import COLUMNS, ROWS, WHOLE, ColumnDense, Local, Part, RowDense, ToRows, split_weight


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer of the model with its weight's number (-1: none), how that is split, and the layout it is fed."""

    spec: LayerSpec
    weight: int
    split: str
    layout: str


def place_layers(model: ModelSpec, tensor: int) -> tuple[list[Placed], str]:
    """Every layer with its split over ``tensor`` ranks, and the layout that the last one leaves.

    Dense layers are split by columns and by rows in turn. Raises ConfigError for a layer that cannot be placed.
    """
    layout, found, weights = WHOLE, list[Placed](), 0
    for spec in model.layers:
        if isinstance(spec, Dense):
            split = ROWS if layout == COLUMNS and tensor > 1 else COLUMNS
            found.append(Placed(spec, weights, split, layout))
            weights += 1
            layout = split if tensor > 1 else WHOLE
        elif isinstance(spec, Relu):
            found.append(Placed(spec, -1, "", layout))
        else:
            raise ConfigError(
                f"{model.name} has layers that cannot be split over workers: {type(spec).__name__}",
                "use replicas, stages, tensor and microbatches of 1",
            )
    return found, layout


def stage_bounds(model: ModelSpec, stages: int) -> list[range]:
    """Layer numbers of each stage: contiguous, every stage with a weight, the largest stage as small as can be.

    A layer without a weight stays with the one before it. Raises ConfigError if there are fewer weights than stages.
    """
    starts = [i for i, spec in enumerate(model.layers) if isinstance(spec, Dense)]
    if len(starts) < stages:
        raise ConfigError(
            f"{model.name} has {len(starts)} weighted layers for {stages} stages", "use fewer stages or a deeper model"
        )
    starts[0] = 0
    ends = [*starts[1:], len(model.layers)]
    costs = [_cost(model.layers[a:b]) for a, b in zip(starts, ends, strict=True)]
    counts = _partition(costs, stages)
    units = [0, *accumulate(counts)]
    return [range(starts[units[s]], ends[units[s + 1] - 1]) for s in range(stages)]


def _cost(layers: Sequence[LayerSpec]) -> int:
    """Work of some layers, in products: entries of weights, and what a comparison costs beside them."""
    return sum(
        spec.inputs * spec.outputs if isinstance(spec, Dense) else 64 * spec.width
        for spec in layers
        if isinstance(spec, Dense | Relu)
    )


def _partition(costs: Sequence[int], parts: int) -> list[int]:
    """How many units each part takes, in order, so that the largest part is as cheap as possible."""
    total = [0, *accumulate(costs)]
    n = len(costs)
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}  # (parts, units) -> (largest, units before)
    for k in range(1, parts + 1):
        for end in range(k, n - (parts - k) + 1):
            best[k, end] = min(
                (max(best[k - 1, at][0], total[end] - total[at]), at) for at in range(k - 1, end) if (k - 1, at) in best
            )
    counts, end = [], n
    for k in range(parts, 0, -1):
        at = best[k, end][1]
        counts.append(end - at)
        end = at
    return counts[::-1]


@dataclass
class Stage:
    """The parts of one stage, with the numbers of their weights in the whole model."""

    parts: list[Part]
    numbers: list[int]

    @property
    def slots(self) -> list[tuple[Part, int]]:
        """(part, which of its weights), in the order of ``numbers``."""
        return [(part, k) for part in self.parts for k in range(len(part.weights))]


def build_stage(rt: Runtime, model: ModelSpec, starts: Sequence[Floats], f: int, *, pp: Group, tp: Group) -> Stage:
    """The parts of this rank's stage around its slices of the public initial weights ``starts``."""
    placed, layout = place_layers(model, tp.size)
    mine = stage_bounds(model, pp.size)[pp.index]
    parts: list[Part] = []
    numbers: list[int] = []
    for at in mine:
        layer = placed[at]
        if layer.weight < 0:
            parts.append(Local(ReluLayer()))
            continue
        start = split_weight(torch.from_numpy(starts[layer.weight]), layer.split, tp.size, tp.index)
        weight, dealer = public(rt, start, f=f), layer.weight % 3
        parts.append(
            RowDense(weight, dealer) if layer.split == ROWS else ColumnDense(weight, dealer, layout=layer.layout)
        )
        numbers.append(layer.weight)
    if mine.stop == len(model.layers) and layout == COLUMNS:
        parts.append(ToRows(model.classes))
    return Stage(parts, numbers)
