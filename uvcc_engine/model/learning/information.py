"""Standard errors of a regression: its information matrix, computed on shares and inverted by the owner in clear.

What is sealed to the owner are sums over all training rows: of x x' w of each row x (with a 1 for the intercept), w
being 1, p (1 - p) or the rate, and of the squared residuals of a linear regression. These are aggregates, and no
small ones: the owner of all rows could compute them by itself, the first of several owners learns by them how the
columns of all owners' rows go together, which is why the policy lists them. The domains see nothing of them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.learning.objectives import OF_ONE_OUTPUT
from uvcc_engine.model.parts import with_ones
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import (
    add,
    add_public,
    matmul_protocol,
    mul_protocol,
    neg,
    public,
    sub,
)
from uvcc_engine.mpc.products.summed import summed_products_protocol

PART: Final = 256
"""Rows whose products are added up before a truncation: those below 2^(54 - 2 frac_bits) each stay in the ring."""


def information_protocol(rt: Runtime, job: PrivateJob, weight: Share, x: Share, y: Share) -> MpcProtocol[list[Share]]:
    """The mean information of a row ``[k, k]`` and ``[1, 3]``: rows, mean squared residual, whether it is the variance.

    ``weight [k, 1]``, the intercept last; ``x [rows, k - 1]``, ``y [rows, 1]``. 6 rounds of a linear regression, of a
    logistic one 8 and of a Poisson one 6 beside those of its objective; the messages of a product for each entry of the
    matrix and part of ``PART`` rows, and for each entry of x where rows count differently. Reveals nothing.
    """
    seen, rows = with_ones(rt, x), x.shape[0]
    outputs = yield from matmul_protocol(rt, seen, weight)
    linear = job.objective == "mse"
    counted, squares = seen, public(rt, torch.zeros(1), f=x.f)
    if linear:
        cut = sub(outputs, y).map(_parts).map(lambda t: t.squeeze(-1))
        each = yield from summed_products_protocol(rt, cut, cut, -1, scale=1.0 / rows)
        squares = each.sum(0, keepdim=True)
    else:
        gradient, _ = yield from OF_ONE_OUTPUT[job.objective](rt, outputs, y, loss=False)
        rate = add(gradient, y)  # the gradient is what is expected less the target
        if job.objective == "binary":
            rate = yield from mul_protocol(rt, rate, add_public(rt, neg(rate), 1.0))
        counted = yield from mul_protocol(rt, seen, rate)
    parts = yield from matmul_protocol(rt, seen.map(_parts).T, counted.map(_parts), scale=1.0 / rows)
    told = [public(rt, torch.tensor([float(value)]), f=x.f) for value in (rows, linear)]
    return [parts.sum(0), cat([told[0], squares, told[1]]).reshape(1, 3)]


def _parts(x: Tensor) -> Tensor:
    """``[rows, k]`` as ``[parts, PART, k]``, with zeros at the end; fewer rows than ``PART`` as one part."""
    size = min(PART, len(x))
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % size)).reshape(-1, size, x.shape[1])
