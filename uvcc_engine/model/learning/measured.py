"""Numbers that are computed, and shared until they may be opened.

Where a run proves what it computes, nothing of them is opened before the proof of all that they depend on; so a metric
is first measured, as a share, and read only when it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share

Read = Callable[[Tensor], dict[str, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What will be opened, and what its ring elements (int64, the share's shape) are read as: numbers by name."""

    share: Share
    read: Read

    def named(self, rename: Callable[[dict[str, float]], dict[str, float]]) -> Measured:
        """The same number under other names, or read on."""
        read = self.read
        return Measured(self.share, lambda opened: rename(read(opened)))


def opened_protocol(rt: Runtime, found: Sequence[Measured]) -> MpcProtocol[dict[str, float]]:
    """Open everything that was measured, in one round; reveals these numbers. See :func:`numbers`."""
    opened: list[Tensor] = yield from par(*(open_ring_protocol(rt, one.share) for one in found))
    return numbers(found, opened)


def numbers(found: Sequence[Measured], opened: Sequence[Tensor]) -> dict[str, float]:
    """What was measured, by name, from what it was opened as, in the shapes of the shares. What is no number (nan) is
    left out."""
    told = {
        name: value for one, ring in zip(found, opened, strict=True) for name, value in one.read(ring.cpu()).items()
    }
    return {name: value for name, value in told.items() if not math.isnan(value)}
