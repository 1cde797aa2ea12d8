"""k-means in secret: each step moves every centroid to the mean of its rows, and nothing but listed numbers opens."""

from __future__ import annotations

import math
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.early_stop import WATCHED
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Floats, Ints, public_stream
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.functions import rsqrt_protocol
from uvcc_engine.model.layer_types.centroids import KMeansLayer, kmeans_of
from uvcc_engine.model.learning.answer_metrics import mean_of
from uvcc_engine.model.learning.measured import Measured
from uvcc_engine.model.learning.replica_sums import ReplicaSums
from uvcc_engine.model.learning.training import PrivateTrainer, SummedLoss
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol
from uvcc_engine.mpc.comparisons.tournament import greatest_place_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import (
    add,
    add_public,
    dot_protocol,
    mul_protocol,
    mul_public_protocol,
    scale_int,
    sub,
)
from uvcc_engine.sealing.inputs import PartyInputs

INERTIA = "inertia"
_ALONE: Final = ReplicaSums()


class KMeansTrainer(PrivateTrainer):
    """Centroids that begin, in step 0, spread like the training rows, and move with ``job.batch`` rows a step.

    A step of all rows and ``lr`` 1 is one of Lloyd's. Which row is nearest to which centroid stays secret, and how many
    are; a centroid of fewer than ``job.min_rows`` of the step's rows does not move.
    """

    def __init__(self, rt: Runtime, job: PrivateJob, model: ModelSpec, inputs: PartyInputs) -> None:
        """Start at nothing. Raises ConfigError as ``PrivateTrainer``, and for too few rows."""
        super().__init__(rt, job, model, inputs)
        self._optimizer.moments.clear()  # centroids have no momentum
        spec = kmeans_of(model)
        assert spec is not None
        self._groups = groups(job.seed, self._tensors["train_x"].shape[0], spec.clusters, job.min_rows)

    @property
    def _layer(self) -> KMeansLayer:
        return cast(KMeansLayer, self._layers[0])

    def _step_protocol(self, rows: Tensor, *, reveal: bool) -> MpcProtocol[SummedLoss | None]:
        rt, first = self._rt, self._optimizer.step == 0
        if first and self._standardiser is not None:
            yield from self._standardiser.fit_protocol(self._tensors["train_x"])
        if first:
            x = yield from self._rows_protocol("train")
            self._layer.weight = yield from starts_protocol(rt, x, self._groups)
        x = yield from self._rows_protocol("train", rows)
        scores, place = yield from nearest_protocol(rt, self._layer, x)
        total = apart_protocol(rt, x, scores, place)
        return (yield from self._beside_protocol(self._move_protocol(x, place), total if reveal else None))

    def _move_protocol(self, x: Share, place: Share) -> MpcProtocol[None]:
        layer, rate = self._layer, self._job.lr_at(self._optimizer.step)
        assert layer.weight is not None
        steps = moved_protocol(self._rt, layer.weight, x, place, self._job.min_rows, rate)
        layer.weight = yield from layer.moved_protocol(steps)

    def _apart_protocol(self, part: str) -> MpcProtocol[tuple[Share, int]]:
        """The squared distances of all rows of ``part``, added up, and how many rows there are."""
        x = yield from self._rows_protocol(part)
        scores, place = yield from nearest_protocol(self._rt, self._layer, x)
        return (yield from apart_protocol(self._rt, x, scores, place)), x.shape[0]

    def _validation_protocol(self) -> MpcProtocol[list[Measured]]:
        total, rows = yield from self._apart_protocol("val")
        return [mean_of(total, rows, lambda mean: {WATCHED: mean})]

    def _measure_protocol(self) -> MpcProtocol[list[Measured]]:
        total, _ = yield from self._apart_protocol("test")
        return [mean_of(total, 1, lambda whole: {INERTIA: whole})]


def nearest_protocol(rt: Runtime, layer: KMeansLayer, x: Share) -> MpcProtocol[tuple[Share, Share]]:
    """What the layer gives for rows ``x [rows, features]``, and one-hot (``f = 0``) the nearest centroid of each, the
    first of equals: ``[rows, clusters]`` both. 8 rounds for up to 10 clusters, 7 more for each further factor of it."""
    scores = yield from layer.forward_protocol(rt, x)
    steps = greatest_place_protocol(rt, scores)
    return scores, (yield from layer.moved_protocol(steps))


def apart_protocol(rt: Runtime, x: Share, scores: Share, place: Share) -> MpcProtocol[Share]:
    """The squared distances of rows ``x [rows, features]`` to their nearest centroids, added up: ``[1]``. 2 rounds."""
    both: MpcProtocol[list[Any]] = par(dot_protocol(rt, x, x), dot_protocol(rt, scores, place))
    squares, near = yield from both
    return sub(squares, scale_int(near, 2))


