"""Optimisers on shares: stochastic gradient descent with momentum, and Adam. Rates are folded into truncations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.functions import rsqrt_protocol, square_protocol
from uvcc_engine.model.layers import Layer, weighted
from uvcc_engine.model.learning.clipping import clipped_protocol, raised_bits
from uvcc_engine.model.learning.overflows import Bounded
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import add, add_public, mul_protocol, mul_public_protocol, public, sub

_EXTRA_BITS: Final = 8
_MOST_BITS: Final = 24
_RANGE_BITS: Final = 20
"""Second moments below 2^20 have an inverse root: of gradients, times ``gradient_gain``, of 1,024 in every step, and of
ten times as much in one step of a hundred."""
_ROOM: Final = 47
"""What two factors of a move may have of fractional bits: the third one has 12 bits, and the move is below 8."""


class Optimizer(Protocol):
    """Moves weights. ``moments``: its secret state by name, one share per weighted layer, which a checkpoint holds."""

    moments: dict[str, list[Share]]
    step: int

    def update_protocol(self, rt: Runtime, layer: Layer, grad: Share) -> MpcProtocol[None]:
        """Update one layer's weight from the gradient of its outputs (summed over the rows)."""

    def bounded(self) -> list[Bounded]:
        """What of its state tells whether gradients have left the fixed point."""


class Sgd:
    """The update v <- m v + g / B, w <- w - lr v, kept as u = lr v so that it takes one product and no extra round.

    u <- m (lr / lr_before) u + (lr / B) g, w <- w - u: the same weights, since lr is a public number of the step.
    """

    def __init__(
        self,
        job: PrivateJob,
        layers: list[Layer],
        velocity: list[Share],
        positions: int = 1,
        decays: Sequence[bool] = (),
    ) -> None:
        """``velocity``: u of every weighted layer, in order; ``positions``: rows of the network per row of the data;
        ``decays``: which weights decay, none of them without it.
        """
        self._job = job
        self._decays = decays
        self._positions = positions
        self._weighted = weighted(layers)
        self.moments = {"velocity": velocity}
        self.step = 0

    def update_protocol(self, rt: Runtime, layer: Layer, grad: Share) -> MpcProtocol[None]:
        """2 rounds, and 28 more to cut the norm."""
        assert layer.weight is not None
        at = self._weighted.index(layer)
        velocity = self.moments["velocity"]
        three: MpcProtocol[list[Any]] = par(
            self._gradient_protocol(rt, layer, grad),
            mul_public_protocol(rt, velocity[at], self._job.decay_at(self.step)),
            decayed_protocol(rt, layer.weight, self._job, self.step, at < len(self._decays) and self._decays[at]),
        )
        fresh, kept, decayed = yield from three
        velocity[at] = add(kept, fresh)
        layer.weight = less_decay(layer, decayed, velocity[at])

    def bounded(self) -> list[Bounded]:
        """Nothing: a weight that a gradient beyond it has moved shows in what comes out of its layer."""
        return []

    def _gradient_protocol(self, rt: Runtime, layer: Layer, grad: Share) -> MpcProtocol[Share]:
        """lr / B times the summed gradient, of a norm of at most lr times the job's limit."""
        job = self._job
        limit, raised = cut_at(job, self.step)
        rate = job.rate_at(self.step) / self._positions
        found = yield from layer.weight_gradient_protocol(rt, grad, rate * 2.0**raised)
        return (yield from clipped_protocol(rt, found, limit, raised)) if limit else found


def cut_at(job: PrivateJob, step: int) -> tuple[float, int]:
    """To which norm a step of SGD cuts its gradient times the rate, and by how many bits that is larger for it."""
    limit = job.clip_norm * job.lr_at(step)
    raised = raised_bits(limit) if limit else 0
    return limit * 2.0**raised, raised


def decayed_protocol(rt: Runtime, weight: Share, job: PrivateJob, step: int, wanted: bool) -> MpcProtocol[Share | None]:
    """What decay takes of a weight, lr * weight_decay of it: 2 rounds; nothing if it is not ``wanted``.

    Shape of the weight.
    """
    if not wanted or not job.weight_decay:
        return None
    return (yield from mul_public_protocol(rt, weight, job.lr_at(step) * job.weight_decay))


def less_decay(layer: Layer, decayed: Share | None, move: Share) -> Share:
    """The layer's weight less its move and what decays. Local. Shape of the weight."""
    assert layer.weight is not None
    moved = sub(layer.weight, move)
    return moved if decayed is None else sub(moved, decayed)


def gradient_gain(batch: int, positions: int) -> float:
    """What Adam multiplies the summed gradient by: the power of two next to 1 / sqrt(rows). It cancels out."""
    return 2.0 ** -round(math.log2(batch * positions) / 2.0)


def _moment_bits(frac_bits: int) -> int:
    """Fractional bits that a second moment needs: more than the weights have, since it is a square."""
    return min(frac_bits + _EXTRA_BITS, _MOST_BITS)


