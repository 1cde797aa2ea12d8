"""One-line pictures of many numbers: sparklines and heat strips."""

from __future__ import annotations

import math
from collections.abc import Sequence

from uvcc_console.ui.drawing.glyphs import Glyphs


def bar(value: float, low: float, high: float, g: Glyphs) -> str:
    """One cell as high as ``value`` lies between ``low`` and ``high``."""
    if not math.isfinite(value):
        return g.unknown
    part = (value - low) / (high - low) if high > low else 0.0
    return g.heat[min(len(g.heat) - 1, max(0, int(part * len(g.heat))))]


def spark(
    values: Sequence[float], width: int, g: Glyphs, *, low: float | None = None, high: float | None = None
) -> str:
    """The newest values, one cell each, the newest at the right; exactly ``width`` cells.

    Without bounds the strip fills the height between its own least and greatest; what never moves is flat and low.
    """
    shown = list(values[-width:]) if width > 0 else []
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return " " * max(0, width)
    low = min(finite) if low is None else low
    high = max(finite) if high is None else high
    return "".join(bar(v, low, high, g) for v in shown).rjust(width)


def part_bar(part: float, width: int, g: Glyphs) -> str:
    """A bar that is full at 1."""
    full = min(width, max(0, round(part * width)))
    return g.full * full + g.empty * (width - full)
