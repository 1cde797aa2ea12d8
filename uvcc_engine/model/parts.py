"""The parts of layers on tensor ranks: what a part must give, and those that serve many layer types.

Gradients of weights are not truncated here: they stay additive terms, which are summed over microbatches, tensor ranks
and replicas first. Only where products are proved each is, with the claim of its product (``Settling``).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from uvcc_engine.model import ops
from uvcc_engine.model.layer_spec import LayerSpec, WeightedSpec
from uvcc_engine.model.registry import SecretContext
from uvcc_engine.model.secret_layer import FusedActivation, Layer
from uvcc_engine.model.stage_part import Pass as Pass
from uvcc_engine.model.stage_part import Settling as Settling
from uvcc_engine.model.stage_part import StagePart as StagePart
from uvcc_engine.model.tensor_parallel import ROWS, WHOLE, PartContext, PlaceContext, Placed, TensorParallel, bounds

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share
    from uvcc_engine.parallel.group import Communicator

S = TypeVar("S", bound=LayerSpec)
W = TypeVar("W", bound=WeightedSpec)


class Plain:
    """What most parts are: their weights are split over the ranks, and they are no block."""

    shared: bool = False
    inner: tuple[StagePart, ...] = ()

    def __init__(self, weight: Share | None = None, dealer: int = 0) -> None:
        self.weights = [] if weight is None else [weight]
        self.dealers = [] if weight is None else [dealer]


class ProductPart(Plain):
    """A part whose outputs are a matrix product, so that the activation behind it can take part in its rounds."""

    @abstractmethod
    def into_activation_protocol(self, on: Pass, activation: Local, x: Share) -> MpcProtocol[Share]:
        """Outputs of inputs, through the activation, which ``fuses``."""

    @abstractmethod
    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        """See ``StagePart``."""

    @abstractmethod
    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        """See ``StagePart``."""


class Local(Plain):
    """A layer without a weight, entry by entry or row by row: the same in every layout."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    @property
    def fuses(self) -> bool:
        """Whether it can take part in the rounds of a product before it."""
        return isinstance(self._layer, FusedActivation)

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        mine = copy.copy(self._layer)  # remembers its own microbatch
        on.keep(self, mine)
        return (yield from mine.forward_protocol(on.rt, x))

    def of_product_protocol(self, on: Pass, left: Share, right: Share, dealer: int) -> MpcProtocol[Share]:
        """The activation of a product, in fewer rounds than one after the other."""
        mine = copy.copy(self._layer)
        assert isinstance(mine, FusedActivation)
        on.keep(self, mine)
        return (yield from mine.of_product_protocol(on.rt, left, right, dealer=dealer))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        layer: Layer = on.take(self)
        return (yield from layer.input_gradient_protocol(on.rt, grad)) if wanted else grad


@runtime_checkable
class AdditiveGradient(Protocol):
    """A layer that can leave its weight's gradient as an additive term, so that a sum over microbatches, ranks and
    replicas is truncated once, however it was divided."""

    def gradient_term(self, rt: Runtime, grad: Share, dealer: int) -> Tensor:
        """This party's term of the weight's gradient, in its shape, at twice the fractional bits. Local."""


class WholeWeight(Plain):
    """A secret layer whose weight every rank holds whole, and which works line by line. Rows in, rows out.

    The rounds of the layer. Unless the layer leaves its weight gradient additive (``AdditiveGradient``), that is
    truncated once per microbatch, beside the way down. The layer is not told training from evaluation.
    """

    shared: bool = True

    def __init__(self, build: Callable[[Share], Layer], weight: Share, dealer: int) -> None:
        super().__init__(weight, dealer)
        self._build = build

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        mine = self._build(self.weights[0])
        on.keep(self, mine)
        return (yield from mine.forward_protocol(on.rt, x))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        mine: Layer = on.take(self)
        work = [self._gradient_protocol(on, mine, grad)]
        work += [mine.input_gradient_protocol(on.rt, grad)] if wanted else []
        _, *below = yield from ops.par(*work)
        return below[0] if wanted else grad

    def _gradient_protocol(self, on: Pass, mine: Layer, grad: Share) -> MpcProtocol[Any]:
        """Hand over the gradient of the weight."""
        if on.settling is not None:
            found = yield from mine.weight_gradient_protocol(on.rt, grad, on.settling.rate)
            on.settling.take(self, 0, found)
        elif isinstance(mine, AdditiveGradient):
            on.gradient(self, 0, mine.gradient_term(on.rt, grad, self.dealers[0]))
        else:
            found = yield from mine.weight_gradient_protocol(on.rt, grad, 1.0)
            on.gradient(self, 0, found.first << self.weights[0].f)


