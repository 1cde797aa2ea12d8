"""Letters and their places to vectors; which row of the table is looked up stays secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.parts import (
    Pass,
    Plain,
    StagePart,
    gather_rows,
    summed_product_protocol,
    weight_gradient_protocol,
)
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
from uvcc_engine.model.tensor_parallel import ROWS, WHOLE, PartContext, PlaceContext, Placed, TensorParallel, bounds

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Embedding(WeightedSpec):
    """Letters and, with ``places``, where they stand, to vectors. Its weight is (vocabulary + positions, width), or
    (vocabulary, width)."""

    vocabulary: int
    positions: int
    width: int
    places: bool = True

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.vocabulary + (self.positions if self.places else 0)

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.rows, self.width


class EmbeddingLayer(Layer):
    """Secret one-hot letters, and their public places, times a table (vocabulary + positions, width): which row is
    looked up stays secret. Forward 2 rounds, weight gradient 2 rounds."""

    def __init__(self, spec: Embedding, weight: Share) -> None:
        self.weight = weight
        self._spec = spec
        self._seen: Share | None = None
        self.also: tuple[Share, Share] | None = None
        """What a second use of the letters' rows adds to their gradient: the transposed first by the second; it is
        ``(lines, vocabulary)`` and ``(lines, width)``, and is used up by one gradient (``tied``)."""

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        self._seen = _letters_and_places(self._spec, rt, x)
        return (yield from ops.matmul_protocol(rt, self._seen, self.weight))

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        """The vectors of one-hot letters (rows, vocabulary) at ``place``."""
        assert self.weight is not None
        spec = self._spec
        found = yield from ops.matmul_protocol(rt, x, self.weight.index(slice(0, spec.vocabulary)))
        return ops.add(found, self.weight.index(spec.vocabulary + place)) if spec.places else found

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """Raises ConfigError: letters have no gradient."""
        raise ConfigError("an embedding has no input gradient", "put it first")
        yield  # a generator like its siblings

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._seen is not None
        left, right = self._seen, grad
        if self.also is not None:
            more, others = self.also
            self.also, spec = None, self._spec
            if spec.places:
                more = ops.cat([more, ops.public(rt, ops.torch.zeros(more.shape[0], spec.positions), f=more.f)], 1)
            left, right = ops.cat([left, more], 0), ops.cat([right, others], 0)
        return (yield from ops.matmul_protocol(rt, left.T, right, scale=scale))


def _letters_and_places(spec: Embedding, rt: Runtime, x: Share) -> Share:
    """(rows, positions * vocabulary) -> (rows * positions, rows of the table). Local."""
    if not spec.places:
        return x.reshape(-1, spec.vocabulary)
    places = ops.public(rt, ops.torch.eye(spec.positions).repeat(x.shape[0], 1), f=x.f)
    return ops.cat([x.reshape(-1, spec.vocabulary), places], 1)


class LookUp(Plain):
    """The table's rows split over the ranks: each looks up what lies in its slice of the vocabulary, and the ranks'
    terms are summed. Whole in, rows out.

    Forward 2 rounds; the table's gradient takes no message.
    """

    def __init__(self, spec: Embedding, weight: Share, dealer: int) -> None:
        super().__init__(weight, dealer)
        self._spec = spec

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        mine = bounds(self._spec.rows, on.tp.size, on.tp.index)
        seen = _letters_and_places(self._spec, on.rt, x).index((slice(None), mine))
        on.keep(self, seen)
        return (yield from summed_product_protocol(on, seen, self.weights[0], self.dealers[0]))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        """The table's gradient; ``grad`` is (rows, width). Raises ConfigError if an input gradient is wanted."""
        if wanted:
            raise ConfigError("an embedding has no input gradient", "put it first")
        seen: Share = on.take(self)
        yield from weight_gradient_protocol(on, self, seen.T, gather_rows(on.tp, grad, on.rows))
        return grad


def _output_shape(spec: Embedding, shape: WeightShape) -> WeightShape:
    check_positive(spec, "vocabulary", "positions", "width")
    check_features(spec, shape, spec.positions * spec.vocabulary)
    return shape[0] * spec.positions, spec.width


def _initial(spec: Embedding, at: InitialContext) -> Floats:
    weight = np.zeros(spec.weight_shape)
    weight[: spec.vocabulary] = at.uniform(spec.vocabulary, spec.width, 0.5)
    return weight


def _secret(spec: Embedding, at: SecretContext) -> EmbeddingLayer:
    return EmbeddingLayer(spec, at.weight)


def _plaintext(spec: Embedding, at: PlaintextContext, x: Tensor) -> Tensor:
    letters = x.reshape(-1, spec.positions, spec.vocabulary)
    found = letters @ at.weight[: spec.vocabulary]
    return (found + at.weight[spec.vocabulary :] if spec.places else found).flatten(0, 1)


def _products(spec: Embedding) -> int:
    return spec.rows * spec.width


def _place(spec: Embedding, at: PlaceContext) -> Placed:
    if at.layout != WHOLE:
        raise at.refusal(spec)
    return at.divided(spec, ROWS, ROWS, spec.rows)


def _part(spec: Embedding, at: PartContext) -> StagePart:
    return LookUp(spec, at.weight, at.dealer)


register(
    LayerType(
        name="embedding",
        spec=Embedding,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=2,
        products=_products,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)
