"""How charts are drawn: one, a large one with two beside it, or a grid of everything that was measured and moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from uvcc_console.ui.drawing.format import number
from uvcc_console.ui.drawing.paint import Line, Span, cut, fit, spread, width_of, wrap
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.board import board_lines
from uvcc_console.ui.widgets.canvas import Frame, plot
from uvcc_console.ui.widgets.curves import (
    AXES,
    FROM_ZERO,
    HARDLY_EVER,
    NEVER,
    ONCE,
    TITLES,
    VITALS,
    ChartLook,
    axis_of,
    constants,
    curves_of,
    names,
)
from uvcc_console.ui.widgets.legend import legend_spans

ACCURACY = ("val_accuracy", "accuracy", "val_ppl", "val_loss")
RATE = ("samples_per_s", "toks_per_s")
PLAIN = ChartLook()


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
    room = max(8, width - width_of(title) - 2)
    if inspect and frame.cursor is not None:
        seen, _, same = curves_of(view, name, replace(look, smooth=0.0))
        legend = legend_spans(view, seen, same, look.axis, frame.cursor, room)
    else:
        legend = legend_spans(view, curves, same, look.axis, room=room)
    lines: list[Line] = [spread(title, cut(legend, room), width)]
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


def cells_of(width: int, height: int, charts: int) -> tuple[int, int, int]:
    """How many charts stand side by side in the grid, and how wide and high each is."""
    columns = across(width, charts)
    return columns, (width - 2 * (columns - 1)) // columns, max(7, height // math.ceil(charts / columns))


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
    columns, each_w, each_h = cells_of(width, height - len(tail), len(known))
    out: list[Line] = []
    for i in range(0, len(known), columns):
        row = [chart(view, n, each_w, each_h, frame, look, n == picked, inspect) for n in known[i : i + columns]]
        out += beside([(block, each_w) for block in row])
    return [*out, *tail]


def still_lines(view: View, width: int) -> list[Line]:
    """What never or hardly moved, or was measured once: values instead of flat or empty charts. Two values are those of
    different workers, or pods: beside "never moved" they would read as a movement."""
    lines: list[Line] = []
    found = constants(view)
    for why in (NEVER, HARDLY_EVER, ONCE):
        told = [
            f"{TITLES.get(name, name)} {number(low)}" + (f" to {number(high)} {_between(name)}" if high > low else "")
            for reason, name, low, high in found
            if reason == why
        ]
        if told:
            lines += wrap([(f"{why}: ", "faint"), (", ".join(told), "muted")], width, "  ")
    return lines


def _between(name: str) -> str:
    whose = "pod" if name in VITALS else "worker"
    return f"from {whose} to {whose}"


def _waiting(view: View, width: int, height: int) -> list[Line]:
    if board := board_lines(view, width, height):
        return board
    stage = view.snap.stage
    what = f"{stage.name} {stage.status}" if stage else "nothing has started"
    text = f"{view.glyphs.dot} the curve starts with the first training step ({what})"
    above = max(0, height // 2 - 1)
    return [*([("", "")] for _ in range(above)), [(fit(text, width, "c"), "muted")]]
