"""Layers on shares whose weights are split over the tensor ranks of a party, and whose gradients are summed up later.

A rank sees an activation in one of three layouts: ``whole`` (every rank has all of it), ``columns`` (each has its
slice of the features) and ``rows`` (each has its slice of the batch). A column-split product turns ``whole`` into
``columns`` without a message; the row-split product that follows sums the ranks' terms inside the party before the one
truncation, and each rank truncates only its own rows: the same numbers as with one rank, up to that truncation's unit.
What works entry by entry or row by row does not mind the layout. (Shoeybi et al., "Megatron-LM", 2019; Korthikanti et
al., 2022, for the split over rows.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from uvcc_engine.model.layers import Layer, ReluLayer
from uvcc_engine.mpc.arithmetic import matmul_gen, public
from uvcc_engine.mpc.runtime import Runtime, Steps
from uvcc_engine.mpc.share import Share, cat
from uvcc_engine.parallel.group import Group
from uvcc_engine.sharding.additive import product, settle_gen
from uvcc_engine.sharding.layout import ROWS, bounds

Gradient = Callable[["Part", int, Tensor], None]


@dataclass
class Pass:
    """One microbatch on its way through a stage: forward on one runtime, backward on another.

    ``rows`` is its number of rows over all tensor ranks. ``gradient`` takes an additive term of a weight's gradient.
    """

    rt: Runtime
    tp: Group
    rows: int
    gradient: Gradient
    kept: dict[int, Any] = field(default_factory=dict)

    def keep(self, part: Part, value: Any) -> None:
        """Remember for the backward pass what the forward pass saw."""
        self.kept[id(part)] = value

    def take(self, part: Part) -> Any:
        return self.kept.pop(id(part))


class Part(Protocol):
    """A layer or a block of a stage. ``weights`` are this rank's; shapes follow from the part alone.

    ``shared``: every tensor rank holds the weights whole and gives the gradient's terms of its own rows only.
    ``inner``: the parts of a block, which hold its weights.
    """

    weights: list[Share]
    dealers: list[int]
    shared: bool
    inner: tuple[Part, ...]

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        """Outputs of inputs."""

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        """Hand over the weights' gradient terms; the gradient of the inputs if ``wanted``, else ``grad``."""


class Plain:
    """What most parts are: their weights are split over the ranks, and they are no block."""

    shared: bool = False
    inner: tuple[Part, ...] = ()


class Local(Plain):
    """A layer without a weight, entry by entry or row by row: the same in every layout."""

    def __init__(self, layer: Layer) -> None:
        self.weights: list[Share] = []
        self.dealers: list[int] = []
        self._layer = layer

    @property
    def is_relu(self) -> bool:
        return isinstance(self._layer, ReluLayer)

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        mine = copy.copy(self._layer)  # remembers its own microbatch
        on.keep(self, mine)
        return (yield from mine.forward_gen(on.rt, x))

    def of_product_gen(self, on: Pass, left: Share, right: Share, dealer: int) -> Steps[Share]:
        """A ReLU of a product, in fewer rounds than one after the other."""
        mine = copy.copy(self._layer)
        assert isinstance(mine, ReluLayer)
        on.keep(self, mine)
        return (yield from mine.of_product_gen(on.rt, left, right, dealer=dealer))

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        layer: Layer = on.take(self)
        return (yield from layer.input_gradient_gen(on.rt, grad)) if wanted else grad


class ColumnDense(Plain):
    """y = [x, 1] W with the columns of W split over the ranks: whole in (or rows, gathered here), columns out.

    Forward 2 rounds; backward 2 rounds, its input gradient summed over the ranks before the truncation.
    """

    def __init__(self, weight: Share, dealer: int, *, layout: str) -> None:
        self.weights = [weight]
        self.dealers = [dealer]
        self._layout = layout

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        return (yield from matmul_gen(on.rt, *self._factors(on, x), dealer=self.dealers[0]))

    def into_relu_gen(self, on: Pass, relu: Local, x: Share) -> Steps[Share]:
        """Through this and the ReLU behind it: 5 rounds, where one after the other take 7."""
        return (yield from relu.of_product_gen(on, *self._factors(on, x), self.dealers[0]))

    def _factors(self, on: Pass, x: Share) -> tuple[Share, Share]:
        seen = with_ones(on.rt, gather_rows(on.tp, x, on.rows) if self._layout == ROWS else x)
        on.keep(self, seen)
        return seen, self.weights[0]

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        seen: Share = on.take(self)
        dealer = self.dealers[0]
        on.gradient(self, 0, product(on.rt, seen.T, grad, dealer))
        if not wanted:
            return grad
        back = self.weights[0].index(slice(0, -1)).T
        if on.tp.size == 1:
            return (yield from matmul_gen(on.rt, grad, back, dealer=dealer))
        term = on.tp.sum_(product(on.rt, grad, back, dealer))
        return (yield from settle_gen(on.rt, my_rows(on.tp, term), back.f, grad.f, dealer))


