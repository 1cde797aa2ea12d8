"""Numbers that are left out while a model trains (Srivastava et al., 2014), and the others made larger for it.

Which are left out is public and follows from the job's seed, the step, the layer and the row's place in the batch: it
depends on no data, so all parties, all ways of splitting the work and the plaintext twin leave out the same. Where rows
are answered, validated or tested, nothing is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import public_stream
from uvcc_engine.model import ops
from uvcc_engine.model.batch_place import BatchPlace
from uvcc_engine.model.parts import Pass, Plain, StagePart
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register, type_of
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive
from uvcc_engine.model.tensor_parallel import (
    COLUMNS,
    ROWS,
    PartContext,
    PlaceContext,
    Placed,
    TensorParallel,
    bounds,
)

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

LARGEST: Final = 0.9
"""The largest share that may be left out: what is left is made 1 / (1 - share) times as large."""


@dataclass(frozen=True, slots=True)
class Dropout(LayerSpec):
    """Leaves out the ``share`` of ``width`` features; ``number`` tells the dropouts of a model apart."""

    width: int
    share: float
    number: int = 0


def kept(spec: Dropout, at: BatchPlace, lines: int) -> NDArray[np.int64]:
    """1 for what is kept and 0 for what is left out, ``[lines, width]``, of the rows of ``at``."""
    each = lines // at.count * spec.width
    words = [
        public_stream(f"dropout {spec.number} row {row}", at.seed, at.step, each)
        for row in range(at.first, at.first + at.count)
    ]
    least = np.uint64(int(spec.share * 2.0**64))
    return (np.stack(words) >= least).astype(np.int64).reshape(lines, spec.width)


def numbered(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The same layers with the dropouts among them, those inside of blocks too, numbered from 0."""
    count = itertools.count()

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(of(one) for one in value)
        if not isinstance(value, LayerSpec):
            return value
        one: Any = value
        if type_of(value).spec is Dropout:
            return replace(one, number=next(count))
        return replace(one, **{field.name: of(getattr(one, field.name)) for field in fields(one)})

    found: tuple[LayerSpec, ...] = of(tuple(layers))
    return found


def _thinned_protocol(rt: Runtime, x: Share, mask: Tensor, share: float) -> MpcProtocol[Share]:
    """``x mask / (1 - share)``: 2 rounds. ``mask``: of the shape of ``x``."""
    some = x.map(lambda t: t * mask.to(t.device))
    return (yield from ops.mul_public_protocol(rt, some, 1.0 / (1.0 - share)))


class DropoutLayer(Layer):
    """The shares of what is left out become 0, which takes no message; making the others larger takes 2 rounds, each
    way."""

    by_line = True

    def __init__(self, spec: Dropout) -> None:
        self._spec = spec
        self._mask: Tensor | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        self._mask = None
        if not self.training:
            return x
        assert self.batch is not None  # the trainer says which rows of its step these are
        self._mask = ops.torch.from_numpy(kept(self._spec, self.batch, x.shape[0]))
        return (yield from _thinned_protocol(rt, x, self._mask, self._spec.share))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        if self._mask is None:
            return grad
        return (yield from _thinned_protocol(rt, grad, self._mask, self._spec.share))


class DropoutPart(Plain):
    """The same in any layout: each rank makes the whole mask, and takes what it sees of it."""

    def __init__(self, spec: Dropout, layout: str) -> None:
        super().__init__()
        self._spec, self._layout = spec, layout

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        if on.batch is None:
            return x
        mask = self._mine(on, kept(self._spec, on.batch, on.rows))
        on.keep(self, mask)
        return (yield from _thinned_protocol(on.rt, x, mask, self._spec.share))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        mask: Tensor = on.take(self)
        if not wanted:
            return grad
        return (yield from _thinned_protocol(on.rt, grad, mask, self._spec.share))

    def _mine(self, on: Pass, whole: NDArray[np.int64]) -> Tensor:
        size, index = on.tp.size, on.tp.index
        if self._layout == ROWS and size > 1:
            whole = whole[bounds(on.rows, size, index)]
        elif self._layout == COLUMNS and size > 1:
            whole = whole[:, bounds(self._spec.width, size, index)]
        return ops.torch.from_numpy(np.ascontiguousarray(whole))


def _output_shape(spec: Dropout, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    if not 0.0 < spec.share <= LARGEST:
        raise ConfigError(f"a dropout leaves out {spec.share:g} of its numbers", f"give a share from 0 to {LARGEST}")
    return shape


def _secret(spec: Dropout, at: SecretContext) -> DropoutLayer:
    return DropoutLayer(spec)


def _plaintext(spec: Dropout, at: PlaintextContext, x: Tensor) -> Tensor:
    if not at.training or at.batch is None:
        return x
    return x * ops.torch.from_numpy(kept(spec, at.batch, x.shape[0])) / (1.0 - spec.share)


def _place(spec: Dropout, at: PlaceContext) -> Placed:
    return at.placed(spec, "", at.layout)


def _part(spec: Dropout, at: PartContext) -> StagePart:
    return DropoutPart(spec, at.placed.layout)


register(
    LayerType(
        name="dropout",
        spec=Dropout,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=4,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)
