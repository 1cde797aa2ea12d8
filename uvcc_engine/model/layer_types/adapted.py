"""A public dense layer with a secret adapter of low rank beside it (LoRA: Hu et al., "Low-Rank Adaptation", 2022).

y = [x, 1] W + s (x A) B^T with public W and secret A (inputs, rank) and B (outputs, rank). A starts at random and B at
zero, so that training starts from the base itself. What is trained is rank (inputs + outputs) numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.layer_spec import LayerSpec, PublicSpec
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.public import PublicLayer, tensor_of
from uvcc_engine.model.registry import (
    InitialContext,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    register,
)
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

SCALES: Final = (2.0**-6, 64.0)
"""Between which the scale of an adapter lies."""


@dataclass(frozen=True, slots=True)
class Adapted(PublicSpec, WeightedSpec):
    """A dense layer of the base, its weight the public ``tensor`` (inputs + 1, outputs), with an adapter of ``rank``.

    The adapter's weight is (inputs + outputs, rank): A above B. ``scale`` is what LoRA calls alpha / rank.
    """

    inputs: int
    outputs: int
    tensor: str
    rank: int
    scale: float

    @property
    def public_tensor(self) -> tuple[str, tuple[int, int]]:
        return self.tensor, (self.inputs + 1, self.outputs)

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + self.outputs, self.rank

    def merged(self, public: Mapping[str, Floats], trained: Iterator[Floats]) -> tuple[LayerSpec, Floats]:
        return Dense(self.inputs, self.outputs), merged(self, public[self.tensor], next(trained))


class AdaptedLayer(PublicLayer):
    """Forward 4 rounds; input gradient 4 rounds; the adapter's gradient 4 rounds.

    The public product and the adapter's second one are added before they are truncated, so an adapter adds the messages
    of ``rank`` numbers a line to those of the public layer.
    """

    by_line = True

    def __init__(self, spec: Adapted, numbers: Floats, weight: Share) -> None:
        super().__init__(spec, numbers)
        self.weight = weight
        self._seen: Share | None = None
        self._low: Share | None = None

    def _parts(self) -> tuple[Share, Share]:
        assert self.weight is not None
        inputs = self._spec.inputs
        return self.weight.index(slice(0, inputs)), self.weight.index(slice(inputs, None))

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        a, b = self._parts()
        w = self.ring(rt, x)
        low = yield from ops.matmul_protocol(rt, x, a, scale=self._spec.scale)
        self._seen, self._low = x, low
        return (yield from ops.public_product_protocol(rt, x, w[:-1], w[-1], also=(low, b.T)))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        a, b = self._parts()  # before the update replaces them
        low = yield from ops.matmul_protocol(rt, grad, b, scale=self._spec.scale)
        w = self.ring(rt, grad)
        return (yield from ops.public_product_protocol(rt, grad, w[:-1].T, also=(low, a.T)))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._seen is not None
        assert self._low is not None
        low = yield from ops.matmul_protocol(rt, grad, self._parts()[1], scale=self._spec.scale)
        both = yield from ops.par(
            ops.matmul_protocol(rt, self._seen.T, low, scale=scale),
            ops.matmul_protocol(rt, grad.T, self._low, scale=scale),
        )
        return ops.cat(both)


def merged(spec: Adapted, public: Floats, adapter: Floats) -> Floats:
    """The weight (inputs + 1, outputs) of the dense layer that computes the same."""
    whole: Floats = public.copy()
    whole[:-1] += spec.scale * adapter[: spec.inputs] @ adapter[spec.inputs :].T
    return whole


def _output_shape(spec: Adapted, shape: WeightShape) -> WeightShape:
    check_positive(spec, "inputs", "outputs", "rank")
    check_features(spec, shape, spec.inputs)
    if spec.rank > min(spec.inputs, spec.outputs):
        raise ConfigError(f"an adapter of rank {spec.rank} for {spec.inputs} x {spec.outputs} weights", "a lower rank")
    if not SCALES[0] <= spec.scale <= SCALES[1]:
        raise ConfigError(f"an adapter's scale of {spec.scale:g}", f"give {SCALES[0]:g} to {SCALES[1]:g}; 1 is usual")
    return shape[0], spec.outputs


def _initial(spec: Adapted, at: InitialContext) -> Floats:
    first = at.uniform(spec.inputs, spec.rank, math.sqrt(3.0 / spec.inputs))
    return np.concatenate([first, np.zeros((spec.outputs, spec.rank))])


def _secret(spec: Adapted, at: SecretContext) -> AdaptedLayer:
    return AdaptedLayer(spec, tensor_of(at.public, spec), at.weight)


def _plaintext(spec: Adapted, at: PlaintextContext, x: Tensor) -> Tensor:
    known = ops.torch.from_numpy(tensor_of(at.public, spec))
    a, b = at.weight[: spec.inputs], at.weight[spec.inputs :]
    return x @ known[:-1] + known[-1] + spec.scale * (x @ a) @ b.T


register(
    LayerType(
        name="adapted",
        spec=Adapted,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
    )
)
