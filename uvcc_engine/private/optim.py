"""Stochastic gradient descent with momentum on shares; rate and batch size are folded into the truncation."""

from __future__ import annotations

from uvcc_engine.mpc.arithmetic import add, mul_public_gen, sub
from uvcc_engine.mpc.runtime import Runtime, Steps, par
from uvcc_engine.mpc.share import Share
from uvcc_engine.private.job import PrivateJob
from uvcc_engine.private.layers import Layer


class Sgd:
    """The update v <- m v + g / B, w <- w - lr v, kept as u = lr v so that it takes one product and no extra round.

    u <- m (lr / lr_before) u + (lr / B) g, w <- w - u: the same weights, since lr is a public number of the step.
    """

    def __init__(self, job: PrivateJob, layers: list[Layer], velocity: list[Share]) -> None:
        """``velocity``: u of every weighted layer, in order."""
        self._job = job
        self._weighted = [layer for layer in layers if layer.weight is not None]
        self.velocity = velocity
        self.step = 0

    def update_gen(self, rt: Runtime, layer: Layer, grad: Share) -> Steps[None]:
        """Update one layer's weight from the gradient of its outputs (summed over the rows): 2 rounds."""
        assert layer.weight is not None
        at = self._weighted.index(layer)
        fresh, kept = yield from par(
            layer.weight_gradient_gen(rt, grad, self._job.rate_at(self.step)),
            mul_public_gen(rt, self.velocity[at], self._job.decay_at(self.step)),
        )
        self.velocity[at] = add(kept, fresh)
        layer.weight = sub(layer.weight, self.velocity[at])
