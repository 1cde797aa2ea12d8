"""Inverse roots and normalisation layers.

Comparing ``x`` with public edges, two an octave, selects the inverse of the middle of its interval and the root of
that, both linear in the bits. What ``x`` times the former is off one, at most a fifth, goes into a polynomial of degree
3. (CrypTen's and SPU's rsqrt begin with a guess as well, and take Newton's steps of three products each from there.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.bits import at_least_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions.nonlinear import chebyshev_coefficients
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    add,
    add_public,
    add_ring,
    mul_protocol,
    mul_public_protocol,
    neg,
    scale_int,
    sub,
)
from uvcc_engine.mpc.products.summed import summed_products_protocol

_MOST_BITS: Final = 60  # of a product of what is at most one and a fifth
_COEFFICIENT_BITS: Final = 14


def rsqrt_protocol(
    rt: Runtime, x: Share, low: float, high: float, *, factor: float = 1.0, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``factor x^(-1/2)`` for ``low <= x <= high`` (public, positive): 11 rounds. Relative error below
    2^-13 + 2^-f, and 2 units.

    Raises ConfigError for a range that is not positive.
    """
    if not 0 < low < high:
        raise ConfigError(f"an inverse root on [{low}, {high}]", "the range must be positive")
    first, last = 2 * math.floor(math.log2(low)), 2 * math.ceil(math.log2(high))
    edges = torch.tensor([2.0 ** (k / 2) for k in range(first + 1, last)], dtype=torch.float64)
    bits = yield from at_least_protocol(rt, x, edges, dealer=dealer)
    roots = [round(factor * 2.0 ** (x.f - (k + 0.5) / 4)) for k in range(first, last)]
    fine = min(2 * x.f, _MOST_BITS - x.f)
    alone = [root / factor for root in roots]  # as they were rounded, so that the polynomial makes that good
    squares = [round(root * root * 2.0 ** (fine - 2 * x.f)) for root in alone]
    c0, *upper = _inverse_root_near_one()
    inverse = _stairs(rt, bits, squares, fine)
    off = add_public(rt, neg((yield from mul_protocol(rt, x, inverse, dealer=dealer))), 1.0)
    guess = _stairs(rt, bits, roots, x.f)
    both = yield from par(mul_protocol(rt, guess, off, dealer=dealer), mul_protocol(rt, off, off, dealer=dealer))
    turned, square = both
    scale = min(_COEFFICIENT_BITS, _MOST_BITS - 2 * x.f)
    c1, c2, c3 = (round(c * 2.0**scale) for c in upper)
    curve = add(scale_int(off, c2), scale_int(square, c3)).with_f(x.f + scale)
    rest = yield from mul_protocol(rt, turned, add_ring(rt, curve, c1 << x.f), dealer=dealer)
    return add(rest, _stairs(rt, bits, [round(root * c0) for root in roots], x.f))


def _stairs(rt: Runtime, bits: Share, values: Sequence[int], f: int) -> Share:
    """``values[i]``, ring elements of scale ``f``, where ``i`` of the bits (first axis) are one. Local."""
    steps = torch.tensor([b - a for a, b in itertools.pairwise(values)], dtype=torch.int64, device=rt.device)
    shaped = steps.reshape(-1, *[1] * (bits.first.dim() - 1))
    return add_ring(rt, scale_int(bits, shaped).sum(0).with_f(f), values[0])


@lru_cache(maxsize=1)
def _inverse_root_near_one() -> list[float]:
    """Coefficients of 1 to ``e^3``, to ``2^-40``, of the polynomial that is ``(1 - e)^(-1/2)`` up to 2^-14.5 wherever
    ``1 - e`` is a number over the middle of its half octave."""
    low, high = 1 - 2.0**0.25, 1 - 2.0**-0.25
    middle, half = (low + high) / 2, (high - low) / 2
    found = chebyshev_coefficients(lambda e: (1 - e) ** -0.5, low, high, 3)
    # of T_0 to T_3 of (e - middle) / half to powers of it, and then to powers of e
    in_t = [found[0] - found[2], found[1] - 3 * found[3], 2 * found[2], 4 * found[3]]
    powers = [
        math.fsum(in_t[n] * math.comb(n, k) * (-middle) ** (n - k) / half**n for n in range(k, 4)) for k in range(4)
    ]
    return [round(c * 2.0**40) / 2.0**40 for c in powers]  # a last bit that differs between machines is left out


def normalize_protocol(
    rt: Runtime, x: Share, *, epsilon: float = 1e-3, high: float = 4096.0, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share]]:
    """``(x - mean) / sqrt(variance + epsilon)`` over the last axis, and that inverse root ``[..., 1]``: 17 rounds.

    The variance must stay below ``high``, and the sum of squares below 2^62 in whole units of both fractions.
    """
    n = x.shape[-1]
    part, ratio = power_of_two_for(n)
    mean = yield from mul_public_protocol(rt, x.sum(-1, keepdim=True), 1.0 / n, dealer=dealer)
    centred = sub(x, mean)
    squares = summed_products_protocol(rt, centred, centred, -1, scale=part, keepdim=True, dealer=dealer)
    variance = yield from squares
    return (yield from deviated_protocol(rt, centred, variance, ratio, epsilon=epsilon, high=high, dealer=dealer))


