"""Two or more settings measured in turn, so that what the machine does meanwhile meets all of them alike."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_RESAMPLES: Final = 2000


def in_turn(measures: Sequence[Callable[[], float]], runs: int) -> list[list[float]]:
    """``runs`` figures of each measure. Every round calls all of them, every other round in reverse order."""
    found: list[list[float]] = [[] for _ in measures]
    order = list(range(len(measures)))
    for _ in range(runs):
        for i in order:
            found[i].append(measures[i]())
        order.reverse()
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of a[i] / b[i] over the rounds, with the interval that holds 95 % of its bootstrap."""

    value: float
    low: float
    high: float


def ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """Rounds are pairs: what slows a round slows both of its figures, and cancels."""
    pairs = [x / y for x, y in zip(a, b, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    cut = round(0.025 * _RESAMPLES)
    return Ratio(statistics.median(pairs), medians[cut], medians[-1 - cut])
