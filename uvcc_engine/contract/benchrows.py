"""The one row format of every ``bench ... --json``. Standard library only."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``value`` is the median of ``runs``; ``reference`` what it is held against in the same run."""

    name: str
    metric: str
    value: float
    unit: str
    runs: int
    min: float
    max: float
    reference: float | None = None
    ratio: float | None = None


def row(name: str, metric: str, unit: str, values: Sequence[float], reference: float | None = None) -> Row:
    """Summarise the runs of one figure."""
    middle = statistics.median(values)
    ratio = middle / reference if reference else None
    return Row(name, metric, middle, unit, len(values), min(values), max(values), reference, ratio)


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(r) for r in rows], indent=1)


def to_text(rows: Sequence[Row]) -> str:
    """Aligned columns: name, metric, median, range, and the ratio to the reference."""
    lines = []
    for r in rows:
        against = f"   {r.ratio:.2f} of {r.reference:g}" if r.ratio is not None else ""
        spread = f"({r.min:,.3f} to {r.max:,.3f}, {r.runs} runs)"
        lines.append(f"{r.name:<22} {r.metric:<9} {r.value:>12,.3f} {r.unit:<8} {spread}{against}")
    return "\n".join(lines)
