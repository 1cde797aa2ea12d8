"""Layers behind an embedding, and in the end the embedding's own table once more: one weight, used twice.

Both uses' gradients add in one product: the table's is ``[letters, grad]^T [arrived, states]``, where ``arrived`` is
what comes back to the vectors, ``states`` what goes into the last product and ``grad`` what comes back from the logits.

Where its layers lie in several stages the first of them owns the table. The stage of the last product borrows it for a
step's passes, and hands back what its use adds to the gradient: there is one weight, and it is moved in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.layer_types.embedding import Embedding, EmbeddingLayer
from uvcc_engine.model.layers import backward_protocol, forward_protocol, next_protocol
from uvcc_engine.model.parts import (
    Pass,
    Plain,
    Settling,
    StagePart,
    backward_parts_protocol,
    forward_parts_protocol,
    gather_rows,
    my_rows,
)
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register, type_of
from uvcc_engine.model.secret_layer import LayerBlock
from uvcc_engine.model.shapes import WeightShape
from uvcc_engine.model.tensor_parallel import ROWS, PartContext, PlaceContext, Placed, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.secret_layer import Layer, Then, Update
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share
    from uvcc_engine.parallel.group import Communicator


@dataclass(frozen=True, slots=True)
class Tied(LayerSpec):
    """An embedding with its ``table``, ``layers``, and behind them the product with the transposed rows of the table's
    letters: as many outputs as letters, without a bias."""

    table: Embedding
    layers: tuple[LayerSpec, ...]

    @property
    def inner(self) -> tuple[LayerSpec, ...]:
        return (self.table, *self.layers)

    @property
    def parted(self) -> bool:
        return True


class TiedLayer(LayerBlock):
    """The rounds of its layers and of one product more, each way; the table's gradient takes one product as before."""

    def __init__(self, spec: Tied, inner: Sequence[Layer]) -> None:
        super().__init__(inner)
        self._letters = spec.table.vocabulary
        self._embedding = cast("EmbeddingLayer", inner[0])
        self._states: Share | None = None

    def _table(self) -> Share:
        """The letters' rows: (vocabulary, width)."""
        assert self._embedding.weight is not None
        return self._embedding.weight.index(slice(0, self._letters))

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        self._states = yield from forward_protocol(rt, self.inner, x)
        return (yield from ops.matmul_protocol(rt, self._states, self._table().T))

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        state = yield from next_protocol(rt, self.inner, x, place)
        return (yield from ops.matmul_protocol(rt, state, self._table().T))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """Raises ConfigError: letters have no gradient."""
        raise ConfigError("a tied block has no input gradient", "put it first")
        yield  # a generator like its siblings

    def backward_protocol(self, rt: Runtime, grad: Share, update: Update, then: Then | None) -> MpcProtocol[None]:
        """Raises ConfigError if a layer below waits for a gradient."""
        if then is not None:
            raise ConfigError("a tied block has no input gradient", "put it first")
        assert self._states is not None
        self._embedding.also = (grad, self._states)
        below = yield from ops.matmul_protocol(rt, grad, self._table())
        yield from backward_protocol(rt, self.inner, below, update, None)


class TiedPart(Plain):
    """The same in a stage; the table lies in the first of its parts. Rows out.

    A tensor rank has some of the table's rows. It gathers all letters' for the product with its own lines, and what its
    lines add to their gradient is summed over the ranks, of which it then takes its rows.
    """

    def __init__(self, spec: Tied, parts: Sequence[StagePart]) -> None:
        super().__init__()
        self.inner = tuple(parts)
        self._letters, self._rows = spec.table.vocabulary, spec.table.rows

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        states = yield from forward_parts_protocol(on, self.inner, x)
        table = gather_rows(on.tp, self.inner[0].weights[0], self._rows).index(slice(0, self._letters))
        on.keep(self, (states, table))
        return (yield from ops.matmul_protocol(on.rt, states, table.T, dealer=self.inner[0].dealers[0]))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        """Raises ConfigError if an input gradient is wanted."""
        if wanted:
            raise ConfigError("a tied block has no input gradient", "put it first")
        kept: tuple[Share, Share] = on.take(self)
        states, table = kept
        dealer = self.inner[0].dealers[0]
        both = yield from self._both_protocol(on, grad, states)
        below = yield from ops.matmul_protocol(on.rt, grad, table, dealer=dealer)
        yield from backward_parts_protocol(both, self.inner, below, wanted=False)
        return grad

    def _both_protocol(self, on: Pass, grad: Share, states: Share) -> MpcProtocol[Pass]:
        """The pass with which the table's gradient takes up what its second use adds."""
        table, dealer = self.inner[0], self.inner[0].dealers[0]
        if on.settling is None:

            def both(part: StagePart, weight: int, term: Tensor) -> None:
                if part is table:  # the terms of one dealer's products add up before anything is truncated
                    term += _mine(on, self._rows, ops.product(on.rt, grad.T, states, dealer))
                on.gradient(part, weight, term)

            return replace(on, gradient=both)
        settling = on.settling
        more = yield from _settled_protocol(on, settling, self._rows, grad, states, dealer)

        def settled(part: StagePart, weight: int, gradient: Share) -> None:
            settling.take(part, weight, ops.add(gradient, more) if part is table else gradient)

        return replace(on, settling=replace(settling, take=settled))


