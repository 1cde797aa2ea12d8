"""One pipeline stage of a model on one tensor rank: which layers it holds, how they are split, what they start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from uvcc_engine.data.sets import Floats
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.registry import type_of
from uvcc_engine.model.tensor_parallel import PartContext
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.sharding.partition import COLUMNS, Placed, place_layers, slice_of, stage_bounds, weights_of
from uvcc_engine.sharding.stage_passes import StagePart, ToRows, leaves

__all__ = ["Placed", "Stage", "build_stage", "place_layers", "stage_bounds"]


@dataclass
class Stage:
    """The parts of one stage, with the numbers of their weights in the whole model."""

    parts: list[StagePart]
    numbers: list[int]

    @property
    def slots(self) -> list[tuple[StagePart, int]]:
        """(part, which of its weights), in the order of ``numbers``."""
        return [(part, k) for part in leaves(self.parts) for k in range(len(part.weights))]


def build_stage(
    rt: Runtime, model: ModelSpec, starts: Sequence[Floats], f: int, *, pp: Communicator, tp: Communicator
) -> Stage:
    """The parts of this rank's stage around its slices of the public initial weights ``starts``.

    ``starts`` has an array per weighted layer of the whole model, in the shape that its specification says.
    """
    placed, layout = place_layers(model, tp.size)
    mine = stage_bounds(model, pp.size)[pp.index]
    layers = [placed[at] for at in mine]
    parts = [_part(rt, one, starts, f, tp) for one in layers]
    if mine.stop == len(model.layers) and layout == COLUMNS:
        parts.append(ToRows(model.classes))
    return Stage(parts, [one.weight for one in weights_of(layers)])


def _part(rt: Runtime, placed: Placed, starts: Sequence[Floats], f: int, tp: Communicator) -> StagePart:
    inner = tuple(_part(rt, one, starts, f, tp) for one in placed.inner)
    own = None
    if placed.weight >= 0:
        own = public(rt, torch.from_numpy(starts[placed.weight][np.ix_(*slice_of(placed, tp.size, tp.index))]), f=f)
    form = type_of(placed.spec).tensor_parallel
    assert form is not None  # it was placed
    return form.part(placed.spec, PartContext(rt, placed, tp, own, placed.weight % 3, inner))
