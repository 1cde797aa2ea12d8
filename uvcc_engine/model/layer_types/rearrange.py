"""The same numbers in another order, or some of them: transposed, sliced, cut into windows, on more or fewer lines.

Which numbers go where is public, so it costs no message. A place is given as strided tensors give theirs: sizes of axes
and, along each, how far apart neighbours lie. Every chain of reshape, transpose and slice comes down to one of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Ints
from uvcc_engine.model import ops
from uvcc_engine.model.parts import one_rank
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

MOST_NUMBERS: Final = 1 << 26
_MOST_AXES: Final = 12


@dataclass(frozen=True, slots=True)
class Rearrange(LayerSpec):
    """Of the ``inputs`` numbers of one row of data those at ``offset`` plus any sum of a multiple of each stride, the
    multiples below the sizes, the last one running fastest; on ``lines`` lines."""

    inputs: int
    lines: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numbers(self) -> int:
        """How many numbers of a row come out."""
        return math.prod(self.sizes)


def lines_of(numbers: int, lines: int) -> Rearrange:
    """The same numbers in the same order, on so many lines."""
    return Rearrange(numbers, lines, (numbers,), (1,))


def places(spec: Rearrange) -> Ints:
    """Where in its row each number comes from, ``[numbers]``."""
    found = np.full(1, spec.offset, dtype=np.int64)
    for size, stride in zip(spec.sizes, spec.strides, strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found


def strided(found: Ints, inputs: int, lines: int) -> Rearrange | None:
    """The layer that takes numbers from the places ``found``, ``[numbers]``; None where no few strides say them."""
    sizes: list[int] = []
    strides: list[int] = []
    left = found
    while len(left) > 1 and len(sizes) < _MOST_AXES:
        step = int(left[1] - left[0])
        odd = np.flatnonzero(np.diff(left) != step)
        run = int(odd[0]) + 1 if len(odd) else len(left)
        size = next((n for n in range(run, 1, -1) if len(left) % n == 0 and _runs(left.reshape(-1, n), step)), 1)
        if size == 1 or step < 0:
            return None
        sizes.insert(0, size)
        strides.insert(0, step)
        left = left.reshape(-1, size)[:, 0]
    if len(left) != 1:
        return None
    return Rearrange(inputs, lines, tuple(sizes) or (1,), tuple(strides) or (1,), int(left[0]))


def _runs(rows: Ints, step: int) -> bool:
    return bool((np.diff(rows, axis=1) == step).all())


_kept_places = lru_cache(maxsize=64)(places)  # no tensors: one that is made in inference mode is of no use in training


def _index(spec: Rearrange) -> Tensor:
    return ops.torch.from_numpy(_kept_places(spec))


def _keeps_order(spec: Rearrange) -> bool:
    return spec.numbers == spec.inputs and spec.strides == (1,)


def _taken(spec: Rearrange, x: Tensor) -> Tensor:
    rows = x.reshape(-1, spec.inputs)
    if not _keeps_order(spec):
        rows = rows.index_select(1, _index(spec).to(x.device))
    return rows.reshape(-1, spec.numbers // spec.lines)


class RearrangeLayer(Layer):
    """No message, forward or backward: there each number's gradient is added up where the number came from."""

    def __init__(self, spec: Rearrange) -> None:
        self._spec = spec
        self._fed: tuple[int, ...] = ()

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        self._fed = tuple(x.shape)
        return x.map(lambda t: _taken(self._spec, t))
        yield  # a generator like its siblings

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        spec = self._spec

        def back(t: Tensor) -> Tensor:
            if _keeps_order(spec):
                return t.reshape(self._fed)
            flat = t.reshape(-1, spec.numbers)
            total = flat.new_zeros(flat.shape[0], spec.inputs)
            return total.index_add_(1, _index(spec).to(t.device), flat).reshape(self._fed)

        return grad.map(back)
        yield  # a generator like its siblings


def _output_shape(spec: Rearrange, shape: WeightShape) -> WeightShape:
    check_positive(spec, "inputs", "lines")
    if not 0 < len(spec.sizes) == len(spec.strides) <= _MOST_AXES or min(spec.sizes) < 1 or min(spec.strides) < 0:
        raise ConfigError(f"Rearrange has sizes {spec.sizes} and strides {spec.strides}", "give one stride per size")
    last = spec.offset + sum((n - 1) * step for n, step in zip(spec.sizes, spec.strides, strict=True))
    if spec.numbers > MOST_NUMBERS or not 0 <= spec.offset <= last < spec.inputs:
        raise ConfigError(f"Rearrange takes place {last} of {spec.inputs}", "make sizes and strides stay in the row")
    if shape[0] * shape[1] != spec.inputs:
        raise ConfigError(
            f"Rearrange takes {spec.inputs} numbers of a row, it is fed {shape[0]} lines of {shape[1]}",
            "make the layer below give as many",
        )
    if spec.numbers % spec.lines:
        raise ConfigError(f"{spec.numbers} numbers of a row do not make {spec.lines} even lines", "use a divisor")
    return spec.lines, spec.numbers // spec.lines


def _secret(spec: Rearrange, at: SecretContext) -> RearrangeLayer:
    return RearrangeLayer(spec)


def _plaintext(spec: Rearrange, at: PlaintextContext, x: Tensor) -> Tensor:
    return _taken(spec, x)


register(
    LayerType(
        name="rearrange",
        spec=Rearrange,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        tensor_parallel=one_rank(_secret),
    )
)
