"""The mean or the maximum of every line, and the softmax of every line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.parts import keeps_layout, one_rank
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive, check_shared
from uvcc_engine.model.tensor_parallel import COLUMNS, PlaceContext, Placed, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Reduce(LayerSpec):
    """One number for each line of ``width``: its mean (``kind`` avg) or its maximum (max)."""

    width: int
    kind: str


@dataclass(frozen=True, slots=True)
class Softmax(LayerSpec):
    """Every line's powers of e, divided by their sum, on ``width`` features."""

    width: int


class MeanLayer(Layer):
    """Sums are local, the public factor takes 2 rounds, forward as backward."""

    def __init__(self, width: int) -> None:
        self._width = width

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        return (yield from ops.mul_public_protocol(rt, x.sum(-1, keepdim=True), 1.0 / self._width))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        small = yield from ops.mul_public_protocol(rt, grad, 1.0 / self._width)
        return small.map(lambda t: t.expand(-1, self._width).contiguous())


class MaximumLayer(Layer):
    """6 rounds forward for up to 10 numbers, which also give the secret place of the maximum; backward 1 round."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._place: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        best, self._place = yield from ops.max_and_place_protocol(rt, x)
        return best.reshape(-1, 1)

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._place is not None
        spread = grad.map(lambda t: t.expand(-1, self._width).contiguous())
        return (yield from ops.mul_protocol(rt, spread, self._place))


class SoftmaxLayer(Layer):
    """Forward 14 rounds and more for more than 10 features; backward 4."""

    by_line = True

    def __init__(self) -> None:
        self._shares: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        narrow = yield from ops.to_exp_scale_protocol(rt, x)
        found, _, _ = yield from ops.softmax_protocol(rt, narrow)
        self._shares = yield from ops.rescale_protocol(rt, found, x.f)
        return self._shares

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        p = self._shares
        assert p is not None
        along = yield from ops.summed_products_protocol(rt, grad, p, -1, keepdim=True)
        return (yield from ops.mul_protocol(rt, ops.sub(grad, along), p))


def _reduced(spec: Reduce, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    if spec.kind not in ("avg", "max"):
        raise ConfigError(f"Reduce.kind is {spec.kind!r}", "give avg or max")
    return shape[0], 1


def _reduce_secret(spec: Reduce, at: SecretContext) -> Layer:
    return MeanLayer(spec.width) if spec.kind == "avg" else MaximumLayer(spec.width)


def _reduce_plaintext(spec: Reduce, at: PlaintextContext, x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True) if spec.kind == "avg" else x.max(-1, keepdim=True).values


def _reduce_products(spec: Reduce) -> int:
    return spec.width if spec.kind == "avg" else 32 * spec.width * spec.width  # every pair is compared


def _same_shape(spec: Softmax, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_shared("Softmax.width", spec.width)
    check_features(spec, shape, spec.width)
    return shape


def _softmax_secret(spec: Softmax, at: SecretContext) -> SoftmaxLayer:
    return SoftmaxLayer()


def _softmax_plaintext(spec: Softmax, at: PlaintextContext, x: Tensor) -> Tensor:
    return ops.torch.softmax(x, -1)


def _softmax_products(spec: Softmax) -> int:
    return 256 * spec.width


_ANYWHERE = keeps_layout(_softmax_secret)


def _softmax_place(spec: Softmax, at: PlaceContext) -> Placed:
    if at.layout == COLUMNS and at.tensor > 1:
        raise at.refusal(spec)
    return at.placed(spec, "", at.layout)


register(
    LayerType(
        name="reduce",
        spec=Reduce,
        output_shape=_reduced,
        secret=_reduce_secret,
        plaintext=_reduce_plaintext,
        rounds=5,
        products=_reduce_products,
        tensor_parallel=one_rank(_reduce_secret),
    )
)
register(
    LayerType(
        name="softmax",
        spec=Softmax,
        output_shape=_same_shape,
        secret=_softmax_secret,
        plaintext=_softmax_plaintext,
        rounds=18,
        products=_softmax_products,
        tensor_parallel=TensorParallel(place=_softmax_place, part=_ANYWHERE.part),
    )
)
