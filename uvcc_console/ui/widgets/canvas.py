"""A line chart in braille: every terminal cell is 2 x 4 dots, every dot column shows the minimum and maximum under it.

Drawing is O(width x log points) per line: the points of a dot column are found by bisection and their extremes by the
interpreter's own ``min`` and ``max`` on array slices, so that 6 lines of 2,000 points take a few milliseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uvcc_console.ui.drawing.format import number
from uvcc_console.ui.drawing.glyphs import Glyphs
from uvcc_console.ui.drawing.paint import Span, fit

# bit of the dot at (column, row) inside a braille cell, and the bits of a run of dots from row a to row b
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_RUNS = tuple(tuple(tuple(sum(half[a : b + 1]) for b in range(4)) for a in range(4)) for half in _DOTS)
Numbers = Sequence[float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: ascending xs with their ys, its colour and its name in the legend."""

    xs: Numbers
    ys: Numbers
    role: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """A filled range between two curves over the same xs, drawn behind the lines."""

    xs: Numbers
    low: Numbers
    high: Numbers
    role: str = "faint"


@dataclass(frozen=True, slots=True)
class Frame:
    """What part of the plane is shown. ``None`` bounds fit the data; ``cursor`` is an x with a vertical line;
    ``zero`` keeps the y axis at zero, so that the noise of a rate does not look like a drama; ``unit`` of the x axis:
    step | time | tokens."""

    x0: float | None = None
    x1: float | None = None
    log: bool = False
    cursor: float | None = None
    zero: bool = False
    marks: tuple[float, ...] = ()
    unit: str = "step"


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values to dots. ``log`` scales take the logarithm first; values at or below zero fall off the bottom."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool

    def rows(self, dots: int) -> Callable[[float], int]:
        """Maps a value to its dot row, 0 at the top, clamped to the canvas."""
        bottom, y0 = dots - 1, self.y0
        slope = bottom / (self.y1 - y0) if self.y1 > y0 else 0.0
        log = self.log

        def row(y: float) -> int:
            if log:
                y = math.log10(y) if y > 0 else y0
            at = bottom - (y - y0) * slope
            if not 0.0 < at < bottom:  # outside, or infinite
                return bottom if at > 0.0 else 0
            return int(at + 0.5)

        return row

    def column(self, x: float, dots: int) -> int:
        """Dot column of an x."""
        span = self.x1 - self.x0
        return round((x - self.x0) / span * (dots - 1)) if span > 0 else 0


def nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers (1, 2, 2.5, 5 times a power of ten) that divide a range into about ``wanted`` parts."""
    span = high - low
    if not math.isfinite(span) or span <= 0 or wanted < 1:
        return [low]
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    found = (round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1))
    return list(dict.fromkeys(found))  # where floats are as far apart as the marks, two fall on one


def log_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Logarithms of round numbers between two logarithms: powers of ten, else 1, 2 and 5 of each, else all nine.

    Where even those are too far apart, the round numbers of a linear scale.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or high - low > 600:
        return [low]
    most = max(2, wanted)
    best: list[float] = []
    for digits in ((1,), (1, 2, 5), tuple(range(1, 10))):
        every = [k + math.log10(d) for k in range(math.floor(low), math.floor(high) + 1) for d in digits]
        found = [tick for tick in every if low <= tick <= high]
        if len(found) > most and len(best) > 1:
            break
        best = found
    if len(best) > most:
        best = best[:: math.ceil(len(best) / most)]
    if len(best) > 1:
        return best
    return [math.log10(value) for value in nice_ticks(10**low, 10**high, most) if value > 0] or [low]


def _window(xs: Numbers, x0: float, x1: float) -> tuple[int, int]:
    """Indexes of the points inside [x0, x1] plus one neighbour at either side, so that lines reach the border."""
    return max(0, bisect_left(xs, x0) - 1), min(len(xs), bisect_left(xs, x1) + 2)


def scale_of(curves: Sequence[Curve], bands: Sequence[Band], frame: Frame) -> AxisScale | None:
    """The scale that shows all that is finite in the window; None when there is nothing to show."""
    filled = [c for c in curves if len(c.xs)]
    if not filled:
        return None
    x0 = frame.x0 if frame.x0 is not None else min(c.xs[0] for c in filled)
    x1 = frame.x1 if frame.x1 is not None else max(c.xs[-1] for c in filled)
    lows: list[float] = []
    highs: list[float] = []
    for xs, low, high in [(c.xs, c.ys, c.ys) for c in filled] + [(b.xs, b.low, b.high) for b in bands]:
        a, b = _window(xs, x0, x1)
        for values, into, pick in ((low[a:b], lows, min), (high[a:b], highs, max)):
            good = values if all(map(math.isfinite, values)) else [v for v in values if math.isfinite(v)]
            if frame.log:
                good = [v for v in good if v > 0]
            if len(good):
                into.append(pick(good))
    if not lows or not highs:
        return None
    y0, y1 = min(lows), max(highs)
    if frame.log:
        y0, y1 = math.log10(y0), math.log10(y1)
    if y1 - y0 < 1e-12:
        pad = abs(y1) * 0.1 or 0.5
        y0, y1 = y0 - pad, y1 + pad
    else:
        pad = (y1 - y0) * 0.04
        y0, y1 = y0 - pad, y1 + pad
        if not frame.log and (frame.zero or min(lows) >= 0 > y0):
            y0 = min(0.0, y0) if min(lows) < 0 else 0.0
    return AxisScale(x0, x1 if x1 > x0 else x0 + 1, y0, y1, frame.log)


def _between(xs: Numbers, ys: Numbers, i: int, x: float) -> float:
    """The value at ``x`` on the straight line from point ``i - 1`` to point ``i``."""
    if i == 0 or xs[i] == xs[i - 1]:
        return ys[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


class Canvas:
    """A dot matrix of ``width`` x ``height`` cells. Each cell keeps its dots and the last role drawn there."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.dots = [bytearray(width) for _ in range(height)]
        self.roles: list[list[str]] = [[""] * width for _ in range(height)]

    def span(self, column: int, top: int, bottom: int, role: str) -> None:
        """A vertical run of dots, both ends included."""
        x, runs = column >> 1, _RUNS[column & 1]
        if not 0 <= x < self.width:
            return
        top, bottom = max(0, top), min(self.height * 4 - 1, bottom)
        first, last = top >> 2, bottom >> 2
        for y in range(first, last + 1):
            self.dots[y][x] |= runs[top & 3 if y == first else 0][bottom & 3 if y == last else 3]
            roles = self.roles[y]
            if roles[x] != role:
                roles[x] = role if roles[x] in ("", "faint") else "mix"

    def curve(self, curve: Curve, scale: AxisScale) -> None:
        """Draw a line: min..max of each dot column, joined to its neighbour."""
        wide, high = self.width * 2, self.height * 4
        xs, ys, to_row = curve.xs, curve.ys, scale.rows(high)
        role, left, wide_span = curve.role, scale.x0, scale.x1 - scale.x0
        per_column = (wide - 1) / wide_span
        a, b = _window(xs, scale.x0, scale.x1)
        last: tuple[int, int] | None = None  # (column, row) where the line left the previous filled column
        i = a
        while i < b:
            column = round((xs[i] - left) * per_column)
            j = bisect_left(xs, left + (column + 0.5) / per_column, i + 1, b)
            part = ys[i:j]
            low, top = min(part), max(part)
            if low != low or top != top:  # not a number: the line is broken here
                last, i = None, j
                continue
            upper, lower = to_row(top), to_row(low)
            if last is not None:
                if column - last[0] == 1:  # nearly always: what joins it lies in the same dot column
                    upper, lower = min(upper, last[1]), max(lower, last[1])
                else:
                    self._join(last, (column, to_row(part[0])), role)
            self.span(column, upper, lower, role)
            last = (column, to_row(part[-1]))
            i = j

    def _join(self, a: tuple[int, int], b: tuple[int, int], role: str) -> None:
        (x0, y0), (x1, y1) = a, b
        gap = x1 - x0
        if gap <= 0:
            return
        start, stop = max(x0, -1), min(x1, self.width * 2)
        previous = y0 + (y1 - y0) * (start - x0) / gap
        for x in range(start + 1, stop + 1):
            here = y0 + (y1 - y0) * (x - x0) / gap
            self.span(x, round(min(previous, here)), round(max(previous, here)), role)
            previous = here

    def fill(self, band: Band, scale: AxisScale) -> None:
        """A sparse raster between the two edges of a band."""
        wide, to_row = self.width * 2, scale.rows(self.height * 4)
        n = len(band.xs)
        if not n:
            return
        for column in range(0, wide, 2):
            x = scale.x0 + (scale.x1 - scale.x0) * column / max(1, wide - 1)
            if x < band.xs[0] or x > band.xs[-1]:
                continue
            i = min(n - 1, bisect_left(band.xs, x))
            top, bottom = to_row(_between(band.xs, band.high, i, x)), to_row(_between(band.xs, band.low, i, x))
            if bottom <= top:
                continue
            for row in range(top + ((column >> 1) + top) % 2, bottom + 1, 2):
                self.span(column, row, row, band.role)

    def row(self, y: int, glyphs: Glyphs) -> list[Span]:
        """One row of cells, neighbours of one colour merged."""
        out: list[Span] = []
        text, role = "", ""
        for mask, cell_role in zip(self.dots[y], self.roles[y], strict=True):
            if not mask:
                cell_role = ""
            sign = " " if not mask else chr(0x2800 + mask) if glyphs.braille else _ascii(mask)
            if cell_role != role and text:
                out.append((text, role))
                text = ""
            text, role = text + sign, cell_role
        out.append((text, role))
        return out


