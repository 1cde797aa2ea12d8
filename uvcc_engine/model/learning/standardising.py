"""Every column to one scale, by statistics that nobody sees: they are computed, and used, in shares.

To mean 0 and deviation 1, or to 0 to 1 from the least to the greatest value or between two quantiles, as the job says.

The rows of all owners lie one after another in one shared table, so the mean and the variance of each column are over
all of them. No owner's own sums exist anywhere, in clear or in shares that are opened: what the parties exchange are
the masked messages of products, truncations and comparisons. The statistics are part of the state, as weights are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.job.owner_files import STATISTIC_TENSORS
from uvcc_engine.contract.job.private_job import STANDARDISED_LEAST, STANDARDISED_LIMIT, PrivateJob, StandardiseBy
from uvcc_engine.data.sets import Dataset, Floats
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions.normalize import rsqrt_protocol
from uvcc_engine.mpc.functions.order_statistics import order_statistics_protocol
from uvcc_engine.mpc.products.arithmetic import (
    add_public,
    mul_protocol,
    neg,
    public,
    rescale_protocol,
    scale_int,
    sub,
)
from uvcc_engine.mpc.products.summed import summed_products_protocol

EPSILON: Final = 2.0**-10
"""What is added to a variance: a column that is the same in every row becomes 0."""
_PARTS: Final = STANDARDISED_LEAST
_DIVISION: Final = 33
QUANTILES: Final = (0.01, 0.99)
_LOG_LIMIT: Final = 7
"""``STANDARDISED_LIMIT`` as a power of two."""
_LOG_STEP: Final = -10
"""To what fraction least values and quantiles are found: the next lower multiple of it."""
_HIGHEST: Final = (2.0 * STANDARDISED_LIMIT) ** 2 * 1.01


class Standardiser:
    """What each column is moved by and multiplied by, both ``[1, features]`` in shares; zeros before they are."""

    def __init__(self, rt: Runtime, features: int, frac_bits: int, by: StandardiseBy = "deviation") -> None:
        self._rt, self.by = rt, by
        self.statistics = [public(rt, torch.zeros(1, features), f=frac_bits) for _ in STATISTIC_TENSORS[by]]

    def fit_protocol(self, x: Share) -> MpcProtocol[None]:
        """Compute them of ``x [rows, features]``; reveals nothing. By deviation it takes 17 rounds, whatever the number
        of rows, else the rounds of ``order_statistics_protocol`` and 27, and messages in proportion to the rows.

        ``|x|`` is at most ``STANDARDISED_LIMIT``, rows are ``STANDARDISED_LEAST`` to ``STANDARDISED_ROWS``; beyond that
        the ring overflows.
        """
        rt, rows = self._rt, x.shape[0]
        if self.by != "deviation":
            yield from self._fit_width_protocol(x)
            return
        columns = x.transpose(0, 1)
        mean = yield from _divided_protocol(rt, columns.sum(1, keepdim=True), rows)
        centred = sub(columns, mean).map(_in_parts)
        squares = yield from summed_products_protocol(rt, centred, centred, -1)
        means = yield from _divided_protocol(rt, squares, rows)
        variance = add_public(rt, means.sum(1, keepdim=True), EPSILON)
        inverse = yield from rsqrt_protocol(rt, variance, EPSILON / 2, _HIGHEST)
        self.statistics[:] = [mean.transpose(0, 1), inverse.transpose(0, 1)]

    def _fit_width_protocol(self, x: Share) -> MpcProtocol[None]:
        """The least value (the lower quantile) and one over the width to the greatest (the upper one)."""
        rt, step = self._rt, max(_LOG_STEP, -x.f)
        ends = yield from order_statistics_protocol(rt, x, ranks_of(self.by, x.shape[0]), _LOG_LIMIT, step)
        low, high = ends.index(slice(0, 1)), ends.index(slice(1, 2))
        width = add_public(rt, sub(high, low), 2.0**step)
        square = yield from mul_protocol(rt, width, width)
        inverse = yield from rsqrt_protocol(rt, add_public(rt, square, EPSILON), EPSILON / 2, _HIGHEST)
        self.statistics[:] = [low, inverse]

    def apply_protocol(self, x: Share) -> MpcProtocol[Share]:
        """``(x - shift) * inverse`` of rows ``[rows, features]``: 2 rounds, a product per value; by quantiles cut to 0
        to 1, by two comparisons per value after each other."""
        shift, inverse = self.statistics
        moved = yield from mul_protocol(self._rt, sub(x, shift), inverse)
        if self.by != "quantiles":
            return moved
        above = yield from relu_only_protocol(self._rt, moved)
        room = yield from relu_only_protocol(self._rt, add_public(self._rt, neg(above), 1.0))
        return add_public(self._rt, neg(room), 1.0)


def ranks_of(by: StandardiseBy, rows: int) -> tuple[int, int]:
    """Which values from the least on are the ends of what becomes 0 to 1."""
    if by == "range":
        return 0, rows - 1
    return math.floor(QUANTILES[0] * (rows - 1)), math.ceil(QUANTILES[1] * (rows - 1))


def _divided_protocol(rt: Runtime, total: Share, rows: int) -> MpcProtocol[Share]:
    """A sum over ``rows``, by a truncation of the same size for each number of rows, so that messages tell none of it.

    Any shape. Sums of features and of a part's squares stay below 2^62 on the way.
    """
    wide = scale_int(total, round(2.0**_DIVISION / rows)).with_f(total.f + _DIVISION)
    return (yield from rescale_protocol(rt, wide, total.f))


def _in_parts(columns: Tensor) -> Tensor:
    """``[features, rows]`` as ``[features, parts, rows of a part]``, filled with zeros: each part's sum has room."""
    features, rows = columns.shape
    filled = torch.nn.functional.pad(columns, (0, -rows % _PARTS))
    return filled.reshape(features, _PARTS, -1)


