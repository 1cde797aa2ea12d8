"""A gradient's norm cut under sharing: nobody learns the norm, nor whether it was cut."""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from uvcc_engine.model.functions import rsqrt_protocol
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import (
    add_public,
    dot_protocol,
    mul_protocol,
    mul_public_protocol,
    sub,
)

_WIDE: Final = 24
"""Fractional bits of a squared norm."""
_LOWEST: Final = -11
_HIGHEST: Final = 14
"""Norms below 2^15 are cut, the longest whose square numbers of 16 fractional bits leave room for."""


def raised_bits(limit: float) -> int:
    """By how many bits numbers that are cut to a ``limit`` that small are to be larger while they are: of norms below
    2^-11 the inverse is not known, and what is shorter than the limit would be cut."""
    return max(0, 1 + _LOWEST - math.floor(math.log2(limit)))


def clipped_protocol(rt: Runtime, x: Share, limit: float, raised: int = 0) -> MpcProtocol[Share]:
    """``x min(1, limit / |x|)`` by the norm of the whole tensor, over 2^``raised``: 28 rounds, most of them on one
    number.

    ``limit`` is a norm, in the units of ``x``. Relative error below 1e-3, and a unit of the norm's inverse and of the
    factor: of a norm n at 16 fractional bits, n / 2^16 and n / limit / 2^16. The direction is kept.
    With a limit below 2^-10 norms of less than 2^-11 are cut, too (``raised_bits``).
    """
    square = yield from squared_norm_protocol(rt, x)
    return (yield from cut_protocol(rt, x, square, limit, raised))


def squared_norm_protocol(rt: Runtime, x: Share) -> MpcProtocol[Share]:
    """The squared norm of a tensor, or of a part of one: one element of at most ``_WIDE`` fractional bits. 2 rounds."""
    scale = 2 * x.f - min(_WIDE, 2 * x.f - 1)
    return (yield from dot_protocol(rt, x.with_f(2 * x.f - scale), x.with_f(scale)))


def cut_protocol(rt: Runtime, x: Share, square: Share, limit: float, raised: int = 0) -> MpcProtocol[Share]:
    """``x min(1, limit / norm)`` over 2^``raised`` by the ``square`` of a norm, that of more than ``x`` perhaps: 26
    rounds."""
    low = max(_LOWEST, min(_HIGHEST - 1, math.floor(math.log2(limit)) - 1))
    root = yield from rsqrt_protocol(rt, square, low, _HIGHEST, x.f)
    factor = yield from mul_public_protocol(rt, root, limit)
    over = yield from relu_only_protocol(rt, add_public(rt, factor, -1.0))
    return (yield from mul_protocol(rt, x, sub(factor, over), scale=2.0**-raised))


def clipped(x: Tensor, limit: float) -> Tensor:
    """``x`` of any shape in plain numbers, scaled down to the norm ``limit`` if its own is larger."""
    return x * min(1.0, limit / max(float(x.norm()), 1e-30))
