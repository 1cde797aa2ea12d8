"""Every column to mean 0 and deviation 1, by statistics that nobody sees: they are computed, and used, in shares.

The rows of all owners lie one after another in one shared table, so the mean and the variance of each column are over
all of them. No owner's own sums exist anywhere, in clear or in shares that are opened: what the parties exchange are
the masked messages of products, truncations and comparisons. The statistics are part of the state, as weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.job.owner_files import STATISTIC_TENSORS
from uvcc_engine.contract.job.private_job import STANDARDISED_LEAST, STANDARDISED_LIMIT, PrivateJob
from uvcc_engine.data.sets import Dataset, Floats
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions.normalize import rsqrt_protocol
from uvcc_engine.mpc.products.arithmetic import (
    add_public,
    mul_protocol,
    product_with_protocol,
    public,
    rescale_protocol,
    scale_int,
    sub,
)

EPSILON: Final = 2.0**-10
"""What is added to a variance: a column that is the same in every row becomes 0."""
_PARTS: Final = STANDARDISED_LEAST
_DIVISION: Final = 33
_HIGHEST: Final = (2.0 * STANDARDISED_LIMIT) ** 2 * 1.01


class Standardiser:
    """The mean and the inverse deviation of each column, both ``[1, features]`` in shares; zeros before they are."""

    def __init__(self, rt: Runtime, features: int, frac_bits: int) -> None:
        self._rt = rt
        self.statistics = [public(rt, torch.zeros(1, features), f=frac_bits) for _ in STATISTIC_TENSORS]

    def fit_protocol(self, x: Share) -> MpcProtocol[None]:
        """Compute them of ``x [rows, features]``. 29 rounds, whatever the number of rows; reveals nothing.

        ``|x|`` is at most ``STANDARDISED_LIMIT``, rows are ``STANDARDISED_LEAST`` to ``STANDARDISED_ROWS``; beyond that
        the ring overflows.
        """
        rt, rows = self._rt, x.shape[0]
        columns = x.transpose(0, 1)
        mean = yield from _divided_protocol(rt, columns.sum(1, keepdim=True), rows)
        centred = sub(columns, mean).map(_in_parts)
        squares = yield from product_with_protocol(rt, centred, centred, lambda a, b: (a * b).sum(-1))
        means = yield from _divided_protocol(rt, squares, rows)
        variance = add_public(rt, means.sum(1, keepdim=True), EPSILON)
        inverse = yield from rsqrt_protocol(rt, variance, EPSILON / 2, _HIGHEST)
        self.statistics[:] = [mean.transpose(0, 1), inverse.transpose(0, 1)]

    def apply_protocol(self, x: Share) -> MpcProtocol[Share]:
        """``(x - mean) * inverse`` of rows ``[rows, features]``. 2 rounds, a product per value."""
        mean, inverse = self.statistics
        return (yield from mul_protocol(self._rt, sub(x, mean), inverse))


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
    """The same of a table in clear: ``mean`` and ``inverse``, ``[features]``, float64."""

    mean: Floats
    inverse: Floats

    @classmethod
    def of(cls, x: Floats) -> ClearStatistics:
        """The statistics of rows ``[rows, features]``."""
        return cls(x.mean(0), 1.0 / np.sqrt(x.var(0) + EPSILON))

    def apply(self, x: Floats) -> Floats:
        """Rows ``[rows, features]`` as a network is trained on them."""
        found: Floats = (x - self.mean) * self.inverse
        return found


def in_clear(job: PrivateJob, data: Dataset) -> Dataset:
    """What the plaintext reference trains on: the data set, standardised by its training rows where the job says so."""
    if not job.standardise:
        return data
    found = ClearStatistics.of(data.train_x)
    val = None if data.val_x is None else found.apply(data.val_x)
    return replace(data, train_x=found.apply(data.train_x), test_x=found.apply(data.test_x), val_x=val)


def named(standardiser: Standardiser | None) -> Iterator[tuple[str, Share]]:
    """The statistics under their names; none without a standardiser. ``[1, features]`` each."""
    if standardiser is not None:
        yield from zip(STATISTIC_TENSORS, standardiser.statistics, strict=True)
