"""The hand-over's table of throughput: what was expected of each worker, and what its own table shows.

Expected is what the smoke measured on that very worker before the full run, and what the plan's gate asks of it. The
first tenth of a table is left out as warm-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from uvcc_console.report.criteria import WARM_UP, training_tables
from uvcc_console.report.package import Package

HEAD: Final = (
    "| table | unit | in the smoke | asked by the plan | measured | of the smoke's |\n|---|---|---|---|---|---|"
)
_NONE: Final = "-"


@dataclass(frozen=True, slots=True)
class Throughput:
    """One worker's rate: the median behind the warm-up. ``smoke`` and ``floor`` are 0.0 where there is none."""

    table: str
    unit: str
    measured: float
    smoke: float
    floor: float

    def line(self) -> str:
        """A row under HEAD."""
        share = f"{self.measured / self.smoke:.0%}" if self.smoke else _NONE
        smoke, floor = (f"{n:,.1f}" if n else _NONE for n in (self.smoke, self.floor))
        return f"| {self.table} | {self.unit} | {smoke} | {floor} | {self.measured:,.1f} | {share} |"


def throughput(package: Package, phase: str) -> Iterator[Throughput]:
    """A row for every unchanged table of ``phase``. Raises UnreadableError for one that its pod sent damaged."""
    phases = package.record.phases
    before = phases[phases.index(phase) - 1] if phase in phases[1:] else ""
    rates = {_of(name): rate for name, rows in training_tables(package, before)[0].items() if (rate := rate_of(rows))}
    gates = package.record.snapshot.profile.get("gates")
    asked = gates.get("toks_per_s") if isinstance(gates, Mapping) else 0.0
    for name, rows in training_tables(package, phase)[0].items():
        if (found := rate_of(rows)) is None:
            continue
        unit, measured = found
        known = rates.get(_of(name))
        smoke = known[1] if known and known[0] == unit else 0.0
        floor = float(asked) if unit == "tokens/s" and isinstance(asked, int | float) else 0.0
        yield Throughput(name, unit, measured, smoke, floor)


def rate_of(rows: Sequence[Mapping[str, float]]) -> tuple[str, float] | None:
    """Unit and median of a table's rate behind the warm-up; None for a table without rows."""
    column, unit = (
        ("samples_per_s", "samples/s") if rows and rows[0].get("samples_per_s") else ("toks_per_s", "tokens/s")
    )
    rates = [row.get(column, 0.0) for row in rows[int(len(rows) * WARM_UP) :]]
    return (unit, statistics.median(rates)) if rates else None


def _of(table: str) -> str:
    """A table's place within its phase: the same worker's in another phase has the same."""
    return str(PurePosixPath(*PurePosixPath(table).parts[1:]))
