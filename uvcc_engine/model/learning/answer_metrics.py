"""What is revealed of a model's answers to the test rows: counts and sums over all rows, never anything of one row.

``accuracy``: opens the count of right rows. ``confusion``: opens the count of every (class, answer). ``auc``: opens
how many rows are of class 1 and one sum over ranks, made of secret counts of scores above public edges.
``precision``: opens how many rows the threshold takes for class 1, and how many of these rightly. ``recall``: the
latter, and how many are of class 1. ``perplexity``: opens the mean loss. ``rmse``: opens the sum of squared errors.
``r2``: that sum and the one of squared distances from the mean. ``overflow``: opens how many numbers between the
layers are too large for the ring's products, over all rows, and how many of an optimiser's squares (``overflows``). A
metric that comes out as no number (``UNDEFINED``) is left out of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import HIGHEST_LOG_RATE, METRICS, PrivateJob
from uvcc_engine.model import losses
from uvcc_engine.model.functions import to_exp_scale_protocol
from uvcc_engine.model.learning.measured import Measured, opened_protocol
from uvcc_engine.model.learning.overflows import Bounded, overflow_protocol
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.comparisons.bits import at_least_protocol
from uvcc_engine.mpc.comparisons.maximum import argmax_one_hot_protocol
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol, relu_only_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.functions.exponential import exp_protocol
from uvcc_engine.mpc.products.arithmetic import (
    add_public,
    dot_protocol,
    matmul_protocol,
    mul_public_protocol,
    public,
    rescale_protocol,
    scale_int,
    sub,
)

EDGES: Final = tuple(0.25 * k for k in range(-32, 33))
"""Scores between two of them count as equal for the area under the curve."""
_MOST_NATS: Final = 300.0


def evaluate_protocol(
    rt: Runtime,
    job: PrivateJob,
    model: ModelSpec,
    outputs: Share,
    targets: Share,
    wanted: Collection[str] | None = None,
    seen: Sequence[Share | Bounded] = (),
) -> MpcProtocol[dict[str, float]]:
    """Open the metrics of :func:`measure_protocol`, by name: one round after it. Outputs and targets: [rows,
    classes]."""
    return (
        yield from opened_protocol(rt, (yield from measure_protocol(rt, job, model, outputs, targets, wanted, seen)))
    )


def measure_protocol(
    rt: Runtime,
    job: PrivateJob,
    model: ModelSpec,
    outputs: Share,
    targets: Share,
    wanted: Collection[str] | None = None,
    seen: Sequence[Share | Bounded] = (),
) -> MpcProtocol[list[Measured]]:
    """The metrics that are ``wanted``, or all that the job reveals, still shared. Reveals nothing.

    ``confusion`` gives one number for each (class, answer). Outputs and targets: [rows, classes]; ``seen``: what came
    out of each layer on the way, and what else ``overflow`` counts.
    """
    found: list[Measured] = []
    rows = int(targets.shape[0])
    wanted = [name for name in METRICS if name in job.reveal] if wanted is None else wanted
    if "accuracy" in wanted and model.classes > 1:
        found.append(_accuracy((yield from losses.hits_protocol(rt, outputs, targets)), rows))
    if "confusion" in wanted or ("accuracy" in wanted and model.classes == 1):
        found.append((yield from _confusion_protocol(rt, outputs, targets, wanted)))
    if "auc" in wanted:
        found.append((yield from _auc_protocol(rt, outputs, targets)))
    if "precision" in wanted or "recall" in wanted:
        found.append((yield from _detection_protocol(rt, job, outputs, targets, wanted)))
    if "perplexity" in wanted:
        powers = yield from losses.powers_protocol(rt, outputs)
        total = yield from losses.total_loss_protocol(rt, powers, targets)
        found.append(mean_of(total, rows, lambda loss: {"perplexity": perplexity(loss)}))
    if "rmse" in wanted or "r2" in wanted:
        found.append((yield from _errors_protocol(rt, job, outputs, targets, wanted)))
    if "overflow" in wanted:
        found.append((yield from overflow_protocol(rt, seen)))
    return found


def mean_of(total: Share, rows: int, read: Callable[[float], dict[str, float]]) -> Measured:
    """A sum over ``rows`` of one element, read as their mean."""
    return Measured(total, lambda opened: read(float(opened.item()) / 2.0**total.f / rows))


def _accuracy(hits: Share, rows: int) -> Measured:
    return Measured(hits, lambda opened: {"accuracy": (int(opened.item()) >> hits.f) / rows})


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss in nats; nan where no number holds it."""
    return math.exp(loss) if loss < _MOST_NATS else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def confusion_values(counts: Any) -> dict[str, float]:
    """``confusion.1.0``: rows of class 1 that were taken for class 0."""
    return {f"confusion.{i}.{j}": float(n) for i, row in enumerate(counts) for j, n in enumerate(row)}


