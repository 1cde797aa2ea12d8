"""Gradient-boosted trees in secret: each step grows one tree for each output, from the slopes of the loss, and adds
their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.layer_types.trees import TreesLayer, trees_of
from uvcc_engine.model.learning.objectives import binary_protocol
from uvcc_engine.model.learning.training import PrivateTrainer, SummedLoss, there_protocol
from uvcc_engine.model.learning.tree_growth import GrownTrees, TreeGrower
from uvcc_engine.model.losses import (
    gradient_protocol,
    powers_protocol,
    total_loss_protocol,
    total_square_protocol,
)
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, stack
from uvcc_engine.mpc.products.arithmetic import add, add_public, mul_protocol, neg, public, sub
from uvcc_engine.sealing.inputs import PartyInputs

T = TypeVar("T")
LEAST_CURVATURE: Final = 2.0**-12
"""What a row's second derivative of a logistic loss or a cross-entropy is raised by, so that what a chance near 0 or 1
is off by in fixed point never makes a sum of them negative."""
_OF_CHANCES: Final = 0.25 + LEAST_CURVATURE + 2.0**-10
STEEPEST: Final = {"binary": _OF_CHANCES, "cross-entropy": _OF_CHANCES, "mse": 1.0}
"""Above this no second derivative lies."""


class TreeTrainer(PrivateTrainer):
    """The trees so far, and what they answer to every training row: ``margins`` [rows, outputs], which a checkpoint
    holds.

    A step draws ``job.batch`` rows, grows a tree for each output from them (of cross-entropy for each class, as
    XGBoost's softprob does), side by side in the same rounds, and adds to the margins of all. Nothing is opened but
    what the job lists: which columns are asked, the leaves, and which rows reach them stay secret.
    """

    def __init__(self, rt: Runtime, job: PrivateJob, model: ModelSpec, inputs: PartyInputs) -> None:
        """Start without trees. Raises ConfigError as ``PrivateTrainer``."""
        super().__init__(rt, job, model, inputs)
        self._optimizer.moments.clear()  # trees have no momentum
        self._margins = [no_answers(rt, job, model, self._tensors["train_x"].shape[0])]

    def _kept(self) -> list[tuple[str, list[Share]]]:
        return [*super()._kept(), ("margins", self._margins)]

    def _step_protocol(self, rows: Tensor, *, reveal: bool) -> MpcProtocol[SummedLoss | None]:
        rt, step, x = self._rt, self._optimizer.step, self._tensors["train_x"]
        drawn = None if len(rows) == x.shape[0] else rows
        y, margins = self._tensors["train_y"], self._margins[0]
        y, margins = (y, margins) if drawn is None else (y.index(drawn), margins.index(drawn))
        slopes, loss = yield from slopes_protocol(rt, self._job, margins, y, self._loss_protocol if reveal else None)
        layer = cast(TreesLayer, self._layers[0])
        grower = TreeGrower(rt, layer, self._job.lr_at(step), STEEPEST[self._job.objective], len(rows))
        grown = yield from layer.grown_protocol(grower.grow_protocol(x, slopes, drawn))
        self._margins[0] = add(self._margins[0], grown.answers)
        layer.weight = written(layer, step, grown)
        return loss


def no_answers(rt: Runtime, job: PrivateJob, model: ModelSpec, rows: int) -> Share:
    """What no tree answers to so many rows: [rows, outputs]."""
    spec = trees_of(model)
    assert spec is not None
    return public(rt, torch.zeros(rows, spec.outputs), f=job.frac_bits)


def slopes_protocol(
    rt: Runtime, job: PrivateJob, margins: Share, y: Share, told: Callable[[MpcProtocol[Share]], MpcProtocol[T]] | None
) -> MpcProtocol[tuple[Share, T | None]]:
    """First and second derivatives of each row's loss by each output, [2, outputs, rows]; and what ``told`` makes of
    the summed loss, if it is wanted."""
    if job.objective == "mse":
        slope = sub(margins, y)
        loss = None if told is None else (yield from told(total_square_protocol(rt, slope)))
        return _by_output(slope, public(rt, 1.0, slope)), loss
    slope, total = yield from _chances_protocol(rt, job, margins, y, reveal=told is not None)
    chance = add(slope, y)
    steps: list[MpcProtocol[Any]] = [mul_protocol(rt, chance, add_public(rt, neg(chance), 1.0))]
    steps += [] if total is None or told is None else [told(total)]
    curvature, *found = yield from par(*steps)
    return _by_output(slope, add_public(rt, curvature, LEAST_CURVATURE)), found[0] if found else None


def _chances_protocol(
    rt: Runtime, job: PrivateJob, margins: Share, y: Share, *, reveal: bool
) -> MpcProtocol[tuple[Share, MpcProtocol[Share] | None]]:
    """What classes' chances are above the targets, and what gives the summed loss, if wanted."""
    if job.objective == "binary":
        slope, total = yield from binary_protocol(rt, margins, y, loss=reveal)
        return slope, None if total is None else there_protocol(total)
    powers = yield from powers_protocol(rt, margins, loss=reveal)
    slope = yield from gradient_protocol(rt, powers, y)
    return slope, total_loss_protocol(rt, powers, y) if reveal else None


def written(layer: TreesLayer, step: int, grown: GrownTrees) -> Share:
    """The layer's weight with the trees of ``step`` in their rows. Local."""
    spec, weight = layer.spec, layer.weight
    assert weight is not None

    def half(old: Tensor, asked: Tensor, leaves: Tensor) -> Tensor:
        found = old.clone()
        trees = found.reshape(-1, spec.outputs, spec.nodes, spec.inputs + 2)[step]
        trees[..., : spec.inputs] = asked << weight.f
        trees[:, spec.nodes - spec.leaves // 2 :, spec.inputs :] = leaves.reshape(spec.outputs, -1, 2)
        return found

    first = half(weight.first, grown.asked.first, grown.leaves.first)
    return Share(first, half(weight.second, grown.asked.second, grown.leaves.second), weight.f)


def _by_output(slopes: Share, curvatures: Share) -> Share:
    """Derivatives [rows, outputs] by output: [2, outputs, rows]."""
    return stack([slopes.T, curvatures.T])
