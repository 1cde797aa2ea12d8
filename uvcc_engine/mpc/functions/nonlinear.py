"""Division, softmax and logarithm on fixed-point shares.

Division is Goldschmidt's iteration with the numerator carried along; smooth functions on a known range are Chebyshev
interpolants.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.maximum import max_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions.exponential import SUM_LIMIT, powers_protocol
from uvcc_engine.mpc.functions.exponential import exp as exp
from uvcc_engine.mpc.functions.exponential import exp_protocol as exp_protocol
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    add,
    add_public,
    add_ring,
    integer_scale,
    mul_protocol,
    neg,
    public,
    rescale_protocol,
    scale_int,
    sub,
)

LEAST_SUM = 1.0 - 2.0**-8  # of powers of which the largest is one, up to rounding
MOST_SUMMANDS = 2048
"""Of powers whose sum is divided by: of more, the line through the inverse is too flat for the ring."""
_NARROW = 80  # of a wider range the first roundings are multiplied to more than ten units
_FINER = 8  # of 24 fractional bits a square of at most one has room
_SQUARE_BITS = 60  # of a square below 2 in absolute value, so that it can be truncated


def divide_protocol(
    rt: Runtime,
    numerator: Share,
    denominator: Share,
    low: float,
    high: float,
    *,
    parts: bool = False,
    dealer: int = DEALER,
) -> MpcProtocol[Share]:
    """``numerator / denominator`` for ``low <= denominator <= high`` (public, positive), broadcasting.

    Goldschmidt: with ``y0`` the best line for ``1/s`` on the range and ``e = 1 - s y0``, the quotient is
    ``numerator y0 (1 + e)(1 + e^2)(1 + e^4)...``. 2 rounds per factor, and 2 for ``e``: 10 rounds on [1, 10].
    The relative error of the iteration is below 2^-14; rounding adds about one unit per factor, and where the range is
    wide what they multiply the first roundings by, an eighth of ``high / low``. ``parts``: of a numerator that is at
    most the denominator as many more bits are kept on the way beyond a range of ``_NARROW``, up to ``_FINER``, in as
    many rounds and up to a quarter more bytes.
    Raises ConfigError for a range that is not positive.
    """
    if not 0 < low <= high:
        raise ConfigError(f"division on the range [{low}, {high}]", "the range must be positive")
    slope, offset, worst = line_for_reciprocal(low, high)
    factors = max(1, math.ceil(math.log2(14 / -math.log2(worst)))) if worst > 2.0**-14 else 1
    guess = affine(rt, denominator, slope, offset)
    finer = parts and high / low > _NARROW
    f, more = numerator.f, min(_FINER, max(0, math.ceil(-math.log2(1.0 - worst)) - 2)) if finer else 0
    split = guess.with_f(guess.f - more)
    product, quotient = yield from par(
        mul_protocol(rt, denominator.with_f(denominator.f + more), split, dealer=dealer),
        mul_protocol(rt, numerator.with_f(f + more), split, dealer=dealer),
    )
    e = add_public(rt, neg(product), 1.0)
    for k in range(factors):
        if more and k + 1 == factors:
            grown = add_public(rt, e, 1.0)
            return (yield from mul_protocol(rt, quotient.with_f(f), grown.with_f(grown.f + more), dealer=dealer))
        step = mul_protocol(rt, quotient, e, dealer=dealer)
        if k + 1 < factors:
            correction, e = yield from par(step, mul_protocol(rt, e, e, dealer=dealer))
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

    The slope is rounded to 12 significant bits. Shape of ``x``.
    """
    factor, shift = integer_scale(slope)
    scaled = scale_int(x, factor << max(0, -shift)).with_f(x.f + max(0, shift))
    return add_ring(rt, scaled, round(offset * 2.0**scaled.f))


