"""The same training without secrets: the float reference that every private run is held against.

Same rows, same order, same initial weights, same schedule, same update rule as ``model.learning.training``; the
arithmetic is float64, the gradients are autograd's and not ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from uvcc_engine.contract.job.early_stop import WATCHED, ValidationLog
from uvcc_engine.contract.job.private_job import VALIDATIONS, PrivateJob
from uvcc_engine.data.sets import Dataset, Floats, Ints, Labels, batch_rows
from uvcc_engine.model.batch_place import BatchPlace
from uvcc_engine.model.definition.specs import ModelSpec, find_model, initial_weights
from uvcc_engine.model.layer_spec import LayerSpec, WeightedSpec, weighted_specs
from uvcc_engine.model.layer_types.centroids import kmeans_of
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.learning.answer_metrics import plaintext_metrics
from uvcc_engine.model.learning.clipping import clipped
from uvcc_engine.model.learning.lloyd_steps import INERTIA
from uvcc_engine.model.learning.objectives import plaintext_loss
from uvcc_engine.model.learning.optimizers import adam_rate, gradient_gain, smallest
from uvcc_engine.model.learning.plaintext_kmeans import ClearKMeans, clear_inertia
from uvcc_engine.model.learning.plaintext_trees import ClearTrees
from uvcc_engine.model.learning.standardising import in_clear
from uvcc_engine.model.learning.validating import PREFIX
from uvcc_engine.model.registry import PlaintextContext, type_of
from uvcc_engine.model.tensor_parallel import bounds


@dataclass(frozen=True, slots=True)
class PlaintextResult:
    """Weights (one per weighted layer), the mean loss of every step, the correct test rows and the test accuracy; the
    metrics that the job reveals, by name. ``validated``: by steps done, the numbers of validation; ``steps``: after how
    many the training ended."""

    weights: tuple[Floats, ...]
    losses: tuple[float, ...]
    correct: int
    accuracy: float
    metrics: Mapping[str, float]
    validated: Mapping[int, Mapping[str, float]]
    steps: int


def forward(
    model: ModelSpec, weights: list[Tensor], x: Tensor, *, training: bool = False, batch: BatchPlace | None = None
) -> Tensor:
    """Logits (rows * positions, classes) of rows (rows, features). ``training`` is for batch normalisation, ``batch``,
    which rows of a step's batch they are, for dropout."""
    return _through(model.layers, weights, x, _Passing(training, model.public, batch))


@dataclass(frozen=True, slots=True)
class _Passing:
    """What all layers of one pass are told."""

    training: bool
    public: Mapping[str, Floats]
    batch: BatchPlace | None


def _through(layers: Sequence[LayerSpec], weights: Sequence[Tensor], x: Tensor, on: _Passing) -> Tensor:
    left = iter(weights)
    for spec in layers:
        mine = list(islice(left, len(weighted_specs([spec]))))
        own = mine[0] if isinstance(spec, WeightedSpec) else None
        inner = partial(_through, spec.inner, mine, on=on)
        parts, after = [], iter(mine)
        for one in spec.inner:
            taken = list(islice(after, len(weighted_specs([one]))))
            parts.append(partial(_through, [one], taken, on=on))
        at = PlaintextContext(own, on.training, inner, tuple(parts), on.public, tuple(mine), on.batch)
        x = type_of(spec).plaintext(spec, at, x)
    return x


def train_plaintext(
    job: PrivateJob,
    data: Dataset,
    starts: Sequence[Floats] | None = None,
    *,
    model: ModelSpec | None = None,
    replicas: int = 1,
    microbatches: int = 1,
) -> PlaintextResult:
    """Train in plain float64 exactly as ``job`` says, from its own initial weights or from ``starts``.

    ``starts`` has an array per weighted layer, in the shape that the layer's specification says. ``model``: the job's,
    with the public tensors that it computes with. ``replicas`` and ``microbatches`` of each: how the rows of a step,
    ``job.batch`` of all replicas together, are divided, which batch normalisation alone can tell.
    """
    model, data = find_model(job.model) if model is None else model, in_clear(job, data)
    first = initial_weights(model, job.seed, job.frac_bits) if starts is None else starts
    weights = [torch.from_numpy(w).clone().requires_grad_() for w in first]
    velocity, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    losses: list[float] = []
    log, best = ValidationLog(job.patience), [w.detach().clone() for w in weights]
    validated: dict[int, Mapping[str, float]] = {}
    other = _other_training(job, model, data, weights)
    for step in range(job.steps):
        rows = batch_rows(job.seed, step, job.batch, len(data.train_x))
        if other is not None:
            losses.append(other.step(step, rows))
        else:
            parts = divided(len(rows), replicas, microbatches)
            losses.append(_descend(job, model, weights, (velocity, second), step, data, rows, parts))
        if job.validates(step):
            validated[step + 1] = now = _validated(job, model, weights, data)
            if WATCHED in now and log.add(step + 1, now[WATCHED]) and job.keep_best:
                best = [w.detach().clone() for w in weights]
            if log.ended:
                break
    weights = best if job.keep_best else weights
    found = [w.detach().numpy() for w in weights]
    if model.unsupervised:
        shown: Mapping[str, float] = {INERTIA: clear_inertia(data.test_x, found[0])}
    else:
        outputs = forward(model, [w.detach() for w in weights], torch.from_numpy(data.test_x))
        shown = plaintext_metrics(job, outputs, targets_of(model, data.test_y))
    correct = count_correct(model, found, data) if model.labels > 1 else 0
    return PlaintextResult(
        tuple(found), tuple(losses), correct, correct / max(1, data.test_y.size), shown, validated, len(losses)
    )


