"""The one shape of a benchmark's result: rows of a name, a metric, a median and what it is held against."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def row(name: str, metric: str, unit: str, runs: Sequence[float], reference: float | None = None) -> Row:
    """One result; ``value`` is the median of ``runs``, ``ratio`` what it is of ``reference``."""
    value = statistics.median(runs)
    return {
        "name": name,
        "metric": metric,
        "value": value,
        "unit": unit,
        "runs": len(runs),
        "min": min(runs),
        "max": max(runs),
        "reference": reference,
        "ratio": value / reference if reference else None,
    }


def render(rows: Iterable[Row], *, as_json: bool) -> str:
    """All rows as one JSON array, or as a table for a person."""
    if as_json:
        return json.dumps(list(rows))
    lines = [f"{'name':<18}{'metric':<9}{'value':>12} {'unit':<9}{'min':>12}{'max':>12}{'reference':>12}{'ratio':>8}"]
    for r in rows:
        reference = f"{r['reference']:>12.4g}{r['ratio']:>8.3f}" if r["reference"] else ""
        spread = f"{r['min']:>12.4g}{r['max']:>12.4g}"
        lines.append(f"{r['name']:<18}{r['metric']:<9}{r['value']:>12.4g} {r['unit']:<9}{spread}{reference}")
    return "\n".join(lines)