def _confusion_protocol(rt: Runtime, outputs: Share, targets: Share, wanted: Collection[str]) -> MpcProtocol[Measured]:
    """Counts (classes, answers), and the accuracy of them where there is one output; without ``confusion`` their trace
    alone."""
    whole, rows, single = "confusion" in wanted, int(targets.shape[0]), targets.shape[1] == 1
    if single:
        bit = yield from drelu_arithmetic_protocol(rt, outputs)
        chosen = cat([_less_one(rt, bit), bit], 1)
        targets = cat([_less_one(rt, targets), targets], 1)
    else:
        chosen = yield from argmax_one_hot_protocol(rt, outputs)
    if not whole:
        return _accuracy((yield from dot_protocol(rt, targets, chosen)), rows)

    def read(opened: Tensor) -> dict[str, float]:
        counts = (opened >> targets.f).numpy()
        told = {"accuracy": float(np.trace(counts)) / rows} if single and "accuracy" in wanted else {}
        return told | confusion_values(counts)

    return Measured((yield from matmul_protocol(rt, targets.T, chosen)), read)


def _less_one(rt: Runtime, x: Share) -> Share:
    return sub(public(rt, torch.ones(x.shape), f=x.f), x)


def _auc_protocol(rt: Runtime, outputs: Share, targets: Share) -> MpcProtocol[Measured]:
    """The area under the curve of scores in steps of 1/4 from -8 to 8, ties counted half.

    With P_k the rows of class 1 and T_k all rows at or above edge k, twice the pairs out of order are
    sum (P_k - P_{k+1}) (T_k + T_{k+1}) - P^2; only that sum and P are opened.
    """
    score, y = _scores(outputs, targets)
    n, f = int(y.shape[0]), y.f
    bits = yield from at_least_protocol(rt, score, torch.tensor(EDGES, dtype=torch.float64))
    every = public(rt, torch.ones(1, n), f=0)
    bits = cat([every, bits.reshape(len(EDGES), n), scale_int(every, 0)])
    some = (yield from matmul_protocol(rt, bits.with_f(f), y.with_f(0).reshape(n, 1))).reshape(-1)
    # bits are integers and y counts in units of 2^f, so the product of both, read as it is, is at scale f
    total = bits.sum(-1)
    steps = sub(some.index(slice(0, -1)), some.index(slice(1, None)))
    both = Share(total.first[:-1] + total.first[1:], total.second[:-1] + total.second[1:], 0)
    ranks = yield from dot_protocol(rt, steps, both)

    def read(opened: Tensor) -> dict[str, float]:
        twice, ones = (int(v) / 2.0**f for v in opened)
        zeros = n - ones
        return {"auc": 1.0 - (twice - ones * ones) / (2.0 * ones * zeros) if ones and zeros else math.nan}

    return Measured(cat([ranks, some.index(slice(0, 1))]), read)


def _scores(outputs: Share, targets: Share) -> tuple[Share, Share]:
    """The logit of class 1 against class 0 and whether it is right, of every row: [rows] each."""
    if targets.shape[1] == 1:
        return outputs.reshape(-1), targets.reshape(-1)
    first, second = (slice(None), 0), (slice(None), 1)
    return sub(outputs.index(second), outputs.index(first)), targets.index(second)


