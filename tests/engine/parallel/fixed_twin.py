"""A plaintext twin to the last bit: the training in plain integers, each truncation rounded down.

A truncation on shares rounds down or up by a mask that only the parties have. Where every mask is zero
(``ZeroStream``) it rounds down, so a run's numbers are determined, and plain integers give the same ones. Nothing here
comes from the layers or protocols that it is held against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.typing import NDArray
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, batch_rows
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.mpc.foundation.prg import Stream

Ints = NDArray[np.int64]
F = 16
EPSILON, LEAST, MOST = 2.0**-10, 2.0**-11, 2.0**20  # of a variance
KEEP = 0.9


class ZeroStream(Stream):
    """Random numbers that are all zero: for what rounding alone would change."""

    def generate(self, place: tuple[int, int, int], piece: int, out: Tensor, room: Tensor | None) -> None:
        out.zero_()


def ring(x: Any) -> Ints:
    return np.rint(np.asarray(x, np.float64) * 2.0**F).astype(np.int64)


def public_factor(value: float, bits: int) -> tuple[int, int]:
    """A public factor as an odd integer of so many bits and one more, and a shift to the right."""
    if value == 0.0:
        return 0, 0
    mantissa, exponent = math.frexp(value)
    factor, shift = round(mantissa * 2 ** (bits + 1)), bits + 1 - exponent
    while factor % 2 == 0:
        factor, shift = factor // 2, shift - 1
    return factor, shift


def by_public(x: Ints, value: float) -> Ints:
    factor, shift = public_factor(value, 15)
    return x * factor >> shift if shift > 0 else x * (factor << -shift)


def down(product: Ints, scale: float = 1.0) -> Ints:
    """A product of two numbers, at twice the fractional bits, times a public scale."""
    factor, shift = public_factor(scale, 11)
    return product * factor >> F + shift if shift >= 0 else product * (factor << -shift) >> F


def inverse_root(x: Ints, least: float, factor: float) -> Ints:
    """Times a factor: by the half octave that ``x`` lies in, and a polynomial in what it is off the middle of that."""
    first, last = 2 * math.floor(math.log2(least)), 2 * math.ceil(math.log2(MOST))
    near = Chebyshev.interpolate(lambda e: (1 - e) ** -0.5, 3, domain=[1 - 2.0**0.25, 1 - 2.0**-0.25])
    c0, *upper = near.convert(kind=Polynomial).coef
    c1, c2, c3 = (round(c * 2**14) for c in upper)
    at = sum((x >= math.ceil(2.0 ** (k / 2 + F))).astype(np.int64) for k in range(first + 1, last))
    roots = ring([factor * 2.0 ** -((k + 0.5) / 4) for k in range(first, last)])
    squares = np.rint((roots / factor) * (roots / factor)).astype(np.int64)
    off = 2**F - (x * squares[at] >> 2 * F)
    turned, square = down(roots[at] * off), down(off * off)
    return (turned * ((c1 << F) + c2 * off + c3 * square) >> F + 14) + np.rint(roots * c0).astype(np.int64)[at]


class Norm:
    """Batch normalisation of a table's columns: its weight is gain, mean, variance and bias."""

    def __init__(self, weight: Ints) -> None:
        self.weight = weight

    def forward(self, x: Ints) -> Ints:
        n = len(x)
        mean = by_public(x.sum(0), 1.0 / n)
        centred = x - mean
        whole = 1 << (n - 1).bit_length()  # as many rows, or more
        square, over = down((centred * centred).sum(0), 1.0 / whole), whole / n
        self.found = np.stack([mean, by_public(square, over)])
        self.inverse = inverse_root(square + int(ring(EPSILON / over)), LEAST / over, 1.0 / math.sqrt(over))
        self.normal = down(centred * self.inverse)
        return down(self.normal * self.weight[0]) + self.weight[3]

    def backward(self, grad: Ints) -> tuple[Ints, Ints]:
        """The gradient of the inputs, and that of the weight at twice the fractional bits."""
        n, still = len(grad), np.zeros_like(self.inverse)
        own = np.stack([(grad * self.normal).sum(0), still, still, grad.sum(0) << F])
        gained = down(grad * self.weight[0])
        mean, along = by_public(gained.sum(0), 1.0 / n), down((gained * self.normal).sum(0), 1.0 / n)
        return down((gained - mean - down(self.normal * along)) * self.inverse), own

    def drift(self, share: float) -> Ints:
        return by_public(self.found - self.weight[1:3], share * (1.0 - KEEP))


class Dense:
    """A product with a weight whose last row is the bias."""

    def __init__(self, weight: Ints) -> None:
        self.weight = weight

    def forward(self, x: Ints) -> Ints:
        self.x = np.concatenate([x, np.full((len(x), 1), 1 << F)], 1)
        return down(self.x @ self.weight)

    def backward(self, grad: Ints) -> tuple[Ints, Ints]:
        return down(grad @ self.weight[:-1].T), self.x.T @ grad


def train_in_integers(job: PrivateJob, data: Dataset, parts: int = 1) -> list[Ints]:
    """The weights after the job's steps of stochastic gradient descent: dense layers, batch normalisations, squares.

    ``parts`` of a step's rows are normalised each by itself.
    """
    model = find_model(job.model)
    x, y = ring(data.train_x), ring(data.train_y).reshape(len(data.train_y), -1)
    weights = [ring(w) for w in initial_weights(model, job.seed, job.frac_bits)]
    moves = [np.zeros_like(w) for w in weights]
    for step in range(job.steps):
        rows = batch_rows(job.seed, step, job.batch, len(x))
        totals, drifts = [np.zeros_like(w) for w in weights], [np.zeros_like(w[1:3]) for w in weights]
        for part in np.split(rows, parts):
            layers = [
                (Norm if isinstance(spec, BatchNorm) else Dense)(w)
                for spec, w in zip(model.layers, weights, strict=True)
            ]
            grad = _through(layers, x[part]) - y[part]
            for at in range(len(layers) - 1, -1, -1):
                layer = layers[at]
                grad, own = layer.backward(grad)
                totals[at] += own
                if isinstance(layer, Norm):
                    drifts[at] += layer.drift(len(part) / len(rows))
        for at, spec in enumerate(model.layers):
            if isinstance(spec, BatchNorm):
                weights[at] = np.concatenate([weights[at][:1], weights[at][1:3] + drifts[at], weights[at][3:]])
            moves[at] = by_public(moves[at], job.decay_at(step)) + down(totals[at], job.rate_at(step))
            weights[at] = weights[at] - moves[at]
    return weights


def _through(layers: Sequence[Norm | Dense], x: Ints) -> Ints:
    for layer in layers:
        x = layer.forward(x)
    return x
