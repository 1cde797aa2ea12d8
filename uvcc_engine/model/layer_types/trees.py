"""Decision trees whose answers add up. Which column a node asks, and what a leaf answers, stay secret.

Every input is a bit: a number column becomes bits by ``bins`` in the schema ("at most this edge"), a category by
``one-hot``. A node asks one column; a row whose bit is 1 goes left. All trees are full: a node that asks nothing has an
empty row, and sends every row right. Trees are not trained by gradients of weights but grown one by one
(``learning.boosting``), so a model that has them has no other layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import ops
from uvcc_engine.model.parts import one_rank_weight
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

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.model_spec import ModelSpec
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

T = TypeVar("T")
MOST_DEPTH: Final = 8
LEAST_L2, MOST_L2 = 0.125, 1024.0
MOST_ROWS: Final = 1 << 17
"""Rows that one tree is grown from: sums over more, squared, pass the ring's end."""
_ANSWERS: Final = 2


@dataclass(frozen=True, slots=True)
class Trees(WeightedSpec):
    """``count`` trees of ``depth`` questions over ``inputs`` bits for each of ``outputs`` numbers, which is the sum of
    its trees' answers. Trees of all outputs are grown together: ``count`` times, one for each.

    Its weight has a row per node, tree after tree (those that are grown together side by side) and level after level:
    ``inputs`` entries, 1 at the column that the node asks, and what a row is answered that goes left and right there,
    which is 0 above the last level. ``l2``: what is added to the curvature of a leaf; ``min_gain``: what a question
    must gain to be asked (XGBoost's lambda and gamma).
    """

    inputs: int
    count: int
    depth: int
    l2: float = 1.0
    min_gain: float = 0.0
    outputs: int = 1

    @property
    def trees(self) -> int:
        """All of them."""
        return self.count * self.outputs

    @property
    def nodes(self) -> int:
        """Of one tree, its leaves not counted."""
        return (1 << self.depth) - 1

    @property
    def leaves(self) -> int:
        """Of one tree."""
        return 1 << self.depth

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.trees * self.nodes, self.inputs + _ANSWERS

    @property
    def decays(self) -> bool:
        return False

    @property
    def grown(self) -> bool:
        return True


def trees_of(model: ModelSpec) -> Trees | None:
    """The trees that a model is, or None if it is another."""
    alone = len(model.layers) == 1 and model.layers[0].grown
    return cast(Trees, model.layers[0]) if alone else None


