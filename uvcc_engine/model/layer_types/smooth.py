"""Smooth activations by one exponential: sigmoid, tanh and SiLU. Value and slope come out of the same rounds."""

from __future__ import annotations

from collections.abc import Callable
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

    Curve = Callable[[Runtime, Share], MpcProtocol[tuple[Share, Share]]]
    """Value and slope of a secret, both at its scale."""


@dataclass(frozen=True, slots=True)
class _Curved(LayerSpec):
    width: int


@dataclass(frozen=True, slots=True)
class Sigmoid(_Curved):
    """1 / (1 + e^-x) on ``width`` features."""


@dataclass(frozen=True, slots=True)
class Tanh(_Curved):
    """The hyperbolic tangent on ``width`` features."""


@dataclass(frozen=True, slots=True)
class Silu(_Curved):
    """x / (1 + e^-x) on ``width`` features."""


class SmoothLayer(Layer):
    """A curve entry by entry: forward keeps the slope, which backward multiplies by in 2 rounds."""

    by_line = True

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._slope: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        y, self._slope = yield from self._curve(rt, x)
        return y

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._slope is not None
        return (yield from ops.mul_protocol(rt, grad, self._slope))


def _at_scale_protocol(rt: Runtime, x: Share) -> MpcProtocol[Share]:
    """1 / (1 + e^-x) at the scale of x, computed at one that the exponential takes."""
    near = yield from ops.to_exp_scale_protocol(rt, x)
    return (yield from ops.rescale_protocol(rt, (yield from ops.sigmoid_protocol(rt, near)), x.f))


def _sigmoid_protocol(rt: Runtime, x: Share) -> MpcProtocol[tuple[Share, Share]]:
    """21 rounds: the slope is y - y^2."""
    y = yield from _at_scale_protocol(rt, x)
    return y, ops.sub(y, (yield from ops.mul_protocol(rt, y, y)))


def _tanh_protocol(rt: Runtime, x: Share) -> MpcProtocol[tuple[Share, Share]]:
    """21 rounds: y = 2 sigmoid(2 x) - 1, the slope is 1 - y^2."""
    half = yield from _at_scale_protocol(rt, ops.scale_int(x, 2))
    y = ops.add_public(rt, ops.scale_int(half, 2), -1.0)
    square = yield from ops.mul_protocol(rt, y, y)
    return y, ops.add_public(rt, ops.scale_int(square, -1), 1.0)


def _silu_protocol(rt: Runtime, x: Share) -> MpcProtocol[tuple[Share, Share]]:
    """23 rounds: y = x s, the slope is s + y - y s."""
    s = yield from _at_scale_protocol(rt, x)
    y = yield from ops.mul_protocol(rt, x, s)
    return y, ops.sub(ops.add(s, y), (yield from ops.mul_protocol(rt, y, s)))


def _add(name: str, spec: type[_Curved], curve: Curve, clear: str, rounds: int) -> None:
    def output_shape(one: _Curved, shape: WeightShape) -> WeightShape:
        check_positive(one, "width")
        check_features(one, shape, one.width)
        return shape

    def products(one: _Curved) -> int:
        return 160 * one.width  # a comparison, an exponential and a division

    def secret(_: _Curved, at: SecretContext) -> SmoothLayer:
        return SmoothLayer(curve)

    def plaintext(_: _Curved, at: PlaintextContext, x: Tensor) -> Tensor:
        found: Tensor = getattr(ops.torch.nn.functional, clear)(x)
        return found

    register(
        LayerType(
            name=name,
            spec=spec,
            output_shape=output_shape,
            secret=secret,
            plaintext=plaintext,
            rounds=rounds,
            products=products,
            tensor_parallel=keeps_layout(secret),
        )
    )


_add("sigmoid", Sigmoid, _sigmoid_protocol, "sigmoid", 23)
_add("tanh", Tanh, _tanh_protocol, "tanh", 23)
_add("silu", Silu, _silu_protocol, "silu", 25)
