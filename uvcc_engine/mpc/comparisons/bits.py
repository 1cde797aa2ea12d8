"""From secret numbers to arithmetic bits: thresholds, and secret indices as one-hots."""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, stack
from uvcc_engine.mpc.products.arithmetic import DEALER, add_ring, public, scale_int, sub


def at_least_protocol(rt: Runtime, x: Share, thresholds: Tensor, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``[x >= t]`` for every public threshold, as arithmetic bits (``f = 0``) ``[thresholds, *x.shape]``: 5 rounds."""
    # the least ring element at or above each: rounded to the nearest, one between two integers would move at f = 0
    ring = torch.ceil(thresholds.to(torch.float64) * 2.0**x.f).to(torch.int64)
    return (yield from drelu_arithmetic_protocol(rt, stack([add_ring(rt, x, -int(t)) for t in ring]), dealer=dealer))


def one_hot_protocol(rt: Runtime, index: Share, classes: int, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """Secret integers ``0 <= index < classes`` (any scale) to one-hot bits (``f = 0``) ``[..., classes]``: 5 rounds."""
    steps = yield from at_least_protocol(rt, index, torch.arange(1, classes) - 0.5, dealer=dealer)
    one = public(rt, torch.ones(1, *index.shape), f=0)
    zero = scale_int(one, 0)
    above = Share(torch.cat([one.first, steps.first]), torch.cat([one.second, steps.second]), 0)
    below = Share(torch.cat([steps.first, zero.first]), torch.cat([steps.second, zero.second]), 0)
    return sub(above, below).map(lambda t: t.movedim(0, -1).contiguous())