def _detection_protocol(
    rt: Runtime, job: PrivateJob, outputs: Share, targets: Share, wanted: Collection[str]
) -> MpcProtocol[Measured]:
    score, y = _scores(outputs, targets)
    taken = yield from drelu_arithmetic_protocol(rt, add_public(rt, score, -_logit(job.threshold)))
    right = yield from dot_protocol(rt, y, taken)  # bits times units of 2^f: exact
    counts = [right]
    counts += [scale_int(_total(taken), 1 << y.f).with_f(y.f)] if "precision" in wanted else []
    counts += [_total(y)] if "recall" in wanted else []

    def read(opened: Tensor) -> dict[str, float]:
        hits, *wholes = (int(v) >> y.f for v in opened)
        names = [name for name in ("precision", "recall") if name in wanted]
        return {name: _ratio(hits, whole) for name, whole in zip(names, wholes, strict=True)}

    return Measured(cat(counts), read)


def _logit(chance: float) -> float:
    return math.log(chance / (1.0 - chance))


def _errors_protocol(
    rt: Runtime, job: PrivateJob, outputs: Share, targets: Share, wanted: Collection[str]
) -> MpcProtocol[Measured]:
    if job.objective == "poisson":
        z = yield from to_exp_scale_protocol(rt, outputs)
        over = yield from relu_only_protocol(rt, add_public(rt, z, -HIGHEST_LOG_RATE))
        power = yield from exp_protocol(rt, add_public(rt, sub(z, over), -HIGHEST_LOG_RATE))
        rate = yield from mul_public_protocol(rt, power, math.exp(HIGHEST_LOG_RATE))
        outputs = yield from rescale_protocol(rt, rate, targets.f)
    off, n, f = sub(outputs, targets), int(targets.shape[0]), targets.f
    sums = [(yield from dot_protocol(rt, off, off))]
    if "r2" in wanted:
        mean = yield from mul_public_protocol(rt, targets.sum(0, keepdim=True), 1.0 / n)
        centred = sub(targets, mean)
        sums.append((yield from dot_protocol(rt, centred, centred)))

    def read(opened: Tensor) -> dict[str, float]:
        squares = [int(v) / 2.0**f for v in opened]
        found = {"rmse": math.sqrt(max(0.0, squares[0]) / n)} if "rmse" in wanted else {}
        return found | ({"r2": 1.0 - squares[0] / squares[1] if squares[1] else math.nan} if "r2" in wanted else {})

    return Measured(cat(sums), read)


def plaintext_metrics(
    job: PrivateJob, outputs: Tensor, targets: Tensor, wanted: Collection[str] | None = None
) -> Mapping[str, float]:
    """The same in clear: outputs (rows, classes) and targets, class numbers (rows,) or numbers (rows, 1)."""
    wanted = job.reveal if wanted is None else wanted
    found: dict[str, float] = {}
    if outputs.shape[1] == 1 and job.objective != "binary":
        answers = outputs.clamp(max=HIGHEST_LOG_RATE).exp() if job.objective == "poisson" else outputs
        squares = float((answers - targets).square().sum())
        spread = float((targets - targets.mean()).square().sum())
        found = {"rmse": math.sqrt(squares / len(targets)), "r2": 1.0 - squares / spread if spread else math.nan}
    else:
        single = outputs.shape[1] == 1
        labels = targets.reshape(-1).long()
        answers = (outputs.reshape(-1) >= 0).long() if single else outputs.argmax(1)
        classes = max(2, outputs.shape[1])
        counts = torch.zeros(classes, classes).index_put_((labels, answers), torch.ones(len(labels)), accumulate=True)
        found = {"accuracy": float((answers == labels).double().mean())} | confusion_values(counts.tolist())
        if classes == 2:
            score = outputs.reshape(-1) if single else outputs[:, 1] - outputs[:, 0]
            found["auc"] = _clear_auc(score, labels)
            taken = score >= _logit(job.threshold)
            hits = int((taken & (labels == 1)).sum())
            found |= {"precision": _ratio(hits, int(taken.sum())), "recall": _ratio(hits, int((labels == 1).sum()))}
        if not single:
            found["perplexity"] = perplexity(float(torch.nn.functional.cross_entropy(outputs, labels)))
    return {k: v for k, v in found.items() if k.partition(".")[0] in wanted and not math.isnan(v)}


def _clear_auc(score: Tensor, labels: Tensor) -> float:
    above, below = score[labels == 1], score[labels == 0]
    if not len(above) or not len(below):
        return math.nan
    order = (above[:, None] > below).double() + 0.5 * (above[:, None] == below).double()
    return float(order.mean())


def _total(x: Share) -> Share:
    return x.reshape(-1).sum(0, keepdim=True)