def _other_training(
    job: PrivateJob, model: ModelSpec, data: Dataset, weights: list[Tensor]
) -> ClearTrees | ClearKMeans | None:
    """What moves the only weight where gradients do not."""
    if (trees := trees_of(model)) is not None:
        return ClearTrees(job, trees, data, weights[0].detach().numpy())
    clusters = kmeans_of(model)
    return None if clusters is None else ClearKMeans(job, clusters, data, weights[0].detach().numpy())


def _descend(
    job: PrivateJob,
    model: ModelSpec,
    weights: list[Tensor],
    moments: tuple[list[Tensor], list[Tensor]],
    step: int,
    data: Dataset,
    rows: Ints,
    parts: Sequence[slice],
) -> float:
    """One step of the optimiser on these rows, which go through the model in ``parts``, in place; their mean loss
    before it."""
    logits = _in_parts(model, weights, torch.from_numpy(data.train_x[rows]), BatchPlace(job.seed, step, 0, 0), parts)
    own = None if data.weights is None else data.weights[rows]
    loss = training_loss(job, logits, targets_of(model, data.train_y[rows]), own)
    grads = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for spec, w, v, s, g in zip(model.weights, weights, *moments, grads, strict=True):
            decay = job.lr_at(step) * job.weight_decay * w if spec.decays else 0.0
            _update(job, step, w, v, s, clipped(g, job.clip_norm) if job.clip_norm else g, model.positions)
            w.sub_(decay)
    return loss.item()


def _in_parts(model: ModelSpec, weights: list[Tensor], x: Tensor, at: BatchPlace, parts: Sequence[slice]) -> Tensor:
    """Logits of rows that go through the model part by part. What a layer keeps of the rows it trains on follows the
    mean over the parts, each counting as many rows as it has."""
    before = [w.detach().clone() for w in weights]
    drifts, found = [torch.zeros_like(w) for w in before], []
    for part in parts:
        place = replace(at, first=part.start, count=part.stop - part.start)
        found.append(forward(model, weights, x[part], training=True, batch=place))
        for w, was, drift in zip(weights, before, drifts, strict=True):
            drift += (w.detach() - was) * (place.count / len(x))
            w.data.copy_(was)
    for w, was, drift in zip(weights, before, drifts, strict=True):
        w.data.copy_(was + drift)
    return torch.cat(found)


def divided(rows: int, replicas: int, microbatches: int) -> list[slice]:
    """The rows of every microbatch of every replica, in order."""
    each, found = rows // replicas, []
    for replica in range(replicas):
        for m in range(microbatches):
            mine = bounds(each, microbatches, m)
            found.append(slice(replica * each + mine.start, replica * each + mine.stop))
    return found


def _validated(job: PrivateJob, model: ModelSpec, weights: list[Tensor], data: Dataset) -> dict[str, float]:
    assert data.val_x is not None
    assert data.val_y is not None
    if model.unsupervised:
        return {WATCHED: clear_inertia(data.val_x, weights[0].detach().numpy()) / len(data.val_x)}
    with torch.no_grad():
        outputs, targets = forward(model, weights, torch.from_numpy(data.val_x)), targets_of(model, data.val_y)
        found = {WATCHED: objective(job, outputs, targets).item()} if WATCHED in job.reveal else {}
    wanted = [name.removeprefix(PREFIX) for name in VALIDATIONS if name in job.reveal]
    return found | {PREFIX + k: v for k, v in plaintext_metrics(job, outputs, targets, wanted).items()}


def objective(job: PrivateJob, outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a batch.

    ``outputs``: [rows, classes]; ``labels``: [rows], or [rows, 1] for numbers; gives a scalar.
    """
    if outputs.shape[1] == 1:
        return plaintext_loss(job.objective, outputs, labels)
    if job.objective == "mse":
        return (outputs - fn.one_hot(labels, outputs.shape[1])).square().sum(1).mean() / 2.0
    return fn.cross_entropy(outputs, labels)


def training_loss(job: PrivateJob, outputs: Tensor, labels: Tensor, own: Floats | None) -> Tensor:
    """As :func:`objective`, of what is trained on: smoothed and weighted as the job says. ``own``: weights [rows]."""
    if not job.weighted and not job.label_smoothing:
        return objective(job, outputs, labels)
    lines = len(labels) // (len(labels) if own is None else len(own))
    rows = torch.ones(len(labels)) if own is None else torch.from_numpy(own).repeat_interleave(lines)
    classes = torch.tensor(job.class_weights, dtype=torch.float64) if job.class_weights else None
    if job.objective == "cross-entropy":
        each = fn.cross_entropy(outputs, labels, classes, label_smoothing=job.label_smoothing, reduction="none")
        return (each * rows).mean()
    if outputs.shape[1] > 1:  # squares of classes
        each = (outputs - fn.one_hot(labels, outputs.shape[1])).square().sum(1) / 2.0
        return (each * rows).mean()
    rows = rows.reshape(-1, 1)
    rows = rows if classes is None else rows * classes[labels.long()]
    return plaintext_loss(
        job.objective, outputs, labels * (1.0 - job.label_smoothing) + job.label_smoothing / 2.0, rows
    )


def targets_of(model: ModelSpec, labels: Labels) -> Tensor:
    """Class numbers, one per line of the outputs, or the numbers to fit, (rows, 1)."""
    if model.classes == 1:
        return torch.from_numpy(labels.astype(np.float64).reshape(-1, 1))
    return torch.from_numpy(labels.astype(np.int64).reshape(-1))


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
