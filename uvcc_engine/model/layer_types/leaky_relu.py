"""max(x, slope x) for a public slope below one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.parts import keeps_layout
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

_BITS: Final = 10


@dataclass(frozen=True, slots=True)
class LeakyRelu(LayerSpec):
    """max(x, slope x) on ``width`` features; the slope is computed as a multiple of 1/1024."""

    width: int
    slope: float = 0.01

    @property
    def units(self) -> int:
        """The slope in units of 1/1024."""
        return round(self.slope * 2**_BITS)


class LeakyReluLayer(Layer):
    """slope x + (1 - slope) max(0, x): forward 7 rounds and keeps the secret sign bits, backward 2 rounds."""

    by_line = True

    def __init__(self, spec: LeakyRelu) -> None:
        self._units = spec.units
        self._factor: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        above, bit = yield from ops.relu_protocol(rt, x, above=ops.ROUNDED)
        steep = 2**_BITS - self._units
        self._factor = ops.add_public(rt, ops.scale_int(bit, steep).with_f(_BITS), self._units / 2**_BITS)
        wide = ops.add(ops.scale_int(above, steep), ops.scale_int(x, self._units)).with_f(x.f + _BITS)
        return (yield from ops.rescale_protocol(rt, wide, x.f))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._factor is not None
        return (yield from ops.mul_protocol(rt, grad, self._factor))


def _output_shape(spec: LeakyRelu, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    if not 0.0 <= spec.slope < 1.0:
        raise ConfigError(f"LeakyRelu.slope is {spec.slope:g}", "give a slope in [0, 1), like 0.01")
    check_features(spec, shape, spec.width)
    return shape


def _secret(spec: LeakyRelu, at: SecretContext) -> LeakyReluLayer:
    return LeakyReluLayer(spec)


def _plaintext(spec: LeakyRelu, at: PlaintextContext, x: Tensor) -> Tensor:
    return ops.torch.nn.functional.leaky_relu(x, spec.units / 2**_BITS)


def _products(spec: LeakyRelu) -> int:
    return 66 * spec.width  # a comparison


register(
    LayerType(
        name="leaky-relu",
        spec=LeakyRelu,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=9,
        products=_products,
        tensor_parallel=keeps_layout(_secret),
    )
)
