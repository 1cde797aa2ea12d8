"""Charts: loss per party beside accuracy and throughput; a grid of everything measured when given the whole screen."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import BindingType

from uvcc_console.core.series import Series
from uvcc_console.ui.drawing.format import number
from uvcc_console.ui.drawing.paint import Line, Span, cut, fit, spread, width_of
from uvcc_console.ui.judging.view import View, coord_parts, party_role
from uvcc_console.ui.widgets.canvas import Band, Curve, Frame, plot
from uvcc_console.ui.widgets.panel import Panel
from uvcc_engine.contract.topology import PARTIES

TITLES = {
    "loss": "loss",
    "val_loss": "validation loss",
    "val_accuracy": "test accuracy",
    "accuracy": "accuracy",
    "val_ppl": "validation perplexity",
    "lr": "learning rate",
    "toks_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "gate_entropy_mean": "gate entropy",
    "step_s": "step time, s",
    "bytes": "bytes per step",
    "mem_mib": "memory, MiB",
}
FIGURE_ORDER = tuple(TITLES)
ACCURACY = ("val_accuracy", "accuracy", "val_ppl", "val_loss")
FROM_ZERO = ("samples_per_s", "toks_per_s", "mem_mib", "bytes", "step_s")
RATE = ("samples_per_s", "toks_per_s")


def by_party(view: View, name: str) -> dict[int, list[Series]]:
    """Series of one name, grouped by the party of their worker."""
    found: dict[int, list[Series]] = {}
    for coord in sorted(view.snap.series):
        series = view.snap.series[coord].get(name)
        if series is not None and len(series):
            found.setdefault(coord_parts(coord)[0], []).append(series)
    return found


def names(view: View) -> list[str]:
    """Everything measured, in a steady order."""
    known: set[str] = set()
    for by_name in view.snap.series.values():
        known.update(by_name)
    return sorted(known, key=lambda n: (FIGURE_ORDER.index(n) if n in FIGURE_ORDER else len(FIGURE_ORDER), n))


def _mean_and_band(lines: Sequence[Series]) -> tuple[Series, Band | None]:
    """The mean over replicas at the steps that all have, and the band around it.

    The band is lowest to highest for a few replicas, from five on the tenth to the ninetieth percentile.
    """
    if len(lines) == 1:
        return lines[0], None
    xs = lines[0].xs()
    columns = [line.ys() for line in lines]
    if any(line.xs() != xs for line in lines[1:]):
        tables = [dict(line) for line in lines]
        xs = array("d", sorted(set.intersection(*(set(t) for t in tables))))
        columns = [array("d", [t[x] for x in xs]) for t in tables]
    cut_off = len(lines) // 10 if len(lines) < 10 else round(len(lines) * 0.1)
    if len(lines) >= 5:
        cut_off = max(1, cut_off)
    low, high, mean = array("d"), array("d"), array("d")
    for values in zip(*columns, strict=True):
        ranked = sorted(values)
        low.append(ranked[cut_off])
        high.append(ranked[-1 - cut_off])
        mean.append(sum(ranked) / len(ranked))
    return Series(xs, mean, len(xs)), Band(xs, low, high)


def curves_of(view: View, name: str) -> tuple[list[Curve], list[Band], bool]:
    """One curve per party with its band over replicas; one neutral curve when all parties hold the very same values."""
    groups = by_party(view, name)
    means: dict[int, tuple[Series, Band | None]] = {p: _mean_and_band(lines) for p, lines in groups.items()}
    first = next(iter(means.values()), None)
    same = first is not None and len(means) == 3 and all(m[0] == first[0] for m in means.values())
    if same and first is not None:
        means = {-1: first}
    curves = [Curve(m.xs(), m.ys(), "accent" if p < 0 else party_role(p), f"P{p}") for p, (m, _) in means.items()]
    return curves, [band for _, band in means.values() if band], same


def _legend(view: View, curves: Sequence[Curve], same: bool) -> list[Span]:
    g = view.glyphs
    if same and curves:
        out: list[Span] = []
        for p in range(PARTIES):
            out += [(f" {g.equal} " if p else "", "muted"), (f"P{p}", f"p{p}")]
        return [*out, ("  ", ""), (number(curves[0].ys[-1]), "title")]
    out = []
    for c in curves:
        out += [(("  " if out else "") + c.name + " ", c.role), (number(c.ys[-1]), "title")]
    return out


def chart(view: View, name: str, width: int, height: int, frame: Frame | None = None) -> list[Line]:
    """One chart: heading with the newest values, then the plot. Always exactly ``height`` lines."""
    curves, bands, same = curves_of(view, name)
    if name in FROM_ZERO:
        frame = replace(frame or Frame(), zero=True)
    title: list[Span] = [(TITLES.get(name, name), "title")]
    if frame and frame.log:
        title.append((" log", "muted"))
    legend = _legend(view, curves, same)
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


def overview_lines(view: View, width: int, height: int, frame: Frame | None = None) -> list[Line]:
    """Loss large; accuracy and throughput at its side where there is room."""
    known = names(view)
    if not known:
        return _waiting(view, width, height)
    main = "loss" if "loss" in known else known[0]
    side = [next((n for n in group if n in known and n != main), "") for group in (ACCURACY, RATE)]
    side = [n for n in side if n]
    if width < 72 or not side or height < 6:
        return chart(view, main, width, height, frame)
    right = min(48, width * 2 // 5)
    left = width - right - 2
    each = height // len(side)
    blocks: list[Line] = []
    for i, name in enumerate(side):
        tall = height - each * (len(side) - 1) if i == len(side) - 1 else each
        blocks += chart(view, name, right, tall, frame)
    return beside([(chart(view, main, left, height, frame), left), (blocks, right)])


def grid_lines(view: View, width: int, height: int, frame: Frame | None = None) -> list[Line]:
    """Every series in a grid: two columns on a wide screen."""
    known = names(view)
    if not known:
        return _waiting(view, width, height)
    across = 1 if width < 100 or len(known) == 1 else 2
    down = math.ceil(len(known) / across)
    each_w = (width - 2 * (across - 1)) // across
    each_h = max(7, height // down)
    out: list[Line] = []
    for i in range(0, len(known), across):
        row = [(chart(view, n, each_w, each_h, frame), each_w) for n in known[i : i + across]]
        out += beside(row)
    return out


def _waiting(view: View, width: int, height: int) -> list[Line]:
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
        "Loss per party, test accuracy and throughput over steps, as the workers report them. One line: all parties "
        "say the same; with replicas the line is their mean and the raster their range.\n"
        "l log scale · z Z zoom in and out around the crosshair, else to the newest part · shift and arrows "
        "pan · left right move the crosshair, home end to the first and last step · backspace the whole run"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("l", "log", "log scale"),
        ("plus,equals_sign,z", "zoom(0.5)", "zoom in"),
        ("underscore,Z", "zoom(2)", "zoom out"),
        ("left", "cross(-1)", "crosshair"),
        ("right", "cross(1)", "crosshair"),
        ("home", "cross(-1000000000)", "first step"),
        ("end", "cross(1000000000)", "last step"),
        ("shift+left", "pan(-0.25)", "pan"),
        ("shift+right", "pan(0.25)", "pan"),
        ("backspace", "reset", "whole run"),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.window = 1.0
        self.centre: float | None = None
        self.log_scale = False
        self.cursor: float | None = None

    def _extent(self) -> tuple[float, float]:
        """First and last step measured."""
        lines = [s for by in self.view.snap.series.values() for s in by.values() if len(s)]
        first = min((next(iter(s))[0] for s in lines), default=0.0)
        last = max((s.last[0] for s in lines if s.last), default=0.0)
        return first, last

    def frame(self) -> Frame:
        """The window as the operator set it; without a centre it stays with the newest steps."""
        if self.window >= 1:
            return Frame(log=self.log_scale, cursor=self.cursor)
        first, last = self._extent()
        wide = (last - first) * self.window
        x1 = last if self.centre is None else min(last, max(first + wide, self.centre + wide / 2))
        return Frame(x0=x1 - wide, x1=x1, log=self.log_scale, cursor=self.cursor)

    def inputs(self, view: View) -> tuple[object, ...]:
        stage = view.snap.stage
        return view.snap.series, stage.status if stage else "", stage.name if stage else "", view.glyphs

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        room = height if self.cursor is None else max(1, height - 1)
        lines = (grid_lines if self.has_class("-paged") else overview_lines)(view, width, room, self.frame())
        return lines if self.cursor is None else [*lines[:room], self._reading(view, width)]

    def _reading(self, view: View, width: int) -> Line:
        """Values of the crosshair's step: one where all parties have the same, else party by party."""
        at = self.cursor or 0.0
        out: list[Span] = [(f"{view.glyphs.up} step {at:.0f}", "accent bold")]
        for name in names(view):
            curves, _, same = curves_of(view, name)
            for c in curves:
                i = bisect_left(c.xs, at)
                if i < len(c.xs) and c.xs[i] == at:
                    party = "" if same else f" {c.name}"
                    out += [(f"   {TITLES.get(name, name)}{party} ", "muted"), (number(c.ys[i]), c.role)]
        return cut(out, width)

    def heading(self, view: View) -> tuple[str, str]:
        frame = self.frame()
        notes = ["log"] if self.log_scale else []
        if frame.x0 is not None and frame.x1 is not None:
            notes.append(f"steps {frame.x0:.0f} to {frame.x1:.0f}")
        return "Charts", " ".join(notes)

    def action_log(self) -> None:
        """Logarithmic y axis on or off."""
        self.log_scale = not self.log_scale
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
        """Move the crosshair by a step."""
        first, last = self._extent()
        self.cursor = last if self.cursor is None else min(last, max(first, self.cursor + by))
        self.redraw()

    def action_reset(self) -> None:
        """The whole run, without a crosshair."""
        self.window, self.centre, self.cursor = 1.0, None, None
        self.redraw()
