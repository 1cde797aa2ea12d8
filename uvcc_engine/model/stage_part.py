"""What a part of a layer on a tensor rank must give, and what a microbatch takes along on its way through the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.batch_place import BatchPlace
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share
    from uvcc_engine.parallel.group import Communicator


@dataclass(frozen=True, slots=True)
class Settling:
    """Where products are proved: gradients leave a part settled, each a claim of its own with its own truncation.

    Terms of several products that are added up before a truncation would be claims of no single worker.
    ``rate``: what the summed gradient is multiplied by in its truncation. ``take(part, k, gradient)`` takes the
    gradient of the part's weight ``k`` times the rate, in the weight's shape and fractional bits.
    """

    rate: float
    take: Callable[[StagePart, int, Share], None]


@dataclass
class Pass:
    """One microbatch on its way through a stage: forward on one runtime, backward on another.

    ``rows`` is its number of lines over all tensor ranks. ``gradient(part, k, term)`` takes an additive term of the
    gradient of the part's weight ``k``, at twice the job's fractional bits; with ``settling`` it refuses. ``batch``:
    which rows of a step's batch they are, where it trains on them; None where it does not.
    """

    rt: Runtime
    tp: Communicator
    rows: int
    gradient: Callable[[StagePart, int, Tensor], None]
    kept: dict[int, Any] = field(default_factory=dict)
    batch: BatchPlace | None = None
    settling: Settling | None = None

    def keep(self, part: StagePart, value: Any) -> None:
        """Remember for the backward pass what the forward pass saw."""
        self.kept[id(part)] = value

    def take(self, part: StagePart) -> Any:
        """What the forward pass kept; once."""
        return self.kept.pop(id(part))


class StagePart(Protocol):
    """A layer or a block of a stage. ``weights`` are this rank's; shapes follow from the part alone.

    ``dealers``: the dealer of each weight's terms. ``shared``: every tensor rank holds the weights whole and gives the
    gradient's terms of its own rows only. ``inner``: the parts of a block, which hold its weights.
    """

    weights: list[Share]
    dealers: list[int]
    shared: bool
    inner: tuple[StagePart, ...]

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        """Outputs of inputs, each in its layout."""

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        """Hand over the weights' gradient terms; the gradient of the inputs if ``wanted``, else ``grad``."""
