"""A step's updates in slices: what each worker computes of its slice of a weight, and what all of them put together.

A replica computes the optimiser on its slice of every weight and of its moments, a tensor rank likewise where the
weight lies whole at all; then slices are gathered, so that all replicas of a party hold identical shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.additive import settle_protocol
from uvcc_engine.model.learning.clipping import cut_protocol, squared_norm_protocol
from uvcc_engine.model.learning.optimizers import (
    adam_moments_protocol,
    cut_at,
    decayed_protocol,
    gradient_gain,
    second_bits,
)
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import add, mul_public_protocol, public, sub
from uvcc_engine.sharding.gradients import Gradients
from uvcc_engine.sharding.stage_passes import StagePart

Slots = Sequence[tuple[StagePart, int]]
"""(part, which of its weights), in the order of the weights."""
Slices = Sequence[Tensor | Share]
"""Of every weight's summed gradient: additive terms, or where products are proved the gradient times the factor."""


@dataclass(frozen=True, slots=True)
class SliceUpdate:
    """Of this worker's slice of a weight: the new gradient times the rule's factor, what momentum keeps (of SGD), what
    decay takes."""

    fresh: Share
    kept: Share | None
    decayed: Share | None


class SlicedOptimizer(Protocol):
    """Moves the weights of a stage. ``moments``: its secret state by name, a whole share per weight."""

    moments: dict[str, list[Share]]

    def factor(self, step: int) -> float:
        """What the summed gradient is multiplied by in its truncation."""

    def update(self, step: int, slices: Slices, beside: MpcProtocol[Any]) -> Any:
        """One step from this worker's slices of the summed gradients; returns what ``beside`` gives, which shares its
        rounds. All workers of the party call it together."""


class _Sliced:
    """What both rules share: gradients truncated and cut in slices, and the weights moved by what was gathered."""

    def __init__(
        self, rt: Runtime, job: PrivateJob, positions: int, slots: Slots, gradients: Gradients, decaying: Sequence[bool]
    ) -> None:
        """``job``: of the whole batch, all replicas' together; ``decaying``: which of the weights decay."""
        self._rt, self._job, self._positions = rt, job, positions
        self._slots, self._gradients, self._decaying = slots, gradients, decaying

    @property
    def _weights(self) -> list[Share]:
        return [part.weights[k] for part, k in self._slots]

    def _mine(self, at: int, share: Share) -> Share:
        return share.map(lambda t: self._gradients.mine(at, t))

    def _settled(
        self,
        step: int,
        slices: Slices,
        factor: float,
        kept: Callable[[int], MpcProtocol[Share | None]],
        beside: MpcProtocol[Any],
    ) -> tuple[list[SliceUpdate], Any]:
        """Every slice truncated with ``factor`` where it is not yet, and ``beside`` in the same rounds: 2 of them."""
        steps: list[MpcProtocol[Any]] = [
            self._slice_protocol(step, at, z, factor, kept(at)) for at, z in enumerate(slices)
        ]
        *found, told = self._rt.run(_each_protocol([*steps, beside]))
        return found, told

    def _slice_protocol(
        self, step: int, at: int, z: Tensor | Share, factor: float, kept: MpcProtocol[Share | None]
    ) -> MpcProtocol[SliceUpdate]:
        part, k = self._slots[at]
        f = self._job.frac_bits
        three: MpcProtocol[list[Any]] = par(
            _same_protocol(z) if isinstance(z, Share) else settle_protocol(self._rt, z, f, f, part.dealers[k], factor),
            kept,
            decayed_protocol(self._rt, self._mine(at, part.weights[k]), self._job, step, self._decaying[at]),
        )
        return SliceUpdate(*(yield from three))

    def _move(self, moves: Sequence[Share], found: Sequence[SliceUpdate]) -> None:
        """Take from every weight its whole move, and what decays of it."""
        taken = _decays(self._gradients, found, self._weights)
        for at, ((part, k), move) in enumerate(zip(self._slots, moves, strict=True)):
            moved = sub(part.weights[k], move)
            part.weights[k] = sub(moved, taken[at]) if at in taken else moved

    def _zeros(self, f: int) -> list[Share]:
        return [public(self._rt, torch.zeros_like(w.first), f=f) for w in self._weights]


