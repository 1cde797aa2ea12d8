"""What scikit-learn's own tools ask of an estimator: its parameters by name, and what kind it is."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Self

from uvcc_engine.contract.errors import ConfigError


class Parameters:
    """An estimator whose parameters are the arguments of its ``__init__``, kept under their names.

    ``_kind``: classifier, regressor or clusterer, or None where its targets say so; ``_supervised``: whether it takes
    any. scikit-learn itself is not needed.
    """

    _kind: ClassVar[str | None] = None
    _supervised: ClassVar[bool] = True

    @classmethod
    def _names(cls) -> list[str]:
        return list(inspect.signature(cls).parameters)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Its parameters by name."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Set some of them. Raises ConfigError naming one that there is not."""
        for name, value in params.items():
            if name not in self._names():
                raise ConfigError(
                    f"{type(self).__name__} has no parameter {name!r}", f"one of {', '.join(self._names())}"
                )
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's own tools ask of an estimator."""
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type=self._kind,
            target_tags=TargetTags(required=self._supervised),
            transformer_tags=None,
            classifier_tags=ClassifierTags() if self._kind == "classifier" else None,
            regressor_tags=RegressorTags() if self._kind == "regressor" else None,
        )
