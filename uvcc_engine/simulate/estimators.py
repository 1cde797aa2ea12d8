"""scikit-learn's estimator interface over a simulated training; scikit-learn itself is not needed."""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.simulate.fitting import SimulatedFit, fit
from uvcc_engine.simulate.parameters import Parameters


class _Estimator(Parameters):
    """What both estimators have in common: a fit that reveals the loss alone."""

    _objectives: tuple[str, ...] = ()

    def __init__(
        self,
        model: Any = None,
        *,
        epochs: int = 10,
        batch: int = 64,
        lr: float = 0.1,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        objective: str = "",
        seed: int = 7,
        frac_bits: int = 16,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.optimizer = optimizer
        self.momentum = momentum
        self.objective = objective
        self.seed = seed
        self.frac_bits = frac_bits

    def _fit(self, x: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> SimulatedFit:
        """Train on all rows. Only the loss is revealed: the one test row that a job needs is not looked at."""
        rows, labels = np.asarray(x), np.asarray(y)
        given = {name: value for name, value in self.get_params().items() if name != "model"}
        given["batch"] = min(given["batch"], len(rows))
        given["objective"] = self.objective or self._objectives[0]
        if given["objective"] not in self._objectives:
            raise ConfigError(
                f"{type(self).__name__}: objective {self.objective!r}", f"one of {', '.join(self._objectives)}"
            )
        model = _DEFAULT if self.model is None else self.model
        given |= {"test": (rows[:1], labels[:1]), "reveal": ["loss"], "row_weights": sample_weight}
        self.result_ = fit(model, rows, labels, **given)
        self.n_features_in_ = self.result_.model.features
        return self.result_

    def _fitted(self) -> SimulatedFit:
        found: SimulatedFit | None = getattr(self, "result_", None)
        if found is None:
            raise ConfigError("this estimator was not fitted", "call fit first")
        return found


class PrivateClassifier(_Estimator):
    """A classifier that is trained between three simulated parties: ``fit``, ``predict``, ``predict_proba``, ``score``.

    Its parameters are those of ``simulate.fit``; without a ``model`` it is 16 neurons and a ReLU. ``result_`` is the
    ``SimulatedFit``. ``objective``: cross-entropy, or binary, which takes a model of one output.
    """

    _kind = "classifier"
    _objectives = ("cross-entropy", "binary")

    def fit(self, x: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on all rows; only the loss is revealed. ``sample_weight``: what each row counts, 0 to 16."""
        self.classes_ = np.array(self._fit(x, y, sample_weight).classes)
        return self

    def predict(self, x: ArrayLike) -> np.ndarray[Any, Any]:
        """The likeliest class of every row."""
        return self._fitted().predict(x)

    def predict_proba(self, x: ArrayLike) -> Floats:
        """Every class's probability."""
        return self._fitted().predict_proba(x)

    def score(self, x: ArrayLike, y: ArrayLike) -> float:
        """Share of the rows that are predicted rightly."""
        return float((self.predict(x) == np.asarray(y)).mean())


class PrivateRegressor(_Estimator):
    """A regressor that is trained between three simulated parties: ``fit``, ``predict``, ``score`` (R squared).

    As ``PrivateClassifier``; ``objective``: mse, huber or poisson. Targets are brought to mean 0 and deviation 1 before
    they are shared, and back in ``predict``; counts (poisson) are shared as they are.
    """

    _kind = "regressor"
    _objectives = ("mse", "huber", "poisson")

    def fit(self, x: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on all rows; only the loss is revealed. ``sample_weight``: what each row counts, 0 to 16."""
        targets = np.asarray(y, dtype=np.float64)
        counts = self.objective == "poisson"
        self.shift_, self.scale_ = (0.0, 1.0) if counts else (float(targets.mean()), float(targets.std()) or 1.0)
        self._fit(x, (targets - self.shift_) / self.scale_, sample_weight)
        return self

    def predict(self, x: ArrayLike) -> Floats:
        """The number that is expected of every row."""
        found: Floats = self._fitted().predict(x) * self.scale_ + self.shift_
        return found

    def score(self, x: ArrayLike, y: ArrayLike) -> float:
        """R squared."""
        truth = np.asarray(y, dtype=np.float64)
        return 1.0 - float(np.square(self.predict(x) - truth).sum() / np.square(truth - truth.mean()).sum())


_DEFAULT: Final = [{"linear": 16}, "relu", "linear"]