class SlicedSgd(_Sliced):
    """``learning.optimizers.Sgd`` in slices: 2 rounds, and 28 more to cut the norm."""

    def __init__(
        self, rt: Runtime, job: PrivateJob, positions: int, slots: Slots, gradients: Gradients, decaying: Sequence[bool]
    ) -> None:
        """See ``_Sliced``. The momentum terms start at zero."""
        super().__init__(rt, job, positions, slots, gradients, decaying)
        self.moments = {"velocity": self._zeros(job.frac_bits)}

    def factor(self, step: int) -> float:
        """See ``SlicedOptimizer``: the learning rate, for a mean over the rows."""
        return self._job.rate_at(step) / self._positions * 2.0 ** cut_at(self._job, step)[1]

    def update(self, step: int, slices: Slices, beside: MpcProtocol[Any]) -> Any:
        """See ``SlicedOptimizer``."""
        job, before = self._job, self.moments["velocity"]

        def kept(at: int) -> MpcProtocol[Share | None]:
            return mul_public_protocol(self._rt, self._mine(at, before[at]), job.decay_at(step))

        found, told = self._settled(step, slices, self.factor(step), kept, beside)
        if job.clip_norm:
            found = cut_to_norm(self._rt, self._gradients, found, *cut_at(job, step))
        mine = [one.fresh if one.kept is None else add(one.kept, one.fresh) for one in found]
        before[:] = self._gradients.joined(mine, self._weights)
        self._move(before, found)
        return told


class SlicedAdam(_Sliced):
    """``learning.optimizers.Adam`` in slices: 22 rounds, and 28 more to cut the norm."""

    def __init__(
        self, rt: Runtime, job: PrivateJob, positions: int, slots: Slots, gradients: Gradients, decaying: Sequence[bool]
    ) -> None:
        """See ``_Sliced``. Both moments start at zero."""
        super().__init__(rt, job, positions, slots, gradients, decaying)
        self.moments = {
            "velocity": self._zeros(job.frac_bits),
            "second": self._zeros(second_bits(job.frac_bits, job.beta2)),
        }

    def factor(self, step: int) -> float:
        """See ``SlicedOptimizer``: the same in every step."""
        return gradient_gain(self._job.batch, self._positions)

    def update(self, step: int, slices: Slices, beside: MpcProtocol[Any]) -> Any:
        """See ``SlicedOptimizer``."""
        job, rt, join = self._job, self._rt, self._gradients.joined
        gain = self.factor(step)
        found, told = self._settled(step, slices, gain, lambda at: _nothing_protocol(), beside)
        if job.clip_norm:
            limit = job.clip_norm * gain * job.batch * self._positions
            found = cut_to_norm(rt, self._gradients, found, limit)
        first, second = self.moments["velocity"], self.moments["second"]
        moved = rt.run(
            _each_protocol(
                adam_moments_protocol(rt, job, step, one.fresh, self._mine(at, first[at]), self._mine(at, second[at]))
                for at, one in enumerate(found)
            )
        )
        weights = self._weights
        first[:], second[:], moves = (join(list(part), weights) for part in zip(*moved, strict=True))
        self._move(moves, found)
        return told


OPTIMIZERS: Final[Mapping[str, Callable[..., SlicedOptimizer]]] = {"sgd": SlicedSgd, "adam": SlicedAdam}


def cut_to_norm(
    rt: Runtime, gradients: Gradients, found: Sequence[SliceUpdate], limit: float, raised: int = 0
) -> list[SliceUpdate]:
    """The same with every weight's whole gradient times the factor of a norm of at most ``limit``, over 2^``raised``:
    28 rounds."""
    squares = rt.run(_each_protocol(squared_norm_protocol(rt, one.fresh) for one in found))
    norms = gradients.norms(squares)
    cut = rt.run(_each_protocol(cut_protocol(rt, o.fresh, n, limit, raised) for o, n in zip(found, norms, strict=True)))
    return [replace(one, fresh=fresh) for one, fresh in zip(found, cut, strict=True)]


def _decays(gradients: Gradients, found: Sequence[SliceUpdate], weights: Sequence[Share]) -> dict[int, Share]:
    """What decay takes of every weight that decays, by its slot, in the shape of the weight."""
    taken = {at: one.decayed for at, one in enumerate(found) if one.decayed is not None}
    whole = gradients.joined(list(taken.values()), [weights[at] for at in taken], list(taken))
    return dict(zip(taken, whole, strict=True))


def _each_protocol(steps: Iterable[MpcProtocol[Any]]) -> MpcProtocol[list[Any]]:
    return (yield from par(*steps))


def _same_protocol(settled: Share) -> MpcProtocol[Share]:
    return settled
    yield  # a generator like its siblings


def _nothing_protocol() -> MpcProtocol[None]:
    return None
    yield  # a generator like its siblings
