"""Several stacks of layers fed the same, whose outputs meet: added, multiplied entry by entry, or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.layers import backward_protocol, forward_protocol, next_protocol
from uvcc_engine.model.parts import Pass, Plain, StagePart, backward_parts_protocol, forward_parts_protocol
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register, type_of
from uvcc_engine.model.secret_layer import LayerBlock
from uvcc_engine.model.shapes import WeightShape
from uvcc_engine.model.tensor_parallel import COLUMNS, PartContext, PlaceContext, Placed, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.secret_layer import Layer, Then, Update
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

SUM, PRODUCT, CONCAT = "sum", "product", "concat"
JOINS: Final = (SUM, PRODUCT, CONCAT)


@dataclass(frozen=True, slots=True)
class Chain(LayerSpec):
    """Layers one after the other; none at all hand on what they are fed. One of ``Branches``."""

    layers: tuple[LayerSpec, ...]

    @property
    def inner(self) -> tuple[LayerSpec, ...]:
        return self.layers

    @property
    def block(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Branches(LayerSpec):
    """Stacks of layers that are fed the same; ``join`` says how what they give becomes one: ``sum``, ``product`` (of
    two) or ``concat``, line by line."""

    join: str
    branches: tuple[tuple[LayerSpec, ...], ...]

    @property
    def inner(self) -> tuple[LayerSpec, ...]:
        return tuple(Chain(layers) for layers in self.branches)

    @property
    def side_by_side(self) -> bool:
        return True


class ChainLayer(LayerBlock):
    """The rounds of its layers."""

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        return (yield from forward_protocol(rt, self.inner, x))

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        return (yield from next_protocol(rt, self.inner, x, place))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        for layer in reversed(self.inner):
            grad = yield from layer.input_gradient_protocol(rt, grad)
        return grad

    def backward_protocol(self, rt: Runtime, grad: Share, update: Update, then: Then | None) -> MpcProtocol[None]:
        yield from backward_protocol(rt, self.inner, grad, update, then)


class BranchesLayer(LayerBlock):
    """The branches take their rounds side by side: as many as the longest. A product takes 2 more, each way."""

    def __init__(self, spec: Branches, inner: Sequence[Layer]) -> None:
        super().__init__(inner)
        self._spec = spec
        self._seen: list[Share] = []

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        self._seen = yield from ops.par(*(layer.forward_protocol(rt, x) for layer in self.inner))
        return (yield from joined_protocol(rt, self._spec.join, self._seen))

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        found = yield from ops.par(*(layer.next_protocol(rt, x, place) for layer in self.inner))
        return (yield from joined_protocol(rt, self._spec.join, found))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        parts = yield from parted_protocol(rt, self._spec.join, self._seen, grad)
        pairs = zip(self.inner, parts, strict=True)
        found: list[Share] = yield from ops.par(*(layer.input_gradient_protocol(rt, part) for layer, part in pairs))
        return reduce(ops.add, found)

    def backward_protocol(self, rt: Runtime, grad: Share, update: Update, then: Then | None) -> MpcProtocol[None]:
        parts = yield from parted_protocol(rt, self._spec.join, self._seen, grad)
        below: list[Share] = []

        def keep_protocol(found: Share) -> MpcProtocol[None]:
            below.append(found)
            return
            yield  # a generator like its siblings

        pairs = zip(self.inner, parts, strict=True)
        arrive = None if then is None else keep_protocol
        yield from ops.par(*(backward_protocol(rt, [layer], part, update, arrive) for layer, part in pairs))
        if then is not None:
            yield from then(reduce(ops.add, below))


def joined_protocol(rt: Runtime, join: str, parts: Sequence[Share]) -> MpcProtocol[Share]:
    """What several outputs (lines, features) become: 2 rounds for a product, none else."""
    if join == CONCAT:
        return ops.cat(list(parts), 1)
    if join == SUM:
        return reduce(ops.add, parts)
    return (yield from ops.mul_protocol(rt, parts[0], parts[1]))


def parted_protocol(rt: Runtime, join: str, seen: Sequence[Share], grad: Share) -> MpcProtocol[list[Share]]:
    """The gradient (lines, features) of each branch from that of the join: 2 rounds for a product, none else."""
    if join == SUM:
        return [grad] * len(seen)
    if join == CONCAT:
        starts = [sum(one.shape[1] for one in seen[:k]) for k in range(len(seen) + 1)]
        return [grad.index((slice(None), slice(a, b))) for a, b in pairwise(starts)]
    return (yield from ops.par(ops.mul_protocol(rt, grad, seen[1]), ops.mul_protocol(rt, grad, seen[0])))


class ChainPart(Plain):
    """Parts one after the other."""

    def __init__(self, parts: Sequence[StagePart]) -> None:
        super().__init__()
        self.inner = tuple(parts)

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        return (yield from forward_parts_protocol(on, self.inner, x))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        return (yield from backward_parts_protocol(on, self.inner, grad, wanted=wanted))


class BranchesPart(Plain):
    """The branches side by side, all in one layout: what they give meets on each rank by itself."""

    def __init__(self, join: str, parts: Sequence[StagePart]) -> None:
        super().__init__()
        self._join = join
        self.inner = tuple(parts)

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        seen: list[Share] = yield from ops.par(*(part.forward_protocol(on, x) for part in self.inner))
        on.keep(self, seen)
        return (yield from joined_protocol(on.rt, self._join, seen))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        parts = yield from parted_protocol(on.rt, self._join, on.take(self), grad)
        pairs = zip(self.inner, parts, strict=True)
        found: list[Share] = yield from ops.par(*(part.backward_protocol(on, g, wanted) for part, g in pairs))
        return reduce(ops.add, found) if wanted else grad


def _chain_shape(spec: Chain, shape: WeightShape) -> WeightShape:
    for layer in spec.layers:
        shape = type_of(layer).output_shape(layer, shape)
    return shape


def _output_shape(spec: Branches, shape: WeightShape) -> WeightShape:
    if spec.join not in JOINS:
        raise ConfigError(f"Branches.join is {spec.join[:40]!r}", f"give {', '.join(JOINS)}")
    if not 2 <= len(spec.branches) <= (2 if spec.join == PRODUCT else 64):
        raise ConfigError(f"a {spec.join} of {len(spec.branches)} branches", "give two; more only without product")
    after = [_chain_shape(Chain(layers), shape) for layers in spec.branches]
    if len({lines for lines, _ in after}) > 1 or (spec.join != CONCAT and len(set(after)) > 1):
        raise ConfigError(f"branches that meet in a {spec.join} give {after} (lines, features)", "make them the same")
    return after[0][0], sum(width for _, width in after) if spec.join == CONCAT else after[0][1]


def _secret(spec: Branches, at: SecretContext) -> BranchesLayer:
    return BranchesLayer(spec, at.inner)


def _chain_secret(spec: Chain, at: SecretContext) -> ChainLayer:
    return ChainLayer(at.inner)


def _plaintext(spec: Branches, at: PlaintextContext, x: Tensor) -> Tensor:
    found = [part(x) for part in at.parts]
    if spec.join == CONCAT:
        return ops.torch.cat(found, 1)
    return reduce(lambda a, b: a + b if spec.join == SUM else a * b, found)


def _chain_plaintext(spec: Chain, at: PlaintextContext, x: Tensor) -> Tensor:
    return at.inner(x)


def _place(spec: Branches, at: PlaceContext) -> Placed:
    if at.tensor == 1:
        return at.placed(spec, "", at.layout)
    left = sorted({one.after for one in at.inner})
    if len(left) > 1:
        raise at.refusal(spec, f"its branches leave {' and '.join(left)}")
    if spec.join == CONCAT and left == [COLUMNS]:
        raise at.refusal(spec, "columns of several branches side by side would not lie as one layer's")
    return at.placed(spec, "", left[0])


def _chain_place(spec: Chain, at: PlaceContext) -> Placed:
    return at.placed(spec, "", at.inner_layout)


def _part(spec: Branches, at: PartContext) -> StagePart:
    return BranchesPart(spec.join, at.inner)


def _chain_part(spec: Chain, at: PartContext) -> StagePart:
    return ChainPart(at.inner)


register(
    LayerType(
        name="chain",
        spec=Chain,
        output_shape=_chain_shape,
        secret=_chain_secret,
        plaintext=_chain_plaintext,
        tensor_parallel=TensorParallel(place=_chain_place, part=_chain_part),
    )
)
register(
    LayerType(
        name="branches",
        spec=Branches,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=4,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)