def power_of_two_for(n: int) -> tuple[float, float]:
    """What a sum of ``n`` squares is multiplied by, a power of two, and by what that falls short of ``1 / n``, 1 to 2.

    ``1 / n`` itself has 12 bits, which a sum of squares leaves no room for: of 100,352 numbers, the pixels of a
    channel of 128 images, a deviation of 3 passed the ring's end.
    """
    part = 2.0 ** -(n - 1).bit_length()
    return part, 1.0 / (n * part)


def deviated_protocol(
    rt: Runtime, x: Share, square: Share, ratio: float, *, epsilon: float, high: float, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share]]:
    """``x / sqrt(ratio square + epsilon)``, and that inverse root: 13 rounds.

    ``x``: any shape; ``square`` and root broadcast to it. The ratio, from 1 to 2, is a factor of the root: it costs
    nothing.
    """
    safe, back = add_public(rt, square, epsilon / ratio), 1.0 / math.sqrt(ratio)
    root = yield from rsqrt_protocol(rt, safe, epsilon / ratio / 2, high, factor=back, dealer=dealer)
    return (yield from mul_protocol(rt, x, root, dealer=dealer)), root


def layer_norm_protocol(
    rt: Runtime, x: Share, weight: Share, bias: Share, *, epsilon: float = 1e-3, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share, Share]]:
    """Layer normalisation over the last axis: (output, normalised input, inverse deviation). 19 rounds."""
    normal, inverse = yield from normalize_protocol(rt, x, epsilon=epsilon, dealer=dealer)
    scaled = yield from mul_protocol(rt, normal, weight, dealer=dealer)
    return add(scaled, bias), normal, inverse


class Summing(Protocol):
    """Sums along the last axis where the numbers at hand are a part of those that are normalised."""

    @property
    def count(self) -> int:
        """How many numbers there are in all."""

    def whole(self, part: Share) -> Share:
        """Sums over the part as sums over all. Local."""

    def products_protocol(self, rt: Runtime, x: Share, y: Share, scale: float) -> MpcProtocol[Share]:
        """``sum(x * y) * scale`` over all, the axis kept. 2 rounds."""


def normalize_gradient_protocol(
    rt: Runtime,
    grad: Share,
    normal: Share,
    inverse: Share,
    *,
    over: Summing | None = None,
    dealer: int = DEALER,
) -> MpcProtocol[Share]:
    """Gradient of the input of ``normalize_protocol``: ``inverse (g - mean(g) - normal mean(g normal))``. 6 rounds.

    ``[..., features]``, as the input. Where these are a part of the features, ``over`` says how to sum over all.
    """
    if over is None:
        n, total = grad.shape[-1], grad.sum(-1, keepdim=True)
        products = summed_products_protocol(rt, grad, normal, -1, scale=1.0 / n, keepdim=True, dealer=dealer)
    else:
        n, total = over.count, over.whole(grad.sum(-1, keepdim=True))
        products = over.products_protocol(rt, grad, normal, 1.0 / n)
    work: list[MpcProtocol[Share]] = [mul_public_protocol(rt, total, 1.0 / n, dealer=dealer), products]
    mean, along = yield from par(*work)
    back = yield from mul_protocol(rt, normal, along, dealer=dealer)
    return (yield from mul_protocol(rt, sub(sub(grad, mean), back), inverse, dealer=dealer))


def batch_norm_protocol(
    rt: Runtime, x: Share, weight: Share, bias: Share, *, epsilon: float = 1e-3, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share, Share]]:
    """Batch normalisation of ``[b, c, ...]`` by channel: (output, normalised ``[c, b ...]``, inverse deviation ``[c,
    1]``).

    19 rounds; the statistics are those of this batch.
    """
    shape = x.shape
    to_rows, to_shape = channel_views(shape)
    normal, inverse = yield from normalize_protocol(rt, x.map(to_rows), epsilon=epsilon, dealer=dealer)
    scaled = yield from mul_protocol(rt, normal, weight.reshape(-1, 1), dealer=dealer)
    return add(scaled, bias.reshape(-1, 1)).map(to_shape), normal, inverse


def channel_views(shape: torch.Size) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """``[b, c, ...]`` to ``[c, b ...]`` rows, and back."""

    def to_rows(t: Tensor) -> Tensor:
        return t.transpose(0, 1).reshape(shape[1], -1)

    def to_shape(t: Tensor) -> Tensor:
        return t.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1).contiguous()

    return to_rows, to_shape
