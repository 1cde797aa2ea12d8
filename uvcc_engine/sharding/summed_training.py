"""Trees and k-means over the replicas of a party: what is made of sums over rows, instead of by gradients.

Each replica has its slice of a step's rows. Histograms and the sums of clusters are added up inside each party before
the one truncation; what follows from them (gains, the choice among them, leaves, ways of centroids) is divided among
the replicas and gathered, so that all of them hold the same trees, margins and centroids, bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.job.early_stop import WATCHED
from uvcc_engine.contract.job.private_job import METRICS, PrivateJob
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.layer_types.centroids import KMeans, KMeansLayer
from uvcc_engine.model.layer_types.trees import Trees, TreesLayer, trees_of
from uvcc_engine.model.learning import lloyd_steps
from uvcc_engine.model.learning.answer_metrics import mean_of
from uvcc_engine.model.learning.boosting import (
    STEEPEST,
    no_answers,
    slopes_protocol,
    written,
)
from uvcc_engine.model.learning.measured import Measured
from uvcc_engine.model.learning.replica_sums import ReplicaSums
from uvcc_engine.model.learning.tree_growth import TreeGrower
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import add
from uvcc_engine.parallel.group import OnEvent
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.pipeline import Record
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding import fleet_answers
from uvcc_engine.sharding.microbatches import MainRuntime
from uvcc_engine.sharding.partition import bounds
from uvcc_engine.sharding.sharded_training import ParallelTrainer
from uvcc_engine.sharding.validation import check_summed


class SummedTrainer(ParallelTrainer):
    """What trains in one protocol on the main stream, its sums over rows being taken over all replicas."""

    def __init__(
        self,
        main: Runtime,
        runtime: MainRuntime,
        job: PrivateJob,
        model: ModelSpec,
        inputs: PartyInputs,
        groups: PartyGroups,
        on_event: OnEvent,
        record: Record | None = None,
    ) -> None:
        """As ``ParallelTrainer``. Raises ConfigError for more than replicas, and for too few rows."""
        size = groups.place.topology
        check_summed(model, stages=size.stages, tensor=size.tensor, microbatches=size.microbatches)
        super().__init__(main, runtime, job, model, inputs, groups, on_event, record)
        self._optimizer.moments.clear()  # there is no momentum
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Make what is kept beside the weight."""

    @property
    def _spec(self) -> object:
        return self._model.layers[0]

    @property
    def _weight(self) -> Share:
        (part, k), *_ = self._slots
        return part.weights[k]

    def _moved_to(self, weight: Share) -> None:
        self._set_weights([weight])

    def _sums(self) -> ReplicaSums:
        self._groups.start_dp()
        self._note_first_sum()
        return ReplicaSums(self._groups.dp)

    def _of_mine(self, rows: int) -> slice:
        """This replica's part of so many rows."""
        size = self._groups.place.topology
        return bounds(rows, size.replicas, self._groups.place.coord.replica)


class ParallelTreeTrainer(SummedTrainer):
    """One replica's part of ``learning.boosting.TreeTrainer``. Every replica keeps the margins of all rows."""

    def _begin(self) -> None:
        rows = self._fleet.tensors["train_x"].shape[0]
        self._margins = [no_answers(self._runtimes.main, self._job, self._model, rows)]

    def _kept(self) -> list[tuple[str, list[Share]]]:
        return [*super()._kept(), ("margins", self._margins)]

    def _trained(self, step: int, *, reveal: bool) -> tuple[Share | None, Tensor | None]:
        sums = self._sums()
        total = self._runtimes.main.run(self._step_protocol(step, sums, reveal=reveal))
        return None if total is None else self._fleet.summed([total]), None

    def _step_protocol(self, step: int, sums: ReplicaSums, *, reveal: bool) -> MpcProtocol[Share | None]:
        """Grow the step's trees, and answer this replica's rows: those of its batch, and its part of those that the
        step does not draw. The summed loss of its batch, if it is to be revealed."""
        main, job, tensors = self._runtimes.main, self._job, self._fleet.tensors
        drawn, mine = self._whole_batch(step), self._my_batch(step)
        rest = _without(tensors["train_x"].shape[0], drawn)
        others = rest[self._of_mine(len(rest))]
        y, margins = tensors["train_y"].index(mine), self._margins[0].index(mine)
        slopes, total = yield from slopes_protocol(main, job, margins, y, _itself if reveal else None)
        layer = TreesLayer(cast(Trees, self._spec), self._weight)
        rate, steepest = job.lr_at(step), STEEPEST[job.objective]
        grower = TreeGrower(main, layer, rate, steepest, self._whole_job.batch, sums)
        x, first = tensors["train_x"].index(torch.cat([mine, others])), torch.arange(len(mine), device=main.device)
        grown = yield from layer.grown_protocol(grower.grow_protocol(x, slopes, first if len(others) else None))
        of_drawn = sums.gathered(grown.answers.index(slice(0, len(mine))), len(drawn))
        of_rest = sums.gathered(grown.answers.index(slice(len(mine), None)), len(rest))
        self._margins[0] = add(self._margins[0], cat([of_drawn, of_rest]).index(_places(torch.cat([drawn, rest]))))
        self._moved_to(written(layer, step, grown))
        return total


