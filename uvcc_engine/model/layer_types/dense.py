"""A fully connected layer.

On tensor ranks dense layers are split by columns and by rows in turn, and the columns of queries, keys and values by
heads (Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.parts import (
    Local,
    Pass,
    Plain,
    ProductPart,
    StagePart,
    gather_rows,
    summed_product_protocol,
    weight_gradient_protocol,
    with_ones,
)
from uvcc_engine.model.registry import (
    InitialContext,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    register,
)
from uvcc_engine.model.secret_layer import ProductLayer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive
from uvcc_engine.model.tensor_parallel import (
    COLUMNS,
    HEADS,
    ROWS,
    PartContext,
    PlaceContext,
    Placed,
    Slices,
    TensorParallel,
    bounds,
    slices_by_split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Dense(WeightedSpec):
    """A fully connected layer. Its weight is (inputs + 1, outputs); the last row is the bias."""

    inputs: int
    outputs: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + 1, self.outputs

    @property
    def adaptable(self) -> tuple[int, int]:
        return self.inputs, self.outputs


class DenseLayer(ProductLayer):
    """y = [x, 1] W with W (inputs + 1, outputs): the last row is the bias, so it costs no message of its own.

    Forward 2 rounds; input gradient 2 rounds; weight gradient 2 rounds.
    """

    direct = True
    by_line = True

    def __init__(self, weight: Share) -> None:
        self.weight = weight
        self._seen: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        return (yield from ops.matmul_protocol(rt, *self.factors(rt, x)))

    def factors(self, rt: Runtime, x: Share) -> tuple[Share, Share]:
        assert self.weight is not None
        self._seen = with_ones(rt, x)
        return self._seen, self.weight

    def outputs(self, product: Share) -> Share:
        return product

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        return (yield from ops.matmul_protocol(rt, grad, self.weight.index(slice(0, -1)).T))

    def gated_gradient_protocol(self, rt: Runtime, grad: Share, bits: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        return (yield from ops.matmul_gated_protocol(rt, grad, self.weight.index(slice(0, -1)).T, bits))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._seen is not None
        return (yield from ops.matmul_protocol(rt, self._seen.T, grad, scale=scale))


class ColumnDense(ProductPart):
    """y = [x, 1] W with the columns of W split over the ranks: whole in (or rows, gathered here), columns out.

    Forward 2 rounds; backward 2 rounds, its input gradient summed over the ranks before the truncation.
    """

    def __init__(self, weight: Share, dealer: int, *, layout: str) -> None:
        super().__init__(weight, dealer)
        self._layout = layout

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        return (yield from ops.matmul_protocol(on.rt, *self._factors(on, x), dealer=self.dealers[0]))

    def into_activation_protocol(self, on: Pass, activation: Local, x: Share) -> MpcProtocol[Share]:
        """Through this and a ReLU behind it: 5 rounds, where one after the other take 7."""
        return (yield from activation.of_product_protocol(on, *self._factors(on, x), self.dealers[0]))

    def _factors(self, on: Pass, x: Share) -> tuple[Share, Share]:
        seen = with_ones(on.rt, gather_rows(on.tp, x, on.rows) if self._layout == ROWS else x)
        on.keep(self, seen)
        return seen, self.weights[0]

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        seen: Share = on.take(self)
        dealer, given = self.dealers[0], weight_gradient_protocol(on, self, seen.T, grad)
        if not wanted:
            yield from given
            return grad
        back = self.weights[0].index(slice(0, -1)).T
        both: MpcProtocol[list[Any]] = ops.par(given, summed_product_protocol(on, grad, back, dealer))
        return cast("Share", (yield from both)[1])


class RowDense(Plain):
    """y = [x, 1] W with the rows of W split over the ranks: columns in, rows out. The first rank holds the bias.

    Forward 2 rounds, its terms summed over the ranks before the truncation; backward 2 rounds.
    """

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        seen = with_ones(on.rt, x) if on.tp.index == 0 else x
        on.keep(self, seen)
        return (yield from summed_product_protocol(on, seen, self.weights[0], self.dealers[0]))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        seen: Share = on.take(self)
        whole = gather_rows(on.tp, grad, on.rows)
        given = weight_gradient_protocol(on, self, seen.T, whole)
        if not wanted:
            yield from given
            return grad
        inputs = slice(0, -1) if on.tp.index == 0 else slice(None)
        back = self.weights[0].index(inputs).T
        both: MpcProtocol[list[Any]] = ops.par(given, ops.matmul_protocol(on.rt, whole, back, dealer=self.dealers[0]))
        return cast("Share", (yield from both)[1])


def _output_shape(spec: Dense, shape: WeightShape) -> WeightShape:
    check_positive(spec, "inputs", "outputs")
    check_features(spec, shape, spec.inputs)
    return shape[0], spec.outputs


def _initial(spec: Dense, at: InitialContext) -> Floats:
    return at.kaiming(spec.weight_shape)


def _secret(spec: Dense, at: SecretContext) -> DenseLayer:
    return DenseLayer(at.weight)


def _plaintext(spec: Dense, at: PlaintextContext, x: Tensor) -> Tensor:
    return x @ at.weight[:-1] + at.weight[-1]


def _products(spec: Dense) -> int:
    return spec.inputs * spec.outputs


def _place(spec: Dense, at: PlaceContext) -> Placed:
    if at.layout == COLUMNS and at.tensor > 1:
        return at.divided(spec, ROWS, ROWS, spec.inputs)
    if at.heads:
        return at.divided(spec, HEADS, COLUMNS, at.heads)
    return at.divided(spec, COLUMNS, COLUMNS, spec.outputs)


def _slices(spec: Dense, placed: Placed, size: int, index: int) -> Slices:
    if placed.split != ROWS:
        return slices_by_split(spec, placed, size, index)
    mine = np.arange(spec.inputs)[bounds(spec.inputs, size, index)]
    return np.append(mine, spec.inputs) if index == 0 else mine, np.arange(spec.outputs)


def _part(spec: Dense, at: PartContext) -> StagePart:
    if at.placed.split == ROWS and at.tp.size > 1:
        return RowDense(at.weight, at.dealer)
    return ColumnDense(at.weight, at.dealer, layout=at.placed.layout)


register(
    LayerType(
        name="dense",
        spec=Dense,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=4,
        products=_products,
        tensor_parallel=TensorParallel(place=_place, part=_part, slices=_slices),
    )
)
