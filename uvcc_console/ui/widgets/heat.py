"""Every worker in one cell: a strip for each party, as high as its step takes long, in the colour of its health."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from uvcc_console.ui.drawing.paint import Line, Span, fit
from uvcc_console.ui.drawing.spark import bar
from uvcc_console.ui.judging.view import FleetRow, View, party_role

FROM = 24  # fewer are seen at a glance in the table


def slowness(view: View, row: FleetRow) -> float:
    """Seconds a step of this worker took lately; -1 where none is known."""
    line = view.snap.series.get(row.coord, {}).get("step_s")
    recent = line.recent(5) if line is not None else ()
    return sum(recent) / len(recent) if recent else -1.0


def floor_of(times: Sequence[float]) -> float:
    """Where a scale of step times begins: at half of the usual one, so that a third more is seen, and noise is not."""
    return statistics.median(times) / 2 if times else 0.0


def heat_lines(view: View, rows: Sequence[FleetRow], width: int, cursor: str = "") -> list[Line]:
    """A strip per party (per run where it has no parties); nothing for a small fleet."""
    workers = sorted((r for r in rows if r.coord), key=lambda r: (r.party, r.replica, r.stage, r.tensor))
    if len(workers) < FROM:
        return []
    times = {r.coord: slowness(view, r) for r in workers}
    most = max(times.values())
    low = floor_of([t for t in times.values() if t >= 0])
    g, lines, apart = view.glyphs, list[Line](), view.snap.proves
    for party in sorted({r.party for r in workers}) if apart else (-1,):
        mine = [r for r in workers if r.party == party or not apart]
        room = max(8, width - 5)
        for at in range(0, len(mine), room):
            line: list[Span] = [(fit(f"P{party}" if at == 0 and party >= 0 else "", 4), f"{party_role(party)} bold")]
            for r in mine[at : at + room]:
                known = times[r.coord] >= 0 and r.health.rank > 1
                sign = bar(times[r.coord], low, most or 1.0, g) if known else r.health.glyph
                line.append((sign, f"{r.health.role} reverse" if r.coord == cursor else r.health.role))
            lines.append(line)
    slowest = max(workers, key=lambda r: times[r.coord])
    if most > 0:
        said = f"    height: seconds a step from {low:.2f} s, slowest {slowest.coord} {most:.2f} s"
        lines.append([(said[:width], "faint")])
    return lines
