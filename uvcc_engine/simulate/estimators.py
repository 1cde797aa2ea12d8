"""scikit-learn's estimator interface over a simulated training; scikit-learn itself is not needed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.simulate.fitting import SimulatedFit, fit


class PrivateClassifier:
    """A classifier that is trained between three simulated parties: ``fit``, ``predict``, ``predict_proba``, ``score``.

    Its parameters are those of ``simulate.fit``; without a ``model`` it is 16 neurons and a ReLU. ``result_`` is the
    ``SimulatedFit``.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        epochs: int = 10,
        batch: int = 64,
        lr: float = 0.1,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        seed: int = 7,
        frac_bits: int = 16,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.optimizer = optimizer
        self.momentum = momentum
        self.seed = seed
        self.frac_bits = frac_bits

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Its parameters by name."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    def set_params(self, **params: Any) -> PrivateClassifier:
        """Set some of them. Raises ConfigError naming one that there is not."""
        for name, value in params.items():
            if name not in _PARAMETERS:
                raise ConfigError(f"PrivateClassifier has no parameter {name!r}", f"one of {', '.join(_PARAMETERS)}")
            setattr(self, name, value)
        return self

    def fit(self, x: ArrayLike, y: ArrayLike) -> PrivateClassifier:
        """Train on all rows. Only the loss is revealed: the one test row that a job needs is not looked at."""
        rows, labels = np.asarray(x), np.asarray(y)
        given = {name: value for name, value in self.get_params().items() if name != "model"}
        given["batch"] = min(given["batch"], len(rows))
        model = _DEFAULT if self.model is None else self.model
        self.result_: SimulatedFit = fit(model, rows, labels, test=(rows[:1], labels[:1]), reveal=["loss"], **given)
        self.classes_ = np.array(self.result_.classes)
        self.n_features_in_ = self.result_.model.features
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

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's own tools ask of a classifier."""
        from sklearn.utils import ClassifierTags, Tags, TargetTags

        target = TargetTags(required=True)
        return Tags(
            estimator_type="classifier",
            target_tags=target,
            transformer_tags=None,
            classifier_tags=ClassifierTags(),
            regressor_tags=None,
        )

    def _fitted(self) -> SimulatedFit:
        found: SimulatedFit | None = getattr(self, "result_", None)
        if found is None:
            raise ConfigError("this estimator was not fitted", "call fit first")
        return found


_DEFAULT: Final = [{"linear": 16}, "relu", "linear"]
_PARAMETERS: Final = ("model", "epochs", "batch", "lr", "optimizer", "momentum", "seed", "frac_bits")
