"""Gradient-boosted trees between three simulated parties, behind scikit-learn's interface."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.bins import MOST_BINS, bits_of, edges_of
from uvcc_engine.data.sets import Floats
from uvcc_engine.simulate.fitting import SimulatedFit, fit
from uvcc_engine.simulate.given_rows import plain_numbers
from uvcc_engine.simulate.parameters import Parameters


class PrivateTrees(Parameters):
    """Boosted trees over numbers: two classes, or a number to fit, as the targets are. ``fit``, ``predict``, ``score``.

    The columns are brought into ``n_bins`` quantile bins by the rows' owner; which of them a tree asks, and what it
    answers, stays secret in a run, which reveals the loss alone. Of more than two classes ``n_estimators`` trees are
    grown for each. ``subsample``: the share of the rows that each tree is grown from. ``result_`` is the
    ``SimulatedFit``, ``edges_`` the bins' edges by column.
    """

    def __init__(
        self,
        n_estimators: int = 20,
        *,
        max_depth: int = 3,
        learning_rate: float = 0.3,
        n_bins: int = 16,
        subsample: float = 1.0,
        l2: float = 1.0,
        min_gain: float = 0.0,
        seed: int = 7,
        frac_bits: int = 16,
    ) -> None:
        self.n_estimators = n_estimators
        self.max_depth = max_depth
        self.learning_rate = learning_rate
        self.n_bins = n_bins
        self.subsample = subsample
        self.l2 = l2
        self.min_gain = min_gain
        self.seed = seed
        self.frac_bits = frac_bits

    def fit(self, x: ArrayLike, y: ArrayLike) -> Self:
        """Grow the trees from rows (rows, columns). Raises ConfigError for what does not fit."""
        rows, labels = plain_numbers(x), np.asarray(y)
        if rows.ndim != 2 or not rows.size or not 0.0 < self.subsample <= 1.0 or not 2 <= self.n_bins <= MOST_BINS:
            what = f"rows of shape {rows.shape}, {self.n_bins} bins, a subsample of {self.subsample:g}"
            raise ConfigError(what, f"(rows, columns), 2 to {MOST_BINS} bins, a share of 0 to 1")
        self.edges_ = [edges_of(column, self.n_bins) for column in rows.T]
        real = labels.dtype.kind == "f"
        self.shift_, self.scale_ = (float(labels.mean()), float(labels.std()) or 1.0) if real else (0.0, 1.0)
        bits, targets = self._bits(rows), (labels - self.shift_) / self.scale_ if real else labels
        words = {"count": self.n_estimators, "depth": self.max_depth, "l2": self.l2, "min_gain": self.min_gain}
        self.result_: SimulatedFit = fit(
            [{"trees": words}],
            bits,
            targets,
            steps=self.n_estimators,
            test=(bits[:1], targets[:1]),
            objective="mse" if real else "binary" if len(np.unique(labels)) <= 2 else "cross-entropy",
            batch=max(1, round(self.subsample * len(rows))),
            lr=self.learning_rate,
            schedule="constant",
            momentum=0.0,
            seed=self.seed,
            frac_bits=self.frac_bits,
            reveal=["loss"],
        )
        self.classes_ = np.array(self.result_.classes)
        return self

    def _bits(self, rows: Floats) -> Floats:
        if not hasattr(self, "edges_"):
            raise ConfigError("these trees were not grown", "call fit first")
        if rows.ndim != 2 or rows.shape[1] != len(self.edges_) or not np.isfinite(rows).all():
            what = f"rows of shape {rows.shape}, or one of their numbers is not finite"
            raise ConfigError(what, f"give {len(self.edges_)} numbers a row, none of them missing")
        return np.stack([b for x, edges in zip(rows.T, self.edges_, strict=True) for b in bits_of(x, edges)], 1)

    def predict_proba(self, x: ArrayLike) -> Floats:
        """Every class's probability, in clear with the opened trees. Raises ConfigError where numbers are fitted."""
        bits = self._bits(plain_numbers(x))
        return self.result_.predict_proba(bits)

    def predict(self, x: ArrayLike) -> np.ndarray[Any, Any]:
        """The likelier class of every row, or the number that is expected, in clear with the opened trees."""
        bits = self._bits(plain_numbers(x))
        found = self.result_.predict(bits)
        return found if len(self.classes_) else found * self.scale_ + self.shift_

    def score(self, x: ArrayLike, y: ArrayLike) -> float:
        """Share of the rows that are predicted rightly, or R squared."""
        truth, found = np.asarray(y), self.predict(x)
        if len(self.classes_):
            return float((found == truth).mean())
        return 1.0 - float(np.square(found - truth).sum() / np.square(truth - truth.mean()).sum())
