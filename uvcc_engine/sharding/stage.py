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
from uvcc_engine.sharding.partition import (
    COLUMNS,
    Placed,
    place_layers,
    slice_of,
    stage_bounds,
    stage_layers,
    weights_of,
)
from uvcc_engine.sharding.stage_passes import StagePart, ToRows, leaves

__all__ = ["Loan", "Placed", "Stage", "build_stage", "place_layers", "stage_bounds"]


@dataclass(frozen=True, slots=True)
class Loan:
    """A weight that one stage owns and a later one computes with, too: which ``part`` of this stage has it or borrows
    it, the stage at the ``other`` end, and whether this one ``lends``."""

    part: StagePart
    other: int
    lends: bool


@dataclass
class Stage:
    """The parts of one stage, with the numbers of their weights in the whole model."""

    parts: list[StagePart]
    numbers: list[int]
    loan: Loan | None = None

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
    stages = stage_layers(model, placed, pp.size)
    parts = [_part(rt, one, starts, f, tp) for one in stages[pp.index]]
    loan = _loan(stages, pp.index, parts)
    if pp.index == pp.size - 1 and layout == COLUMNS:
        parts.append(ToRows(model.classes))
    return Stage(parts, [one.weight for one in weights_of(stages[pp.index])], loan)


def _loan(stages: Sequence[Sequence[Placed]], mine: int, parts: Sequence[StagePart]) -> Loan | None:
    """What this stage lends or borrows: only what a first layer does behind its block borrows, of the first stage."""
    for to, layers in enumerate(stages):
        borrowing = [at for at, one in enumerate(layers) if one.borrows >= 0]
        if borrowing and mine == to:
            return Loan(parts[borrowing[0]], 0, lends=False)
        if borrowing and mine == 0:
            return Loan(parts[0], to, lends=True)
    return None


def _part(rt: Runtime, placed: Placed, starts: Sequence[Floats], f: int, tp: Communicator) -> StagePart:
    inner = tuple(_part(rt, one, starts, f, tp) for one in placed.inner)
    own = None
    if placed.weight >= 0:
        own = public(rt, torch.from_numpy(starts[placed.weight][np.ix_(*slice_of(placed, tp.size, tp.index))]), f=f)
    form = type_of(placed.spec).tensor_parallel
    assert form is not None  # it was placed
    dealer = max(placed.weight, placed.borrows) % 3
    return form.part(placed.spec, PartContext(rt, placed, tp, own, dealer, inner))
