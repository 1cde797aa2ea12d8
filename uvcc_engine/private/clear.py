"""The same training without secrets: the float reference that every private run is held against.

Same rows, same order, same initial weights, same schedule, same update rule as ``private.training``; only the
arithmetic differs (float64 here, fixed point on shares there).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uvcc_engine.private.data import Dataset, Floats, batch_rows, one_hot
from uvcc_engine.private.job import PrivateJob
from uvcc_engine.private.models import Dense, ModelSpec, find_model, initial_weights


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Weights (one per dense layer), the mean loss of every step, the correct test rows and the test accuracy."""

    weights: tuple[Floats, ...]
    losses: tuple[float, ...]
    correct: int
    accuracy: float


def with_ones(x: Floats) -> Floats:
    """Append the constant column that carries the bias."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def forward(model: ModelSpec, weights: list[Floats], x: Floats) -> tuple[Floats, list[Floats]]:
    """Logits (n, classes) and, per layer, the input it saw."""
    seen: list[Floats] = []
    index = 0
    for layer in model.layers:
        seen.append(x)
        if isinstance(layer, Dense):
            x = with_ones(x) @ weights[index]
            index += 1
        else:
            x = np.maximum(x, 0.0)
    return x, seen


def backward(model: ModelSpec, weights: list[Floats], seen: list[Floats], grad: Floats) -> list[Floats]:
    """Gradients of the weights from the gradient of the logits."""
    found: list[Floats] = []
    index = len(weights)
    for layer, x in zip(reversed(model.layers), reversed(seen), strict=True):
        if isinstance(layer, Dense):
            index -= 1
            found.append(with_ones(x).T @ grad)
            grad = grad @ weights[index][:-1].T
        else:
            grad = grad * (x > 0)
    return found[::-1]


def train_clear(job: PrivateJob, data: Dataset) -> ClearResult:
    """Train in clear float64 exactly as ``job`` says."""
    model = find_model(job.model)
    weights = initial_weights(model, job.seed, job.frac_bits)
    velocity = [np.zeros_like(w) for w in weights]
    targets = one_hot(data.train_y, data.classes)
    losses: list[float] = []
    for step in range(job.steps):
        rows = batch_rows(job.seed, step, job.batch, len(data.train_x))
        logits, seen = forward(model, weights, data.train_x[rows])
        shifted = logits - logits.max(axis=1, keepdims=True)
        exp = np.exp(shifted)
        total = exp.sum(axis=1, keepdims=True)
        losses.append(float(np.mean(np.log(total[:, 0]) - (shifted * targets[rows]).sum(axis=1))))
        grads = backward(model, weights, seen, exp / total - targets[rows])
        velocity = [job.momentum * v + g / job.batch for v, g in zip(velocity, grads, strict=True)]
        weights = [w - job.lr_at(step) * v for w, v in zip(weights, velocity, strict=True)]
    correct = count_correct(model, weights, data)
    return ClearResult(tuple(weights), tuple(losses), correct, correct / len(data.test_y))


def count_correct(model: ModelSpec, weights: list[Floats], data: Dataset) -> int:
    """Test rows whose largest logit is at the label."""
    logits, _ = forward(model, weights, data.test_x)
    return int((logits.argmax(axis=1) == data.test_y).sum())
