"""Gradient-boosted trees in secret: each step grows one tree for each output, from the slopes of the loss, and adds
their answers."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.layer_types.trees import TreesLayer, trees_of
from uvcc_engine.model.learning.objectives import binary_protocol
from uvcc_engine.model.learning.training import PrivateTrainer, SummedLoss, there_protocol
from uvcc_engine.model.learning.tree_growth import GrownTree, TreeGrower
from uvcc_engine.model.losses import (
    gradient_protocol,
    powers_protocol,
    total_loss_protocol,
    total_square_protocol,
)
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat, stack
from uvcc_engine.mpc.products.arithmetic import add, add_public, mul_protocol, neg, public, scale_int, sub
from uvcc_engine.sealing.inputs import PartyInputs

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
        spec = trees_of(model)
        assert spec is not None
        self._spec = spec
        rows = self._tensors["train_x"].shape[0]
        self._margins = [public(rt, torch.zeros(rows, spec.outputs), f=job.frac_bits)]

    def _kept(self) -> list[tuple[str, list[Share]]]:
        return [*super()._kept(), ("margins", self._margins)]

    def _step_protocol(self, rows: Tensor, *, reveal: bool) -> MpcProtocol[SummedLoss | None]:
        rt, step, x = self._rt, self._optimizer.step, self._tensors["train_x"]
        drawn = None if len(rows) == x.shape[0] else rows
        y, margins = self._tensors["train_y"], self._margins[0]
        y, margins = (y, margins) if drawn is None else (y.index(drawn), margins.index(drawn))
        slopes, loss = yield from self._slopes_protocol(margins, y, reveal=reveal)
        layer = cast(TreesLayer, self._layers[0])
        grower = TreeGrower(rt, layer, self._job.lr_at(step), STEEPEST[self._job.objective], len(rows))
        outputs = range(self._spec.outputs)
        each: MpcProtocol[list[GrownTree]] = par(*(grower.grow_protocol(x, slopes.index(k), drawn) for k in outputs))
        grown = yield from layer.grown_protocol(each)
        self._margins[0] = add(self._margins[0], cat([tree.answers for tree in grown], 1))
        for output, tree in enumerate(grown):
            self._put(step * len(grown) + output, tree)
        return loss

    def _slopes_protocol(
        self, margins: Share, y: Share, *, reveal: bool
    ) -> MpcProtocol[tuple[Share, SummedLoss | None]]:
        """First and second derivatives of each row's loss by each output, [outputs, 2, rows], and the summed loss if
        wanted."""
        rt, loss = self._rt, None
        if self._job.objective == "mse":
            slope = sub(margins, y)
            if reveal:
                loss = yield from self._loss_protocol(total_square_protocol(rt, slope))
            return _by_output(slope, public(rt, 1.0, slope)), loss
        slope, total = yield from self._chances_protocol(margins, y, reveal=reveal)
        chance = add(slope, y)
        steps: list[MpcProtocol[Any]] = [mul_protocol(rt, chance, add_public(rt, neg(chance), 1.0))]
        steps += [] if total is None else [self._loss_protocol(total)]
        curvature, *told = yield from par(*steps)
        loss = told[0] if told else None
        return _by_output(slope, add_public(rt, curvature, LEAST_CURVATURE)), loss

    def _chances_protocol(
        self, margins: Share, y: Share, *, reveal: bool
    ) -> MpcProtocol[tuple[Share, MpcProtocol[Share] | None]]:
        """What classes' chances are above the targets, and what gives the summed loss, if wanted."""
        rt = self._rt
        if self._job.objective == "binary":
            slope, total = yield from binary_protocol(rt, margins, y, loss=reveal)
            return slope, None if total is None else there_protocol(total)
        powers = yield from powers_protocol(rt, margins, loss=reveal)
        slope = yield from gradient_protocol(rt, powers, y)
        return slope, total_loss_protocol(rt, powers, y) if reveal else None

    def _put(self, number: int, tree: GrownTree) -> None:
        """Write the tree of this number into its rows of the weight. Local."""
        layer, spec = self._layers[0], self._spec
        assert layer.weight is not None
        one = 1 << layer.weight.f
        asked = scale_int(tree.asked, one)
        first, last = number * spec.nodes, (number + 1) * spec.nodes

        def written(weight: Tensor, asked: Tensor, leaves: Tensor) -> Tensor:
            found = weight.clone()
            found[first:last, : spec.inputs] = asked
            found[last - spec.leaves // 2 : last, spec.inputs :] = leaves.reshape(-1, 2)
            return found

        w = layer.weight
        layer.weight = Share(
            written(w.first, asked.first, tree.leaves.first), written(w.second, asked.second, tree.leaves.second), w.f
        )


def _by_output(slopes: Share, curvatures: Share) -> Share:
    """Derivatives [rows, outputs] side by side, by output: [outputs, 2, rows]."""
    return stack([slopes.T, curvatures.T], 1)
