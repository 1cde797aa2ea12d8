"""x + layers(x)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.layers import backward_protocol, forward_protocol, next_protocol
from uvcc_engine.model.parts import Pass, Plain, StagePart, backward_parts_protocol, forward_parts_protocol
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register, type_of
from uvcc_engine.model.secret_layer import LayerBlock
from uvcc_engine.model.shapes import WeightShape
from uvcc_engine.model.tensor_parallel import PartContext, PlaceContext, Placed, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.secret_layer import Then, Update
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Residual(LayerSpec):
    """x + layers(x)."""

    layers: tuple[LayerSpec, ...]

    @property
    def inner(self) -> tuple[LayerSpec, ...]:
        return self.layers


class ResidualLayer(LayerBlock):
    """x + layers(x). Its weights are its layers'."""

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        return ops.add(x, (yield from forward_protocol(rt, self.inner, x)))

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        return ops.add(x, (yield from next_protocol(rt, self.inner, x, place)))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        below = grad
        for layer in reversed(self.inner):
            below = yield from layer.input_gradient_protocol(rt, below)
        return ops.add(grad, below)

    def backward_protocol(self, rt: Runtime, grad: Share, update: Update, then: Then | None) -> MpcProtocol[None]:
        def below_protocol(inner: Share) -> MpcProtocol[None]:
            assert then is not None
            yield from then(ops.add(grad, inner))

        yield from backward_protocol(rt, self.inner, grad, update, None if then is None else below_protocol)


class Branch(Plain):
    """x + parts(x), in one layout. Its weights are its parts'."""

    def __init__(self, parts: Sequence[StagePart]) -> None:
        super().__init__()
        self.inner = tuple(parts)

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        return ops.add(x, (yield from forward_parts_protocol(on, self.inner, x)))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        inner = yield from backward_parts_protocol(on, self.inner, grad, wanted=wanted)
        return ops.add(grad, inner) if wanted else grad


def _output_shape(spec: Residual, shape: WeightShape) -> WeightShape:
    after = shape
    for layer in spec.layers:
        after = type_of(layer).output_shape(layer, after)
    if after != shape:
        raise ConfigError(f"a residual block is fed {shape} (lines, features) and its layers give {after}")
    return shape


def _secret(spec: Residual, at: SecretContext) -> ResidualLayer:
    return ResidualLayer(at.inner)


def _plaintext(spec: Residual, at: PlaintextContext, x: Tensor) -> Tensor:
    return x + at.inner(x)


def _place(spec: Residual, at: PlaceContext) -> Placed:
    if at.inner_layout != at.layout:
        raise at.refusal(spec, f"it turns {at.layout} into {at.inner_layout}")
    return at.placed(spec, "", at.layout)


def _part(spec: Residual, at: PartContext) -> StagePart:
    return Branch(at.inner)


register(
    LayerType(
        name="residual",
        spec=Residual,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)
