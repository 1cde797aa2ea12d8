"""The heading of a chart: what every curve says, now or where the crosshair stands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.drawing.format import duration, number
from uvcc_console.ui.drawing.paint import Span, clean, width_of
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.canvas import Curve
from uvcc_console.ui.widgets.curves import last_common, per_step, read_at
from uvcc_engine.contract.job.topology import PARTIES


def legend_spans(
    view: View,
    curves: Sequence[Curve],
    same: bool,
    axis: str = "step",
    cursor: float | None = None,
    room: int = sys.maxsize,
) -> list[Span]:
    """The newest value of every curve; where parties are at different steps, of the last step that all have.

    With a ``cursor``, the values there. Where that is wider than ``room``, the step is written shortly, then the
    parties are not named, and then the step is left out: the values come first.
    """
    named = [c for c in curves if c.name]
    mine = [c for c in named if c.name[:1] == "P" and c.name[1:].lstrip("-").isdecimal()]
    at = last_common(mine) if cursor is None else cursor
    points = [read_at(c, at) if at is not None else None for c in mine]
    step = at  # where the values are read
    if cursor is not None and points and points[0]:
        step = points[0][0]  # not every step is evaluated
    elsewhere = step != cursor if cursor is not None else any(c.xs[-1] != at for c in mine)
    wheres = [""]
    if step is not None and elsewhere:
        where = f"step {step:.0f}" if axis == "step" else axis_words(view.snap, axis, step)
        wheres = [f" at {where}", f" @ {where.removeprefix('step ')}", ""]

    def told(c: Curve, point: tuple[float, float] | None) -> float | None:
        return point[1] if point else c.ys[-1] if cursor is None else None

    each = [(c, told(c, point)) for c, point in zip(mine, points, strict=True)]
    agreed = len(mine) == PARTIES and all(point is not None and point == points[0] for point in points)
    whole, short = _values(view, each, same or agreed), _range(view, each)
    others: list[Span] = []
    for c in named:
        if c not in mine:
            value = told(c, None if cursor is None else read_at(c, cursor))
            gap = "  " if mine or others else ""
            others += [(f"{gap}{clean(c.name)} ", c.role), (_said(view, value), "title")]
    tries = [(whole, wheres[0]), (whole, wheres[len(wheres) // 2]), *((short, where) for where in wheres[1:] or wheres)]
    made = [[*values, *([(where, "muted")] if where else []), *others] for values, where in tries]
    return next((line for line in made if width_of(line) <= room), made[-1])


def _said(view: View, value: float | None) -> str:
    return view.glyphs.dot if value is None else number(value)


def _values(view: View, each: Sequence[tuple[Curve, float | None]], same: bool) -> list[Span]:
    """The value of each party by its name; of parties that agree, one."""
    out: list[Span] = []
    if same and each:
        for p in range(PARTIES):
            out += [(f" {view.glyphs.equal} " if p else "", "muted"), (f"P{p}", f"p{p}")]
        return [*out, ("  ", ""), (_said(view, each[0][1]), "title")]
    for c, value in each:
        name = c.name if c.name != "P-1" else "run"
        out += [(("  " if out else "") + name + " ", c.role), (_said(view, value), "title")]
    return out


def _range(view: View, each: Sequence[tuple[Curve, float | None]]) -> list[Span]:
    """The least and the greatest of the values, or the one that all are, without whose they are."""
    if not each:
        return []
    known = [value for _, value in each if value is not None]
    ends = [_said(view, end(known)) for end in (min, max)] if known else [_said(view, None)]
    return [(" to ".join(dict.fromkeys(ends)), "title")]


def axis_words(s: Snapshot, axis: str, x: float) -> str:
    """A place on the x axis in words."""
    return duration(x) if axis == "time" else f"{number(x)} {per_step(s)[1]}"
