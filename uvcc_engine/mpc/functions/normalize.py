"""Inverse roots and normalisation layers.

A first guess of ``x^(-1/2)`` comes from comparing ``x`` with public powers of two, whose bits select it linearly;
Newton's iteration ``y (3 - x y^2) / 2`` does the rest (the scheme of CrypTen's and SPU's rsqrt, with the guess in
five rounds).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.bits import at_least_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
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


def staircase_protocol(
    rt: Runtime, x: Share, edges: list[float], values: list[float], *, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``values[i]`` for ``edges[i-1] <= x < edges[i]``: a public step function of a secret. 5 rounds, no product."""
    bits = yield from at_least_protocol(rt, x, torch.tensor(edges, dtype=torch.float64), dealer=dealer)
    ring = [round(v * 2.0**x.f) for v in values]
    steps = torch.tensor([b - a for a, b in itertools.pairwise(ring)], dtype=torch.int64, device=rt.device)
    total = scale_int(bits, steps.reshape(-1, *[1] * len(x.shape))).sum(0).with_f(x.f)
    return add_ring(rt, total, ring[0])


def rsqrt_protocol(rt: Runtime, x: Share, low: float, high: float, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``x^(-1/2)`` for ``low <= x <= high`` (public, positive): 23 rounds. Relative error about 2^-12 + 2 units.

    Raises ConfigError for a range that is not positive.
    """
    if not 0 < low < high:
        raise ConfigError(f"an inverse root on [{low}, {high}]", "the range must be positive")
    first = math.floor(math.log2(low))
    last = math.ceil(math.log2(high))
    edges = [2.0**k for k in range(first + 1, last)]
    middle = [2.0 ** -((k + 0.5) / 2) for k in range(first, last)]
    y = yield from staircase_protocol(rt, x, edges, middle, dealer=dealer)
    for _ in range(3):
        # (x y) y keeps small y exact where y^2 would lose its bits
        xy = yield from mul_protocol(rt, x, y, dealer=dealer)
        xyy = yield from mul_protocol(rt, xy, y, dealer=dealer)
        y = yield from mul_protocol(rt, add_public(rt, neg(xyy), 3.0), y, scale=0.5, dealer=dealer)
    return y


def normalize_protocol(
    rt: Runtime, x: Share, *, epsilon: float = 1e-3, high: float = 4096.0, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share]]:
    """``(x - mean) / sqrt(variance + epsilon)`` over the last axis, and that inverse root ``[..., 1]``: 29 rounds.

    The variance must stay below ``high``.
    """
    n = x.shape[-1]
    mean = yield from mul_public_protocol(rt, x.sum(-1, keepdim=True), 1.0 / n, dealer=dealer)
    centred = sub(x, mean)
    squares = summed_products_protocol(rt, centred, centred, -1, scale=1.0 / n, keepdim=True, dealer=dealer)
    variance = yield from squares
    inverse = yield from rsqrt_protocol(rt, add_public(rt, variance, epsilon), epsilon / 2, high, dealer=dealer)
    normal = yield from mul_protocol(rt, centred, inverse, dealer=dealer)
    return normal, inverse


def layer_norm_protocol(
    rt: Runtime, x: Share, weight: Share, bias: Share, *, epsilon: float = 1e-3, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share, Share]]:
    """Layer normalisation over the last axis: (output, normalised input, inverse deviation). 31 rounds."""
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

    31 rounds; the statistics are those of this batch.
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
