"""The page of decisions: its text (``decisions.txt``) with figures from the kept rows of benchmarks.

``{{FILE ROW METRIC}}`` is a row's value with its unit; two with `` / `` between them, how many times as much.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from docs.make.figures import DOCS, number
from docs.make.words import HEAD

_FIGURE: Final = re.compile(r"\{\{([^}]+)\}\}")


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
    return f"{number(value)} {unit}"


def _figure(found: re.Match[str]) -> str:
    first, _, other = found[1].partition(" / ")
    if other:
        return f"{number(float(kept(first)['value']) / float(kept(other)['value']))} times"
    return shown(kept(first))


def page() -> str:
    """The page."""
    text = (Path(__file__).parent / "decisions.txt").read_text(encoding="utf-8")
    title, _, rest = _FIGURE.sub(_figure, text).partition("\n")
    return f"{title}\n\n{HEAD}\n{rest}"
