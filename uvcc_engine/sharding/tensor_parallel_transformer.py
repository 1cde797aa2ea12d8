"""Parts of deep networks on tensor ranks: the embedding, layer normalisation and residual blocks.

Between the split products of a block (attention by heads, the wide layer by columns) every rank keeps its own slice of
the rows, and what works row by row is done once, by the rank that has the row (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model.specs import Embedding
from uvcc_engine.model.transformer import EPSILON, HIGHEST
from uvcc_engine.mpc.arithmetic import add, matmul_gen, mul_gen, partners, public, terms
from uvcc_engine.mpc.normalize import normalize_gen, normalize_gradient_gen
from uvcc_engine.mpc.roles import roles
from uvcc_engine.mpc.runtime import Runtime, Steps
from uvcc_engine.mpc.share import Share, cat
from uvcc_engine.sharding.additive import product, settle_gen
from uvcc_engine.sharding.layout import bounds
from uvcc_engine.sharding.tensor_parallel import Part, Pass, Plain, backward_gen, forward_gen, gather_rows, my_rows


class LookUp(Plain):
    """Secret one-hot letters and their public places times a table whose rows are split over the ranks: each looks up
    what lies in its slice of the vocabulary, and the ranks' terms are summed. Whole in, rows out.

    Forward 2 rounds; the table's gradient takes no message.
    """

    def __init__(self, spec: Embedding, weight: Share, dealer: int) -> None:
        self.weights = [weight]
        self.dealers = [dealer]
        self._spec = spec

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        spec, rt, dealer = self._spec, on.rt, self.dealers[0]
        letters = x.reshape(-1, spec.vocabulary)
        places = public(rt, torch.eye(spec.positions).repeat(x.shape[0], 1), f=x.f)
        mine = bounds(spec.vocabulary + spec.positions, on.tp.size, on.tp.index)
        seen = cat([letters, places], 1).index((slice(None), mine))
        on.keep(self, seen)
        if on.tp.size == 1:
            return (yield from matmul_gen(rt, seen, self.weights[0], dealer=dealer))
        term = on.tp.sum_(product(rt, seen, self.weights[0], dealer))
        return (yield from settle_gen(rt, my_rows(on.tp, term), self.weights[0].f, x.f, dealer))

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        if wanted:
            raise ConfigError("an embedding has no input gradient", "put it first")
        seen: Share = on.take(self)
        on.gradient(self, 0, product(on.rt, seen.T, gather_rows(on.tp, grad, on.rows), self.dealers[0]))
        return grad
        yield  # a generator like its siblings


class Norm(Plain):
    """Rows brought to mean 0 and variance 1, then gain and bias, which every rank holds whole. Rows in, rows out.

    Forward 31 rounds, backward 8; the gradient of gain and bias takes no message.
    """

    shared: bool = True

    def __init__(self, weight: Share, dealer: int) -> None:
        self.weights = [weight]
        self.dealers = [dealer]

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        gain, bias = self.weights[0].index(0), self.weights[0].index(1)
        normal, inverse = yield from normalize_gen(on.rt, x, epsilon=EPSILON, high=HIGHEST)
        on.keep(self, (normal, inverse))
        return add((yield from mul_gen(on.rt, normal, gain)), bias)

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        normal, inverse = on.take(self)
        bias = grad.lo.sum(0) << normal.f
        on.gradient(self, 0, torch.stack([_columns(on.rt, grad, normal, self.dealers[0]), bias]))
        if not wanted:
            return grad
        gained = yield from mul_gen(on.rt, grad, self.weights[0].index(0))
        return (yield from normalize_gradient_gen(on.rt, gained, normal, inverse))


def _columns(rt: Runtime, x: Share, y: Share, dealer: int) -> Tensor:
    """This party's additive term of the column sums of ``x * y``. Local."""
    role = roles(rt, dealer)
    pairs = zip(terms(role, x), partners(role, y), strict=True)
    return torch.stack([(a * b).sum(0) for a, b in pairs]).sum(0)


class Branch(Plain):
    """x + parts(x), in one layout. Its weights are its parts'."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.weights: list[Share] = []
        self.dealers: list[int] = []
        self.inner = tuple(parts)

    def forward_gen(self, on: Pass, x: Share) -> Steps[Share]:
        return add(x, (yield from forward_gen(on, self.inner, x)))

    def backward_gen(self, on: Pass, grad: Share, wanted: bool) -> Steps[Share]:
        inner = yield from backward_gen(on, self.inner, grad, wanted=wanted)
        return add(grad, inner) if wanted else grad
