"""Functions that learning needs beyond ``mpc``: squares and inverse square roots over a wide range of magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, stack
from uvcc_engine.mpc.functions.nonlinear import chebyshev_protocol
from uvcc_engine.mpc.products.arithmetic import add_ring, mul_protocol, rescale_protocol

EXP_SCALE: Final = 16
"""The scale at which exponentials are computed; a job at another one is brought to it and back."""
_RSQRT_DEGREE: Final = 8


def exp_scale(f: int) -> int:
    """The scale at which numbers of scale ``f`` go into an exponential, and at which a loss comes out."""
    return f if f in (4, 8, 12) else EXP_SCALE


def to_exp_scale_protocol(rt: Runtime, x: Share) -> MpcProtocol[Share]:
    """``x`` at a scale that the exponential takes: 2 rounds if it has another one, none otherwise. Any shape."""
    if x.f == exp_scale(x.f):
        return x
    return (yield from rescale_protocol(rt, x, exp_scale(x.f)))


def square_protocol(rt: Runtime, x: Share, f: int, scale: float = 1.0) -> MpcProtocol[Share]:
    """``scale x^2`` at ``f`` fractional bits, which may be more than ``x`` has: 2 rounds.

    Raises ConfigError for ``f`` of twice that of ``x`` or more. Shape of ``x``, element by element.
    """
    if not 0 < f < 2 * x.f:
        raise ConfigError(f"a square at f={f} of a number at f={x.f}", "choose f below twice that of the number")
    return (yield from mul_protocol(rt, x.with_f(f), x.with_f(2 * x.f - f), scale=scale))


def rsqrt_protocol(rt: Runtime, x: Share, low: int, high: int, f: int, finer: int = 0) -> MpcProtocol[Share]:
    """``1 / sqrt(x)``, computed at scale ``f`` and given at that and ``finer`` bits more, up to ``high``.

    For ``4^low <= x < 4^(high + 1)`` (secret where in it).
    ``high - low`` comparisons place x in [4^j, 4^(j+1)); the products with the secret powers 4^-j and 2^-j around a
    polynomial on [1, 4) do the rest. 16 rounds. Relative error below 2e-4, plus a few units of what comes out; below
    the range the result is wrong, yet not above 2^(1 - low). Raises ConfigError for an empty range, and for more bits
    than there are.
    Any shape, element by element.
    """
    if low >= high:
        raise ConfigError(f"an inverse square root on 4^{low} to 4^{high}", "the range must not be empty")
    if not 0 <= finer <= max(0, high):
        raise ConfigError(f"{finer} more bits of an inverse square root up to 4^{high}", "give as many as its exponent")
    places = range(low + 1, high + 1)
    shifted = stack([add_ring(rt, x, -round(4.0**j * 2.0**x.f)) for j in places])
    bits = (yield from drelu_arithmetic_protocol(rt, shifted)).reshape(*shifted.shape)
    whole = max(0, high)
    squares = _steps(rt, bits, [4.0**-j for j in (low, *places)], 2 * whole)
    roots = _steps(rt, bits, [2.0**-j for j in (low, *places)], whole)
    near = yield from mul_protocol(rt, x.with_f(f), squares.with_f(squares.f + x.f - f))
    curve = yield from chebyshev_protocol(rt, near, lambda t: t**-0.5, 1.0, 4.0, _RSQRT_DEGREE)
    return (yield from mul_protocol(rt, curve.with_f(f + finer), roots.with_f(whole - finer)))


def _steps(rt: Runtime, bits: Share, values: Sequence[float], f: int) -> Share:
    """The step function that goes from one value to the next with every bit (first axis) that is one. Local."""
    ring = [round(v * 2.0**f) for v in values]
    jumps = torch.tensor([b - a for a, b in pairwise(ring)], device=rt.device)
    jumps = jumps.reshape(-1, *[1] * (bits.first.dim() - 1))
    total = bits.map(lambda t: (t * jumps).sum(0))
    return add_ring(rt, total, ring[0]).with_f(f)