@runtime_checkable
class Following(Protocol):
    """A part that keeps statistics of the rows it trains on beside its weights. They move once a step.

    ``shared``: the statistics lie whole at every tensor rank, which has some of the rows.
    """

    shared: bool

    def drift(self) -> Share:
        """The sum of what this worker's microbatches move them by; forgets it."""

    def follow(self, drift: Share) -> None:
        """Move them by the sum over all replicas."""


@runtime_checkable
class Borrowing(Protocol):
    """A part that computes with a weight which lies in an earlier stage, at the same tensor rank."""

    def borrow(self, weight: Share) -> None:
        """Use this until the next one comes: the peer's slice of the weight. All tensor ranks call it together."""

    def repay(self) -> list[Tensor]:
        """What the microbatches since then add to that slice's gradient, as ``Pass.gradient`` or ``Settling.take`` take
        it there: one additive term, or both components of a share. Forgets it."""


def weight_gradient_protocol(on: Pass, part: StagePart, left: Share, right: Share) -> MpcProtocol[None]:
    """Hand over ``left @ right`` as the gradient of the part's only weight: no round, 2 where gradients are settled.

    ``left``: [inputs, lines]; ``right``: [lines, outputs].
    """
    dealer, settling = part.dealers[0], on.settling
    if settling is None:
        on.gradient(part, 0, ops.product(on.rt, left, right, dealer))
        return
    settling.take(part, 0, (yield from ops.matmul_protocol(on.rt, left, right, scale=settling.rate, dealer=dealer)))


def summed_product_protocol(on: Pass, x: Share, y: Share, dealer: int) -> MpcProtocol[Share]:
    """``x @ y`` summed over the tensor ranks, of it this rank's rows: 2 rounds.

    Additive terms are summed and truncated once. Where products are proved each rank's is truncated by itself, whole,
    and shares are summed: a claim is about one worker's product. ``x``: [rows, k]; ``y``: [k, n] of this rank.
    """
    if on.tp.size == 1:
        return (yield from ops.matmul_protocol(on.rt, x, y, dealer=dealer))
    if on.rt.ledger is None:
        term = on.tp.sum_(ops.product(on.rt, x, y, dealer))
        return (yield from ops.settle_protocol(on.rt, my_rows(on.tp, term), y.f, x.f, dealer))
    mine = yield from ops.matmul_protocol(on.rt, x, y, dealer=dealer)
    both = on.tp.sum_(ops.torch.stack([mine.first, mine.second]))
    return ops.Share(my_rows(on.tp, both[0]), my_rows(on.tp, both[1]), mine.f)


def summed_over_ranks_protocol(rt: Runtime, tp: Communicator, x: Share, y: Share, scale: float) -> MpcProtocol[Share]:
    """``sum(x * y) * scale`` along the last axis, ``[n, 1]``, over all tensor ranks' numbers: 2 rounds. The same at
    all ranks.

    ``x`` and ``y``: [n, this rank's numbers]. Additive terms are summed, and each rank truncates a slice of the sums.
    Where products are proved each rank's is truncated by itself, and shares are summed, as in
    ``summed_product_protocol``.
    """
    torch, n = ops.torch, x.shape[0]
    if tp.size == 1 or rt.ledger is not None:
        mine = yield from ops.summed_products_protocol(rt, x, y, -1, scale=scale, keepdim=True)
        both = tp.sum_(torch.stack([mine.first, mine.second]))
        return ops.Share(both[0], both[1], mine.f)
    term = ops.summed_term(rt, x, y, -1, ops.DEALER)
    slices = torch.cat([term, term.new_zeros(-n % tp.size)])
    settled = yield from ops.settle_protocol(rt, tp.sum_slices(slices)(), y.f, x.f, ops.DEALER, scale)
    both = torch.cat(tp.gather(torch.stack([settled.first, settled.second])), 1)[:, :n, None]
    return ops.Share(both[0], both[1], x.f)


def leaves(parts: Sequence[StagePart]) -> Iterator[StagePart]:
    """All parts, those inside of blocks in their place."""
    for part in parts:
        if part.inner:
            yield from leaves(part.inner)
        else:
            yield part


def forward_parts_protocol(on: Pass, parts: Sequence[StagePart], x: Share) -> MpcProtocol[Share]:
    """Through the parts of a stage, first to last.

    ``x``: [rows, inputs], as the first part wants it laid out; gives the outputs of the last.
    """
    left = list(reversed(parts))
    while left:
        part = left.pop()
        following = left[-1] if left else None
        if isinstance(part, ProductPart) and isinstance(following, Local) and following.fuses:
            x = yield from part.into_activation_protocol(on, following, x)
            left.pop()
        else:
            x = yield from part.forward_protocol(on, x)
    return x


