"""Objectives of one output per row, on shares: logistic, Huber and Poisson. The others: ``losses``.

Each gives the gradient of the summed loss by the outputs and, where it is asked for, that sum, still shared. Targets
are numbers at the scale of the outputs: 0 or 1, anything, or counts. ``weights`` [rows, 1] say what each row counts in
both, at 2 rounds more; without them each counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import HIGHEST_LOG_RATE
from uvcc_engine.model.functions import to_exp_scale_protocol
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol, mux_protocol, relu_only_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, stack
from uvcc_engine.mpc.functions.nonlinear import divide_protocol, exp_protocol, log_protocol
from uvcc_engine.mpc.products.arithmetic import (
    add,
    add_public,
    dot_protocol,
    mul_protocol,
    mul_public_protocol,
    public,
    rescale_protocol,
    scale_int,
    sub,
)

HUBER: Final = 1.0
"""The distance at which Huber's loss goes on as a line: one deviation of a standardised target."""

Gained = tuple[Share, Share | None]
"""The gradient by the outputs, and the summed loss (one element) if it was asked for."""
ObjectiveProtocol = Callable[..., MpcProtocol[Gained]]


def binary_protocol(
    rt: Runtime, outputs: Share, targets: Share, weights: Share | None = None, *, loss: bool
) -> MpcProtocol[Gained]:
    """Logistic loss log(1 + e^z) - y z of targets 0 and 1; gradient 1 / (1 + e^-z) - y. 20 rounds; error 10 units.

    Outputs, targets and gradient are [rows, 1].
    """
    z = yield from to_exp_scale_protocol(rt, outputs)
    positive = yield from drelu_arithmetic_protocol(rt, z)
    above = yield from mul_protocol(rt, z, positive)
    power = yield from exp_protocol(rt, sub(z, scale_int(above, 2)))
    one, whole = public(rt, 1.0, power), add_public(rt, power, 1.0)
    steps: list[MpcProtocol[Any]] = [divide_protocol(rt, one, whole, 1.0, 2.0)]
    if loss:
        steps += [log_protocol(rt, whole, 1.0, 2.0), _picked_protocol(rt, z, targets, weights)]
    upper, *rest = yield from par(*steps)
    chance = yield from mux_protocol(rt, positive, upper, sub(one, upper))
    grad = sub((yield from rescale_protocol(rt, chance, targets.f)), targets)
    each = _less(add(above, rest[0]), rest[1], weights) if loss else None
    return (yield from _counted_protocol(rt, grad, each, weights))


def huber_protocol(
    rt: Runtime, outputs: Share, targets: Share, weights: Share | None = None, *, loss: bool
) -> MpcProtocol[Gained]:
    """Half the squared distance up to 1, then distance - 1/2; the gradient is the distance, cut at 1. 6 rounds.

    Outputs, targets and gradient are [rows, 1].
    """
    off = sub(outputs, targets)
    edges = stack([add_public(rt, off, HUBER), add_public(rt, off, -HUBER)])
    over = yield from relu_only_protocol(rt, edges)
    cut = add_public(rt, sub(over.index(0), over.index(1)), -HUBER)
    grad = cut if weights is None else (yield from mul_protocol(rt, cut, weights))
    if not loss:
        return grad, None
    whole = sub(scale_int(off, 2), cut)
    return grad, (yield from dot_protocol(rt, grad, whole, scale=0.5))


def poisson_protocol(
    rt: Runtime, outputs: Share, targets: Share, weights: Share | None = None, *, loss: bool
) -> MpcProtocol[Gained]:
    """e^z - y z for counts y and z, cut at 4, the logarithm of a rate; gradient e^z - y. 14 rounds.

    Outputs, targets and gradient are [rows, 1].
    """
    z = yield from to_exp_scale_protocol(rt, outputs)
    over = yield from relu_only_protocol(rt, add_public(rt, z, -HIGHEST_LOG_RATE))
    low = sub(z, over)
    power = yield from exp_protocol(rt, add_public(rt, low, -HIGHEST_LOG_RATE))
    rate = yield from mul_public_protocol(rt, power, math.exp(HIGHEST_LOG_RATE))
    grad = sub((yield from rescale_protocol(rt, rate, targets.f)), targets)
    each = _less(rate, (yield from _picked_protocol(rt, low, targets, weights)), weights) if loss else None
    return (yield from _counted_protocol(rt, grad, each, weights))


def _counted_protocol(rt: Runtime, grad: Share, each: Share | None, weights: Share | None) -> MpcProtocol[Gained]:
    """The gradient [rows, 1] and the sum of the losses of ``each`` row, if wanted, as often as rows count.

    Without weights ``each`` is that sum already.
    """
    if weights is None:
        return grad, each
    steps: list[MpcProtocol[Any]] = [mul_protocol(rt, grad, weights)]
    steps += [] if each is None else [dot_protocol(rt, each, weights)]
    grad, *total = yield from par(*steps)
    return grad, total[0] if total else None


def _picked_protocol(rt: Runtime, outputs: Share, targets: Share, weights: Share | None) -> MpcProtocol[Share]:
    """Outputs times targets: of each row if rows are weighted, else their sum, which is one truncation."""
    if weights is None:
        return (yield from dot_protocol(rt, outputs, targets))
    return (yield from mul_protocol(rt, outputs, targets))


def _less(losses: Share, picked: Share, weights: Share | None) -> Share:
    return sub(losses if weights is not None else _total(losses), picked)


def plaintext_loss(name: str, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over a batch of weight times loss in clear, by torch's own functions; (rows, 1) each."""
    fn = torch.nn.functional
    if name == "binary":
        each = fn.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    elif name == "huber":
        each = fn.huber_loss(outputs, targets, delta=HUBER, reduction="none")
    elif name == "poisson":
        low = outputs + (outputs.clamp(max=HIGHEST_LOG_RATE) - outputs).detach()
        each = fn.poisson_nll_loss(low, targets, reduction="none")
    else:
        each = (outputs - targets).square() / 2.0
    return each.mean() if weights is None else (each * weights).mean()


OF_ONE_OUTPUT: Final[dict[str, ObjectiveProtocol]] = {
    "binary": binary_protocol,
    "huber": huber_protocol,
    "poisson": poisson_protocol,
}


def _total(x: Share) -> Share:
    return x.reshape(-1).sum(0, keepdim=True)
