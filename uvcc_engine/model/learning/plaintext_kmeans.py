"""The same k-means in clear, float64: what the secret one is held against."""

from __future__ import annotations

import numpy as np

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, Floats, Ints
from uvcc_engine.model.layer_types.centroids import KMeans
from uvcc_engine.model.learning.lloyd_steps import clear_starts, groups


class ClearKMeans:
    """Moves the centroids ``weight`` [clusters, features], which it changes in place, a step at a time."""

    def __init__(self, job: PrivateJob, spec: KMeans, data: Dataset, weight: Floats) -> None:
        self._job, self._x, self.weight = job, data.train_x, weight
        self._groups = groups(job.seed, len(data.train_x), spec.clusters, job.min_rows)

    def step(self, step: int, rows: Ints) -> float:
        """Go a step with these rows; their mean squared distance to the nearest centroid before it."""
        if step == 0:
            self.weight[:] = clear_starts(self._x, self._groups)
        x = self._x[rows]
        squares = np.square(x[:, None] - self.weight).sum(2)
        nearest = squares.argmin(1)
        for at in range(len(self.weight)):
            mine = x[nearest == at]
            if len(mine) >= self._job.min_rows:
                self.weight[at] += self._job.lr_at(step) * (mine.mean(0) - self.weight[at])
        return float(squares.min(1).mean())


def clear_inertia(x: Floats, centroids: Floats) -> float:
    """The squared distances of rows to their nearest centroids, added up."""
    return float(np.square(x[:, None] - centroids).sum(2).min(1).sum())
