"""Where the way forward ends and the way back begins: each objective on one microbatch's lines of one tensor rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model import losses
from uvcc_engine.model.learning.objectives import OF_ONE_OUTPUT
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import mul_protocol, sub

Reached = losses.Powers | Share
"""What the forward pass leaves for the loss: exponentials for the cross-entropy, the outputs for any other."""
Down = Callable[[Share], MpcProtocol[Share]]


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of lines, ``[lines, classes]``, and what each counts, ``[lines, 1]``, where a target does not say so."""

    values: Share
    counts: Share | None


def reached_protocol(rt: Runtime, job: PrivateJob, outputs: Share) -> MpcProtocol[Reached]:
    """What is kept of the outputs ``[lines, classes]`` until the way back."""
    if job.objective != "cross-entropy":
        return outputs
    return (yield from losses.powers_protocol(rt, outputs))


def descend_protocol(
    rt: Runtime, job: PrivateJob, at: Reached, targets: Targets, down: Down, *, reveal: bool
) -> MpcProtocol[tuple[Share, Share | None]]:
    """What ``down`` gives for the gradient of the summed loss, and with ``reveal`` that sum, still shared: one element.

    The loss costs no round beside the way down.
    """
    if isinstance(at, losses.Powers):
        steps: list[MpcProtocol[Any]] = [_from_powers_protocol(rt, job, at, targets.values, down)]
        if reveal:
            steps.append(losses.total_loss_protocol(rt, at, targets.values, weighted=job.weighted))
        grad, *loss = yield from par(*steps)
        return grad, loss[0] if loss else None
    if job.objective == "mse":
        difference = sub(at, targets.values)
        grad = difference
        if targets.counts is not None:
            grad = yield from mul_protocol(rt, difference, targets.counts)
        steps = [down(grad)] + ([losses.total_square_protocol(rt, difference, grad)] if reveal else [])
        below, *loss = yield from par(*steps)
        return below, loss[0] if loss else None
    grad, total = yield from OF_ONE_OUTPUT[job.objective](rt, at, targets.values, targets.counts, loss=reveal)
    return (yield from down(grad)), total


def _from_powers_protocol(
    rt: Runtime, job: PrivateJob, at: losses.Powers, targets: Share, down: Down
) -> MpcProtocol[Share]:
    grad = yield from losses.gradient_protocol(rt, at, targets, weighted=job.weighted)
    return (yield from down(grad))