def backward_parts_protocol(on: Pass, parts: Sequence[StagePart], grad: Share, *, wanted: bool) -> MpcProtocol[Share]:
    """Through the parts, last to first. Without ``wanted`` nothing is computed below the lowest weight.

    ``grad``: [rows, outputs] of the last part; gives the gradient of the first one's inputs.
    """
    lowest = next((i for i, part in enumerate(parts) if any(p.weights for p in leaves([part]))), len(parts))
    for i in range(len(parts) - 1, -1, -1):
        if not wanted and i < lowest:
            break
        grad = yield from parts[i].backward_protocol(on, grad, wanted or i > lowest)
    return grad


def keeps_layout(secret: Callable[[S, SecretContext], Layer]) -> TensorParallel[S]:
    """The form of a layer without a weight that works entry by entry: each rank does what it sees, in any layout."""

    def place(spec: S, at: PlaceContext) -> Placed:
        return at.placed(spec, "", at.layout)

    def part(spec: S, at: PartContext) -> StagePart:
        return Local(secret(spec, SecretContext(None, [])))

    return TensorParallel(place=place, part=part)


def whole_weight(secret: Callable[[W, SecretContext], Layer]) -> TensorParallel[W]:
    """The form of a layer with a weight that works line by line, each line alone: its weight lies whole at every rank,
    which does its own lines. Fed ``rows``, or anything on one rank."""

    def part(spec: W, at: PartContext) -> StagePart:
        return WholeWeight(lambda weight: secret(spec, SecretContext(weight, [])), at.weight, at.dealer)

    return TensorParallel(place=place_whole, part=part)


def one_rank(secret: Callable[[S, SecretContext], Layer]) -> TensorParallel[S]:
    """The form of a layer without a weight that must see its rows of data whole: over replicas, stages and
    microbatches, and refused over tensor ranks."""

    def part(spec: S, at: PartContext) -> StagePart:
        return Local(secret(spec, SecretContext(None, [])))

    return TensorParallel(place=place_on_one_rank, part=part)


def one_rank_weight(secret: Callable[[W, SecretContext], Layer]) -> TensorParallel[W]:
    """The same for a layer with a weight."""

    def part(spec: W, at: PartContext) -> StagePart:
        return WholeWeight(lambda weight: secret(spec, SecretContext(weight, [])), at.weight, at.dealer)

    return TensorParallel(place=place_on_one_rank, part=part)


def place_on_one_rank(spec: LayerSpec, at: PlaceContext) -> Placed:
    """Place a layer where there is one tensor rank. Raises ConfigError for more."""
    if at.tensor > 1:
        raise at.refusal(spec, "it is computed on one rank")
    return at.placed(spec, WHOLE if isinstance(spec, WeightedSpec) else "", at.layout)


def place_whole(spec: LayerSpec, at: PlaceContext) -> Placed:
    """Place a weight whole at every rank. Raises ConfigError unless the layer is fed rows, or there is one rank."""
    if at.layout != ROWS and at.tensor > 1:
        raise at.refusal(spec)
    return at.placed(spec, WHOLE, at.layout)


def with_ones(rt: Runtime, x: Share) -> Share:
    """Append the constant column that carries the bias."""
    return ops.cat([x, ops.public(rt, ops.torch.ones(x.shape[0], 1), f=x.f)], 1)


def my_rows(tp: Communicator, x: Tensor) -> Tensor:
    """This rank's slice along the first axis of [rows, ...]."""
    return x[bounds(x.shape[0], tp.size, tp.index)].contiguous()


def gather_rows(tp: Communicator, x: Share, total: int) -> Share:
    """All ranks' slices of the first axis (:func:`bounds` of ``total``) put together: [total, ...]."""
    if tp.size == 1:
        return x
    torch = ops.torch
    places = [bounds(total, tp.size, k) for k in range(tp.size)]
    longest = max(place.stop - place.start for place in places)
    padded = torch.zeros(2, longest, *x.shape[1:], dtype=torch.int64, device=x.first.device)
    padded[0, : x.shape[0]], padded[1, : x.shape[0]] = x.first, x.second
    parts = [found[:, : place.stop - place.start] for found, place in zip(tp.gather(padded), places, strict=True)]
    whole = torch.cat(parts, 1)
    return ops.Share(whole[0], whole[1], x.f)
