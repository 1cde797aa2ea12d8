"""max(0, x)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from uvcc_engine.model import ops
from uvcc_engine.model.parts import keeps_layout
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import FusedActivation, ProductLayer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

FUSED: Final = 1 << 18  # outputs; larger products flow through their rounds in chunks, faster than with fewer rounds


@dataclass(frozen=True, slots=True)
class Relu(LayerSpec):
    """max(0, x) on ``width`` features."""

    width: int


class ReluLayer(FusedActivation):
    """max(0, x): forward 5 rounds and keeps the secret sign bits; backward 1 round.

    Behind a product of up to ``FUSED`` outputs the two take 5 rounds together, and on the way back the product that
    comes down and the choice by the bits take 2.
    """

    by_line = True

    def __init__(self) -> None:
        self._positive: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        y, self._positive = yield from ops.relu_protocol(rt, x, above=ops.ROUNDED)
        return y

    def after_protocol(self, rt: Runtime, layer: ProductLayer, x: Share) -> MpcProtocol[Share]:
        y = yield from self.of_product_protocol(rt, *layer.factors(rt, x))
        if self._positive is not None:
            self._positive = layer.outputs(self._positive)
        return layer.outputs(y)

    def of_product_protocol(
        self, rt: Runtime, left: Share, right: Share, *, dealer: int | None = None
    ) -> MpcProtocol[Share]:
        dealer = ops.DEALER if dealer is None else dealer
        if left.shape[0] * right.shape[1] > FUSED:
            return (
                yield from self.forward_protocol(rt, (yield from ops.matmul_protocol(rt, left, right, dealer=dealer)))
            )
        y, self._positive = yield from ops.matmul_relu_protocol(rt, left, right, dealer=dealer)
        return y

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._positive is not None
        return (yield from ops.mul_protocol(rt, grad, self._positive))

    def before_protocol(self, rt: Runtime, layer: ProductLayer, grad: Share) -> MpcProtocol[Share]:
        assert self._positive is not None
        if self._positive.n > FUSED:
            return (yield from self.input_gradient_protocol(rt, (yield from layer.input_gradient_protocol(rt, grad))))
        return (yield from layer.gated_gradient_protocol(rt, grad, self._positive))


def _output_shape(spec: Relu, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    return shape


def _secret(spec: Relu, at: SecretContext) -> ReluLayer:
    return ReluLayer()


def _plaintext(spec: Relu, at: PlaintextContext, x: Tensor) -> Tensor:
    return ops.torch.relu(x)


def _products(spec: Relu) -> int:
    return 64 * spec.width  # a comparison


register(
    LayerType(
        name="relu",
        spec=Relu,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=6,
        products=_products,
        tensor_parallel=keeps_layout(_secret),
    )
)
