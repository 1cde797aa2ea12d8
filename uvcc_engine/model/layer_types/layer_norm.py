"""Layer normalisation: every row brought to mean 0 and variance 1, then gain and bias (Ba et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.layer_types.normalization import EPSILON, HIGHEST
from uvcc_engine.model.parts import Pass, Plain, StagePart, place_whole
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
from uvcc_engine.model.tensor_parallel import PartContext, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class LayerNorm(WeightedSpec):
    """Every row brought to mean 0 and variance 1. Its weight is (2, width): gain and bias."""

    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 2, self.width

    @property
    def decays(self) -> bool:
        return False


class LayerNormLayer(Layer):
    """Rows brought to mean 0 and variance 1, then gain and bias: the rows of the weight (2, width).

    Forward 19 rounds, backward 8.
    """

    by_line = True

    def __init__(self, weight: Share) -> None:
        self.weight = weight
        self._normal: Share | None = None
        self._inverse: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        self._normal, self._inverse = yield from ops.normalize_protocol(rt, x, epsilon=EPSILON, high=HIGHEST)
        scaled = yield from ops.mul_protocol(rt, self._normal, self.weight.index(0))
        return ops.add(scaled, self.weight.index(1))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        assert self._normal is not None
        assert self._inverse is not None
        gained = yield from ops.mul_protocol(rt, grad, self.weight.index(0))
        return (yield from ops.normalize_gradient_protocol(rt, gained, self._normal, self._inverse))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._normal is not None
        return (yield from _weight_gradient_protocol(rt, grad, self._normal, scale))


class NormPart(Plain):
    """The same with gain and bias whole at every rank. Rows in, rows out.

    Forward 19 rounds, backward 8; the gradient of gain and bias takes no message, unless gradients are settled.
    """

    shared: bool = True

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        gain, bias = self.weights[0].index(0), self.weights[0].index(1)
        normal, inverse = yield from ops.normalize_protocol(on.rt, x, epsilon=EPSILON, high=HIGHEST)
        on.keep(self, (normal, inverse))
        return ops.add((yield from ops.mul_protocol(on.rt, normal, gain)), bias)

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        normal, inverse = on.take(self)
        if on.settling is None:
            bias = grad.first.sum(0) << normal.f
            gain = ops.summed_term(on.rt, grad, normal, 0, self.dealers[0])
            on.gradient(self, 0, ops.torch.stack([gain, bias]))
        else:
            settled = yield from _weight_gradient_protocol(on.rt, grad, normal, on.settling.rate)
            on.settling.take(self, 0, settled)
        if not wanted:
            return grad
        gained = yield from ops.mul_protocol(on.rt, grad, self.weights[0].index(0))
        return (yield from ops.normalize_gradient_protocol(on.rt, gained, normal, inverse))


def _weight_gradient_protocol(rt: Runtime, grad: Share, normal: Share, scale: float) -> MpcProtocol[Share]:
    """The gradient of gain and bias times ``scale``, [2, width]."""
    gain, bias = yield from ops.par(
        ops.summed_products_protocol(rt, grad, normal, 0, scale=scale),
        ops.mul_public_protocol(rt, grad.sum(0), scale),
    )
    return ops.cat([gain.reshape(1, -1), bias.reshape(1, -1)])


def _output_shape(spec: LayerNorm, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    return shape


def _initial(spec: LayerNorm, at: InitialContext) -> Floats:
    return np.stack([np.ones(spec.width), np.zeros(spec.width)])


def _secret(spec: LayerNorm, at: SecretContext) -> LayerNormLayer:
    return LayerNormLayer(at.weight)


def _plaintext(spec: LayerNorm, at: PlaintextContext, x: Tensor) -> Tensor:
    return ops.torch.nn.functional.layer_norm(x, (spec.width,), at.weight[0], at.weight[1], EPSILON)


def _products(spec: LayerNorm) -> int:
    return 64 * 62 + 16 * spec.width  # an inverse root takes 61 comparisons


def _part(spec: LayerNorm, at: PartContext) -> StagePart:
    return NormPart(at.weight, at.dealer)


register(
    LayerType(
        name="layer-norm",
        spec=LayerNorm,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=27,
        products=_products,
        tensor_parallel=TensorParallel(place=place_whole, part=_part),
    )
)
