"""x times the normal distribution function of x (Hendrycks and Gimpel, 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uvcc_engine.model import ops
from uvcc_engine.model.parts import keeps_layout
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Gelu(LayerSpec):
    """x times the normal distribution function of x, on ``width`` features."""

    width: int


class GeluLayer(Layer):
    """x times the normal distribution function of x: forward 13 rounds and keeps the slope; backward 2 rounds."""

    by_line = True

    def __init__(self) -> None:
        self._slope: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        y, self._slope = yield from ops.gelu_protocol(rt, x)
        return y

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._slope is not None
        return (yield from ops.mul_protocol(rt, grad, self._slope))


def _output_shape(spec: Gelu, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    return shape


def _secret(spec: Gelu, at: SecretContext) -> GeluLayer:
    return GeluLayer()


def _plaintext(spec: Gelu, at: PlaintextContext, x: Tensor) -> Tensor:
    return ops.torch.nn.functional.gelu(x)


def _products(spec: Gelu) -> int:
    return 256 * spec.width  # four comparisons


register(
    LayerType(
        name="gelu",
        spec=Gelu,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=15,
        products=_products,
        tensor_parallel=keeps_layout(_secret),
    )
)