class TreesLayer(Layer):
    """The answers of all trees: 2 rounds for all questions at once, 1 per further level, 1 for the leaves.

    Every row asks every node, so nothing tells which way it goes. Exact: bits times bits lose nothing.
    """

    def __init__(self, spec: Trees, weight: Share) -> None:
        self.weight = weight
        self.spec = spec

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        spec, rows = self.spec, x.shape[0]
        asked = self.weight.index((slice(None), slice(0, spec.inputs)))
        bits = yield from answered_protocol(rt, x, asked)
        bits = bits.reshape(rows, spec.trees, spec.nodes)
        here = None
        for level in range(spec.depth):
            first = (1 << level) - 1
            mine = bits.index((slice(None), slice(None), slice(first, 2 * first + 1)))
            here = yield from descend_protocol(rt, here, mine)
        assert here is not None
        answers = self.weight.reshape(spec.trees, spec.nodes, -1).index(
            (slice(None), slice(spec.leaves // 2 - 1, None), slice(spec.inputs, None))
        )
        sums = []
        for output in range(spec.outputs):
            of = slice(output, None, spec.outputs)
            mine, leaf = answers.index(of).reshape(1, -1), here.index((slice(None), of)).reshape(rows, -1)
            sums.append(ops.matmul_protocol(rt, mine, leaf.T))
        return ops.cat((yield from ops.par(*sums))).T

    def grown_protocol(self, steps: MpcProtocol[T]) -> MpcProtocol[T]:
        """``steps``, which grow one of these trees, passed through: who counts a layer's messages sees them here."""
        return (yield from steps)

    def gains_protocol(self, steps: MpcProtocol[Share]) -> MpcProtocol[Share]:
        """``steps``, which find what questions gain, passed through: the largest numbers of these trees."""
        return (yield from steps)

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """Raises ConfigError: trees ask bits, and bits have no gradient."""
        raise ConfigError("trees have no input gradient", "let them be the only layer")
        yield  # a generator like its siblings


def answered_protocol(rt: Runtime, x: Share, asked: Share) -> MpcProtocol[Share]:
    """What rows of bits ``x [rows, columns]`` say to each question, a one-hot row of ``asked [questions, columns]`` at
    any scale: bits [rows, questions] of ``f = 0``. 2 rounds.

    The truncation of whole numbers is exact; that of a proved product is not, so there a comparison with one half gives
    the bits: 9 rounds where everything is proved, 6 where products are.
    """
    if rt.ledger is None:
        return (yield from ops.matmul_protocol(rt, x.with_f(0), asked.T.with_f(x.f + asked.f)))
    whole = yield from ops.matmul_protocol(rt, x.with_f(0), asked.T.with_f(0))  # one is 2^(x.f + asked.f)
    return (yield from ops.drelu_arithmetic_protocol(rt, ops.add_public(rt, whole, -(2.0 ** (x.f + asked.f - 1)))))


def descend_protocol(rt: Runtime, here: Share | None, bits: Share) -> MpcProtocol[Share]:
    """Where rows are one level further down: ``[..., nodes]`` to ``[..., 2 nodes]``, all bits of ``f = 0``: 1 round.

    ``here``: whether a row is at each node, None at the root; ``bits``: whether it would go left there.
    """
    if here is None:
        left, right = bits, ops.add_public(rt, ops.scale_int(bits, -1), 1.0)
    else:
        left = yield from ops.mul_protocol(rt, here, bits)
        right = ops.sub(here, left)
    both = ops.cat([one.map(lambda t: t.unsqueeze(-1)) for one in (left, right)], -1)
    return both.reshape(*bits.shape[:-1], 2 * bits.shape[-1])


def _output_shape(spec: Trees, shape: WeightShape) -> WeightShape:
    check_positive(spec, "inputs", "count", "depth", "outputs")
    check_features(spec, shape, spec.inputs)
    if spec.depth > MOST_DEPTH:
        raise ConfigError(f"trees of depth {spec.depth}", f"1 to {MOST_DEPTH}: a tree has 2^depth leaves")
    if not LEAST_L2 <= spec.l2 <= MOST_L2:
        raise ConfigError(f"trees with l2 {spec.l2:g}", f"{LEAST_L2:g} to {MOST_L2:g}: leaves are divided by it")
    if not 0.0 <= spec.min_gain <= MOST_L2:
        raise ConfigError(f"trees with min_gain {spec.min_gain:g}", f"0 to {MOST_L2:g}")
    return shape[0], spec.outputs


def _initial(spec: Trees, at: InitialContext) -> Floats:
    return np.zeros(spec.weight_shape)


def _secret(spec: Trees, at: SecretContext) -> TreesLayer:
    return TreesLayer(spec, at.weight)


def _plaintext(spec: Trees, at: PlaintextContext, x: Tensor) -> Tensor:
    weight = at.weight.reshape(spec.trees, spec.nodes, -1)
    bits = (x @ at.weight[:, : spec.inputs].T).reshape(len(x), spec.trees, spec.nodes)
    here = ops.torch.ones(len(x), spec.trees, 1, dtype=x.dtype)
    for level in range(spec.depth):
        first = (1 << level) - 1
        left = here * bits[..., first : 2 * first + 1]
        here = ops.torch.stack([left, here - left], -1).reshape(len(x), spec.trees, -1)
    answers = weight[:, spec.leaves // 2 - 1 :, spec.inputs :].reshape(spec.trees, -1)
    return (here * answers).reshape(len(x), spec.count, spec.outputs, -1).sum((1, 3))


def _products(spec: Trees) -> int:
    return spec.trees * spec.nodes * spec.inputs


register(
    LayerType(
        name="trees",
        spec=Trees,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=3,
        products=_products,
        tensor_parallel=one_rank_weight(_secret),
    )
)
