"""The one row format of every ``bench ... --json``. Standard library only."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``value`` is the median of ``runs``; ``reference`` what it is held against in the same run.

    ``bar``: what is asked of it on this machine, and ``met`` whether the value is that good (None: nothing is asked).
    """

    name: str
    metric: str
    value: float
    unit: str
    runs: int
    min: float
    max: float
    reference: float | None = None
    ratio: float | None = None
    bar: float | None = None
    met: bool | None = None


def row(name: str, metric: str, unit: str, values: Sequence[float], reference: float | None = None) -> Row:
    """Summarise the runs of one figure."""
    middle = statistics.median(values)
    ratio = middle / reference if reference else None
    return Row(name, metric, middle, unit, len(values), min(values), max(values), reference, ratio)


def held(one: Row, bar: float, *, at_least: bool = False) -> Row:
    """The row with its bar: the most that the value may be, or the least."""
    return replace(one, bar=bar, met=one.value >= bar if at_least else one.value <= bar)


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(r) for r in rows], indent=1)


def to_text(rows: Sequence[Row]) -> str:
    """Aligned columns: name, metric, median, range, the ratio to the reference, and the bar."""
    lines = []
    for r in rows:
        against = f"   {r.ratio:.2f} of {r.reference:g}" if r.ratio is not None else ""
        if r.bar is not None:
            against += f"   bar {r.bar:,.3f}: {'met' if r.met else 'MISSED'}"
        spread = f"({r.min:,.3f} to {r.max:,.3f}, {r.runs} runs)"
        lines.append(f"{r.name:<22} {r.metric:<9} {r.value:>12,.3f} {r.unit:<8} {spread}{against}")
    return "\n".join(lines)
