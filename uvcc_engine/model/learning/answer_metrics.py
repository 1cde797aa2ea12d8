"""What is revealed of a model's answers to the test rows: counts and sums over all rows, never anything of one row.

``accuracy``: opens the count of right rows. ``confusion``: opens the count of every (class, answer). ``auc``: opens
how many rows are of class 1 and one sum over ranks, made of secret counts of scores above public edges.
``precision``: opens how many rows the threshold takes for class 1, and how many of these rightly. ``recall``: the
latter, and how many are of class 1. ``perplexity``: opens the mean loss. ``rmse``: opens the sum of squared errors.
``r2``: that sum and the one of squared distances from the mean. ``overflow``: opens how many numbers between the
layers are too large for the ring's products, over all rows (``overflows``). A metric that comes out as no number
(``UNDEFINED``) is left out of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import HIGHEST_LOG_RATE, METRICS, PrivateJob
from uvcc_engine.model import losses
from uvcc_engine.model.learning.overflows import overflow_protocol
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.comparisons.bits import at_least_protocol
from uvcc_engine.mpc.comparisons.maximum import argmax_one_hot_protocol
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol, relu_only_protocol
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.functions.exponential import exp_protocol
from uvcc_engine.mpc.products.arithmetic import (
    add_public,
    mul_public_protocol,
    product_with_protocol,
    public,
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
    seen: Sequence[Share] = (),
) -> MpcProtocol[dict[str, float]]:
    """The metrics that are ``wanted``, by name, or all that the job reveals.

    ``confusion`` gives one number for each (class, answer). Outputs and targets: [rows, classes]; ``seen``: what came
    out of each layer on the way, for ``overflow``.
    """
    found: dict[str, float] = {}
    wanted = [name for name in METRICS if name in job.reveal] if wanted is None else wanted
    if "accuracy" in wanted and model.classes > 1:
        found["accuracy"] = (yield from losses.correct_protocol(rt, outputs, targets)) / targets.shape[0]
    if "confusion" in wanted or ("accuracy" in wanted and model.classes == 1):
        counts = yield from _confusion_protocol(rt, outputs, targets, whole="confusion" in wanted)
        if "accuracy" in wanted:
            found["accuracy"] = float(np.trace(counts)) / targets.shape[0]
        if "confusion" in wanted:
            found |= confusion_values(counts)
    if "auc" in wanted:
        found["auc"] = yield from _auc_protocol(rt, outputs, targets)
    if "precision" in wanted or "recall" in wanted:
        found |= yield from _detection_protocol(rt, job, outputs, targets, wanted)
    if "perplexity" in wanted:
        powers = yield from losses.powers_protocol(rt, outputs)
        found["perplexity"] = perplexity((yield from losses.mean_loss_protocol(rt, powers, targets)))
    if "rmse" in wanted or "r2" in wanted:
        found |= yield from _errors_protocol(rt, job, outputs, targets, wanted)
    if "overflow" in wanted:
        found["overflow"] = float((yield from overflow_protocol(rt, seen)))
    return _defined(found)


def _defined(found: Mapping[str, float]) -> dict[str, float]:
    """Without those that came out as no number."""
    return {name: value for name, value in found.items() if not math.isnan(value)}


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss in nats; nan where no number holds it."""
    return math.exp(loss) if loss < _MOST_NATS else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def confusion_values(counts: Any) -> dict[str, float]:
    """``confusion.1.0``: rows of class 1 that were taken for class 0."""
    return {f"confusion.{i}.{j}": float(n) for i, row in enumerate(counts) for j, n in enumerate(row)}


def _confusion_protocol(rt: Runtime, outputs: Share, targets: Share, *, whole: bool) -> MpcProtocol[Any]:
    """Counts (classes, answers); without ``whole`` only their trace is opened, in the first place."""
    if targets.shape[1] == 1:
        bit = yield from drelu_arithmetic_protocol(rt, outputs)
        chosen = cat([_less_one(rt, bit), bit], 1)
        targets = cat([_less_one(rt, targets), targets], 1)
    else:
        chosen = yield from argmax_one_hot_protocol(rt, outputs)
    local = _table if whole else _dot
    counts = yield from product_with_protocol(rt, targets, chosen, local)
    opened = yield from open_ring_protocol(rt, counts)
    return (opened >> targets.f).cpu().numpy() if whole else [[int(opened.item()) >> targets.f]]


def _less_one(rt: Runtime, x: Share) -> Share:
    return sub(public(rt, torch.ones(x.shape), f=x.f), x)


