"""How a model is cut up: its layers over the stages, their weights over the tensor ranks. No torch.

Dense layers are split by columns and by rows in turn, the columns of queries, keys and values by heads, an embedding's
table by its rows. Gain and bias of a normalisation stay whole at every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Ints
from uvcc_engine.model.specs import (
    Attention,
    Dense,
    Embedding,
    Gelu,
    LayerNorm,
    LayerSpec,
    ModelSpec,
    Pool,
    Relu,
    Residual,
)

Number = TypeVar("Number", np.float64, np.int64)
WHOLE: Final = "whole"
COLUMNS: Final = "columns"
ROWS: Final = "rows"
HEADS: Final = "heads"
_ROUND: Final = 2048  # products of one row in the time of a round of messages, in small microbatches
_ROUNDS: Final = {Dense: 4, Relu: 6, Gelu: 15, LayerNorm: 43, Attention: 30, Embedding: 2}  # both ways
_LOSS_ROUNDS: Final = 23


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer of the model with its weight's number (-1: none), how that is split, and the layout it is fed.

    ``heads`` where queries, keys and values are split by them; ``inner``: the layers of a residual block.
    """

    spec: LayerSpec
    weight: int
    split: str
    layout: str
    heads: int = 0
    inner: tuple[Placed, ...] = ()


def place_layers(model: ModelSpec, tensor: int) -> tuple[list[Placed], str]:
    """Every layer with its split over ``tensor`` ranks, and the layout that the last one leaves.

    Raises ConfigError for a layer that cannot be placed.
    """
    found, layout, _ = _place(model, model.layers, tensor, WHOLE, 0)
    return found, layout


def _place(
    model: ModelSpec, layers: Sequence[LayerSpec], tensor: int, layout: str, weights: int
) -> tuple[list[Placed], str, int]:
    found: list[Placed] = []
    for at, spec in enumerate(layers):
        follows = layers[at + 1] if at + 1 < len(layers) else None
        if isinstance(spec, Residual):
            inner, after, count = _place(model, spec.layers, tensor, layout, weights)
            if after != layout:
                raise _unplaced(model, spec, f"it turns {layout} into {after}")
            found.append(Placed(spec, -1, "", layout, inner=tuple(inner)))
            weights = count
            continue
        one = _placed(model, spec, tensor, layout, follows)
        if one.split:
            one = replace(one, weight=weights)
            weights += 1
        found.append(one)
        layout = layout_after(one, tensor)
    return found, layout, weights


def _placed(model: ModelSpec, spec: LayerSpec, tensor: int, layout: str, follows: LayerSpec | None) -> Placed:
    if isinstance(spec, Dense):
        if layout == COLUMNS and tensor > 1:
            return _checked(model, Placed(spec, -1, ROWS, layout), spec.inputs, tensor)
        if isinstance(follows, Attention):
            return _checked(model, Placed(spec, -1, HEADS, layout, follows.heads), follows.heads, tensor)
        return _checked(model, Placed(spec, -1, COLUMNS, layout), spec.outputs, tensor)
    if isinstance(spec, Embedding) and layout == WHOLE:
        return _checked(model, Placed(spec, -1, ROWS, layout), spec.vocabulary + spec.positions, tensor)
    if isinstance(spec, LayerNorm) and (layout == ROWS or tensor == 1):
        return Placed(spec, -1, WHOLE, layout)
    if isinstance(spec, Relu | Gelu) or (isinstance(spec, Attention) and (layout == COLUMNS or tensor == 1)):
        return Placed(spec, -1, "", layout)
    raise _unplaced(model, spec, f"it is fed {layout}")


def _checked(model: ModelSpec, placed: Placed, slices: int, tensor: int) -> Placed:
    if tensor > slices:
        raise ConfigError(
            f"{model.name}: a {type(placed.spec).__name__} of {slices} {placed.split} over {tensor} tensor ranks",
            "use fewer tensor ranks",
        )
    return placed


