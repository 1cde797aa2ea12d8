"""How one layer is split over the tensor ranks of a party: which slice of its weight each holds, and in what layout the
ranks see what goes through it. No torch.

A rank sees an activation in one of three layouts: ``whole`` (every rank has all of it), ``columns`` (each has its
slice of the features) and ``rows`` (each has its slice of the batch's lines). A column-split product turns ``whole``
into ``columns`` without a message; the row-split product that follows sums the ranks' terms inside the party before
the one truncation, and each rank truncates only its own rows: the same numbers as with one rank, up to that
truncation's unit. What works entry by entry or row by row does not mind the layout. (Shoeybi et al., "Megatron-LM",
2019; Korthikanti et al., 2022, for the split over rows.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Ints
from uvcc_engine.model.layer_spec import LayerSpec, WeightedSpec

if TYPE_CHECKING:
    from uvcc_engine.model.stage_part import StagePart
    from uvcc_engine.mpc.foundation.runtime import Runtime
    from uvcc_engine.mpc.foundation.share import Share
    from uvcc_engine.parallel.group import Communicator

WHOLE: Final = "whole"
COLUMNS: Final = "columns"
ROWS: Final = "rows"
HEADS: Final = "heads"
S = TypeVar("S", bound=LayerSpec)


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer of the model with its weight's number (-1: none), how that is split ("": no weight), the layout it is
    fed, and the one that it leaves.

    ``heads`` where queries, keys and values are split by them; ``inner``: the layers of a block. ``borrows``: where it
    is what a block does behind its layers, which lie elsewhere, the number of the weight that it borrows (-1: none).
    """

    spec: LayerSpec
    weight: int
    split: str
    layout: str
    after: str
    heads: int = 0
    inner: tuple[Placed, ...] = ()
    borrows: int = -1


@dataclass(frozen=True, slots=True)
class PlaceContext:
    """Where a layer is to be placed: the ``model``'s name, the ``layout`` that it is fed, and the ``tensor`` ranks.

    ``heads``: in how many heads the layer behind takes its columns, 0 for none. ``inner``: the layers of a block,
    already placed, which leave ``inner_layout``.
    """

    model: str
    layout: str
    tensor: int
    heads: int = 0
    inner: tuple[Placed, ...] = ()
    inner_layout: str = WHOLE

    def placed(self, spec: LayerSpec, split: str, after: str) -> Placed:
        """The layer with its weight split so ("" without a weight), leaving the layout ``after``."""
        heads = self.heads if split == HEADS else 0
        return Placed(spec, -1, split, self.layout, WHOLE if self.tensor == 1 else after, heads, self.inner)

    def divided(self, spec: LayerSpec, split: str, after: str, slices: int) -> Placed:
        """The same for a weight of so many ``slices`` that are not divided further.

        Raises ConfigError if there are fewer of them than ranks.
        """
        if self.tensor > slices:
            raise ConfigError(
                f"{self.model}: a {type(spec).__name__} of {slices} {split} over {self.tensor} tensor ranks",
                "use fewer tensor ranks",
            )
        return self.placed(spec, split, after)

    def refusal(self, spec: LayerSpec, why: str = "") -> ConfigError:
        """The error of a layer that cannot stand here."""
        return ConfigError(
            f"{self.model} has layers that cannot be split over workers: {type(spec).__name__}"
            f" ({why or f'it is fed {self.layout}'})",
            "use replicas, stages, tensor and microbatches of 1",
        )


@dataclass(frozen=True, slots=True)
class PartContext:
    """What a rank builds its part of a layer around: its runtime, where the layer is placed, and the tensor ranks.

    ``own``: this rank's slice of the weight, if the layer has one. ``dealer``: the party that deals the layer's
    truncations, another one for every weight. ``inner``: the parts of a block.
    """

    rt: Runtime
    placed: Placed
    tp: Communicator
    own: Share | None
    dealer: int
    inner: tuple[StagePart, ...] = ()

    @property
    def weight(self) -> Share:
        """This rank's slice of the weight, in the shape that ``placed`` says; only where the spec has one."""
        assert self.own is not None, "the spec has no weight"
        return self.own


Slices = tuple[Ints, Ints]
"""Numbers of the rows and of the columns of a weight that one rank holds."""


def bounds(n: int, size: int, index: int) -> slice:
    """Member ``index``'s slice of ``range(n)`` among ``size`` members: equal ones, up to one."""
    return slice(n * index // size, n * (index + 1) // size)


def slices_by_split(spec: WeightedSpec, placed: Placed, size: int, index: int) -> Slices:
    """Rows and columns of a weight at rank ``index`` of ``size``: consecutive rows, or consecutive columns, or the
    columns of consecutive heads in each of queries, keys and values."""
    height, width = spec.weight_shape
    rows, columns = np.arange(height), np.arange(width)
    if placed.split == ROWS:
        return rows[bounds(height, size, index)], columns
    if placed.split == COLUMNS:
        return rows, columns[bounds(width, size, index)]
    by_head = columns.reshape(3, placed.heads, -1)[:, bounds(placed.heads, size, index)]
    return rows, by_head.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel(Generic[S]):
    """How a layer type is split over the tensor ranks of a party, and over the stages and replicas of a fleet."""

    place: Callable[[S, PlaceContext], Placed]
    """How the weight is split, given the layout that the layer is fed, and the layout that the layer leaves: by
    ``context.placed`` or ``context.divided``. Raises ``context.refusal(spec)`` where the layer cannot stand so."""

    part: Callable[[S, PartContext], StagePart]
    """Build this rank's part around its slice of the weight. It is fed and gives this rank's slice, in the layouts of
    ``context.placed``, of (rows * lines, features); see ``StagePart``."""

    slices: Callable[[S, Placed, int, int], Slices] | None = None
    """Which rows and columns of the weight rank ``index`` of ``size`` holds, where it is split (neither whole nor at
    one rank); every entry lies at one rank. Checkpoints are cut and joined by it. Default: ``slices_by_split``."""

    heads: Callable[[S], int] | None = None
    """In how many heads the layer takes queries, keys and values as columns; a product before it is split by them."""