def _auc_protocol(rt: Runtime, outputs: Share, targets: Share) -> MpcProtocol[float]:
    """The area under the curve of scores in steps of 1/4 from -8 to 8, ties counted half.

    With P_k the rows of class 1 and T_k all rows at or above edge k, twice the pairs out of order are
    sum (P_k - P_{k+1}) (T_k + T_{k+1}) - P^2; only that sum and P are opened.
    """
    score, y = _scores(outputs, targets)
    n, f = int(y.shape[0]), y.f
    bits = yield from at_least_protocol(rt, score, torch.tensor(EDGES, dtype=torch.float64))
    every = public(rt, torch.ones(1, n), f=0)
    bits = cat([every, bits.reshape(len(EDGES), n), scale_int(every, 0)])
    some = yield from product_with_protocol(rt, bits.with_f(f), y.with_f(0), lambda b, t: (b * t).sum(-1))
    # bits are integers and y counts in units of 2^f, so the product of both, read as it is, is at scale f
    total = bits.sum(-1)
    steps = sub(some.index(slice(0, -1)), some.index(slice(1, None)))
    both = Share(total.first[:-1] + total.first[1:], total.second[:-1] + total.second[1:], 0)
    ranks = yield from product_with_protocol(rt, steps, both, _dot)
    opened = yield from open_ring_protocol(rt, cat([ranks, some.index(slice(0, 1))]))
    twice, ones = (int(v) / 2.0**f for v in opened)
    zeros = n - ones
    return 1.0 - (twice - ones * ones) / (2.0 * ones * zeros) if ones and zeros else math.nan


def _scores(outputs: Share, targets: Share) -> tuple[Share, Share]:
    """The logit of class 1 against class 0 and whether it is right, of every row: [rows] each."""
    if targets.shape[1] == 1:
        return outputs.reshape(-1), targets.reshape(-1)
    first, second = (slice(None), 0), (slice(None), 1)
    return sub(outputs.index(second), outputs.index(first)), targets.index(second)


def _detection_protocol(
    rt: Runtime, job: PrivateJob, outputs: Share, targets: Share, wanted: Collection[str]
) -> MpcProtocol[dict[str, float]]:
    score, y = _scores(outputs, targets)
    taken = yield from drelu_arithmetic_protocol(rt, add_public(rt, score, -_logit(job.threshold)))
    right = yield from product_with_protocol(rt, y, taken, _dot)  # bits times units of 2^f: exact
    counts = [right]
    counts += [scale_int(_total(taken), 1 << y.f).with_f(y.f)] if "precision" in wanted else []
    counts += [_total(y)] if "recall" in wanted else []
    opened = yield from open_ring_protocol(rt, cat(counts))
    hits, *wholes = (int(v) >> y.f for v in opened)
    names = [name for name in ("precision", "recall") if name in wanted]
    return {name: _ratio(hits, whole) for name, whole in zip(names, wholes, strict=True)}


def _logit(chance: float) -> float:
    return math.log(chance / (1.0 - chance))


def _errors_protocol(
    rt: Runtime, job: PrivateJob, outputs: Share, targets: Share, wanted: Collection[str]
) -> MpcProtocol[dict[str, float]]:
    if job.objective == "poisson":
        over = yield from relu_only_protocol(rt, add_public(rt, outputs, -HIGHEST_LOG_RATE))
        power = yield from exp_protocol(rt, add_public(rt, sub(outputs, over), -HIGHEST_LOG_RATE))
        outputs = yield from mul_public_protocol(rt, power, math.exp(HIGHEST_LOG_RATE))
    off, n = sub(outputs, targets), int(targets.shape[0])
    sums = [(yield from product_with_protocol(rt, off, off, _dot, scale=1.0))]
    if "r2" in wanted:
        mean = yield from mul_public_protocol(rt, targets.sum(0, keepdim=True), 1.0 / n)
        centred = sub(targets, mean)
        sums.append((yield from product_with_protocol(rt, centred, centred, _dot)))
    opened = yield from open_ring_protocol(rt, cat(sums))
    squares = [int(v) / 2.0**targets.f for v in opened]
    found = {"rmse": math.sqrt(max(0.0, squares[0]) / n)} if "rmse" in wanted else {}
    return found | ({"r2": 1.0 - squares[0] / squares[1] if squares[1] else math.nan} if "r2" in wanted else {})


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
    return _defined({k: v for k, v in found.items() if k.partition(".")[0] in wanted})


def _clear_auc(score: Tensor, labels: Tensor) -> float:
    above, below = score[labels == 1], score[labels == 0]
    if not len(above) or not len(below):
        return math.nan
    order = (above[:, None] > below).double() + 0.5 * (above[:, None] == below).double()
    return float(order.mean())


def _total(x: Share) -> Share:
    return x.reshape(-1).sum(0, keepdim=True)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum().reshape(1)


def _table(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(2) * y.unsqueeze(1)).sum(0)
