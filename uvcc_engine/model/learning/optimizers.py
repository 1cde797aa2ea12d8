"""Optimisers on shares: stochastic gradient descent with momentum, and Adam. Rates are folded into truncations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.functions import rsqrt_protocol, square_protocol
from uvcc_engine.model.layers import Layer, weighted
from uvcc_engine.model.learning.clipping import clipped_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import add, add_public, mul_protocol, mul_public_protocol, public, sub

_EXTRA_BITS: Final = 8
_MOST_BITS: Final = 24
_HIGHEST: Final = 6  # second moments below 4^7


class Optimizer(Protocol):
    """Moves weights. ``moments``: its secret state by name, one share per weighted layer, which a checkpoint holds."""

    moments: dict[str, list[Share]]
    step: int

    def update_protocol(self, rt: Runtime, layer: Layer, grad: Share) -> MpcProtocol[None]:
        """Update one layer's weight from the gradient of its outputs (summed over the rows)."""


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

    def _gradient_protocol(self, rt: Runtime, layer: Layer, grad: Share) -> MpcProtocol[Share]:
        """lr / B times the summed gradient, of a norm of at most lr times the job's limit."""
        job = self._job
        found = yield from layer.weight_gradient_protocol(rt, grad, job.rate_at(self.step) / self._positions)
        if not job.clip_norm:
            return found
        return (yield from clipped_protocol(rt, found, job.clip_norm * job.lr_at(self.step)))


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


def second_bits(frac_bits: int) -> int:
    """Fractional bits of Adam's second moment: more than the weights have, since it is a square."""
    return min(frac_bits + _EXTRA_BITS, _MOST_BITS)


def smallest(frac_bits: int) -> float:
    """Adam's epsilon, squared: what is added to the second moment (16 units of it) before the square root."""
    return 2.0 ** (4 - second_bits(frac_bits))


def adam_rate(job: PrivateJob, step: int) -> float:
    """The step's learning rate with both bias corrections, as in the last form of section 2 of the paper."""
    t = step + 1
    return job.lr_at(step) * math.sqrt(1.0 - job.beta2**t) / (1.0 - job.momentum**t)


class Adam:
    """Adam (Kingma and Ba, 2015) with both moments secret: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
    w <- w - rate m / sqrt(v + eps^2).

    ``g`` is the batch's summed gradient times a public power of two, which the quotient cancels. 22 rounds per layer,
    beside the way down to the layers below: gradient 2, moments 2, square root 16, product 2. Per weight, 16
    comparisons and 13 products.
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
            for name, f in (("velocity", job.frac_bits), ("second", second_bits(job.frac_bits)))
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


def adam_moments_protocol(
    rt: Runtime, job: PrivateJob, step: int, g: Share, first: Share, second: Share
) -> MpcProtocol[tuple[Share, Share, Share]]:
    """Both moments after the gradient ``g``, and what the weight moves by: 20 rounds. All of one shape."""
    f, wide = first.f, second.f
    kept, fresh, kept_square, square = yield from par(
        mul_public_protocol(rt, first, job.momentum),
        mul_public_protocol(rt, g, 1.0 - job.momentum),
        mul_public_protocol(rt, second, job.beta2),
        square_protocol(rt, g, wide, 1.0 - job.beta2),
    )
    first, second = add(kept, fresh), add(kept_square, square)
    safe = add_public(rt, second, smallest(f))
    root = yield from rsqrt_protocol(rt, safe, (4 - wide) // 2, _HIGHEST, f)
    return first, second, (yield from mul_protocol(rt, first, root, scale=adam_rate(job, step)))