def moved_protocol(
    rt: Runtime, centroids: Share, x: Share, place: Share, least: int, rate: float, replicas: ReplicaSums = _ALONE
) -> MpcProtocol[Share]:
    """Centroids ``[clusters, features]`` that went ``rate`` of the way to the mean of their rows, which ``place``
    ``[rows, clusters]`` says of rows ``x [rows, features]``. One of fewer than ``least`` rows stays where it is.
    Each of ``replicas`` has as many rows of its own, and moves some of the centroids.

    What the rows are apart from their centroid is added up before the one truncation, and divided by their secret
    number as the square of an inverse square root: off by 4e-4 of the way, so by nothing at the end. About 30 rounds,
    all but 2 of them of ``clusters`` numbers.
    """
    rows, (clusters, features), f = x.shape[0] * replicas.dp.size, centroids.shape, centroids.f
    spare, mine = halvings(rows, clusters, f), replicas.mine(clusters)
    counts = place.sum(0)
    minus = scale_int(counts, -1).map(torch.diag)
    counts = replicas.summed(counts).index(mine)
    sums = replicas.matmuls_protocol(rt, [(cat([x, centroids]).T, cat([place, minus]))], 2.0**-spare, mine)
    if mine.stop == mine.start:
        yield from sums
        return add(centroids, replicas.gathered(replicas.nothing(rt, features, f).T, clusters))
    over = add_public(rt, counts, -float(least))
    first: MpcProtocol[list[Any]] = par(sums, drelu_arithmetic_protocol(rt, over))
    apart, enough = yield from first
    apart, over = yield from par(mul_protocol(rt, apart, enough.reshape(1, -1)), mul_protocol(rt, over, enough))
    share = scale_int(add_public(rt, over, float(least)), 1 << (f - spare)).with_f(f)
    low, high = _powers(least, max(least, rows), spare)
    inverse = (yield from rsqrt_protocol(rt, share, low, high, f)).reshape(1, -1)
    root = yield from mul_protocol(rt, apart, inverse)
    way = yield from mul_protocol(rt, root, inverse, scale=rate)
    return add(centroids, replicas.gathered(way.T, clusters))


def halvings(rows: int, clusters: int, f: int) -> int:
    """How often sums over a cluster's rows, and their number, are halved: to about one where all are of one size."""
    return max(0, min(f, round(math.log2(rows / clusters))))


def _powers(least: int, most: int, spare: int) -> tuple[int, int]:
    """Between which powers of 4 numbers of ``least`` to ``most`` lie that were halved ``spare`` times."""
    low = math.floor(math.log(least, 4) - spare / 2.0 - 2.0**-10)
    return low, max(1, low + 1, math.ceil(math.log(most, 4) - spare / 2.0))


def groups(seed: int, rows: int, clusters: int, least: int) -> Ints:
    """Rows ``[clusters, size]`` whose means the centroids begin near, drawn by a public seed. Raises ConfigError where
    a group would have fewer than ``least``."""
    size = rows // clusters
    if size < max(1, least):
        what = f"{clusters} clusters of {rows} training rows, and job.min_rows is {least}"
        raise ConfigError(what, "fewer clusters, or more rows")
    order = np.argsort(public_stream("kmeans", seed, 0, rows), kind="stable")[: size * clusters]
    return order.astype(np.int64).reshape(clusters, size)


def starts_protocol(rt: Runtime, x: Share, grouped: Ints, replicas: ReplicaSums = _ALONE) -> MpcProtocol[Share]:
    """Centroids spread like the rows ``x [rows, features]``: the mean of each of these groups, moved away from that of
    all as far as a row lies, which is a mean's distance times the root of the group's size. 2 rounds. ``x`` are all
    rows at each of ``replicas``, which finds some of the centroids."""
    (clusters, size), mine = grouped.shape, replicas.mine(grouped.shape[0])
    if mine.stop == mine.start:
        return replicas.gathered(replicas.nothing(rt, x.shape[1], x.f).T, clusters)
    sums = x.index(torch.from_numpy(grouped.reshape(-1)).to(rt.device)).reshape(clusters, size, -1).sum(1)
    whole = sums.sum(0, keepdim=True)
    away, middle = _factors(clusters, size)
    both: MpcProtocol[list[Any]] = par(
        mul_public_protocol(rt, sub(scale_int(sums.index(mine), clusters), whole), away),
        mul_public_protocol(rt, whole, middle),
    )
    apart, centre = yield from both
    return replicas.gathered(add(apart, centre), clusters)


def clear_starts(x: Floats, grouped: Ints) -> Floats:
    """The same in clear: [clusters, features] of rows [rows, features]."""
    clusters, size = grouped.shape
    sums = x[grouped].sum(1)
    away, middle = _factors(clusters, size)
    found: Floats = (clusters * sums - sums.sum(0)) * away + sums.sum(0) * middle
    return found


def _factors(clusters: int, size: int) -> tuple[float, float]:
    return math.sqrt(size) / (size * clusters), 1.0 / (size * clusters)
