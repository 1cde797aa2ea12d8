"""The same boosted trees in clear, float64: what the secret ones are held against."""

from __future__ import annotations

import numpy as np

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, Floats, Ints
from uvcc_engine.model.layer_types.trees import Trees
from uvcc_engine.model.learning.boosting import LEAST_CURVATURE


class ClearTrees:
    """Grows a tree per step into ``weight``, of the spec's ``weight_shape``, which it changes in place."""

    def __init__(self, job: PrivateJob, spec: Trees, data: Dataset, weight: Floats) -> None:
        self._job, self._spec, self.weight = job, spec, weight
        self._x = data.train_x
        smooth = job.label_smoothing
        self._y: Floats = data.train_y.reshape(-1).astype(np.float64) * (1.0 - smooth) + smooth / 2.0
        self.margins: Floats = np.zeros(len(self._x))

    def step(self, step: int, rows: Ints) -> float:
        """Grow the tree of ``step`` from these rows; their mean loss before it."""
        spec, y, z = self._spec, self._y[rows], self.margins[rows]
        if self._job.objective == "mse":
            slope, curvature, losses = z - y, np.ones_like(z), (z - y) ** 2 / 2.0
        else:
            chance = 1.0 / (1.0 + np.exp(-z))
            slope, curvature = chance - y, chance * (1.0 - chance) + LEAST_CURVATURE
            losses = np.logaddexp(0.0, z) - y * z
        here: Floats = np.ones((len(self._x), 1))
        slopes = np.stack([slope, curvature])
        tree = self.weight[step * spec.nodes : (step + 1) * spec.nodes]
        for level in range(spec.depth):
            first = (1 << level) - 1
            best = self.gains(slopes, here[rows], rows).argmax(-1)
            for node, column in enumerate(best.tolist()):
                tree[first + node, : spec.inputs] = np.arange(1, spec.inputs + 1) == column
            left = here * (self._x @ tree[first : 2 * first + 1, : spec.inputs].T)
            here = np.stack([left, here - left], -1).reshape(len(here), -1)
        whole = slopes @ here[rows]
        leaves = -self._job.lr_at(step) * whole[0] / (whole[1] + spec.l2)
        tree[spec.leaves // 2 - 1 :, spec.inputs :] = leaves.reshape(-1, 2)
        self.margins += here @ leaves
        return float(losses.mean())

    def gains(self, slopes: Floats, here: Floats, rows: Ints) -> Floats:
        """What each question would leave, [nodes, 1 + columns], that of asking nothing first.

        ``slopes``: [2, rows]; ``here``: [rows, nodes], 1 where a row is.
        """
        spec, parts = self._spec, slopes[:, None, :] * here.T[None]
        whole = parts.sum(-1, keepdims=True)
        left = np.concatenate([0.0 * whole, parts @ self._x[rows]], -1)
        found: Floats = sum((s[0] ** 2 / (s[1] + spec.l2) for s in (left, whole - left)), np.zeros(left.shape[1:]))
        found[:, 0] += 2.0 * spec.min_gain
        return found
