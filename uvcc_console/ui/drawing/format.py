"""Numbers as an operator reads them: short, aligned, with their unit."""

from __future__ import annotations

import math
import time


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 m 04 s``, ``1 h 02 m``, ``2 d 03 h``."""
    if not math.isfinite(seconds):
        return "-"
    s = max(0.0, seconds)
    if s < 9.95:
        return f"{s:.1f} s"
    if s < 60:
        return f"{s:.0f} s"
    whole = int(s)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def age(seconds: float) -> str:
    """Like ``duration`` in whole seconds, so that a calm screen does not flicker."""
    return duration(math.floor(max(0.0, seconds))).replace(".0 s", " s")


def money(dollars: float) -> str:
    """``$0.00``, ``$12.34``, ``$1,234``."""
    return f"${dollars:,.2f}" if abs(dollars) < 1000 else f"${dollars:,.0f}"


def number(value: float, digits: int = 4) -> str:
    """A float in ``digits`` significant digits: ``0.3124``, ``12.40``, ``125k``, ``3.1e-05``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e12 or size < 1e-3:
        return f"{value:.{max(0, digits - 3)}e}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{_plain(value / scale, digits - 1)}{unit}"
    return _plain(value, digits)


def _plain(value: float, digits: int) -> str:
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}"


def volume(count: float) -> str:
    """Bytes: ``0 kB``, ``850 kB``, ``12.3 MB``, ``4.0 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count / 1e3:.0f} kB"


def short(digest: str, keep: int = 8) -> str:
    """The first characters of a hash; ``-`` for none."""
    return digest[:keep] if digest else "-"


def clock(ts: float, *, millis: bool = False, utc: bool = False) -> str:
    """Wall clock time of day."""
    parts = time.gmtime(ts) if utc else time.localtime(ts)
    text = time.strftime("%H:%M:%S", parts)
    return f"{text}.{int(ts * 1000) % 1000:03d}" if millis else text
