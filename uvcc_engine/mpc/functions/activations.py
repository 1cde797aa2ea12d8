"""Smooth activations: sigmoid, tanh, GELU, each with its derivative, and table lookup by secret index."""

from __future__ import annotations

import math
from typing import Any

from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol, mux_protocol
from uvcc_engine.mpc.foundation.range_watch import unwatched_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, stack
from uvcc_engine.mpc.functions.nonlinear import chebyshev_protocol, divide_protocol, exp_protocol
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    add,
    add_public,
    matmul_protocol,
    mul_protocol,
    mul_public_protocol,
    public,
    scale_int,
    sub,
)

GELU_RANGE = 4.0
_GELU_DEGREE = 8


def sigmoid_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``1 / (1 + e^-x)``, any range: 19 rounds, error about 5 units.

    By ``e^-|x|`` and one division on [1, 2]; the sign puts the result on its side of one half.
    """
    positive = yield from drelu_arithmetic_protocol(rt, x, dealer=dealer)
    magnitude = yield from mul_protocol(rt, scale_int(x, 2), positive, dealer=dealer)
    power = yield from exp_protocol(rt, sub(x, magnitude), dealer=dealer)
    one = public(rt, 1.0, power)
    upper = yield from divide_protocol(rt, one, add_public(rt, power, 1.0), 1.0, 2.0, dealer=dealer)
    return (yield from mux_protocol(rt, positive, upper, sub(one, upper)))


def tanh_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``tanh x = 2 sigmoid(2 x) - 1``: 19 rounds, error about 10 units. Any shape, element by element."""
    half = yield from sigmoid_protocol(rt, scale_int(x, 2), dealer=dealer)
    return add_public(rt, scale_int(half, 2), -1.0)


def gelu_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[tuple[Share, Share]]:
    """GELU, ``x Phi(x)``, and its derivative: 13 rounds, error below 2e-3.

    On [-4, 4] both are a line plus a smooth function of ``x^2`` (after PUMA, arXiv 2307.12533, which uses two pieces);
    beyond, the value is ``x`` or 0 and the derivative 1 or 0.
    """
    edges = stack([add_public(rt, x, GELU_RANGE), add_public(rt, x, -GELU_RANGE)])
    inner_pair = unwatched_protocol(rt, _gelu_inner_protocol(rt, x, dealer))  # beyond 4 it is chosen away
    branches: MpcProtocol[list[Any]] = par(inner_pair, drelu_arithmetic_protocol(rt, edges, dealer=dealer))
    (value, slope), sides = yield from branches
    above = sides.index(1)
    inside = sub(sides.index(0), above)
    inner: list[MpcProtocol[Share]] = [
        mul_protocol(rt, value, inside, dealer=dealer),
        mul_protocol(rt, slope, inside, dealer=dealer),
        mul_protocol(rt, x, above, dealer=dealer),
    ]
    near, near_slope, far = yield from par(*inner)
    return add(near, far), add(near_slope, scale_int(above, 1 << x.f).with_f(x.f))


def _gelu_inner_protocol(rt: Runtime, x: Share, dealer: int) -> MpcProtocol[tuple[Share, Share]]:
    """Value and derivative for ``|x| <= 4``: ``x / 2 + E(x^2)`` and ``1 / 2 + x H(x^2)``."""
    square = yield from mul_protocol(rt, x, x, dealer=dealer)
    top = GELU_RANGE**2
    polynomials: list[MpcProtocol[Share]] = [
        chebyshev_protocol(rt, square, _gelu_even, 0.0, top, _GELU_DEGREE, dealer=dealer),
        chebyshev_protocol(rt, square, _gelu_slope, 0.0, top, _GELU_DEGREE, dealer=dealer),
    ]
    even, slope = yield from par(*polynomials)
    last: list[MpcProtocol[Share]] = [
        mul_public_protocol(rt, x, 0.5, dealer=dealer),
        mul_protocol(rt, x, slope, dealer=dealer),
    ]
    half, odd = yield from par(*last)
    return add(half, even), add_public(rt, odd, 0.5)


def _gelu_even(square: float) -> float:
    x = math.sqrt(max(square, 0.0))
    return 0.5 * x * math.erf(x / math.sqrt(2.0))


def _gelu_slope(square: float) -> float:
    """``(GELU'(x) - 1/2) / x`` as a function of ``x^2``."""
    x = math.sqrt(max(square, 0.0))
    density = math.exp(-0.5 * square) / math.sqrt(2.0 * math.pi)
    return density + (0.5 * math.erf(x / math.sqrt(2.0)) / x if x > 1e-6 else density)


def embedding_protocol(rt: Runtime, one_hot: Share, table: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """Rows of ``table`` ``[vocabulary, width]`` by secret one-hot ``[..., vocabulary]`` (``f = 0``): 1 round.

    The result keeps the table's scale and is exact. ``bits.one_hot_protocol`` makes one-hots from secret indices.
    """
    flat = one_hot.reshape(-1, one_hot.shape[-1])
    rows = yield from matmul_protocol(rt, table.T, flat.T, dealer=dealer)
    return rows.map(lambda t: t.t().reshape(*one_hot.shape[:-1], -1).contiguous())


def sigmoid(rt: Runtime, x: Share) -> Share:
    """``sigmoid_protocol``, run."""
    return rt.run(sigmoid_protocol(rt, x))


def gelu(rt: Runtime, x: Share) -> tuple[Share, Share]:
    """``gelu_protocol``, run."""
    return rt.run(gelu_protocol(rt, x))