def _memory_bits(beta2: float) -> int:
    """What ``1 / (1 - beta2)`` has of bits left of the point, less one: squares are added up over so many steps."""
    return math.floor(-math.log2(1.0 - beta2))


def second_bits(frac_bits: int, beta2: float) -> int:
    """Fractional bits of what Adam keeps for its second moment, which is that moment over ``1 - beta2``."""
    return _moment_bits(frac_bits) - _memory_bits(beta2)


def smallest(frac_bits: int) -> float:
    """Adam's epsilon, squared: what is added to the second moment (16 units of it) before the square root."""
    return 2.0 ** (4 - _moment_bits(frac_bits))


def second_range(job: PrivateJob) -> tuple[float, float]:
    """Between which numbers what is kept for the second moment lies where no gradient left the fixed point."""
    highest = 4.0 ** (_highest(job) + 1)
    return -smallest(job.frac_bits) / (1.0 - job.beta2), highest


def _highest(job: PrivateJob) -> int:
    """What is kept for the second moment is to be below 4 to the power of this and one. A gradient's square leaves the
    ring beyond, at the latest."""
    most = min(_RANGE_BITS, 62 - 2 * job.frac_bits) + _memory_bits(job.beta2) + 1
    return math.ceil(most / 2) - 1


def adam_rate(job: PrivateJob, step: int) -> float:
    """The step's learning rate with both bias corrections, as in the last form of section 2 of the paper."""
    t = step + 1
    return job.lr_at(step) * math.sqrt(1.0 - job.beta2**t) / (1.0 - job.momentum**t)


class Adam:
    """Adam (Kingma and Ba, 2015) with both moments secret: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
    w <- w - rate m / sqrt(v + eps^2).

    ``g`` is the batch's summed gradient times a public power of two, which the quotient cancels. What is kept is v over
    1 - b2, whose squares take no factor and so leave the ring later. 22 rounds per layer, beside the way down to the
    layers below: gradient 2, moments 2, square root 16, product 2. Per weight, 20 comparisons and 13 products.
    """

    def __init__(
        self, rt: Runtime, job: PrivateJob, layers: list[Layer], positions: int = 1, decays: Sequence[bool] = ()
    ) -> None:
        """Both moments start at zero. ``positions``, ``decays``: see ``Sgd``."""
        self._job = job
        self._decays = decays
        self._rows = job.batch * positions
        self._weighted = weighted(layers)
        self._gain = gradient_gain(job.batch, positions)
        weights = [layer.weight for layer in self._weighted if layer.weight is not None]
        self.moments = {
            name: [public(rt, torch.zeros(w.shape), f=f) for w in weights]
            for name, f in (("velocity", job.frac_bits), ("second", second_bits(job.frac_bits, job.beta2)))
        }
        self.step = 0

    def update_protocol(self, rt: Runtime, layer: Layer, grad: Share) -> MpcProtocol[None]:
        """22 rounds, and 28 more to cut the norm."""
        assert layer.weight is not None
        job, at = self._job, self._weighted.index(layer)
        first, second = self.moments["velocity"], self.moments["second"]
        g = yield from layer.weight_gradient_protocol(rt, grad, self._gain)
        if job.clip_norm:
            g = yield from clipped_protocol(rt, g, job.clip_norm * self._gain * self._rows)
        decayed = yield from decayed_protocol(
            rt, layer.weight, job, self.step, at < len(self._decays) and self._decays[at]
        )
        first[at], second[at], move = yield from adam_moments_protocol(rt, job, self.step, g, first[at], second[at])
        layer.weight = less_decay(layer, decayed, move)

    def bounded(self) -> list[Bounded]:
        """What is kept for the second moments: a square that left the ring is as likely as not below zero."""
        return [Bounded(second, *second_range(self._job)) for second in self.moments["second"]]


def adam_moments_protocol(
    rt: Runtime, job: PrivateJob, step: int, g: Share, first: Share, second: Share
) -> MpcProtocol[tuple[Share, Share, Share]]:
    """Both moments after the gradient ``g``, and what the weight moves by: 20 rounds. All of one shape."""
    f, wide = first.f, second.f
    kept, fresh, kept_square, square = yield from par(
        mul_public_protocol(rt, first, job.momentum),
        mul_public_protocol(rt, g, 1.0 - job.momentum),
        mul_public_protocol(rt, second, job.beta2),
        square_protocol(rt, g, wide),
    )
    first, second = add(kept, fresh), add(kept_square, square)
    safe, highest = add_public(rt, second, smallest(f) / (1.0 - job.beta2)), _highest(job)
    finer = max(0, min(highest, _ROOM - 2 * f))  # of a large moment the root is small
    root = yield from rsqrt_protocol(rt, safe, (4 - wide) // 2, highest, f, finer)
    rate = adam_rate(job, step) / math.sqrt(1.0 - job.beta2)
    return first, second, (yield from mul_protocol(rt, first, root, scale=rate))
