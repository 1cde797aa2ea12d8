"""The same training without secrets: the float reference that every private run is held against.

Same rows, same order, same initial weights, same schedule, same update rule as ``private.training``; the arithmetic is
float64, the gradients are autograd's and not ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as fn

from uvcc_engine.data.sets import Dataset, Floats, batch_rows
from uvcc_engine.model.job import PrivateJob
from uvcc_engine.model.optimizers import adam_rate, gradient_gain, smallest
from uvcc_engine.model.specs import (
    Attention,
    BatchNorm,
    Conv2d,
    Dense,
    Embedding,
    Gelu,
    Image,
    LayerNorm,
    LayerSpec,
    ModelSpec,
    Pool,
    Residual,
    find_model,
    initial_weights,
)
from uvcc_engine.model.transformer import EPSILON, KEEP


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Weights (one per weighted layer), the mean loss of every step, the correct test rows and the test accuracy."""

    weights: tuple[Floats, ...]
    losses: tuple[float, ...]
    correct: int
    accuracy: float


def forward(model: ModelSpec, weights: list[Tensor], x: Tensor, *, training: bool = False) -> Tensor:
    """Logits (rows * positions, classes) of rows (rows, features). ``training`` is for batch normalisation."""
    return _through(model.layers, iter(weights), x, training)


def _through(layers: Sequence[LayerSpec], left: Iterator[Tensor], x: Tensor, training: bool) -> Tensor:
    for layer in layers:
        if isinstance(layer, Dense):
            w = next(left)
            x = x @ w[:-1] + w[-1]
        elif isinstance(layer, Conv2d):
            w = next(left)
            kernel = w[:-1].T.reshape(layer.channels, layer.image.channels, layer.kernel, layer.kernel)
            x = fn.conv2d(_image(x, layer.image), kernel, w[-1], layer.stride, layer.padding).flatten(1)
        elif isinstance(layer, Pool):
            pool = fn.avg_pool2d if layer.kind == "avg" else fn.max_pool2d
            x = pool(_image(x, layer.image), layer.size).flatten(1)
        elif isinstance(layer, Residual):
            x = x + _through(layer.layers, left, x, training)
        elif isinstance(layer, LayerNorm):
            w = next(left)
            x = fn.layer_norm(x, (layer.width,), w[0], w[1], EPSILON)
        elif isinstance(layer, BatchNorm):
            x = _batch_norm(layer, next(left), x, training)
        elif isinstance(layer, Embedding):
            w = next(left)
            letters = x.reshape(-1, layer.positions, layer.vocabulary)
            x = (letters @ w[: layer.vocabulary] + w[layer.vocabulary :]).flatten(0, 1)
        elif isinstance(layer, Attention):
            parts = x.reshape(-1, layer.positions, 3, layer.heads, layer.width // layer.heads).permute(2, 0, 3, 1, 4)
            mixed = fn.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = mixed.transpose(1, 2).reshape(-1, layer.width)
        else:
            x = fn.gelu(x) if isinstance(layer, Gelu) else torch.relu(x)
    return x


def _batch_norm(layer: BatchNorm, w: Tensor, x: Tensor, training: bool) -> Tensor:
    image = _image(x, layer.image)
    if training:
        over = (0, 2, 3)
        found = torch.stack([image.mean(over), image.var(over, unbiased=False)]).detach()
        w.data[1:3] = KEEP * w.data[1:3] + (1.0 - KEEP) * found  # not a gradient's business
    mean, variance = (None, None) if training else (w[1], w[2])
    return fn.batch_norm(image, mean, variance, w[0], w[3], training, 0.0, EPSILON).flatten(1)


def _image(x: Tensor, image: Image) -> Tensor:
    return x.reshape(-1, image.channels, image.height, image.width)


def train_clear(job: PrivateJob, data: Dataset, starts: Sequence[Floats] | None = None) -> ClearResult:
    """Train in clear float64 exactly as ``job`` says, from its own initial weights or from ``starts``."""
    model = find_model(job.model)
    first = initial_weights(model, job.seed, job.frac_bits) if starts is None else starts
    weights = [torch.from_numpy(w).clone().requires_grad_() for w in first]
    velocity, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    losses: list[float] = []
    for step in range(job.steps):
        rows = batch_rows(job.seed, step, job.batch, len(data.train_x))
        logits = forward(model, weights, torch.from_numpy(data.train_x[rows]), training=True)
        loss = objective(job, logits, torch.from_numpy(data.train_y[rows].reshape(-1)))
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for w, v, s, g in zip(weights, velocity, second, grads, strict=True):
                _update(job, step, w, v, s, g, model.positions)
    found = [w.detach().numpy() for w in weights]
    correct = count_correct(model, found, data)
    return ClearResult(tuple(found), tuple(losses), correct, correct / data.test_y.size)


def objective(job: PrivateJob, outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a batch."""
    if job.objective == "mse":
        return (outputs - fn.one_hot(labels, outputs.shape[1])).square().sum(1).mean() / 2.0
    return fn.cross_entropy(outputs, labels)


def _update(job: PrivateJob, step: int, w: Tensor, v: Tensor, second: Tensor, g: Tensor, positions: int) -> None:
    """One update of a weight and its moments in place; g is the gradient of the mean loss."""
    if job.optimizer == "sgd":
        v.mul_(job.momentum).add_(g)
        w.sub_(job.lr_at(step) * v)
        return
    g = g * job.batch * positions * gradient_gain(job.batch, positions)
    v.mul_(job.momentum).add_(g, alpha=1.0 - job.momentum)
    second.mul_(job.beta2).add_(g.square(), alpha=1.0 - job.beta2)
    w.sub_(adam_rate(job, step) * v / torch.sqrt(second + smallest(job.frac_bits)))


def count_correct(model: ModelSpec, weights: list[Floats], data: Dataset) -> int:
    """Test rows whose largest logit is at the label."""
    logits = forward(model, [torch.from_numpy(w) for w in weights], torch.from_numpy(data.test_x))
    return int((logits.argmax(1) == torch.from_numpy(data.test_y.reshape(-1))).sum())
