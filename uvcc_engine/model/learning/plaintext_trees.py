"""The same boosted trees in clear, float64: what the secret ones are held against."""

from __future__ import annotations

import numpy as np

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, Floats, Ints
from uvcc_engine.model.layer_types.trees import Trees
from uvcc_engine.model.learning.boosting import LEAST_CURVATURE


class ClearTrees:
    """Grows a tree for each output per step into ``weight``, of the spec's ``weight_shape``: changed in place."""

    def __init__(self, job: PrivateJob, spec: Trees, data: Dataset, weight: Floats) -> None:
        self._job, self._spec, self.weight = job, spec, weight
        self._x = data.train_x
        smooth, labels, outputs = job.label_smoothing, data.train_y.reshape(-1), spec.outputs
        y = labels.reshape(-1, 1) if outputs == 1 else np.eye(outputs)[labels.astype(np.int64)]
        self._y: Floats = y.astype(np.float64) * (1.0 - smooth) + smooth / max(2, outputs)
        self.margins: Floats = np.zeros((len(self._x), outputs))

    def step(self, step: int, rows: Ints) -> float:
        """Grow the trees of ``step`` from these rows; their mean loss before it."""
        y, z = self._y[rows], self.margins[rows]
        if self._job.objective == "mse":
            slope, curvature, losses = z - y, np.ones_like(z), (z - y) ** 2 / 2.0
        else:
            whole = np.logaddexp(0.0, z) if z.shape[1] == 1 else np.logaddexp.reduce(z, 1, keepdims=True)
            chance = np.exp(z - whole)
            slope, curvature = chance - y, chance * (1.0 - chance) + LEAST_CURVATURE
            losses = whole - y * z if z.shape[1] == 1 else y * (whole - z)
        for output in range(z.shape[1]):
            at = step * z.shape[1] + output
            self.margins[:, output] += self._grown(step, at, rows, np.stack([slope[:, output], curvature[:, output]]))
        return float(losses.sum() / len(rows))

    def _grown(self, step: int, number: int, rows: Ints, slopes: Floats) -> Floats:
        """Grow the tree of this number from derivatives [2, rows]; what it answers to every row."""
        spec = self._spec
        here: Floats = np.ones((len(self._x), 1))
        tree = self.weight[number * spec.nodes : (number + 1) * spec.nodes]
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
        answers: Floats = here @ leaves
        return answers

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
