"""Charts: loss per party beside accuracy and throughput; a grid of everything measured when given the whole screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import BindingType

from uvcc_console.core.series import Series
from uvcc_console.ui.format import number
from uvcc_console.ui.paint import Line, Span, cut, fit, spread, width_of
from uvcc_console.ui.view import View, coord_parts, party_role
from uvcc_console.ui.widgets.canvas import Band, Curve, Frame, plot
from uvcc_console.ui.widgets.panel import Panel

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
ORDER = tuple(TITLES)
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
    return sorted(known, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def _mean_and_band(lines: Sequence[Series]) -> tuple[Series, Band | None]:
    """The mean over replicas at the steps that all have, and the range between the lowest and the highest."""
    if len(lines) == 1:
        return lines[0], None
    tables = [dict(line) for line in lines]
    steps = sorted(set.intersection(*(set(t) for t in tables)))
    mean = Series()
    low: list[float] = []
    high: list[float] = []
    for x in steps:
        values = [t[x] for t in tables]
        mean = mean.append(x, math.fsum(values) / len(values))
        low.append(min(values))
        high.append(max(values))
    return mean, Band(steps, low, high)


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
        for p in range(3):
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
        "Loss per party, test accuracy and throughput over steps. One line: all parties hold the same values; "
        "with replicas the line is their mean and the raster their range.\n"
        "l log scale · + - zoom to the newest part · left right move the crosshair · esc removes it"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("l", "log", "log scale"),
        ("plus,equals_sign", "zoom(0.5)", "zoom in"),
        ("minus", "zoom(2)", "zoom out"),
        ("left", "cross(-1)", "crosshair"),
        ("right", "cross(1)", "crosshair"),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.window = 1.0
        self.log_scale = False
        self.cursor: float | None = None

    def _last(self) -> float:
        steps = [s.last[0] for by in self.view.snap.series.values() for s in by.values() if s.last]
        return max(steps, default=0.0)

    def frame(self) -> Frame:
        """The window as the operator set it."""
        x0 = None if self.window >= 1 else self._last() * (1 - self.window)
        return Frame(x0=x0, log=self.log_scale, cursor=self.cursor)

    def inputs(self, view: View) -> tuple[object, ...]:
        stage = view.snap.stage
        return view.snap.series, stage.status if stage else "", stage.name if stage else "", view.glyphs

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        lines = (grid_lines if self.has_class("-paged") else overview_lines)(view, width, height, self.frame())
        return lines if self.cursor is None else [*lines[: max(1, height - 1)], self._reading(view, width)]

    def _reading(self, view: View, width: int) -> Line:
        """Values of the crosshair's step."""
        at = self.cursor or 0.0
        out: list[Span] = [(f"{view.glyphs.up} step {at:.0f}  ", "accent")]
        for name in names(view):
            for party, lines in by_party(view, name).items():
                value = next((y for x, y in lines[0] if x == at), None)
                if value is not None and (party == 0 or name == "loss"):
                    out.append((f"{TITLES.get(name, name)} P{party} {number(value)}  ", party_role(party)))
        return cut(out, width)

    def heading(self, view: View) -> tuple[str, str]:
        notes = [n for n, on in (("log", self.log_scale), (f"newest {self.window:.0%}", self.window < 1)) if on]
        return "Charts", " ".join(notes)

    def action_log(self) -> None:
        """Logarithmic y axis on or off."""
        self.log_scale = not self.log_scale
        self.redraw()

    def action_zoom(self, factor: float) -> None:
        """Show a smaller or larger newest part."""
        self.window = min(1.0, max(1 / 64, self.window * factor))
        self.redraw()

    def action_cross(self, by: int) -> None:
        """Move the crosshair by a step."""
        last = self._last()
        self.cursor = last if self.cursor is None else min(last, max(0.0, self.cursor + by))
        self.redraw()

    def clear_cursor(self) -> bool:
        """Remove the crosshair; False when there was none."""
        if self.cursor is None:
            return False
        self.cursor = None
        self.redraw()
        return True
