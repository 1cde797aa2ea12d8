"""Log lines as text: time in four ways, level, who said it, what; wrapped, highlighted, counted over time."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.drawing.format import age, clock
from uvcc_console.ui.drawing.glyphs import Glyphs
from uvcc_console.ui.drawing.paint import Line, Span, clean, fit
from uvcc_console.ui.drawing.spark import bar
from uvcc_console.ui.judging.filters import LEVELS as RANKS
from uvcc_console.ui.widgets.ring import PARTY, RingLog, sources_of

LEVELS = {"error": ("ERROR", "bad"), "warn": ("WARN", "warn"), "info": ("info", "muted"), "debug": ("debug", "faint")}
WORKER_LOG: Final = re.compile(r"[^/]+/worker_([^/]+)\.log")
COORD: Final = re.compile(r"p\d+r\d+s\d+t\d+")
STAMPS: Final = ("clock", "ago", "date", "none")


def source_role(source: str) -> str:
    """A pod's or worker's lines carry the colour of its party; of several parties, or of the console, none."""
    found = {m.group(1) for m in PARTY.finditer(source.partition("/")[0])}
    return f"p{found.pop()}" if len(found) == 1 else "accent"


def source_word(entry: LogEntry, width: int) -> str:
    """Who said it: a worker for its log, how many where their names do not fit, the rollout for what nobody signed."""
    sources = sources_of(entry)
    worker = WORKER_LOG.fullmatch(entry.source)
    said = clean(worker[1] if worker else entry.source or "rollout")
    if len(sources) == 1 or cell_len(said) <= width:
        return said
    workers = all(COORD.fullmatch(source) for source in sources)
    return f"{len(sources)} {'workers' if workers else 'pods'}"


def stamp_text(ts: float, kind: str, now: float, *, wide: bool, utc: bool) -> str:
    """When it was: time of day, how long ago, with the date, or not at all."""
    if kind == "ago":
        return fit(f"{age(max(0.0, now - ts))} ago", 12, "r")
    if kind == "date":
        parts = time.gmtime(ts) if utc else time.localtime(ts)
        return time.strftime("%Y-%m-%d ", parts) + clock(ts, utc=utc)
    return clock(ts, millis=wide, utc=utc) if kind == "clock" else ""


def entry_line(
    entry: LogEntry,
    glyphs: Glyphs,
    *,
    wide: bool = True,
    find: str = "",
    utc: bool = False,
    stamp: str = "clock",
    now: float = 0.0,
) -> list[Span]:
    """One log line: time, level as word and colour, source, text; matches of a search are highlighted."""
    word, role = LEVELS.get(entry.level, (entry.level, "text"))
    text_role = {"error": "bad", "warn": "warn", "debug": "muted"}.get(entry.level, "text")
    when = stamp_text(entry.ts, stamp, now, wide=wide, utc=utc)
    out: list[Span] = [(when, "faint"), (" ", "")] if when else []
    out.append((fit(word, 5), role))
    width = 16 if wide else 10
    out.append((f" {fit(source_word(entry, width), width, more=glyphs.more)} ", source_role(entry.source)))
    out += highlighted(clean(entry.text), find, text_role)
    if entry.detail:
        out += highlighted(f"  {clean(entry.detail)}", find, "faint" if entry.level != "error" else "bad")
    return out


def highlighted(text: str, find: str, role: str) -> list[Span]:
    """The text with every match of a search marked."""
    if not find:
        return [(text, role)]
    out: list[Span] = []
    at = 0
    for hit in re.finditer(re.escape(find), text, re.IGNORECASE):
        out += [(text[at : hit.start()], role), (hit.group(), "hit")]
        at = hit.end()
    return [*out, (text[at:], role)]


def indent_of(stamp: str, *, wide: bool) -> int:
    """Cells before the text of a line."""
    when = {"clock": 12 if wide else 8, "ago": 12, "date": 19}.get(stamp, 0)
    return (when + 1 if when else 0) + 5 + (18 if wide else 12)


def row_count(entry: LogEntry, width: int, indent: int) -> int:
    """How many rows a line takes when it is wrapped."""
    text = f"{entry.text}  {entry.detail}" if entry.detail else entry.text
    size = len(text) if text.isascii() else cell_len(clean(text))
    return max(1, -(-size // max(1, width - indent)))


def wrapped(line: Sequence[Span], width: int, indent: int) -> list[Line]:
    """A line in pieces of at most ``width`` cells, those after the first below its text."""
    rows: list[list[Span]] = [[]]
    room = width
    for text, role in line:
        while cell_len(text) > room:
            head = set_cell_size(text, room)
            rows[-1].append((head, role))
            text = text[max(1, len(head.rstrip("\0"))) :]
            rows.append([(" " * indent, "")])
            room = max(1, width - indent)
        rows[-1].append((text, role))
        room -= cell_len(text)
    return [*rows]


def entry_text(entry: LogEntry) -> str:
    """A line for a file or the clipboard: UTC with milliseconds, level, source, text."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(entry.ts)) + f".{int(entry.ts * 1000) % 1000:03d}Z"
    detail = f"  {entry.detail}" if entry.detail else ""
    return clean(f"{when} {entry.level} {entry.source} {entry.text}{detail}")


def histogram(ring: RingLog, cells: int, g: Glyphs) -> list[Span]:
    """How many of the shown lines came when, one cell each stretch of time, in the colour of the worst of them."""
    n = len(ring)
    if n < 2 or cells < 1:
        return []
    first, last = ring[0].ts, ring[n - 1].ts
    span = max(1e-9, last - first)
    counts, worst = [0] * cells, [0] * cells
    for i in range(0, n, max(1, n // 20_000)):
        entry = ring[i]
        at = min(cells - 1, max(0, int((entry.ts - first) / span * cells)))
        counts[at] += 1
        worst[at] = max(worst[at], RANKS.get(entry.level, 20))
    most = max(counts)
    roles = {40: "bad", 30: "warn"}
    return [
        (bar(count, 0.0, most, g) if count else " ", roles.get(rank, "accent"))
        for count, rank in zip(counts, worst, strict=True)
    ]
