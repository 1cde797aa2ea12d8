"""Figures of kept rows (``docs/benchmarks/*.json``) in a page's text.

``{{FILE ROW METRIC}}`` is a row's value with its unit; two with `` / `` between them, how many times as much.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parents[1]
_FIGURE: Final = re.compile(r"\{\{([^}]+)\}\}")


def number(value: float) -> str:
    """Three digits that count, or a whole number with commas."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def kept(told: str) -> dict[str, Any]:
    """The row that ``FILE ROW METRIC`` names. Raises LookupError."""
    file, name, metric = told.split()
    rows = json.loads((DOCS / "benchmarks" / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if row["name"] == name and str(row["metric"]).replace(" ", "_") == metric:
            found: dict[str, Any] = row
            return found
    raise LookupError(f"docs/benchmarks/{file}.json has no row {name} of {metric}")


def shown(row: dict[str, Any]) -> str:
    """A value with its unit: bytes as megabytes, seconds below one as milliseconds, shares as percent."""
    value, unit = float(row["value"]), str(row["unit"])
    if unit == "B":
        return f"{number(value / 1e6)} MB"
    if unit == "s" and value < 1:
        return f"{number(1000 * value)} ms"
    if row["metric"] == "share":
        return f"{number(100 * value)} %"
    if row["metric"] == "ratio":
        return f"{number(value)} times"
    return f"{number(value)} {unit}"


def _figure(found: re.Match[str]) -> str:
    first, _, other = found[1].partition(" / ")
    if other:
        return f"{number(float(kept(first)['value']) / float(kept(other)['value']))} times"
    return shown(kept(first))


def filled(text: str) -> str:
    """The text with its figures. Raises LookupError for a row that is not there."""
    return _FIGURE.sub(_figure, text)