class BorrowedTable(Plain):
    """The last product alone, in a stage behind the table's: with rows that this rank's peer there lends. Rows in and
    out. The rounds are those of one product, each way."""

    def __init__(self, spec: Tied, tp: Communicator, dealer: int) -> None:
        super().__init__()
        self._letters, self._rows, self._tp, self._dealer = spec.table.vocabulary, spec.table.rows, tp, dealer
        self._table: Share | None = None
        self._owed: list[Tensor] | None = None

    def borrow(self, weight: Share) -> None:
        """See ``Borrowing``."""
        self._table = gather_rows(self._tp, weight, self._rows).index(slice(0, self._letters))

    def repay(self) -> list[Tensor]:
        """See ``Borrowing``."""
        assert self._owed is not None, "no microbatch came back"
        owed, self._owed = self._owed, None
        return owed

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        assert self._table is not None
        on.keep(self, x)
        return (yield from ops.matmul_protocol(on.rt, x, self._table.T, dealer=self._dealer))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        assert self._table is not None
        states: Share = on.take(self)
        if on.settling is None:
            self._owe([_mine(on, self._rows, ops.product(on.rt, grad.T, states, self._dealer))])
        else:
            more = yield from _settled_protocol(on, on.settling, self._rows, grad, states, self._dealer)
            self._owe([more.first, more.second])
        return (yield from ops.matmul_protocol(on.rt, grad, self._table, dealer=self._dealer))

    def _owe(self, term: list[Tensor]) -> None:
        self._owed = term if self._owed is None else [a + b for a, b in zip(self._owed, term, strict=True)]


def _settled_protocol(
    on: Pass, settling: Settling, rows: int, grad: Share, states: Share, dealer: int
) -> MpcProtocol[Share]:
    """What the second use adds to this rank's rows of the table's gradient, a claim of its own: 2 rounds."""
    found = yield from ops.matmul_protocol(on.rt, grad.T, states, scale=settling.rate, dealer=dealer)
    return found.map(lambda term: _mine(on, rows, term.clone()))  # the claim of the product is about its memory


def _mine(on: Pass, rows: int, letters: Tensor) -> Tensor:
    """What all ranks' lines add to this rank's rows of the table, 0 for places, of what these add to the letters'
    (vocabulary, width); ``rows``: of the whole table."""
    whole = letters.new_zeros(rows, letters.shape[1])
    whole[: len(letters)] = on.tp.sum_(letters)
    return my_rows(on.tp, whole)


def _output_shape(spec: Tied, shape: WeightShape) -> WeightShape:
    table, after = spec.table, shape
    for layer in spec.inner:
        after = type_of(layer).output_shape(layer, after)
    if after[1] != table.width:
        what = f"a tied block ends on {after[1]} features, its table has vectors of {table.width}"
        raise ConfigError(what, "end on as many features as the embedding gives")
    return after[0], table.vocabulary


def _secret(spec: Tied, at: SecretContext) -> TiedLayer:
    return TiedLayer(spec, at.inner)


def _plaintext(spec: Tied, at: PlaintextContext, x: Tensor) -> Tensor:
    return at.inner(x) @ at.weights[0][: spec.table.vocabulary].T


def _products(spec: Tied) -> int:
    return spec.table.vocabulary * spec.table.width


def _place(spec: Tied, at: PlaceContext) -> Placed:
    if at.tensor > 1 and at.inner_layout != ROWS:
        raise at.refusal(spec, f"its layers leave {at.inner_layout}: end them on rows, as a normalisation does")
    return at.placed(spec, "", at.inner_layout)


def _part(spec: Tied, at: PartContext) -> StagePart:
    return TiedPart(spec, at.inner) if at.placed.borrows < 0 else BorrowedTable(spec, at.tp, at.dealer)


register(
    LayerType(
        name="tied",
        spec=Tied,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=4,
        products=_products,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)
