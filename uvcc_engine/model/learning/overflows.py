"""How many numbers between a model's layers have grown so large that a product of two of them leaves the ring.

A training whose numbers overflow goes on with noise, and no party can see it: every share is uniform whatever it is a
share of. This is what can be told of it: one count over all rows and layers, and over what an optimiser keeps of
squares, which leave the ring before anything else does; and nothing of a row, a layer or a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from uvcc_engine.model.learning.measured import Measured
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, stack
from uvcc_engine.mpc.products.arithmetic import add_ring, public, sub

LIMIT_BITS: Final = 31
"""A number is outside whose ring element is not below 2^31: two such have a product of 2^62, the last that is truncated
rightly. With ``frac_bits`` f that are numbers from 2^(31 - f) on, 32,768 with 16."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Numbers of any shape that lie from ``low`` to below ``high`` in a training whose numbers do not overflow."""

    numbers: Share
    low: float
    high: float


def overflow_protocol(rt: Runtime, seen: Sequence[Share | Bounded]) -> MpcProtocol[Measured]:
    """How many entries of all of ``seen``, of any shape, lie outside, still shared. 7 rounds for each, with the bytes
    of about two ReLUs of its size."""
    inside: Share | None = None
    entries = 0
    for one in seen:
        low, found, high = _bounds(one)
        flat = found.reshape(-1)
        edges = [add_ring(rt, flat, -round(edge * 2.0**found.f)) for edge in (low, high)]
        above = yield from drelu_arithmetic_protocol(rt, stack(edges))
        counts = above.sum(1)
        within = sub(counts.index(slice(0, 1)), counts.index(slice(1, 2)))  # [x >= low] - [x >= high]
        inside = (
            within if inside is None else Share(inside.first + within.first, inside.second + within.second, within.f)
        )
        entries += flat.n
    if inside is None:
        inside = public(rt, torch.zeros(1), f=0)
    return Measured(inside, lambda opened: {"overflow": float(entries - int(opened.item()))})


def _bounds(one: Share | Bounded) -> tuple[float, Share, float]:
    if isinstance(one, Bounded):
        return one.low, one.numbers, one.high
    edge = 2.0 ** (LIMIT_BITS - one.f)
    return -edge, one, edge