def _unplaced(model: ModelSpec, spec: LayerSpec, why: str) -> ConfigError:
    return ConfigError(
        f"{model.name} has layers that cannot be split over workers: {type(spec).__name__} ({why})",
        "use replicas, stages, tensor and microbatches of 1",
    )


def layout_after(placed: Placed, tensor: int) -> str:
    """The layout of what a layer gives."""
    if tensor == 1:
        return WHOLE
    return {ROWS: ROWS, COLUMNS: COLUMNS, HEADS: COLUMNS}.get(placed.split, placed.layout)


def bounds(n: int, size: int, index: int) -> slice:
    """Member ``index``'s slice of ``range(n)`` among ``size`` members: equal ones, up to one."""
    return slice(n * index // size, n * (index + 1) // size)


def slice_of(placed: Placed, size: int, index: int) -> tuple[Ints, Ints]:
    """Rows and columns of a weight that rank ``index`` of ``size`` holds. The first rank holds the bias row."""
    spec = placed.spec
    assert not isinstance(spec, Relu | Gelu | Attention | Residual | Pool)
    height, width = spec.weight_shape
    rows, columns = np.arange(height), np.arange(width)
    if placed.split == WHOLE or size == 1:
        return rows, columns
    if placed.split == COLUMNS:
        return rows, columns[bounds(width, size, index)]
    if placed.split == HEADS:
        by_head = columns.reshape(3, placed.heads, -1)[:, bounds(placed.heads, size, index)]
        return rows, by_head.reshape(-1)
    if isinstance(spec, Embedding):
        return rows[bounds(height, size, index)], columns
    mine = rows[bounds(height - 1, size, index)]
    return (np.append(mine, height - 1) if index == 0 else mine), columns


def join_weight(placed: Placed, slices: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """A layer's whole weight from its slices of all tensor ranks, in order: the inverse of :func:`slice_of`."""
    spec = placed.spec
    assert not isinstance(spec, Relu | Gelu | Attention | Residual | Pool)
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
    the one before it. Raises ConfigError if there are fewer weights than stages.
    """
    starts = [i for i, spec in enumerate(model.layers) if isinstance(spec, Dense | Embedding | LayerNorm | Residual)]
    if len(starts) < stages:
        raise ConfigError(
            f"{model.name} has {len(starts)} weighted layers or blocks for {stages} stages",
            "use fewer stages or a deeper model",
        )
    starts[0] = 0
    ends = [*starts[1:], len(model.layers)]
    costs = [_cost(model.layers[a:b]) for a, b in zip(starts, ends, strict=True)]
    costs[-1] += _LOSS_ROUNDS * _ROUND
    counts = _partition(costs, stages)
    units = [0, *accumulate(counts)]
    return [range(starts[units[s]], ends[units[s + 1] - 1]) for s in range(stages)]


def _cost(layers: Sequence[LayerSpec]) -> int:
    """Work of some layers on one row, forward and backward, in products; every round of messages counts as many."""
    return sum(_products(spec) + _ROUND * _ROUNDS.get(type(spec), 0) for spec in layers)


def _products(spec: LayerSpec) -> int:
    """Entries of weights, and what comparisons cost beside them."""
    if isinstance(spec, Residual):
        return _cost(spec.layers)
    if isinstance(spec, Dense):
        return spec.inputs * spec.outputs
    if isinstance(spec, Embedding):
        return (spec.vocabulary + spec.positions) * spec.width
    if isinstance(spec, LayerNorm):
        return 64 * 24 + 16 * spec.width  # an inverse root takes 23 comparisons
    if isinstance(spec, Attention):
        return spec.positions * (2 * spec.width + 256 * spec.heads)  # every weight is an exponential
    return {Relu: 64, Gelu: 256}.get(type(spec), 0) * getattr(spec, "width", 0)


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