class ParallelKMeansTrainer(SummedTrainer):
    """One replica's part of ``learning.lloyd_steps.KMeansTrainer``."""

    def _begin(self) -> None:
        rows, clusters = self._fleet.tensors["train_x"].shape[0], cast(KMeans, self._spec).clusters
        self._groups_of_rows = lloyd_steps.groups(self._job.seed, rows, clusters, self._job.min_rows)

    @property
    def _layer(self) -> KMeansLayer:
        return KMeansLayer(cast(KMeans, self._spec), self._weight)

    def _trained(self, step: int, *, reveal: bool) -> tuple[Share | None, Tensor | None]:
        main, sums, x = self._runtimes.main, self._sums(), self._fleet.tensors["train_x"]
        if step == 0:
            self._moved_to(main.run(lloyd_steps.starts_protocol(main, x, self._groups_of_rows, sums)))
        total = main.run(self._step_protocol(x.index(self._my_batch(step)), step, sums, reveal=reveal))
        return None if total is None else self._fleet.summed([total]), None

    def _step_protocol(self, x: Share, step: int, sums: ReplicaSums, *, reveal: bool) -> MpcProtocol[Share | None]:
        """Move the centroids; the summed squares of this replica's rows, if they are to be revealed."""
        main, layer, job = self._runtimes.main, self._layer, self._job
        scores, place = yield from lloyd_steps.nearest_protocol(main, layer, x)
        moving = lloyd_steps.moved_protocol(main, self._weight, x, place, job.min_rows, job.lr_at(step), sums)
        steps = [layer.moved_protocol(moving)]
        steps += [lloyd_steps.apart_protocol(main, x, scores, place)] if reveal else []
        moved, *total = yield from par(*steps)
        self._moved_to(moved)
        return total[0] if total else None

    def _apart(self, part: str) -> Share:
        """The squared distances of all rows of ``part``, added up. All workers call it together."""
        main, x = self._runtimes.main, self._fleet.tensors[f"{part}_x"]
        self._groups.start_dp()
        found = main.run(self._apart_protocol(x.index(self._of_mine(x.shape[0]))))
        return self._fleet.summed([found])

    def _apart_protocol(self, x: Share) -> MpcProtocol[Share]:
        main = self._runtimes.main
        scores, place = yield from lloyd_steps.nearest_protocol(main, self._layer, x)
        return (yield from lloyd_steps.apart_protocol(main, x, scores, place))

    def _measured_validation(self) -> list[Measured]:
        total, rows = self._apart("val"), self._fleet.tensors["val_x"].shape[0]
        return [mean_of(total, rows, partial(_named, WATCHED))] if self._fleet.opener else []

    def evaluate(self) -> dict[str, float]:
        """See ``Learner``."""
        if self._job.keep_best:
            self._set_weights(self._best)
        if not set(METRICS) & set(self._job.reveal):
            return {}
        total = self._apart("test")
        measured = [mean_of(total, 1, partial(_named, lloyd_steps.INERTIA))] if self._fleet.opener else []
        rings = self._open_metrics([one.share for one in measured])
        return fleet_answers.told_numbers(self._fleet, measured, rings)


def parallel_trainer_of(
    main: Runtime,
    runtime: MainRuntime,
    job: PrivateJob,
    model: ModelSpec,
    inputs: PartyInputs,
    groups: PartyGroups,
    on_event: OnEvent,
    record: Record | None = None,
) -> ParallelTrainer:
    """The trainer of one of several workers of a party. Raises ConfigError if the model cannot be placed so."""
    summed = ParallelKMeansTrainer if model.unsupervised else ParallelTreeTrainer
    kind = summed if model.unsupervised or trees_of(model) is not None else ParallelTrainer
    return kind(main, runtime, job, model, inputs, groups, on_event, record)


def _itself(total: MpcProtocol[Share]) -> MpcProtocol[Share]:
    return total


def _named(name: str, value: float) -> dict[str, float]:
    return {name: value}


def _without(n: int, rows: Tensor) -> Tensor:
    """The numbers below ``n`` that are not among ``rows``, in order."""
    left = torch.ones(n, dtype=torch.bool, device=rows.device)
    left[rows] = False
    return left.nonzero()[:, 0]


def _places(rows: Tensor) -> Tensor:
    """Where each number first stands in ``rows``, which has all from 0 up to its largest: the same at all parties."""
    return torch.from_numpy(np.unique(rows.cpu().numpy(), return_index=True)[1]).to(rows.device)