class RowDense(Plain):
    """y = [x, 1] W with the rows of W split over the ranks: columns in, rows out. The first rank holds the bias.

    Forward 2 rounds, its terms summed over the ranks before the truncation; backward 2 rounds.
    """

    def __init__(self, weight: Share, dealer: int) -> None:
        self.weights = [weight]
        self.dealers = [dealer]

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        seen = with_ones(on.rt, x) if on.tp.index == 0 else x
        on.keep(self, seen)
        weight, dealer = self.weights[0], self.dealers[0]
        if on.tp.size == 1:
            return (yield from matmul_gen(on.rt, seen, weight, dealer=dealer))
        term = on.tp.sum_(product(on.rt, seen, weight, dealer))
        return (yield from settle_gen(on.rt, my_rows(on.tp, term), weight.f, x.f, dealer))

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        seen: Share = on.take(self)
        whole = gather_rows(on.tp, grad, on.rows)
        on.gradient(self, 0, product(on.rt, seen.T, whole, self.dealers[0]))
        if not wanted:
            return grad
        inputs = slice(0, -1) if on.tp.index == 0 else slice(None)
        return (yield from matmul_gen(on.rt, whole, self.weights[0].index(inputs).T, dealer=self.dealers[0]))


class ToRows(Plain):
    """Columns in, rows out: each rank gathers all columns and keeps its own rows. Backward the other way. Local."""

    def __init__(self, columns: int) -> None:
        self.weights: list[Share] = []
        self.dealers: list[int] = []
        self._columns = columns

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        whole = gather_rows(on.tp, x.T, self._columns)
        return whole.T.map(lambda t: my_rows(on.tp, t))
        yield  # a generator like its siblings

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        whole = gather_rows(on.tp, grad, on.rows)
        return whole.T.map(lambda t: my_rows(on.tp, t)).T
        yield  # a generator like its siblings


def with_ones(rt: Runtime, x: Share) -> Share:
    """Append the constant column that carries the bias."""
    return cat([x, public(rt, torch.ones(x.shape[0], 1), f=x.f)], 1)


def my_rows(tp: Group, x: Tensor) -> Tensor:
    """This rank's slice along the first axis."""
    return x[bounds(x.shape[0], tp.size, tp.index)].contiguous()


def gather_rows(tp: Group, x: Share, total: int) -> Share:
    """All ranks' slices of the first axis (:func:`bounds` of ``total``) put together."""
    if tp.size == 1:
        return x
    places = [bounds(total, tp.size, k) for k in range(tp.size)]
    longest = max(place.stop - place.start for place in places)
    padded = torch.zeros(2, longest, *x.shape[1:], dtype=torch.int64, device=x.lo.device)
    padded[0, : x.shape[0]], padded[1, : x.shape[0]] = x.lo, x.hi
    parts = [found[:, : place.stop - place.start] for found, place in zip(tp.gather(padded), places, strict=True)]
    whole = torch.cat(parts, 1)
    return Share(whole[0], whole[1], x.f)


def leaves(parts: Sequence[Part]) -> Iterator[Part]:
    """All parts, those inside of residual blocks in their place."""
    for part in parts:
        if part.inner:
            yield from leaves(part.inner)
        else:
            yield part


def forward_gen(on: Pass, parts: Sequence[Part], x: Share) -> Steps[Share]:
    """Through the parts of a stage, first to last."""
    left = list(reversed(parts))
    while left:
        part = left.pop()
        following = left[-1] if left else None
        if isinstance(part, ColumnDense) and isinstance(following, Local) and following.is_relu:
            x = yield from part.into_relu_gen(on, following, x)
            left.pop()
        else:
            x = yield from part.forward_gen(on, x)
    return x


def backward_gen(on: Pass, parts: Sequence[Part], grad: Share, *, wanted: bool) -> Steps[Share]:
    """Through the parts, last to first. Without ``wanted`` nothing is computed below the lowest weight."""
    lowest = next((i for i, part in enumerate(parts) if any(p.weights for p in leaves([part]))), len(parts))
    for i in range(len(parts) - 1, -1, -1):
        if not wanted and i < lowest:
            break
        grad = yield from parts[i].backward_gen(on, grad, wanted or i > lowest)
    return grad
