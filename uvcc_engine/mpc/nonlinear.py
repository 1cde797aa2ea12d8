"""Exponential, division, softmax and logarithm on fixed-point shares.

The exponential is computed by the parties in the clear on their own summands: with ``x = u + v`` (``roles``), ``e^x =
e^u e^v``, and only the carry of ``u + v`` past the range is computed under masks (the idea of Kelkar et al., "Secure
Poisson regression", USENIX Security 2022, moved from a prime field to the power-of-two ring). Division is
Goldschmidt's iteration with the numerator carried along.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.arithmetic import (
    DEALER,
    add,
    add_public,
    add_ring,
    integer_scale,
    mul_gen,
    neg,
    public,
    rescale_gen,
    scale_int,
    sub,
)
from uvcc_engine.mpc.boolean import PairBits, drelu_gen, padded
from uvcc_engine.mpc.carry import carry_gen, tree
from uvcc_engine.mpc.maximum import max_gen
from uvcc_engine.mpc.roles import online_part, roles
from uvcc_engine.mpc.runtime import Runtime, Steps, par
from uvcc_engine.mpc.selection import b2a_gen, select_dealt_gen
from uvcc_engine.mpc.share import Share
from uvcc_engine.mpc.truncation import truncate_pair_gen

EXP_RANGE = 16
_EXP_DIGIT = 4
_DEALER_BITS = 40
_ONLINE_BITS = 20


def exp_in_range_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[Share]:
    """``e^x`` for ``-16 < x <= 0``; outside, a wrong number (still secret). Shape and scale kept; f = 4, 8, 12 or 16.

    5 rounds. Absolute error below 2^-17 + one unit.
    """
    if x.f not in (4, 8, 12, 16):
        raise ConfigError(f"the exponential at f={x.f}", "use f = 4, 8, 12 or 16 here")
    bits = x.f + 4
    role = roles(rt, dealer)
    flat = padded(x.reshape(-1))
    value = (flat.lo + flat.hi) if role.is_dealer else online_part(rt, role, flat)
    if role.is_dealer:
        value = value - 1  # so that zero, too, lies below the upper end; the unit comes back below
    value = value & ((1 << bits) - 1)
    planes = rt.kernels.to_planes(value, bits)
    carry, _ = yield from carry_gen(
        rt,
        dealer,
        _EXP_DIGIT,
        tree(((bits // _EXP_DIGIT, 1),)),
        planes.shape[-1],
        planes if role.is_dealer else None,
        lambda: planes,
        torch.zeros_like(planes[0]) if role.is_dealer else None,
    )
    wrapped = PairBits(role.d, flat.shape, carry)
    # x - unit + 16 = u + v - 16 wrapped, all in [0, 16)
    real = value.to(torch.float64) / 2.0**x.f
    dealt: Tensor | None = None
    if role.is_dealer:
        dealt = torch.round(torch.exp(real - EXP_RANGE) * 2.0**_DEALER_BITS).to(torch.int64)
    whole, over = yield from select_dealt_gen(rt, wrapped, dealt)
    z: Tensor | None = None
    if whole is not None and over is not None:
        real = real + 2.0**-x.f
        plain = torch.round(torch.exp(real) * 2.0**_ONLINE_BITS).to(torch.int64)
        less = torch.round(torch.exp(real - EXP_RANGE) * 2.0**_ONLINE_BITS).to(torch.int64)
        z = whole * plain + over * (less - plain)
    out = yield from truncate_pair_gen(rt, z, flat.shape, _DEALER_BITS + _ONLINE_BITS - x.f, x.f, dealer)
    return out.map(lambda t: t[: x.n].reshape(x.shape))


def exp_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[Share]:
    """``e^x`` for any ``x <= 0``; zero below -16. 6 rounds: the comparison runs beside the exponential."""
    inside = add_public(rt, x, EXP_RANGE - 2.0**-x.f)
    value, keep = yield from par(exp_in_range_gen(rt, x, dealer=dealer), _arithmetic_bit_gen(rt, inside, dealer))
    return (yield from mul_gen(rt, value, keep, dealer=dealer))


def _arithmetic_bit_gen(rt: Runtime, x: Share, dealer: int) -> Steps[Share]:
    bits = yield from drelu_gen(rt, x, dealer=dealer)
    return (yield from b2a_gen(rt, bits)).reshape(*x.shape)


def divide_gen(
    rt: Runtime, numerator: Share, denominator: Share, low: float, high: float, *, dealer: int = DEALER
) -> Steps[Share]:
    """``numerator / denominator`` for ``low <= denominator <= high`` (public, positive), broadcasting.

    Goldschmidt: with ``y0`` the best line for ``1/s`` on the range and ``e = 1 - s y0``, the quotient is
    ``numerator y0 (1 + e)(1 + e^2)(1 + e^4)...``. 2 rounds per factor, and 2 for ``e``: 10 rounds on [1, 10].
    The relative error of the iteration is below 2^-14; rounding adds about one unit per factor.
    """
    if not 0 < low <= high:
        raise ConfigError(f"division on the range [{low}, {high}]", "the range must be positive")
    slope, offset, worst = line_for_reciprocal(low, high)
    factors = max(1, math.ceil(math.log2(14 / -math.log2(worst)))) if worst > 2.0**-14 else 1
    guess = affine(rt, denominator, slope, offset)
    product, quotient = yield from par(
        mul_gen(rt, denominator, guess, dealer=dealer), mul_gen(rt, numerator, guess, dealer=dealer)
    )
    e = add_public(rt, neg(product), 1.0)
    for k in range(factors):
        step = mul_gen(rt, quotient, e, dealer=dealer)
        if k + 1 < factors:
            correction, e = yield from par(step, mul_gen(rt, e, e, dealer=dealer))
        else:
            correction = yield from step
        quotient = add(quotient, correction)
    return quotient


def line_for_reciprocal(low: float, high: float) -> tuple[float, float, float]:
    """``(slope, offset, worst)``: the line with the least ``worst = max |1 - s (slope s + offset)|`` on the range."""
    total = low + high
    scale = 8.0 / (total * total + 4.0 * low * high)
    return -scale, scale * total, 1.0 - scale * low * high


def affine(rt: Runtime, x: Share, slope: float, offset: float) -> Share:
    """``slope x + offset`` for public reals without communication: the result has 11 or 12 more fractional bits.

    The slope is rounded to 12 significant bits.
    """
    factor, shift = integer_scale(slope)
    scaled = scale_int(x, factor << max(0, -shift)).with_f(x.f + max(0, shift))
    return add_ring(rt, scaled, round(offset * 2.0**scaled.f))


def reciprocal_gen(rt: Runtime, x: Share, low: float, high: float, *, dealer: int = DEALER) -> Steps[Share]:
    """``1 / x`` on a known positive range: as ``divide_gen`` with a public one (10 rounds on [1, 10])."""
    return (yield from divide_gen(rt, public(rt, 1.0, x), x, low, high, dealer=dealer))


def softmax_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[tuple[Share, Share, Share]]:
    """Softmax over the last axis of ``[..., n]``: (probabilities, maximum ``[..., 1]``, sum of ``e^(x - max)``
    ``[..., 1]``).

    Maximum 6 rounds (n <= 10), exponential 6, division 10 (n = 10): 22 rounds.
    """
    n = x.shape[-1]
    top = (yield from max_gen(rt, x, dealer=dealer)).map(lambda t: t.unsqueeze(-1))
    powers = yield from exp_gen(rt, sub(x, top), dealer=dealer)
    total = powers.sum(-1, keepdim=True)
    probability = yield from divide_gen(rt, powers, total, 1.0 - 2.0**-8, float(n), dealer=dealer)
    return probability, top, total


def chebyshev_gen(
    rt: Runtime, x: Share, fn: Callable[[float], float], low: float, high: float, degree: int, *, dealer: int = DEALER
) -> Steps[Share]:
    """``fn(x)`` for ``low <= x <= high`` by Chebyshev interpolation: ``2 ceil(log2 degree) + 4`` rounds.

    Basis values come from ``T_{a+b} = 2 T_a T_b - T_{|a-b|}``, so every intermediate stays in [-1, 1].
    """
    coefficients = np.polynomial.chebyshev.chebinterpolate(
        np.vectorize(lambda t: fn((t + 1.0) / 2.0 * (high - low) + low)), degree
    )
    wide = affine(rt, x, 2.0 / (high - low), -(high + low) / (high - low))
    basis = {1: (yield from rescale_gen(rt, wide, x.f, dealer=dealer))}
    while max(basis) < degree:
        have = max(basis)
        new = range(have + 1, min(2 * have, degree) + 1)
        products = yield from par(*[mul_gen(rt, basis[have], basis[k - have], dealer=dealer) for k in new])
        for k, product in zip(new, products, strict=True):
            twice = scale_int(product, 2)
            basis[k] = add_public(rt, twice, -1.0) if k == 2 * have else sub(twice, basis[2 * have - k])
    bits = 14
    total = scale_int(basis[1], round(coefficients[1] * 2**bits))
    for k in range(2, degree + 1):
        total = add(total, scale_int(basis[k], round(coefficients[k] * 2**bits)))
    total = add_ring(rt, total.with_f(x.f + bits), round(coefficients[0] * 2.0 ** (x.f + bits)))
    return (yield from rescale_gen(rt, total, x.f, dealer=dealer))


def log_gen(rt: Runtime, x: Share, low: float, high: float, *, degree: int = 12, dealer: int = DEALER) -> Steps[Share]:
    """Natural logarithm on a known positive range: 12 rounds at degree 12, error below 1e-3 on [1, 10]."""
    return (yield from chebyshev_gen(rt, x, math.log, low, high, degree, dealer=dealer))


def exp(rt: Runtime, x: Share) -> Share:
    """``exp_gen``, run."""
    return rt.run(exp_gen(rt, x))


def reciprocal(rt: Runtime, x: Share, low: float, high: float) -> Share:
    """``reciprocal_gen``, run."""
    return rt.run(reciprocal_gen(rt, x, low, high))


def softmax(rt: Runtime, x: Share) -> Share:
    """The probabilities of ``softmax_gen``, run."""
    return rt.run(softmax_gen(rt, x))[0]


def log(rt: Runtime, x: Share, low: float, high: float) -> Share:
    """``log_gen``, run."""
    return rt.run(log_gen(rt, x, low, high))
