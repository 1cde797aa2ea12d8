"""Charts: loss per party beside accuracy and throughput; a grid of everything measured when given the whole screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from textual.binding import BindingType
from textual.message import Message

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.drawing.format import number
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, spread, width_of, wrap
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.board import board_lines
from uvcc_console.ui.widgets.canvas import Frame, plot
from uvcc_console.ui.widgets.curves import (
    AXES,
    FROM_ZERO,
    HARDLY_EVER,
    NEVER,
    ONCE,
    SMOOTH,
    TITLES,
    ChartLook,
    axis_of,
    constants,
    curves_of,
    names,
    per_step,
    read_at,
)
from uvcc_console.ui.widgets.legend import axis_words, legend_spans
from uvcc_console.ui.widgets.panel import Hints, Panel

ACCURACY = ("val_accuracy", "accuracy", "val_ppl", "val_loss")
RATE = ("samples_per_s", "toks_per_s")
PLAIN = ChartLook()
ACROSS: Final = 200
"""So many moves of the crosshair lead from one end of the window to the other."""
MANY: Final = 12
"""Of more charts than this the values at the crosshair stand in their headings, and below the charts of fewer."""


def chart(
    view: View,
    name: str,
    width: int,
    height: int,
    frame: Frame | None = None,
    look: ChartLook = PLAIN,
    mark: bool = False,
    inspect: bool = False,
) -> list[Line]:
    """One chart: heading with the newest values, then the plot. Always exactly ``height`` lines.

    ``inspect``: the heading has what was measured at the crosshair.
    """
    if axis_of(view.snap, look.axis) is None:  # kept of another run: this one does not know it
        look = replace(look, axis=AXES[0])
    curves, bands, same = curves_of(view, name, look)
    frame = replace(frame or Frame(), unit=look.axis)
    if name in FROM_ZERO:
        frame = replace(frame, zero=True)
    title: list[Span] = [(TITLES.get(name, name), "key" if mark else "title")]
    if frame.log:
        title.append((" log", "muted"))
    if inspect and frame.cursor is not None:
        seen, _, same = curves_of(view, name, replace(look, smooth=0.0))
        legend = legend_spans(view, seen, same, look.axis, frame.cursor)
    else:
        legend = legend_spans(view, curves, same, look.axis)
    lines: list[Line] = [spread(title, cut(legend, max(8, width - width_of(title) - 2)), width)]
    lines += plot(curves, width, height - 1, view.glyphs, frame=frame, bands=bands, x_labels=height > 4)
    lines += [[("", "")] for _ in range(height - len(lines))]
    return lines[:height]


def beside(blocks: Sequence[tuple[Sequence[Line], int]], gap: int = 2) -> list[Line]:
    """Blocks of lines next to each other, each padded to its width."""
    rows = max((len(b) for b, _ in blocks), default=0)
    out: list[Line] = []
    for y in range(rows):
        line: list[Span] = []
        for i, (block, width) in enumerate(blocks):
            if i:
                line.append((" " * gap, ""))
            part = list(block[y]) if y < len(block) else []
            line += part
            line.append((" " * max(0, width - width_of(part)), ""))
        out.append(line)
    return out


def overview_lines(
    view: View, width: int, height: int, frame: Frame | None = None, look: ChartLook = PLAIN
) -> list[Line]:
    """Loss large; accuracy and throughput at its side where there is room, three beside it on a wide screen."""
    known = names(view)
    if not known:
        return _waiting(view, width, height)
    main = "loss" if "loss" in known else known[0]
    side = [next((n for n in group if n in known and n != main), "") for group in (ACCURACY, RATE)]
    side = [n for n in side if n]
    if width < 72 or not side or height < 6:
        return chart(view, main, width, height, frame, look)
    right = min(48, width * 2 // 5) if width < 150 else width // 3
    left = width - right - 2
    each = height // len(side)
    blocks: list[Line] = []
    for i, name in enumerate(side):
        tall = height - each * (len(side) - 1) if i == len(side) - 1 else each
        blocks += chart(view, name, right, tall, frame, look)
    return beside([(chart(view, main, left, height, frame, look), left), (blocks, right)])


def matching(view: View) -> list[str]:
    """The figures that the filter's words find by name; all of them where they find none, as a pod's name does."""
    known, wanted = names(view), view.filter.words()
    if not wanted:
        return known
    return [n for n in known if wanted.matches({}, f"{n} {TITLES.get(n, '')}".lower())] or known


def across(width: int, charts: int) -> int:
    """How many charts stand side by side: as many as there is room for, with as few gaps at the end as can be."""
    most = max(1, min(charts, width // 50 if width >= 100 else 1, 4))
    return min(range(min(2, most), most + 1), key=lambda n: (-charts % n, -n))


def grid_lines(
    view: View,
    width: int,
    height: int,
    frame: Frame | None = None,
    look: ChartLook = PLAIN,
    picked: str = "",
    inspect: bool = False,
) -> list[Line]:
    """Every series that moves in a grid, as many columns as there is room for; then what never moved."""
    known = matching(view)
    if not known:
        return _waiting(view, width, height)
    tail = still_lines(view, width)
    columns = across(width, len(known))
    down = math.ceil(len(known) / columns)
    each_w = (width - 2 * (columns - 1)) // columns
    each_h = max(7, (height - len(tail)) // down)
    out: list[Line] = []
    for i in range(0, len(known), columns):
        row = [chart(view, n, each_w, each_h, frame, look, n == picked, inspect) for n in known[i : i + columns]]
        out += beside([(block, each_w) for block in row])
    return [*out, *tail]


def still_lines(view: View, width: int) -> list[Line]:
    """What never or hardly moved, or was measured once: values instead of flat or empty charts."""
    lines: list[Line] = []
    found = constants(view)
    for why in (NEVER, HARDLY_EVER, ONCE):
        told = [
            f"{TITLES.get(name, name)} {number(low)}" + (f" to {number(high)}" if high > low else "")
            for reason, name, low, high in found
            if reason == why
        ]
        if told:
            lines += wrap([(f"{why}: ", "faint"), (", ".join(told), "muted")], width, "  ")
    return lines


def _waiting(view: View, width: int, height: int) -> list[Line]:
    if board := board_lines(view, width, height):
        return board
    stage = view.snap.stage
    what = f"{stage.name} {stage.status}" if stage else "nothing has started"
    text = f"{view.glyphs.dot} the curve starts with the first training step ({what})"
    above = max(0, height // 2 - 1)
    return [*([("", "")] for _ in range(above)), [(fit(text, width, "c"), "muted")]]


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
        "in, home end to the first and last step · backspace the whole run · :compare RUN lays another run over it, c "
        "the newest other one, the next, none"
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
        if self._alone():
            lines = chart(view, self.picked, width, max(5, room), frame, self.look, True)
        elif self.has_class("-paged"):
            picked = self.picked if self.has_focus else ""
            lines = grid_lines(view, width, room, frame, self.look, picked)
            if reading and len(self._known()) > MANY:
                return grid_lines(view, width, height, frame, self.look, picked, inspect=True)
            if reading:  # nothing scrolls beside the values, so the chart that is picked is brought in sight
                start = max(0, min(_picked_at(lines), len(lines) - room))
                lines = lines[start:]
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
