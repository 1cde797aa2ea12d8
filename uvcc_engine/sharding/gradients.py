"""A step's weight gradients on their way: summed over microbatches, tensor ranks and replicas, truncated in slices.

Until its sum is complete a gradient is an additive term. A weight's sum over the replicas starts as soon as its last
microbatch has come, in buckets, while the layers below are still at work (Li et al., "PyTorch Distributed", VLDB 2020).
Backward passes reach the weights from the last to the first, whatever their order among each other, so all replicas
fill the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.sharding.stage_passes import StagePart

BUCKET_BYTES: Final = 1 << 18


@dataclass
class _Bucket:
    """Some weights whose sums travel together: their slots, sizes of their slices, the flat terms, and the wait."""

    slots: list[int]
    sizes: list[int]
    flat: Tensor
    wait: Callable[[], Tensor] | None = None


class Gradients:
    """The gradient sums of one worker. ``slots``: (part, which of its weights) in the order of the weights."""

    def __init__(
        self, slots: Sequence[tuple[StagePart, int]], groups: PartyGroups, *, bucket: int = BUCKET_BYTES
    ) -> None:
        self._at = {(id(part), k): at for at, (part, k) in enumerate(slots)}
        self._slots = list(slots)
        self._groups = groups
        self._most = bucket
        self.begin(1)

    def begin(self, microbatches: int, lent: StagePart | None = None) -> None:
        """A new step, in which every weight gets ``microbatches`` terms, and that of the part ``lent`` one more."""
        self._terms: list[Tensor | None] = [None] * len(self._slots)
        self._due = [microbatches + (part is lent) for part, _ in self._slots]
        self._ready: list[tuple[int, Tensor]] = []
        self._buckets: list[_Bucket] = []
        self._left = len(self._slots)

    def take(self, part: StagePart, weight: int, term: Tensor) -> None:
        """Take a microbatch's term of one weight; the last one sends the sum on its way."""
        at = self._at[id(part), weight]
        known = self._terms[at]
        self._terms[at] = total = term if known is None else known.add_(term)
        self._due[at] -= 1
        if self._due[at] == 0:
            self._complete(at, total)

    def _complete(self, at: int, total: Tensor) -> None:
        dp, tp = self._groups.dp, self._across(at)
        places = self._groups.place.topology.replicas
        flat = padded(total.reshape(-1), places * tp.size)
        self._ready.append((at, tp.sum_slices(flat)()))
        self._terms[at] = None
        self._left -= 1
        if self._left == 0 or sum(t.nbytes for _, t in self._ready) >= self._most:
            wide = [t.reshape(places, -1) for _, t in self._ready]
            flat = torch.cat(wide, 1).reshape(-1)
            self._buckets.append(_Bucket([k for k, _ in self._ready], [w.shape[1] for w in wide], flat))
            self._ready.clear()
            if self._groups.dp_started:
                self._buckets[-1].wait = dp.sum_slices(flat)

    def _across(self, at: int) -> Communicator:
        """The tensor ranks, where each has terms of its own rows only and a slice of the update is its own."""
        part = self._slots[at][0]
        tp = self._groups.tp
        return tp if part.shared else Communicator("alone", [self._groups.place.rank], 0)

    def slices(self) -> list[Tensor]:
        """This worker's slice of every weight's whole sum. Brings up the data-parallel group if it is not there yet.

        Raises ProtocolError if a weight had no gradient.
        """
        if self._left:
            raise ProtocolError(f"{self._left} weights had no gradient", "report this: it is a defect")
        self._groups.start_dp()
        for bucket in self._buckets:
            bucket.wait = bucket.wait or self._groups.dp.sum_slices(bucket.flat)
        found: dict[int, Tensor] = {}
        for bucket in self._buckets:
            assert bucket.wait is not None
            found |= zip(bucket.slots, torch.split(bucket.wait(), bucket.sizes), strict=True)
        return [found[at] for at in range(len(self._slots))]

    def mine(self, at: int, x: Tensor) -> Tensor:
        """The slice of a weight-shaped tensor that corresponds to this worker's slice of the sum. Local."""
        dp, tp = self._groups.dp, self._across(at)
        flat = padded(x.reshape(-1), dp.size * tp.size)
        return flat.reshape(tp.size, dp.size, -1)[tp.index, dp.index]

    def joined(self, mine: Sequence[Share], like: Sequence[Share], slots: Sequence[int] | None = None) -> list[Share]:
        """All workers' slices of the updates, put together in the shapes of the weights: equal at every replica.

        ``slots``: of which weights they are, of all without it; ``like``: those weights.
        """
        if not mine:
            return []
        slots = range(len(self._slots)) if slots is None else slots
        wide = torch.stack([torch.cat([s.first for s in mine]), torch.cat([s.second for s in mine])])
        by_replica = self._groups.dp.gather(wide)
        sizes = [s.n for s in mine]
        found = []
        for at, parts in enumerate(zip(*[torch.split(part, sizes, 1) for part in by_replica], strict=True)):
            whole = torch.cat(self._across(slots[at]).gather(torch.cat(parts, 1)), 1)[:, : like[at].n]
            shape = like[at].shape
            found.append(Share(whole[0].reshape(shape), whole[1].reshape(shape), mine[at].f))
        return found

    def norms(self, squares: Sequence[Share]) -> list[Share]:
        """The squared norm of every weight's whole gradient, from those of this worker's slices: one element each.

        Every element of a weight lies in the slice of just one replica and one tensor rank.
        """
        both = torch.stack([torch.cat([s.first for s in squares]), torch.cat([s.second for s in squares])])
        self._groups.dp.sum_(self._groups.tp.sum_(both))
        return [Share(both[0, at : at + 1], both[1, at : at + 1], s.f) for at, s in enumerate(squares)]


class SettledGradients:
    """The gradient sums of one worker where each was truncated by itself: shares, of which both components are added.

    Adding up shares is local, so a party that adds up wrongly holds other numbers than the two that hold them with it.
    """

    def __init__(self, slots: Sequence[tuple[StagePart, int]], groups: PartyGroups, f: int) -> None:
        """``f``: fractional bits of the gradients; the rest as of ``Gradients``."""
        self._f = f
        self._components = [Gradients(slots, groups) for _ in range(2)]

    def begin(self, microbatches: int, lent: StagePart | None = None) -> None:
        """See ``Gradients.begin``."""
        for one in self._components:
            one.begin(microbatches, lent)

    def take(self, part: StagePart, weight: int, gradient: Share) -> None:
        """See ``Gradients.take``. The gradient stays as it is: claims may be about its memory."""
        for one, component in zip(self._components, (gradient.first, gradient.second), strict=True):
            one.take(part, weight, component.clone())

    def slices(self) -> list[Share]:
        """See ``Gradients.slices``."""
        first, second = (one.slices() for one in self._components)
        return [Share(a, b, self._f) for a, b in zip(first, second, strict=True)]


def padded(flat: Tensor, size: int) -> Tensor:
    """A flat tensor with zeros behind it, up to a multiple of ``size`` elements."""
    short = -len(flat) % size
    return torch.cat([flat, flat.new_zeros(short)]) if short else flat
