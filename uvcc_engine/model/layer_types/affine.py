"""Numbers times a public factor, plus a public one: x / 8, 1 - x, x * 0.5 + 3."""

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

LARGEST: Final = 4096.0
LEAST: Final = 2.0**-12


@dataclass(frozen=True, slots=True)
class Affine(LayerSpec):
    """``factor`` times x plus ``shift``, on ``width`` features."""

    width: int
    factor: float
    shift: float


class AffineLayer(Layer):
    """2 rounds forward and 2 backward; none for a factor that is a whole number. The factor keeps 15 bits."""

    by_line = True

    def __init__(self, spec: Affine) -> None:
        self._spec = spec

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        scaled = yield from ops.mul_public_protocol(rt, x, self._spec.factor)
        return ops.add_public(rt, scaled, self._spec.shift)

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        return (yield from ops.mul_public_protocol(rt, grad, self._spec.factor))


def _output_shape(spec: Affine, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    if not LEAST <= abs(spec.factor) <= LARGEST or abs(spec.shift) > LARGEST:
        raise ConfigError(
            f"{spec} has numbers that fixed point does not hold", f"use factors of {LEAST:g} to {LARGEST:g}"
        )
    return shape


def _secret(spec: Affine, at: SecretContext) -> AffineLayer:
    return AffineLayer(spec)


def _plaintext(spec: Affine, at: PlaintextContext, x: Tensor) -> Tensor:
    return x * spec.factor + spec.shift


register(
    LayerType(
        name="affine",
        spec=Affine,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=4,
        tensor_parallel=keeps_layout(_secret),
    )
)
