"""The saved rows of benchmarks (``docs/benchmarks/*.json``) as tables of the page that tells how fast it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parents[1]
BEGIN: Final = "<!-- rows: made by python -m docs.make from docs/benchmarks; do not edit -->"
END: Final = "<!-- /rows -->"
_MACHINE: Final = ("machine_", "ring_gemm_1", "ring_gemm_5")  # what bounds the other rows; a GPU's is shown
_OF_GROWTH: Final = ("cost", "each")  # which the page of growth shows side by side


def number(value: float) -> str:
    """Three digits that count, or a whole number with commas."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield f"`{row['name']}`"
    yield str(row["metric"]).replace("_", " ")
    spread = "" if row["runs"] == 1 else f" ({number(row['min'])} to {number(row['max'])})"
    yield f"{number(row['value'])} {row['unit']}{spread}"
    yield "" if row["reference"] is None else number(row["reference"])
    bar = row["bar"]
    yield "" if bar is None else f"{number(bar)}{'' if row['met'] else ', missed'}"


def tables() -> str:
    """Every saved file as a section."""
    lines: list[str] = []
    for path in sorted((DOCS / "benchmarks").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        load = kept["load"]
        busy = f"load {load['before']} before and {load['after']} after" if load else "its load was not read"
        lines += [
            f"### {path.stem}",
            "",
            f"`{kept['command']}`",
            "",
            f"{kept['processor']}, commit {kept['commit']}, {busy}.",
            "",
            "| row | metric | median (range) | held against | bar here |",
            "|---|---|---|---|---|",
        ]
        rows = [row for row in kept["rows"] if not row["name"].startswith(_MACHINE)]
        rows = [row for row in rows if row["metric"] not in _OF_GROWTH]
        lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """The page as it lies there, with its rows made anew."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"
