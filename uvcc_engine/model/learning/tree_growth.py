"""One tree grown on shares, level by level, from histograms: the split finding of XGBoost (Chen and Guestrin, 2016).

Rows bring the first and second derivative of their loss. At every node the two are summed over the rows whose bit of a
column is 1, for all columns in one secure matrix product; a question's gain follows by inverse square roots, and the
greatest is found by comparisons. The chosen column stays a secret one-hot: nothing is opened, and the messages depend
on the numbers of rows, columns and nodes alone. (SecretFlow's SS-XGB shares histograms in the same way between two
parties.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.model.functions import rsqrt_protocol
from uvcc_engine.model.layer_types.trees import TreesLayer, answered_protocol, descend_protocol
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
class GrownTree:
    """``asked`` [nodes, columns]: one-hot rows (``f = 0``), empty where nothing is asked; ``leaves`` [1, leaves]: what
    is answered; ``answers`` [rows, 1]: of which each row gets one."""

    asked: Share
    leaves: Share
    answers: Share


@dataclass(frozen=True, slots=True)
class TreeGrower:
    """What the growth of a tree of ``layer`` depends on and is public: ``rate``, by which its answers are multiplied,
    ``steepest``, above which no second derivative lies, and the number of ``rows`` that it is grown from."""

    rt: Runtime
    layer: TreesLayer
    rate: float
    steepest: float
    rows: int

    @property
    def _scale(self) -> float:
        return 2.0 ** -halvings(self.rows)

    def grow_protocol(self, x: Share, slopes: Share, drawn: Tensor | None) -> MpcProtocol[GrownTree]:
        """A tree over bits ``x [rows, columns]`` from ``slopes [2, drawn rows]``: first and second derivatives.

        ``drawn``: which rows those are, all in their order if None. About 50 rounds per level and 25 for the leaves.
        Bytes: per level and node about 2,000 for each column, and 32 for each row.
        """
        rt, sample = self.rt, x if drawn is None else x.index(drawn)
        here: Share | None = None
        asked: list[Share] = []
        for _ in range(self.layer.spec.depth):
            at = here if here is None or drawn is None else here.index(drawn)
            question = yield from self._question_protocol(sample, (yield from self._parted_protocol(slopes, at)))
            asked.append(question)
            bits = yield from answered_protocol(rt, x, question)
            here = yield from descend_protocol(rt, here, bits)
        assert here is not None
        leaves = yield from self._leaves_protocol(slopes, here if drawn is None else here.index(drawn))
        answers = yield from matmul_protocol(rt, leaves, here.T)
        return GrownTree(cat(asked), leaves, answers.T)

    def _parted_protocol(self, slopes: Share, here: Share | None) -> MpcProtocol[Share]:
        """The slopes of the rows at each node, zero for all others: [2, nodes, rows], 1 round."""
        each = slopes.map(lambda t: t.unsqueeze(1))
        if here is None:
            return each
        return (yield from mul_protocol(self.rt, each, here.T.map(lambda t: t.unsqueeze(0))))

    def _question_protocol(self, sample: Share, parts: Share) -> MpcProtocol[Share]:
        """What each node asks: one-hot rows [nodes, columns], the first of the best; an empty row if none gains."""
        rt, (_, nodes, rows) = self.rt, parts.shape
        sums: MpcProtocol[list[Any]] = par(
            matmul_protocol(rt, parts.reshape(2 * nodes, rows), sample, scale=self._scale),
            mul_public_protocol(rt, parts.sum(-1, keepdim=True), self._scale),
        )
        ones, whole = yield from sums
        ones = ones.reshape(2, nodes, -1)
        left = cat([scale_int(whole, 0), ones], -1)  # the first question is none: no row goes left
        gains = yield from self.layer.gains_protocol(self._gains_protocol(stack([left, sub(whole, left)], 1)))
        place = yield from greatest_place_protocol(rt, gains)
        return place.index((slice(None), slice(1, None)))

    def _gains_protocol(self, sums: Share) -> MpcProtocol[Share]:
        """sum over both sides of (first^2 / (second + l2)), of [2, sides, nodes, questions]: [nodes, questions]."""
        rt = self.rt
        slope, inverse = sums.index(0), (yield from self._inverse_root_protocol(sums.index(1)))
        roots = yield from mul_protocol(rt, slope, inverse)
        gains = yield from summed_products_protocol(rt, roots, roots, 0)
        if not self.layer.spec.min_gain:
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
        """-rate first / (second + l2) of every leaf's rows: [1, leaves]."""
        rt = self.rt
        sums = yield from matmul_protocol(rt, slopes, here, scale=self._scale)
        inverse = yield from self._inverse_root_protocol(sums.index(slice(1, 2)))
        roots = yield from mul_protocol(rt, sums.index(slice(0, 1)), inverse)
        return (yield from mul_protocol(rt, roots, inverse, scale=-self.rate))
