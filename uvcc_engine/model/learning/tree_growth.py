"""Trees grown on shares, one for each output side by side, level by level, from histograms: the split finding of
XGBoost (Chen and Guestrin, 2016).

Rows bring the first and second derivative of their loss. At every node the two are summed over the rows whose bit of a
column is 1, for all columns in one secure matrix product; a question's gain follows by inverse square roots, and the
greatest is found by comparisons. The chosen column stays a secret one-hot: nothing is opened, and the messages depend
on the numbers of rows, columns and nodes alone. (SecretFlow's SS-XGB shares histograms in the same way between two
parties.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.model.functions import rsqrt_protocol
from uvcc_engine.model.layer_types.trees import TreesLayer, answered_protocol, descend_protocol
from uvcc_engine.model.learning.replica_sums import ReplicaSums
from uvcc_engine.mpc.comparisons.tournament import greatest_place_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat, stack
from uvcc_engine.mpc.products.arithmetic import (
    add_public,
    add_ring,
    matmul_protocol,
    mul_protocol,
    mul_public_protocol,
    scale_int,
    sub,
)
from uvcc_engine.mpc.products.summed import summed_products_protocol

_LOG_ROOMY: Final = 9
"""Sums of up to 2^9 rows are taken as they are; of more they are halved as often as it takes."""


def halvings(rows: int) -> int:
    """How often the sums over so many rows are halved."""
    return max(0, math.ceil(math.log2(rows)) - _LOG_ROOMY)


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """``asked`` [outputs, nodes, columns]: one-hot rows (``f = 0``), empty where nothing is asked; ``leaves``
    [outputs, leaves]: what is answered; ``answers`` [rows, outputs]: of which each row gets one of each tree."""

    asked: Share
    leaves: Share
    answers: Share


@dataclass(frozen=True, slots=True)
class TreeGrower:
    """What the growth of trees of ``layer`` depends on and is public: ``rate``, by which its answers are multiplied,
    ``steepest``, above which no second derivative lies, and the number of ``rows`` that they grow from, those of all
    ``replicas`` together. Each of these has rows of its own, on which it follows the questions; the sums over rows are
    added up, and what follows from them is divided: gains by columns, the choice among them by nodes, leaves by leaves.
    """

    rt: Runtime
    layer: TreesLayer
    rate: float
    steepest: float
    rows: int
    replicas: ReplicaSums = field(default_factory=ReplicaSums)

    @property
    def _scale(self) -> float:
        return 2.0 ** -halvings(self.rows)

    def grow_protocol(self, x: Share, slopes: Share, drawn: Tensor | None) -> MpcProtocol[GrownTrees]:
        """Trees over bits ``x [rows, columns]`` from ``slopes [2, outputs, drawn rows]``: first and second derivatives.

        ``drawn``: which rows those are, all in their order if None. About 50 rounds per level and 25 for the leaves.
        Bytes: per level and node about 2,000 for each column, and 32 for each row.
        """
        rt, sample, outputs = self.rt, x if drawn is None else x.index(drawn), slopes.shape[1]
        here: Share | None = None
        asked: list[Share] = []
        for _ in range(self.layer.spec.depth):
            at = here if here is None or drawn is None else here.index(drawn)
            question = yield from self._question_protocol(sample, (yield from self._parted_protocol(slopes, at)))
            asked.append(question.reshape(outputs, -1, question.shape[1]))
            bits = yield from answered_protocol(rt, x, question)
            here = yield from descend_protocol(rt, here, bits.reshape(bits.shape[0], outputs, -1))
        assert here is not None
        leaves = yield from self._leaves_protocol(slopes, here if drawn is None else here.index(drawn))
        each: MpcProtocol[list[Share]] = par(
            *(matmul_protocol(rt, leaves.index(slice(k, k + 1)), _of(here, k).T) for k in range(outputs))
        )
        return GrownTrees(cat(asked, 1), leaves, cat((yield from each)).T)

    def _parted_protocol(self, slopes: Share, here: Share | None) -> MpcProtocol[Share]:
        """The slopes of the rows at each node of each output, zero for all others: [2, outputs * nodes, rows].

        1 round.
        """
        if here is None:
            return slopes
        each = slopes.map(lambda t: t.unsqueeze(2))
        parted = yield from mul_protocol(self.rt, each, here.map(lambda t: t.permute(1, 2, 0).unsqueeze(0)))
        return parted.reshape(2, -1, slopes.shape[2])

    def _question_protocol(self, sample: Share, parts: Share) -> MpcProtocol[Share]:
        """What each node asks: one-hot rows [nodes, columns], the first of the best; an empty row if none gains."""
        rt, (_, nodes, rows), columns = self.rt, parts.shape, sample.shape[1]
        mine = self.replicas.mine(columns + 1)  # the first question is none: no row goes left
        asked = slice(max(mine.start - 1, 0), max(mine.stop - 1, 0))
        flat, whole = parts.reshape(2 * nodes, rows), self.replicas.summed(parts.sum(-1, keepdim=True))
        sums: MpcProtocol[list[Any]] = par(
            self.replicas.matmuls_protocol(rt, [(flat, sample)], self._scale, asked),
            mul_public_protocol(rt, whole, self._scale),
        )
        left, whole = yield from sums
        left = left.reshape(2, nodes, asked.stop - asked.start)
        left = left if mine.start else cat([scale_int(whole, 0), left], -1)
        gains = self.replicas.nothing(rt, nodes, sample.f)
        if mine.stop > mine.start:
            steps = self._gains_protocol(stack([left, sub(whole, left)], 1), none=not mine.start)
            gains = yield from self.layer.gains_protocol(steps)
        place = yield from self._chosen_protocol(self.replicas.gathered(gains.T, columns + 1).T)
        return place.index((slice(None), slice(1, None)))

    def _chosen_protocol(self, gains: Share) -> MpcProtocol[Share]:
        """One-hot (``f = 0``) the place of the greatest in each row of ``gains [nodes, questions]``."""
        rt, (nodes, questions) = self.rt, gains.shape
        mine = self.replicas.mine(nodes)
        place = self.replicas.nothing(rt, questions, 0).T
        if mine.stop > mine.start:
            place = yield from greatest_place_protocol(rt, gains.index(mine))
        return self.replicas.gathered(place, nodes)

    def _gains_protocol(self, sums: Share, *, none: bool) -> MpcProtocol[Share]:
        """sum over both sides of (first^2 / (second + l2)), of [2, sides, nodes, questions]: [nodes, questions].

        ``none``: whether the first question is to ask nothing.
        """
        rt = self.rt
        slope, inverse = sums.index(0), (yield from self._inverse_root_protocol(sums.index(1)))
        roots = yield from mul_protocol(rt, slope, inverse)
        gains = yield from summed_products_protocol(rt, roots, roots, 0)
        if not self.layer.spec.min_gain or not none:
            return gains
        least = torch.zeros(gains.shape[1], dtype=torch.int64, device=rt.device)
        least[0] = round(2.0 * self.layer.spec.min_gain * self._scale * 2.0**gains.f)
        return add_ring(rt, gains, least)

    def _inverse_root_protocol(self, curvature: Share) -> MpcProtocol[Share]:
        """1 / sqrt(second + l2) of halved sums, element by element: 16 rounds."""
        least = self.layer.spec.l2 * self._scale
        most = least + self.steepest * self.rows * self._scale
        low = math.floor(math.log(least, 4) - 2.0**-10)
        high = max(1, low + 1, math.ceil(math.log(most, 4)))
        return (yield from rsqrt_protocol(self.rt, add_public(self.rt, curvature, least), low, high, curvature.f))

    def _leaves_protocol(self, slopes: Share, here: Share) -> MpcProtocol[Share]:
        """-rate first / (second + l2) of every leaf's rows: [outputs, leaves]."""
        rt, outputs, count = self.rt, slopes.shape[1], slopes.shape[1] * self.layer.spec.leaves
        mine = self.replicas.mine(count)
        pairs = [(slopes.index((slice(None), k)), _of(here, k)) for k in range(outputs)]
        sums = yield from self.replicas.matmuls_protocol(rt, pairs, self._scale, mine)
        leaves = self.replicas.nothing(rt, 1, sums.f)
        if mine.stop > mine.start:
            leaves = yield from self._answers_protocol(sums)
        return self.replicas.gathered(leaves.T, count).reshape(outputs, -1)

    def _answers_protocol(self, sums: Share) -> MpcProtocol[Share]:
        """-rate first / (second + l2) of sums [2, leaves]: [1, leaves]."""
        rt = self.rt
        inverse = yield from self._inverse_root_protocol(sums.index(slice(1, 2)))
        roots = yield from mul_protocol(rt, sums.index(slice(0, 1)), inverse)
        return (yield from mul_protocol(rt, roots, inverse, scale=-self.rate))


def _of(here: Share, output: int) -> Share:
    """Where the rows are in one output's tree: [rows, nodes] of ``here [rows, outputs, nodes]``."""
    return here.index((slice(None), output))
