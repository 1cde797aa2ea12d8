"""A step's updates in slices: what each worker computes of its slice of a weight, cut to a norm and decayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from uvcc_engine.model.learning.clipping import cut_protocol, squared_norm_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.sharding.gradients import Gradients


@dataclass(frozen=True, slots=True)
class SliceUpdate:
    """Of this worker's slice of a weight: the new gradient times the rate, what momentum keeps, what decay takes."""

    fresh: Share
    kept: Share
    decayed: Share | None


def cut_to_norm(rt: Runtime, gradients: Gradients, found: Sequence[SliceUpdate], limit: float) -> list[SliceUpdate]:
    """The same with every weight's whole gradient times the rate of a norm of at most ``limit``: 28 rounds."""
    squares = rt.run(_each_protocol(squared_norm_protocol(rt, one.fresh) for one in found))
    norms = gradients.norms(squares)
    cut = rt.run(_each_protocol(cut_protocol(rt, o.fresh, n, limit) for o, n in zip(found, norms, strict=True)))
    return [replace(one, fresh=fresh) for one, fresh in zip(found, cut, strict=True)]


def decays(gradients: Gradients, found: Sequence[SliceUpdate], weights: Sequence[Share]) -> dict[int, Share]:
    """What decay takes of every weight that decays, by its slot, in the shape of the weight."""
    taken = {at: one.decayed for at, one in enumerate(found) if one.decayed is not None}
    whole = gradients.joined(list(taken.values()), [weights[at] for at in taken], list(taken))
    return dict(zip(taken, whole, strict=True))


def _each_protocol(steps: Iterable[MpcProtocol[Share]]) -> MpcProtocol[list[Share]]:
    return (yield from par(*steps))
