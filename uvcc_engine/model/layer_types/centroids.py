"""Centroids of k-means (Lloyd, 1982), which stay secret: where they lie, how many rows each has, and which.

They learn from rows alone, without a target, and are not trained by gradients but moved to the mean of their rows
(``learning.lloyd_steps``), so a model that has them has no other layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.parts import one_rank_weight
from uvcc_engine.model.registry import (
    InitialContext,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    register,
)
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.model_spec import ModelSpec
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

T = TypeVar("T")
MOST_CLUSTERS: Final = 256


@dataclass(frozen=True, slots=True)
class KMeans(WeightedSpec):
    """``clusters`` centroids among rows of ``inputs`` features: its weight has one in each row.

    Of a row x and a centroid c it gives x c - c c / 2, which is greatest at the nearest centroid.
    """

    inputs: int
    clusters: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.clusters, self.inputs

    @property
    def decays(self) -> bool:
        return False

    @property
    def unsupervised(self) -> bool:
        return True


def kmeans_of(model: ModelSpec) -> KMeans | None:
    """The centroids that a model is, or None if it is another."""
    return cast(KMeans, model.layers[0]) if model.unsupervised else None


class KMeansLayer(Layer):
    """Centroids: 2 rounds from rows to what tells the nearest."""

    def __init__(self, spec: KMeans, weight: Share) -> None:
        self.weight = weight
        self.spec = spec

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        c = self.weight
        both: MpcProtocol[list[Any]] = ops.par(
            ops.matmul_protocol(rt, x, c.T), ops.summed_products_protocol(rt, c, c, 1, scale=0.5)
        )
        products, halves = yield from both
        return ops.sub(products, halves.reshape(1, -1))

    def moved_protocol(self, steps: MpcProtocol[T]) -> MpcProtocol[T]:
        """``steps``, which move these centroids, passed through: who counts a layer's messages sees them here."""
        return (yield from steps)

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """Raises ConfigError: nothing is learned before centroids."""
        raise ConfigError("k-means has no input gradient", "let it be the only layer")
        yield  # a generator like its siblings


def _output_shape(spec: KMeans, shape: WeightShape) -> WeightShape:
    check_positive(spec, "inputs", "clusters")
    check_features(spec, shape, spec.inputs)
    if not 2 <= spec.clusters <= MOST_CLUSTERS:
        raise ConfigError(f"k-means with {spec.clusters} clusters", f"2 to {MOST_CLUSTERS}")
    return shape[0], spec.clusters


def _initial(spec: KMeans, at: InitialContext) -> Floats:
    return np.zeros(spec.weight_shape)


def _secret(spec: KMeans, at: SecretContext) -> KMeansLayer:
    return KMeansLayer(spec, at.weight)


def _plaintext(spec: KMeans, at: PlaintextContext, x: Tensor) -> Tensor:
    return x @ at.weight.T - at.weight.square().sum(1) / 2.0


def _products(spec: KMeans) -> int:
    return spec.clusters * spec.inputs


register(
    LayerType(
        name="kmeans",
        spec=KMeans,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=2,
        products=_products,
        tensor_parallel=one_rank_weight(_secret),
    )
)
