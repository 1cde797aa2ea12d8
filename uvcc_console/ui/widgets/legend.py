"""The heading of a chart: what every curve says, now or where the crosshair stands."""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.drawing.format import duration, number
from uvcc_console.ui.drawing.paint import Span, clean
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.canvas import Curve
from uvcc_console.ui.widgets.curves import last_common, per_step, read_at
from uvcc_engine.contract.job.topology import PARTIES


def legend_spans(
    view: View, curves: Sequence[Curve], same: bool, axis: str = "step", cursor: float | None = None
) -> list[Span]:
    """The newest value of every curve; where parties are at different steps, of the last step that all have.

    With a ``cursor``, the values there.
    """
    g = view.glyphs
    named = [c for c in curves if c.name]
    mine = [c for c in named if c.name[:1] == "P" and c.name[1:].lstrip("-").isdecimal()]
    others = [c for c in named if c not in mine]
    out: list[Span] = []
    at = last_common(mine) if cursor is None else cursor
    points = [read_at(c, at) for c in mine] if at is not None else []
    step = at  # where the values are read
    if cursor is not None and points and points[0]:
        step = points[0][0]  # not every step is evaluated
    elsewhere = step != cursor if cursor is not None else any(c.xs[-1] != at for c in mine)
    agreed = len(mine) == PARTIES and all(point is not None and point == points[0] for point in points)

    def told(c: Curve, point: tuple[float, float] | None) -> str:
        return number(point[1]) if point else number(c.ys[-1]) if cursor is None else g.dot

    if (same or agreed) and mine:
        for p in range(PARTIES):
            out += [(f" {g.equal} " if p else "", "muted"), (f"P{p}", f"p{p}")]
        out += [("  ", ""), (told(mine[0], points[0] if points else None), "title")]
    else:
        for c, point in zip(mine, points or [None] * len(mine), strict=True):
            out += [(("  " if out else "") + (c.name if c.name != "P-1" else "run") + " ", c.role)]
            out += [(told(c, point), "title")]
    if step is not None and elsewhere:
        where = f"step {step:.0f}" if axis == "step" else axis_words(view.snap, axis, step)
        out.append((f" at {where}", "muted"))
    for c in others:
        out += [(("  " if out else "") + clean(c.name) + " ", c.role)]
        out += [(told(c, None if cursor is None else read_at(c, cursor)), "title")]
    return out


def axis_words(s: Snapshot, axis: str, x: float) -> str:
    """A place on the x axis in words."""
    return duration(x) if axis == "time" else f"{number(x)} {per_step(s)[1]}"