def _ascii(mask: int) -> str:
    upper, lower = mask & (0x01 | 0x02 | 0x08 | 0x10), mask & (0x04 | 0x40 | 0x20 | 0x80)
    return ":" if upper and lower else "'" if upper else "."


def y_labels(scale: AxisScale, height: int) -> dict[int, str]:
    """Labels by row, no two of them the same: as many digits as it takes to tell them apart."""
    ticks = (log_ticks if scale.log else nice_ticks)(scale.y0, scale.y1, max(1, height // 3))
    more = 2
    while not scale.log and len(ticks) < 2 and more < 5 and height > 2:  # one mark tells no size
        ticks, more = nice_ticks(scale.y0, scale.y1, more), more + 1
    texts: list[str] = []
    for digits in range(3, 10):
        if scale.log:
            texts = [_round(10**t, digits) for t in ticks]
        else:
            texts = [number(t, digits if abs(t) < 1 else digits + 1) for t in ticks]
        if len(set(texts)) == len(texts) and (scale.log or all(map(_exact, texts, ticks))):
            break
    if not scale.log and any("." in text for text in texts) and all(abs(t) < 1e4 for t in ticks):
        aligned = [f"{t:.{_places(ticks)}f}" for t in ticks]
        texts = aligned if all(map(_exact, aligned, ticks)) else texts
    labels: dict[int, str] = {}
    to_row = AxisScale(scale.x0, scale.x1, scale.y0, scale.y1, False).rows(height * 4)
    for value, text in zip(ticks, texts, strict=True):
        labels[to_row(value) >> 2] = text
    return labels


def _round(value: float, digits: int) -> str:
    """A mark of a logarithmic scale: ``0.05``, ``200``, ``20k``."""
    return f"{value:.{digits}g}" if 1e-4 <= value < 1e4 else number(value, digits)


def _exact(text: str, value: float) -> bool:
    """Whether a mark reads as what stands there: 0.0025, not 0.003."""
    units = {"k": 1e3, "M": 1e6, "G": 1e9}
    said = float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)
    return abs(said - value) <= 1e-6 * abs(value)


def _places(ticks: list[float]) -> int:
    for places in range(7):
        if all(abs(round(t, places) - t) < 1e-9 for t in ticks):
            return places
    return 6


_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def x_ticks(low: float, high: float, wanted: int, unit: str) -> list[tuple[float, str]]:
    """Where the x axis is marked and how: whole steps, round times, round counts; no two the same."""
    if unit == "time":
        raw = (high - low) / max(1, wanted)
        step = next((t for t in _TIMES if t >= raw), 86400 * math.ceil(raw / 86400))
        first, last = math.ceil(low / step), math.floor(high / step)
        return [(k * step, brief(k * step)) for k in range(first, last + 1)]
    ticks = nice_ticks(low, high, wanted)
    if unit == "step":
        ticks = list(dict.fromkeys(float(round(t)) for t in ticks if abs(t - round(t)) < 1e-9)) or [float(round(low))]
        return [(t, f"{int(t)}") for t in ticks]
    texts: list[str] = []
    for digits in range(4, 12):  # as many as it takes to tell them apart
        texts = [number(t, digits) if t else "0" for t in ticks]
        if len(set(texts)) == len(texts):
            break
    return list(zip(ticks, texts, strict=True))


def brief(seconds: float) -> str:
    """A round time: ``45 s``, ``10 m``, ``1 h 30``, ``2 d``."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} m" + (f" {whole % 60:02d}" if whole % 60 else "")
    if whole < 172_800:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60:02d}" if whole % 3600 else "")
    return f"{whole // 86_400} d"


def _x_axis(scale: AxisScale, width: int, gutter: int, g: Glyphs, unit: str) -> list[list[Span]]:
    ruler = list(g.dash * width)
    labels = [" "] * (width + gutter)
    free = 0
    for tick, text in x_ticks(scale.x0, scale.x1, max(1, width // 12), unit):
        x = scale.column(tick, width * 2) >> 1
        start = min(max(gutter + x - len(text) // 2, 0), width + gutter - len(text))
        if start < free or not 0 <= x < width:
            continue
        ruler[x] = g.axis_x
        labels[start : start + len(text)] = text
        free = start + len(text) + 1
    return [[(" " * (gutter - 1) + g.axis_0, "faint"), ("".join(ruler), "faint")], [("".join(labels), "muted")]]


@dataclass(frozen=True, slots=True)
class PlotLayout:
    """Where things lie in a plot: its scale, the rows of the plane, the labels by row, the cells left of the plane."""

    scale: AxisScale
    rows: int
    labels: dict[int, str]
    gutter: int


def layout_of(
    curves: Sequence[Curve], width: int, height: int, frame: Frame, bands: Sequence[Band], x_labels: bool
) -> PlotLayout | None:
    """How a plot of this size is laid out; None when nothing fits."""
    scale = scale_of(curves, bands, frame)
    rows = height - (2 if x_labels else 0)
    if scale is None or rows < 1 or width < 12:
        return None
    labels = y_labels(scale, rows)
    return PlotLayout(scale, rows, labels, max((len(t) for t in labels.values()), default=1) + 1)


def plot(
    curves: Sequence[Curve],
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    frame: Frame | None = None,
    bands: Sequence[Band] = (),
    x_labels: bool = True,
) -> list[list[Span]]:
    """Draw curves with their axes into exactly ``height`` lines of at most ``width`` cells; [] when nothing fits."""
    frame = frame or Frame()
    laid = layout_of(curves, width, height, frame, bands, x_labels)
    if laid is None:
        return []
    scale, rows, labels, gutter = laid.scale, laid.rows, laid.labels, laid.gutter
    canvas = Canvas(width - gutter, rows)
    for x in (*frame.marks, *((frame.cursor,) if frame.cursor is not None else ())):
        column = scale.column(x, canvas.width * 2)
        if 0 <= column < canvas.width * 2:
            role = "accent" if x == frame.cursor else "faint"
            for row in range(0, rows * 4, 1 if x == frame.cursor else 2):
                canvas.span(column, row, row, role)
    for band in bands:
        canvas.fill(band, scale)
    for curve in curves:
        if len(curve.xs):
            canvas.curve(curve, scale)
    lines: list[list[Span]] = []
    for y in range(rows):
        text = labels.get(y, "")
        edge = glyphs.axis_y if text else ("│" if glyphs.braille else "|")
        lines.append([(fit(text, gutter - 1, "r"), "muted"), (edge, "faint"), *canvas.row(y, glyphs)])
    if x_labels:
        lines.extend(_x_axis(scale, canvas.width, gutter, glyphs, frame.unit))
    return lines
