"""k-means between three simulated parties, behind scikit-learn's interface."""

from __future__ import annotations

import os
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats, Ints
from uvcc_engine.model.learning.kmeans import Clusters, kmeans_protocol
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import share_of, split
from uvcc_engine.simulate.given_rows import plain_numbers
from uvcc_engine.simulate.parameters import Parameters


class PrivateKMeans(Parameters):
    """k-means of shared rows: ``fit``, ``predict``. Revealed are the centroids, the clusters' sizes and the inertia of
    every round, none of fewer than ``min_rows`` rows; which row belongs to which cluster stays secret.

    Of ``n_init`` starts, drawn by ``seed``, the one with the least revealed inertia counts. Columns should be of one
    scale. It runs between simulated parties only: a profile asks for centroids that stay secret (``fit`` of
    ``[{"kmeans": 3}]``).
    """

    _kind = "clusterer"
    _supervised = False

    def __init__(
        self,
        n_clusters: int = 3,
        *,
        n_init: int = 4,
        max_iter: int = 30,
        min_rows: int = 5,
        seed: int = 7,
        frac_bits: int = 16,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_init = n_init
        self.max_iter = max_iter
        self.min_rows = min_rows
        self.seed = seed
        self.frac_bits = frac_bits

    def fit(self, x: ArrayLike, y: object = None) -> Self:
        """Find the centroids of rows (rows, columns). Raises ConfigError for what does not fit."""
        rows = plain_numbers(x, "rows")
        if rows.ndim != 2 or self.n_clusters < 2 or self.n_init < 1 or self.max_iter < 1:
            raise ConfigError(
                f"rows of shape {rows.shape} in {self.n_clusters} clusters", "(rows, columns), 2 clusters or more"
            )
        made = split(torch.from_numpy(rows), self.frac_bits, os.urandom, name="rows")
        planes = LocalPlanes(self.seed)

        def body(rt: Runtime) -> list[tuple[Floats, list[Clusters]]]:
            mine, found = share_of(made, rt.party, self.frac_bits), []
            for start in range(self.n_init):
                steps = kmeans_protocol(
                    rt, mine, self.n_clusters, rounds=self.max_iter, seed=self.seed + start, least=self.min_rows
                )
                found.append(rt.run(steps))
            return found

        tried = planes.run_three(body)[0]
        self.cluster_centers_, told = min(tried, key=lambda one: one[1][-1].inertia)
        self.inertia_ = told[-1].inertia
        self.counts_: Ints = told[-1].counts
        self.n_iter_ = len(told)
        self.rounds_ = planes.runtimes[0].rounds
        self.bytes_sent_ = sum(rt.bytes_sent for rt in planes.runtimes)
        return self

    def fit_predict(self, x: ArrayLike, y: object = None) -> np.ndarray[Any, Any]:
        """Find the centroids of rows, and the nearest one of each, in clear. Raises ConfigError as ``fit``."""
        return self.fit(x).predict(x)

    def predict(self, x: ArrayLike) -> np.ndarray[Any, Any]:
        """The nearest centroid of every row, in clear."""
        rows = plain_numbers(x, "rows")
        found: np.ndarray[Any, Any] = np.square(rows[:, None] - self.cluster_centers_).sum(2).argmin(1)
        return found
