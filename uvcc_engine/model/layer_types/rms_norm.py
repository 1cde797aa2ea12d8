"""Root-mean-square normalisation: every row brought to mean square 1, then a gain (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.layer_types.normalization import EPSILON, HIGHEST
from uvcc_engine.model.parts import whole_weight
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

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class RmsNorm(WeightedSpec):
    """Every row brought to mean square 1. Its weight is (1, width): the gain."""

    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 1, self.width

    @property
    def decays(self) -> bool:
        return False


class RmsNormLayer(Layer):
    """x / sqrt(mean(x^2) + epsilon) times the gain. Forward 17 rounds, backward 8."""

    by_line = True

    def __init__(self, weight: Share) -> None:
        self.weight = weight
        self._normal: Share | None = None
        self._inverse: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        part, ratio = ops.power_of_two_for(x.shape[-1])
        square = yield from ops.summed_products_protocol(rt, x, x, -1, scale=part, keepdim=True)
        found = ops.deviated_protocol(rt, x, square, ratio, epsilon=EPSILON, high=HIGHEST)
        self._normal, self._inverse = yield from found
        return (yield from ops.mul_protocol(rt, self._normal, self.weight.index(0)))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """inverse (g - normal mean(g normal)) for the gained gradient g."""
        assert self.weight is not None
        assert self._normal is not None
        assert self._inverse is not None
        gained = yield from ops.mul_protocol(rt, grad, self.weight.index(0))
        n = grad.shape[-1]
        along = yield from ops.summed_products_protocol(rt, gained, self._normal, -1, scale=1.0 / n, keepdim=True)
        back = yield from ops.mul_protocol(rt, self._normal, along)
        return (yield from ops.mul_protocol(rt, ops.sub(gained, back), self._inverse))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._normal is not None
        found = yield from ops.summed_products_protocol(rt, grad, self._normal, 0, scale=scale)
        return found.reshape(1, -1)

    def gradient_term(self, rt: Runtime, grad: Share, dealer: int) -> Tensor:
        """See ``parts.AdditiveGradient``."""
        assert self._normal is not None
        return ops.summed_term(rt, grad, self._normal, 0, dealer).reshape(1, -1)


def _output_shape(spec: RmsNorm, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    return shape


def _initial(spec: RmsNorm, at: InitialContext) -> Floats:
    return np.ones((1, spec.width))


def _secret(spec: RmsNorm, at: SecretContext) -> RmsNormLayer:
    return RmsNormLayer(at.weight)


def _plaintext(spec: RmsNorm, at: PlaintextContext, x: Tensor) -> Tensor:
    return ops.torch.nn.functional.rms_norm(x, (spec.width,), at.weight[0], EPSILON)


def _products(spec: RmsNorm) -> int:
    return 64 * 62 + 14 * spec.width  # an inverse root takes 61 comparisons


register(
    LayerType(
        name="rms-norm",
        spec=RmsNorm,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=25,
        products=_products,
        tensor_parallel=whole_weight(_secret),
    )
)
