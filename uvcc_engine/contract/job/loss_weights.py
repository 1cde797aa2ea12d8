"""What a job says of how much rows count in its loss, and of how sure its targets are. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from uvcc_engine.contract.errors import ConfigError

MOST_WEIGHT: Final = 16.0
"""The most that a row may count, its class's weight times its own: gradients keep room in the fixed point."""
OF_CLASSES: Final = ("cross-entropy", "binary")
"""Objectives whose targets are classes, one of which every row has."""


def check_weighting(objective: str, task: str, classes: Sequence[float], smoothing: float, rows: bool) -> None:
    """Refuse (ConfigError) weights, or a smoothing, that the objective or the task has no use for."""
    asked = [
        name
        for name, given in (("class_weights", classes), ("label_smoothing", smoothing), ("row_weights", rows))
        if given
    ]
    if asked and task != "train":
        raise ConfigError(f"job.{asked[0]} in task {task!r}", "only a training has a loss")
    if asked and asked[0] != "row_weights" and objective not in OF_CLASSES:
        raise ConfigError(f"job.{asked[0]} with objective {objective!r}", f"it is for {' and '.join(OF_CLASSES)}")
    for weight in classes:
        if not 0.0 < weight <= MOST_WEIGHT:
            raise ConfigError(f"job.class_weights names {weight:g}", f"give numbers above 0, up to {MOST_WEIGHT:g}")


def weight_bits(classes: Sequence[float], rows: bool) -> int:
    """By how many bits weights may make a gradient longer."""
    most = MOST_WEIGHT if rows else max((1.0, *classes))
    return math.ceil(math.log2(most))