@dataclass(frozen=True, slots=True)
class ClearStatistics:
    """The same of a table in clear: ``mean`` (or where 0 is) and ``inverse``, ``[features]``, float64; ``cut``: whether
    what lies outside of 0 to 1 is brought there."""

    mean: Floats
    inverse: Floats
    cut: bool = False

    @classmethod
    def of(cls, x: Floats, by: StandardiseBy = "deviation") -> ClearStatistics:
        """The statistics of rows ``[rows, features]``."""
        if by == "deviation":
            return cls(x.mean(0), 1.0 / np.sqrt(x.var(0) + EPSILON))
        step = 2.0**_LOG_STEP
        low, high = np.floor(np.sort(x, axis=0)[list(ranks_of(by, len(x)))] / step) * step
        return cls(low, 1.0 / np.sqrt((high - low + step) ** 2 + EPSILON), by == "quantiles")

    def apply(self, x: Floats) -> Floats:
        """Rows ``[rows, features]`` as a network is trained on them."""
        found: Floats = (x - self.mean) * self.inverse
        return np.clip(found, 0.0, 1.0) if self.cut else found


def in_clear(job: PrivateJob, data: Dataset) -> Dataset:
    """What the plaintext reference trains on: the data set, standardised by its training rows where the job says so."""
    if not job.standardise:
        return data
    found = ClearStatistics.of(data.train_x, job.standardise_by)
    val = None if data.val_x is None else found.apply(data.val_x)
    return replace(data, train_x=found.apply(data.train_x), test_x=found.apply(data.test_x), val_x=val)


def named(standardiser: Standardiser | None) -> Iterator[tuple[str, Share]]:
    """The statistics under their names; none without a standardiser. ``[1, features]`` each."""
    if standardiser is not None:
        yield from zip(STATISTIC_TENSORS[standardiser.by], standardiser.statistics, strict=True)
