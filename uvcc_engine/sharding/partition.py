"""How a model is cut up: its layers over the stages, their weights over the tensor ranks. No torch.

Each layer type says how it is split (``model.tensor_parallel``); here the layers are placed one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.layer_spec import LayerSpec, WeightedSpec, weighted_specs
from uvcc_engine.model.registry import type_of
from uvcc_engine.model.tensor_parallel import (
    COLUMNS,
    HEADS,
    ROWS,
    WHOLE,
    PlaceContext,
    Placed,
    Slices,
    bounds,
    slices_by_split,
)

__all__ = [
    "COLUMNS",
    "HEADS",
    "ROWS",
    "WHOLE",
    "Placed",
    "bounds",
    "join_weight",
    "place_layers",
    "slice_of",
    "stage_bounds",
    "stage_layers",
    "weights_of",
]

Number = TypeVar("Number", np.float64, np.int64)
_ROUND: Final = 2048  # products of one row in the time of a round of messages, in small microbatches
_LOSS_ROUNDS: Final = 23


def place_layers(model: ModelSpec, tensor: int) -> tuple[list[Placed], str]:
    """Every layer with its split over ``tensor`` ranks, and the layout that the last one leaves.

    Raises ConfigError for a layer that cannot be placed.
    """
    found, layout, _ = _place(model, model.layers, tensor, WHOLE, 0)
    return found, layout


def _place(
    model: ModelSpec, layers: Sequence[LayerSpec], tensor: int, layout: str, weights: int
) -> tuple[list[Placed], str, int]:
    """``layers``, fed ``layout``, the first weight among them having the number ``weights``; and the same behind."""
    found: list[Placed] = []
    for at, spec in enumerate(layers):
        inner, after, weights = _place_inner(model, spec, tensor, layout, weights)
        heads = _heads(layers[at + 1]) if at + 1 < len(layers) else 0
        where = PlaceContext(model.name, layout, tensor, heads, tuple(inner), after)
        form = type_of(spec).tensor_parallel
        if form is None:
            raise where.refusal(spec)
        one = form.place(spec, where)
        if isinstance(spec, WeightedSpec):
            one = replace(one, weight=weights)
            weights += 1
        found.append(one)
        layout = one.after
    return found, layout, weights


def _place_inner(
    model: ModelSpec, spec: LayerSpec, tensor: int, layout: str, weights: int
) -> tuple[list[Placed], str, int]:
    """A block's layers: one after the other, or each fed what the block is."""
    if not spec.side_by_side:
        return _place(model, spec.inner, tensor, layout, weights)
    found: list[Placed] = []
    after = layout
    for one in spec.inner:
        placed, after, weights = _place(model, [one], tensor, layout, weights)
        found += placed
    return found, after, weights


def _heads(spec: LayerSpec) -> int:
    form = type_of(spec).tensor_parallel
    return form.heads(spec) if form is not None and form.heads is not None else 0


def slice_of(placed: Placed, size: int, index: int) -> Slices:
    """Rows and columns of a weight that rank ``index`` of ``size`` holds."""
    spec, form = placed.spec, type_of(placed.spec).tensor_parallel
    assert isinstance(spec, WeightedSpec)
    assert form is not None
    if placed.split == WHOLE or size == 1:
        height, width = spec.weight_shape
        return np.arange(height), np.arange(width)
    return (form.slices or slices_by_split)(spec, placed, size, index)


def join_weight(placed: Placed, slices: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """A layer's whole weight from its slices of all tensor ranks, in order: the inverse of :func:`slice_of`.

    Each slice is [inputs, outputs] of its rank's part.
    """
    spec = placed.spec
    assert isinstance(spec, WeightedSpec)
    whole = np.zeros(spec.weight_shape, dtype=slices[0].dtype)
    for index, mine in enumerate(slices):
        whole[np.ix_(*slice_of(placed, len(slices), index))] = mine
    return whole


def weights_of(layers: Sequence[Placed]) -> list[Placed]:
    """The layers that hold a weight, in the order of the weights' numbers."""
    found: list[Placed] = []
    for one in layers:
        found += weights_of(one.inner) if one.inner else [one] if one.weight >= 0 else []
    return found


def stage_bounds(model: ModelSpec, stages: int) -> list[range]:
    """Layer numbers of each stage: contiguous, every stage with a weight, the costliest stage as cheap as can be.

    The last stage has the loss, too, which takes as many rounds as several layers. A layer without a weight stays with
    the one before it. Of a first layer that is ``parted`` the layers count, and behind them what it does itself. Raises
    ConfigError if there are fewer weights than stages.
    """
    work = _work(model)
    starts = [i for i, (weighted, _) in enumerate(work) if weighted]
    if len(starts) < stages:
        raise ConfigError(
            f"{model.name} has {len(starts)} weighted layers or blocks for {stages} stages",
            "use fewer stages or a deeper model",
        )
    starts[0] = 0
    ends = [*starts[1:], len(work)]
    costs = [sum(cost for _, cost in work[a:b]) for a, b in zip(starts, ends, strict=True)]
    costs[-1] += _LOSS_ROUNDS * _ROUND
    counts = _partition(costs, stages)
    units = [0, *accumulate(counts)]
    return [range(starts[units[s]], ends[units[s + 1] - 1]) for s in range(stages)]


def stage_layers(model: ModelSpec, placed: Sequence[Placed], stages: int) -> list[list[Placed]]:
    """The layers of each stage, of those that :func:`place_layers` gave. Raises ConfigError as :func:`stage_bounds`."""
    first, *others = placed
    if not first.spec.parted:
        return [list(placed[mine.start : mine.stop]) for mine in stage_bounds(model, stages)]
    end = replace(first, inner=(), borrows=weights_of(first.inner)[0].weight)
    units = [*first.inner, end, *others]
    found = [units[mine.start : mine.stop] for mine in stage_bounds(model, stages)]
    if end in found[0]:  # nothing is borrowed within a stage
        found[0] = [first, *found[0][len(first.inner) + 1 :]]
    return found


def _work(model: ModelSpec) -> list[tuple[bool, int]]:
    """Of everything that may lie in a stage of its own: whether it has a weight, and what it costs."""
    first, *others = model.layers
    parts = [first, *others] if not first.parted else [*first.inner, None, *others]
    return [(False, _own_cost(first)) if one is None else (bool(weighted_specs([one])), _cost(one)) for one in parts]


def _cost(spec: LayerSpec) -> int:
    """Work of a layer on one row, forward and backward, in products; every round of messages counts as many."""
    return _own_cost(spec) + sum(map(_cost, spec.inner))


def _own_cost(spec: LayerSpec) -> int:
    kind = type_of(spec)
    return kind.products(spec) + _ROUND * kind.rounds


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
