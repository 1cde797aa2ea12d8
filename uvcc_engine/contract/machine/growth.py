"""How fast a cost grows with its cause, from a few measured points. Standard library only.

A cost is often a constant and a part that grows, and the constant hides the power of the other while the cause is
small. So the power is read from the upper half of the points, where the part that grows is largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from uvcc_engine.contract.machine.benchrows import Row, held, row

TOLERANCE: Final = 0.1
"""What noise may add to a power that is allowed."""
Costs = dict[str, float]


@dataclass(frozen=True, slots=True)
class Growth:
    """cost ~ cause ** ``exponent`` over the upper half of the points, by least squares of the logarithms.

    ``low`` and ``high``: the least and the largest power between two neighbouring points, over all of them.
    """

    exponent: float
    low: float
    high: float


def fitted(points: Sequence[tuple[float, float]]) -> Growth:
    """The growth of the second numbers with the first. Raises ValueError for fewer than three points, for causes that
    do not increase, or for a cost that is not positive."""
    if len(points) < 3 or any(b <= a for (a, _), (b, _) in pairwise(points)):
        raise ValueError("growth takes at least three points of increasing causes")
    if min(min(point) for point in points) <= 0:
        raise ValueError("growth takes positive causes and costs")
    logs = [(math.log(cause), math.log(cost)) for cause, cost in points]
    steps = [_slope(two) for two in pairwise(logs)]
    return Growth(_slope(logs[(len(logs) - 1) // 2 :]), min(steps), max(steps))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares through at least two points."""
    mx = sum(x for x, _ in points) / len(points)
    my = sum(y for _, y in points) / len(points)
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


def growth_rows(
    axis: str, found: Sequence[tuple[float, Costs]], allowed: Mapping[str, float], units: Mapping[str, str]
) -> list[Row]:
    """Of every cost that has an allowed power: the power with which it grows, held against that one; what one more of
    the cause adds, between the two largest points; then its values.

    ``found``: cause and costs of each point, in rising order. Raises ValueError as :func:`fitted`.
    """
    rows = []
    for cost, power in allowed.items():
        one = fitted([(cause, costs[cost]) for cause, costs in found])
        made = Row(f"{axis}_{cost}", "power", one.exponent, axis, len(found), one.low, one.high, power)
        rows.append(held(made, power + TOLERANCE))
        (before, less), (last, most) = ((cause, costs[cost]) for cause, costs in found[-2:])
        rows.append(row(f"{axis}_{cost}", "each", units[cost], [(most - less) / (last - before)]))
        rows += [row(f"{axis}_{cost}@{cause:g}", "cost", units[cost], [costs[cost]]) for cause, costs in found]
    return rows