def reciprocal_protocol(rt: Runtime, x: Share, low: float, high: float, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``1 / x`` on a known positive range: as ``divide_protocol`` with a public one (10 rounds on [1, 10])."""
    return (yield from divide_protocol(rt, public(rt, 1.0, x), x, low, high, dealer=dealer))


def softmax_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[tuple[Share, Share, Share]]:
    """Softmax over the last axis of ``[..., n]``: (probabilities, maximum ``[..., 1]``, sum of ``e^(x - max)``).

    14 rounds for n <= 10: maximum 6, exponential and inverse 6, their product 2. Longer rows take more for the maximum
    and, above 15 entries, for the division.
    """
    n = x.shape[-1]
    flat = x.reshape(-1, n)
    top = (yield from max_protocol(rt, flat, dealer=dealer)).reshape(-1, 1)
    probability, total = yield from softmax_of_shifted_protocol(rt, sub(flat, top), dealer=dealer)
    lead = x.shape[:-1]
    return probability.reshape(*x.shape), top.reshape(*lead, 1), total.reshape(*lead, 1)


def softmax_of_shifted_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[tuple[Share, Share]]:
    """(probabilities, sum of powers) of ``[rows, n]`` whose rows have maximum zero: 8 rounds for n <= 15.

    Raises ConfigError for more than ``MOST_SUMMANDS`` numbers of a row.
    """
    n = x.shape[-1]
    if n > MOST_SUMMANDS:
        raise ConfigError(f"a softmax of {n} numbers", f"up to {MOST_SUMMANDS} fit the ring")
    if n > SUM_LIMIT or rt.proves_everything:
        powers = yield from exp_protocol(rt, x, dealer=dealer)
        total = powers.sum(-1, keepdim=True)
        return (yield from divide_protocol(rt, powers, total, LEAST_SUM, float(n), parts=True, dealer=dealer)), total
    powers, total, inverse = yield from powers_protocol(rt, x, dealer=dealer)
    return (yield from mul_protocol(rt, powers, inverse, dealer=dealer)), total


def chebyshev_protocol(
    rt: Runtime, x: Share, fn: Callable[[float], float], low: float, high: float, degree: int, *, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``fn(x)`` for ``low <= x <= high`` by Chebyshev interpolation: ``2 ceil(log2 degree) + 2`` rounds.

    Basis values come from ``T_{a+b} = 2 T_a T_b - T_{|a-b|}``, so every intermediate stays in [-1, 1]. 2 rounds more
    where ``x`` has too many bits to be squared before it is brought to scale.
    """
    coefficients = chebyshev_coefficients(fn, low, high, degree)
    wide = affine(rt, x, 2.0 / (high - low), -(high + low) / (high - low))
    scaled = rescale_protocol(rt, wide, x.f, dealer=dealer)
    if degree < 2 or 2 * wide.f > _SQUARE_BITS:
        basis = {1: (yield from scaled)}
    else:
        square = mul_protocol(rt, wide.with_f(x.f), wide.with_f(2 * wide.f - x.f), dealer=dealer)
        first, second = yield from par(scaled, square)
        basis = {1: first, 2: add_public(rt, scale_int(second, 2), -1.0)}
    while max(basis) < degree:
        have = max(basis)
        new = range(have + 1, min(2 * have, degree) + 1)
        products = yield from par(*[mul_protocol(rt, basis[have], basis[k - have], dealer=dealer) for k in new])
        for k, product in zip(new, products, strict=True):
            twice = scale_int(product, 2)
            basis[k] = add_public(rt, twice, -1.0) if k == 2 * have else sub(twice, basis[2 * have - k])
    bits = 14
    total = scale_int(basis[1], round(coefficients[1] * 2**bits))
    for k in range(2, degree + 1):
        total = add(total, scale_int(basis[k], round(coefficients[k] * 2**bits)))
    total = add_ring(rt, total.with_f(x.f + bits), round(coefficients[0] * 2.0 ** (x.f + bits)))
    return (yield from rescale_protocol(rt, total, x.f, dealer=dealer))


def chebyshev_coefficients(fn: Callable[[float], float], low: float, high: float, degree: int) -> list[float]:
    """Coefficients of the interpolant of ``fn`` at the Chebyshev points of ``[low, high]``."""
    count = degree + 1
    angles = [math.pi * (j + 0.5) / count for j in range(count)]
    values = [fn(low + (math.cos(a) + 1.0) / 2.0 * (high - low)) for a in angles]
    sums = [
        2.0 / count * math.fsum(v * math.cos(k * a) for v, a in zip(values, angles, strict=True)) for k in range(count)
    ]
    return [sums[0] / 2.0, *sums[1:]]


def log_protocol(
    rt: Runtime, x: Share, low: float, high: float, *, degree: int = 12, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """Natural logarithm on a known positive range: 10 rounds at degree 12, error below 1e-3 on [1, 10]."""
    return (yield from chebyshev_protocol(rt, x, math.log, low, high, degree, dealer=dealer))


def reciprocal(rt: Runtime, x: Share, low: float, high: float) -> Share:
    """``reciprocal_protocol``, run."""
    return rt.run(reciprocal_protocol(rt, x, low, high))


def softmax(rt: Runtime, x: Share) -> Share:
    """The probabilities of ``softmax_protocol``, run."""
    return rt.run(softmax_protocol(rt, x))[0]


def log(rt: Runtime, x: Share, low: float, high: float) -> Share:
    """``log_protocol``, run."""
    return rt.run(log_protocol(rt, x, low, high))
