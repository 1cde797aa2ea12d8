"""Charts: loss per party beside accuracy and throughput; a grid of everything measured when given the whole screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from textual import events
from textual.binding import BindingType
from textual.message import Message

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.drawing.format import number
from uvcc_console.ui.drawing.paint import Line, Span, clean, wrap
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.chart_grid import PLAIN, cells_of, chart, grid_lines, matching, overview_lines, still_lines
from uvcc_console.ui.widgets.canvas import Frame, layout_of
from uvcc_console.ui.widgets.curves import (
    AXES,
    FROM_ZERO,
    SMOOTH,
    TITLES,
    ChartLook,
    axis_of,
    curves_of,
    names,
    per_step,
    read_at,
)
from uvcc_console.ui.widgets.legend import axis_words
from uvcc_console.ui.widgets.panel import Hints, Panel

ACROSS: Final = 200
"""So many moves of the crosshair lead from one end of the window to the other."""
MANY: Final = 12
"""Of more charts than this the values at the crosshair stand in their headings, and below the charts of fewer."""


class ChartsPanel(Panel):
    """Charts with a log scale, a zoom window and a crosshair shared by all of them."""

    title = "Charts"
    number = "2"
    help = (
        "Loss per party, test accuracy and throughput, as the workers report them. One line: all parties say the same; "
        "with replicas the line is their mean and the raster their range. Values are those of the last step that all "
        "parties have.\n"
        "j k pick a chart, enter shows it alone · / only charts of such a name, on this page · l log scale · e "
        "smoother, measured values stay behind · a axis: step, time, tokens · z Z zoom in and out around the "
        "crosshair, else to the newest part · shift and arrows pan · left right move the crosshair, finer when zoomed "
        "in, home end to the first and last step, a click to where it is · backspace the whole run · :compare RUN lays "
        "another run over it, c the newest other one, the next, none"
    )
    hints: ClassVar[Hints] = (
        ("j", "pick"),
        ("enter", "alone"),
        ("l", "log"),
        ("e", "smooth"),
        ("a", "axis"),
        ("z", "zoom"),
        ("c", "compare"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("j,down", "pick(1)", "next chart"),
        ("k,up", "pick(-1)", "previous chart"),
        ("enter", "alone", "alone"),
        ("l", "log", "log scale"),
        ("e", "smooth", "smooth"),
        ("a", "axis", "axis"),
        ("plus,equals_sign,z", "zoom(0.5)", "zoom in"),
        ("underscore,Z", "zoom(2)", "zoom out"),
        ("left", "cross(-1)", "crosshair"),
        ("right", "cross(1)", "crosshair"),
        ("home", "cross(-1000000000)", "first step"),
        ("end", "cross(1000000000)", "last step"),
        ("shift+left", "pan(-0.25)", "pan"),
        ("shift+right", "pan(0.25)", "pan"),
        ("backspace", "reset", "whole run"),
        ("c", "other", "another run"),
    ]

    class OtherWanted(Message):
        """The operator wants the next other run laid over the charts."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.window = 1.0
        self.centre: float | None = None
        self.log_scale = False
        self.cursor: float | None = None
        self.look = ChartLook()
        self.picked = ""
        self.alone = False
        self._drawn = (0, 0, 0)  # width, height of the charts, lines of the grid above what is shown

    def _known(self) -> list[str]:
        """The figures that are drawn here: on the page those that the filter finds."""
        return matching(self.view) if self.has_class("-paged") else names(self.view)

    def _alone(self) -> bool:
        """Whether one chart has the whole panel."""
        return self.alone and self.picked in self._known()

    def _extent(self) -> tuple[float, float]:
        """First and last step measured."""
        lines = [s for by in self.view.snap.series.values() for s in by.values() if len(s)]
        first = min((next(iter(s))[0] for s in lines), default=0.0)
        last = max((s.last[0] for s in lines if s.last), default=0.0)
        return first, last

    def frame(self) -> Frame:
        """The window as the operator set it, in steps; without a centre it stays with the newest steps."""
        if self.window >= 1:
            return Frame(log=self.log_scale, cursor=self.cursor)
        first, last = self._extent()
        wide = (last - first) * self.window
        x1 = last if self.centre is None else min(last, max(first + wide, self.centre + wide / 2))
        return Frame(x0=x1 - wide, x1=x1, log=self.log_scale, cursor=self.cursor)

    def _on_axis(self, frame: Frame) -> Frame:
        """The window in the unit of the x axis."""
        to = axis_of(self.view.snap, self.look.axis)
        if self.look.axis == "step" or to is None:
            return frame
        x0, x1, cursor = (None if x is None else to(x) for x in (frame.x0, frame.x1, frame.cursor))
        return replace(frame, x0=x0, x1=x1, cursor=cursor)

    def inputs(self, view: View) -> tuple[object, ...]:
        stage = view.snap.stage
        moving = view.snap.series, stage.status if stage else "", stage.name if stage else "", view.glyphs
        before = (view.snap.pods, view.snap.workers, int(view.now)) if not view.snap.series else ()
        return (*moving, view.filter.source, *before)

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        reading = self.reading(view, width)[: max(1, height // 2)]
        room = max(1, height - len(reading))
        frame = self._on_axis(self.frame())
        self._drawn = width, room, 0
        if self._alone():
            lines = chart(view, self.picked, width, max(5, room), frame, self.look, True)
        elif self.has_class("-paged"):
            picked = self.picked if self.has_focus else ""
            lines = grid_lines(view, width, room, frame, self.look, picked)
            if reading and len(self._known()) > MANY:
                self._drawn = width, height, 0
                return grid_lines(view, width, height, frame, self.look, picked, inspect=True)
            if reading:  # nothing scrolls beside the values, so the chart that is picked is brought in sight
                start = max(0, min(_picked_at(lines), len(lines) - room))
                lines = lines[start:]
                self._drawn = width, room, start
        else:
            lines = overview_lines(view, width, room, frame, self.look)
        return [*lines[:room], *reading] if reading else lines

    def reading(self, view: View, width: int) -> list[Line]:
        """Values at the crosshair, over as many lines as they need: one where all parties agree, else each party's.

        Those of other runs at the same step come last.
        """
        if self.cursor is None:
            return []
        at = self.cursor
        out: list[Span] = [(f"{view.glyphs.up} step {at:.0f}", "accent bold")]
        to = axis_of(view.snap, self.look.axis)
        if self.look.axis != "step" and to is not None:
            out.append((f" {axis_words(view.snap, self.look.axis, to(at))}", "accent"))
        measured = replace(self.look, axis="step", smooth=0.0)
        for name in [self.picked] if self._alone() else self._known():
            curves, _, _ = curves_of(view, name, measured)
            told = [(c, point) for c in curves if (point := read_at(c, at)) is not None]
            out += [(f"   {TITLES.get(name, name)}", "muted")] if told else []
            for c, (step, value) in told:
                whose = "" if c.name == "P-1" else f" {clean(c.name)}"
                out += [(whose, "muted"), (f" {number(value)}", c.role)]
                out += [(f" at {step:.0f}", "faint")] if step != at else []  # not every step is evaluated
        return list(wrap(out, width, "  "))

    def heading(self, view: View) -> tuple[str, str]:
        frame = self.frame()
        notes = [self._filtered()] if self.has_class("-paged") and view.filter.words() else []
        if self.cursor is not None and not self._alone() and self.has_class("-paged"):
            notes.append(f"crosshair at step {self.cursor:.0f}")
        notes += ["log"] if self.log_scale else []
        if self.look.smooth:
            notes.append(f"smoothed {self.look.smooth:g}")
        if self.look.axis != "step" and axis_of(view.snap, self.look.axis) is not None:
            notes.append(f"over {self.look.axis if self.look.axis == 'time' else per_step(view.snap)[1]}")
        if frame.x0 is not None and frame.x1 is not None:
            notes.append(f"steps {frame.x0:.0f} to {frame.x1:.0f}")
        if self.look.others:
            notes.append("with " + ", ".join(run for run, _ in self.look.others))
        if not view.snap.series and view.snap.run:
            return "Pods", ""
        return "Charts", f" {view.glyphs.dot} ".join(notes)

    def _filtered(self) -> str:
        """How many charts the filter leaves."""
        shown, known = len(self._known()), len(names(self.view))
        told = f"{shown} of {known} charts" if shown < known else "every chart"
        return f"{told} /{self.view.filter.source}"

    def action_other(self) -> None:
        """The newest other run over the charts, then the next, at last none."""
        self.post_message(self.OtherWanted())

    def compare(self, run: str, snap: Snapshot | None) -> None:
        """Lay another run over the charts; None takes every other run away."""
        kept = tuple(pair for pair in self.look.others if pair[0] != run)
        self.look = replace(self.look, others=(*kept, (run, snap)) if snap is not None else ())
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """On the page: the crosshair stands where the mouse is, in the chart that is picked by it."""
        at = event.get_content_offset(self)
        if at is None or self.pulled(event) or not self.has_class("-paged"):
            return
        found = self._under(at.x, at.y + self.scroll_offset.y)
        if found is not None:
            self.picked, self.cursor = found
            self.redraw()

    def _under(self, x: int, y: int) -> tuple[str, float] | None:
        """(chart, step measured next to it) at this cell of what is drawn; None beside every plane."""
        (width, height, above), known, view = self._drawn, self._known(), self.view
        if not known or not width:
            return None
        columns, wide, high = cells_of(width, height - len(still_lines(view, width)), len(known))
        i = (y + above) // high * columns + min(x // (wide + 2), columns - 1)
        if self._alone():
            columns, wide, i = 1, width, known.index(self.picked)
        if not 0 <= i < len(known):
            return None
        frame = replace(self._on_axis(self.frame()), zero=known[i] in FROM_ZERO)
        curves, bands, _ = curves_of(view, known[i], self.look)
        tall = max(5, height) if self._alone() else high
        laid = layout_of(curves, wide, tall - 1, frame, bands, tall > 4)
        cell = x % (wide + 2) - laid.gutter if laid is not None else -1
        if laid is None or not 0 <= cell < wide - laid.gutter:
            return None
        seen = laid.scale.x0 + (laid.scale.x1 - laid.scale.x0) * (2 * cell + 0.5) / (2 * (wide - laid.gutter) - 1)
        steps, to = curves_of(view, known[i], PLAIN)[0][0].xs, axis_of(view.snap, self.look.axis) or float
        return known[i], min(steps, key=lambda step: abs(to(step) - seen))

    def action_pick(self, by: int) -> None:
        """Pick the next chart; on the overview, scroll."""
        known = self._known()
        if not known or not (self.alone or self.has_class("-paged")):
            return
        at = known.index(self.picked) + by if self.picked in known else 0
        self.picked = known[at % len(known)]
        self.redraw()
        if not self.alone:
            here = _picked_at(self.lines)
            if not self.scroll_offset.y <= here < self.scroll_offset.y + self.content_region.height - 6:
                self.scroll_to(y=here, animate=False, force=True)

    def action_alone(self) -> None:
        """The picked chart alone, or all of them again."""
        known = self._known()
        if known:
            self.picked = self.picked if self.picked in known else known[0]
            self.alone = not self.alone
            self.redraw()

    def action_log(self) -> None:
        """Logarithmic y axis on or off."""
        self.log_scale = not self.log_scale
        self.redraw()

    def action_smooth(self) -> None:
        """Smoother, and from the smoothest back to what was measured."""
        at = SMOOTH.index(self.look.smooth) if self.look.smooth in SMOOTH else 0
        self.look = replace(self.look, smooth=SMOOTH[(at + 1) % len(SMOOTH)])
        self.redraw()

    def action_axis(self) -> None:
        """The next x axis that this run knows."""
        at = AXES.index(self.look.axis)
        order = [*AXES[at + 1 :], *AXES[: at + 1]]
        axis = next((a for a in order if axis_of(self.view.snap, a) is not None), "step")
        self.look = replace(self.look, axis=axis)
        self.redraw()

    def action_zoom(self, factor: float) -> None:
        """Show less or more, around the crosshair where there is one."""
        self.window = min(1.0, max(1 / 256, self.window * factor))
        self.centre = self.cursor if self.window < 1 else None
        self.redraw()

    def action_pan(self, part: float) -> None:
        """Move the window by a part of its width."""
        frame = self.frame()
        if frame.x0 is None or frame.x1 is None:
            return
        middle = (frame.x0 + frame.x1) / 2 + (frame.x1 - frame.x0) * part
        self.centre = None if frame.x1 >= self._extent()[1] and part > 0 else middle
        self.redraw()

    def action_cross(self, by: int) -> None:
        """Move the crosshair by a step, of a long run by what can be seen; the window goes along."""
        first, last = self._extent()
        frame = self.frame()
        x0, x1 = (first if frame.x0 is None else frame.x0), (last if frame.x1 is None else frame.x1)
        far = by * max(1, round((x1 - x0) / ACROSS))
        if self.cursor is None:  # it appears at the newest step in sight, and leaves from there for an end of the run
            self.cursor, far = round(x1), far if abs(by) > 1 else 0
        self.cursor = min(last, max(first, self.cursor + far))
        if not x0 <= self.cursor <= x1:
            self.centre = self.cursor
        self.redraw()

    def action_reset(self) -> None:
        """The whole run, without a crosshair."""
        self.window, self.centre, self.cursor, self.alone = 1.0, None, None, False
        self.redraw()


def _picked_at(lines: Sequence[Line]) -> int:
    """The line of the heading of the chart that is picked; the first without one."""
    return next((i for i, line in enumerate(lines) if any(role == "key" for _, role in line)), 0)
