"""What the owner shares of the training rows' targets: smoothed and weighted in clear, so that nothing is left to do.

The targets of cross-entropy are w_c ((1 - e) y_c + e / K) of K classes, times the row's own weight; their sum over the
classes is what the row counts, so no other tensor says so. Objectives of a single output need the weights beside.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.loss_weights import MOST_WEIGHT
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, Floats, Labels, target_rows

TRAIN_WEIGHTS: Final = "train_w"
"""The tensor [rows, 1] of what every training row counts, where its target does not say so."""
_LEAST_STEPS: Final = 8
"""A smoothed target is at least so many steps of the fixed point, so that rounding is a small part of it."""


def carries_weights(job: PrivateJob) -> bool:
    """Whether what rows count is a tensor of its own."""
    return job.weighted and job.objective != "cross-entropy"


def training_targets(job: PrivateJob, labels: Labels, outputs: int, own: Floats | None) -> dict[str, Floats]:
    """``train_y`` [rows, targets], and ``train_w`` [rows, 1] if :func:`carries_weights`; nothing of no outputs.

    ``own``: the weight of every row [rows], where ``job.row_weights``. Raises ConfigError for weights that are none.
    """
    check_own(job, own is not None)
    rows = np.ones(len(labels)) if own is None else own
    y = target_rows(labels, outputs)
    if not outputs:
        return {}
    if job.objective == "cross-entropy":
        share = job.label_smoothing / outputs
        if 0.0 < share < _LEAST_STEPS * 2.0**-job.frac_bits:
            what = f"job.label_smoothing {job.label_smoothing:g} over {outputs} classes is {share:.2g} for each"
            raise ConfigError(what, f"give more of it, or more than {job.frac_bits} frac_bits")
        lines = y.reshape(len(y), -1, outputs) * (1.0 - job.label_smoothing) + share
        if job.class_weights:
            lines = lines * np.array(job.class_weights)
        _check(lines.sum(2).max(1, initial=0.0) * rows)
        return {"train_y": (lines * rows[:, None, None]).reshape(y.shape)}
    found = {"train_y": y}
    if job.label_smoothing:
        found["train_y"] = y * (1.0 - job.label_smoothing) + job.label_smoothing / 2.0
    if carries_weights(job):
        whole = rows * np.array(job.class_weights)[labels.astype(np.int64)] if job.class_weights else rows
        _check(whole)
        found[TRAIN_WEIGHTS] = whole.reshape(-1, 1)
    return found


def check_own(job: PrivateJob, weighted: bool) -> None:
    """Refuse (ConfigError) rows with weights for a job that says nothing of them, and the other way round."""
    if job.row_weights != weighted:
        what = "though the rows have weights" if weighted else "and the rows have none"
        raise ConfigError(f"job.row_weights is {str(job.row_weights).lower()}, {what}", "a schema's weight names them")


def _check(weights: Floats) -> None:
    bad = ~((weights >= 0.0) & (weights <= MOST_WEIGHT))
    if bad.any():
        raise ConfigError(
            f"a training row counts {weights[bad][0]:g}, with its class's weight",
            f"together they are 0 to {MOST_WEIGHT:g}: divide all by the same number",
        )


def part_targets(job: PrivateJob, part: str, labels: Labels, outputs: int, own: Floats | None) -> dict[str, Floats]:
    """What is shared of one part's targets, by name, each [rows, numbers]: only those that are trained on are smoothed
    and weighted. ``labels`` [rows] or [rows, positions], ``own`` [rows].
    """
    if part == "train":
        return training_targets(job, labels, outputs, own)
    return {f"{part}_y": target_rows(labels, outputs)} if outputs else {}


def own_weights(data: Dataset, part: str) -> Floats | None:
    """The weights of one part's rows, where they have some: of those that are trained on."""
    return data.weights if part == "train" else None
