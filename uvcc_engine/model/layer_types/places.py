"""Learned vectors that are added to lines, as a model's places are, or put before them, as a class token is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.parts import one_rank_weight
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
class LinePlaces(WeightedSpec):
    """A learned vector of ``width`` added to each line of a row of data. Its weight is (lines, width)."""

    lines: int
    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.lines, self.width

    @property
    def decays(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Prefix(WeightedSpec):
    """``count`` learned lines put before the ``lines`` lines of a row of data. Its weight is (count, width)."""

    lines: int
    width: int
    count: int = 1

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.count, self.width


class PlacesLayer(Layer):
    """Forward and the input gradient take no message; the weight's gradient, a sum over rows, 2 rounds."""

    def __init__(self, spec: LinePlaces, weight: Share) -> None:
        self.weight = weight
        self._spec = spec

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        rows = x.shape[0] // self._spec.lines
        return ops.add(x, self.weight.map(lambda t: t.repeat(rows, 1)))
        yield  # a generator like its siblings

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        return grad
        yield  # a generator like its siblings

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        total = grad.reshape(-1, self._spec.lines, self._spec.width).sum(0)
        return (yield from ops.mul_public_protocol(rt, total, scale))


class PrefixLayer(Layer):
    """Forward and the input gradient take no message; the weight's gradient, a sum over rows, 2 rounds."""

    def __init__(self, spec: Prefix, weight: Share) -> None:
        self.weight = weight
        self._spec = spec

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        spec = self._spec
        lines = x.reshape(-1, spec.lines, spec.width)
        first = self.weight.map(lambda t: t.expand(lines.shape[0], spec.count, spec.width))
        return ops.cat([first, lines], 1).reshape(-1, spec.width)
        yield  # a generator like its siblings

    def _cut(self, grad: Share) -> Share:
        return grad.reshape(-1, self._spec.count + self._spec.lines, self._spec.width)

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        return self._cut(grad).index((slice(None), slice(self._spec.count, None))).reshape(-1, self._spec.width)
        yield  # a generator like its siblings

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        total = self._cut(grad).index((slice(None), slice(None, self._spec.count))).sum(0)
        return (yield from ops.mul_public_protocol(rt, total, scale))


def _places_shape(spec: LinePlaces, shape: WeightShape) -> WeightShape:
    check_positive(spec, "lines", "width")
    check_features(spec, shape, spec.width)
    if shape[0] != spec.lines:
        raise ConfigError(f"{spec} is fed {shape[0]} lines of a row", "make the layer below give as many")
    return shape


def _prefix_shape(spec: Prefix, shape: WeightShape) -> WeightShape:
    check_positive(spec, "lines", "width", "count")
    check_features(spec, shape, spec.width)
    if shape[0] != spec.lines:
        raise ConfigError(f"{spec} is fed {shape[0]} lines of a row", "make the layer below give as many")
    return spec.count + spec.lines, spec.width


def _places_initial(spec: LinePlaces, at: InitialContext) -> Floats:
    return np.zeros(spec.weight_shape)


def _prefix_initial(spec: Prefix, at: InitialContext) -> Floats:
    return at.uniform(spec.count, spec.width, 0.5)


def _places_secret(spec: LinePlaces, at: SecretContext) -> PlacesLayer:
    return PlacesLayer(spec, at.weight)


def _prefix_secret(spec: Prefix, at: SecretContext) -> PrefixLayer:
    return PrefixLayer(spec, at.weight)


def _places_plaintext(spec: LinePlaces, at: PlaintextContext, x: Tensor) -> Tensor:
    return (x.reshape(-1, spec.lines, spec.width) + at.weight).reshape(-1, spec.width)


def _prefix_plaintext(spec: Prefix, at: PlaintextContext, x: Tensor) -> Tensor:
    lines = x.reshape(-1, spec.lines, spec.width)
    first = at.weight.expand(len(lines), spec.count, spec.width)
    return ops.torch.cat([first, lines], 1).reshape(-1, spec.width)


register(
    LayerType(
        name="places",
        spec=LinePlaces,
        output_shape=_places_shape,
        secret=_places_secret,
        plaintext=_places_plaintext,
        initial=_places_initial,
        rounds=2,
        tensor_parallel=one_rank_weight(_places_secret),
    )
)
register(
    LayerType(
        name="prefix",
        spec=Prefix,
        output_shape=_prefix_shape,
        secret=_prefix_secret,
        plaintext=_prefix_plaintext,
        initial=_prefix_initial,
        rounds=2,
        tensor_parallel=one_rank_weight(_prefix_secret),
    )
)
