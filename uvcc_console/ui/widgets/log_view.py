"""The merged event log: a ring buffer drawn line by line, following its end until the operator scrolls up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, cast

from rich.cells import cell_len
from textual.binding import BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.drawing.format import clock
from uvcc_console.ui.drawing.glyphs import Glyphs
from uvcc_console.ui.drawing.paint import Line, Span, clean, fit, literal
from uvcc_console.ui.judging.filters import Filter
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.panel import HasPalette
from uvcc_console.ui.widgets.ring import PARTY, RingLog

LEVELS = {"error": ("ERROR", "bad"), "warn": ("WARN", "warn"), "info": ("info", "muted"), "debug": ("debug", "faint")}


def source_role(source: str) -> str:
    """A pod's or worker's lines carry the colour of its party; the console's own parts are neutral."""
    found = PARTY.search(source)
    return f"p{found.group(1)}" if found else "accent"


def entry_line(entry: LogEntry, glyphs: Glyphs, *, wide: bool = True, find: str = "", utc: bool = False) -> Line:
    """One log line: time, level as word and colour, source, text; matches of a search are highlighted."""
    word, role = LEVELS.get(entry.level, (entry.level, "text"))
    text_role = {"error": "bad", "warn": "warn", "debug": "muted"}.get(entry.level, "text")
    out: list[Span] = [(clock(entry.ts, millis=wide, utc=utc), "faint"), (" ", "")]
    out.append((fit(word, 5), role))
    out.append((" " + fit(clean(entry.source), 16 if wide else 10, more=glyphs.more) + " ", source_role(entry.source)))
    return [*out, *_highlight(clean(entry.text), find, text_role)]


def _highlight(text: str, find: str, role: str) -> list[Span]:
    if not find:
        return [(text, role)]
    out: list[Span] = []
    at = 0
    for hit in re.finditer(re.escape(find), text, re.IGNORECASE):
        out += [(text[at : hit.start()], role), (hit.group(), "hit")]
        at = hit.end()
    return [*out, (text[at:], role)]


class LogView(ScrollView, can_focus=True):
    """Log lines of the whole run, merged by time of arrival."""

    DEFAULT_CSS = "LogView { scrollbar-size: 1 1; overflow-x: hidden; overflow-y: scroll; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("j,down", "line(1)", "down"),
        ("k,up", "line(-1)", "up"),
        ("g,home", "top", "oldest"),
        ("G,end,f", "follow", "follow"),
        ("n", "next(1)", "next match"),
        ("N", "next(-1)", "previous match"),
        ("m", "jump(60)", "minute on"),
        ("M", "jump(-60)", "minute back"),
        ("left", "pan(-8)", "left"),
        ("right", "pan(8)", "right"),
    ]
    number: ClassVar[str] = "3"
    help: ClassVar[str] = (
        "Events of every pod and of the console, in order of arrival. It follows the end until you scroll up; then the "
        "border counts what is new.\n"
        "f follow · g G oldest, newest · m M a minute on, back · / filters (level>=warn, pod=pod-p1, !heartbeat) · "
        ":find TEXT then n N · left right pan"
    )

    def __init__(self, *, id: str | None = None, classes: str | None = None, cap: int = 200_000) -> None:
        super().__init__(id=id, classes=classes)
        self.ring = RingLog(cap)
        self.view = View()
        self.needle = ""
        self.following = True
        self.unseen = 0
        self.pan = 0
        self._hit = -1
        self._title = ("", "")

    def on_mount(self) -> None:
        self._label()

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Take new lines; one repaint for the whole batch."""
        if not entries:
            return
        before = self.ring.dropped
        fresh = self.ring.extend(entries)
        trimmed = self.ring.dropped - before
        self._resize()
        if self.following:
            self._to_end()
        else:
            self.unseen += fresh
            if trimmed and self.ring.filter == Filter():
                self.scroll_to(y=max(0, self.scroll_offset.y - trimmed), animate=False, force=True)
        self.refresh()
        self._label()

    def replace(self, entries: Sequence[LogEntry]) -> None:
        """Start over with other lines (a jump in a replay)."""
        self.ring.clear()
        self.unseen = 0
        self.add(entries)
        if not entries:
            self._resize()
            self.refresh()
            self._label()

    def show(self, view: View) -> None:
        """Take over filter and signs of a view."""
        changed = view.filter.source != self.view.filter.source
        self.view = view
        if changed:
            self.ring.set_filter(view.filter)
            self._resize()
            self.action_follow()
        self._label()

    def _resize(self) -> None:
        self.virtual_size = Size(max(1, self.scrollable_content_region.width), len(self.ring))

    def _to_end(self) -> None:
        self.scroll_to(
            y=max(0, len(self.ring) - self.scrollable_content_region.height), animate=False, force=True, immediate=True
        )

    def _label(self) -> None:
        dot = self.view.glyphs.dot
        parts = [f"{self.number} Log"]
        if self.ring.filter:
            parts.append(f"/{self.ring.filter.source} {dot} {len(self.ring)} of {self.ring.total}")
        if self.needle:
            parts.append(f"find {self.needle}")
        state = "follows" if self.following else f"+{self.unseen} new, f follows"
        title = literal(f" {dot} ".join(parts))
        if (title, state) != self._title:
            self._title = (title, state)
            self.border_title = title
            self.border_subtitle = state

    def on_resize(self) -> None:
        self._resize()
        if self.following:
            self._to_end()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        at_end = new_value >= len(self.ring) - self.scrollable_content_region.height
        if new_value < old_value and not at_end:
            self.following = False
        elif at_end and new_value > old_value:
            self.following, self.unseen = True, 0
        self._label()

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        width = self.scrollable_content_region.width
        at = y + self.scroll_offset.y
        if at >= len(self.ring):
            return Strip.blank(width, base)
        line = entry_line(self.ring[at], self.view.glyphs, wide=width >= 100, find=self.needle, utc=self.view.utc)
        if at == self._hit:
            line = [(self.view.glyphs.cursor, "accent"), *line]
        size = sum(cell_len(text) for text, _ in line)
        strip = cast(HasPalette, self.app).palette.strip(line, max(size, width + self.pan), base)
        return strip.crop(self.pan, self.pan + width)

    def action_line(self, by: int) -> None:
        """Scroll by lines."""
        self.scroll_relative(y=by, animate=False)

    def action_top(self) -> None:
        """To the oldest line kept."""
        self.following = False
        self.scroll_to(y=0, animate=False)

    def action_follow(self) -> None:
        """To the newest line, and stay there."""
        self.following, self.unseen, self._hit = True, 0, -1
        self._to_end()
        self.refresh()
        self._label()

    def action_pan(self, by: int) -> None:
        """Look at the right part of long lines."""
        self.pan = max(0, self.pan + by)
        self.refresh()

    def action_jump(self, seconds: int) -> None:
        """A stretch of time forward or back."""
        if not len(self.ring):
            return
        here = self.ring[min(len(self.ring) - 1, self.scroll_offset.y)]
        self.following = False
        self.scroll_to(y=self.ring.at_time(here.ts + seconds), animate=False)

    def find(self, needle: str) -> bool:
        """Search backwards from the end; False when nothing matches. An empty needle ends the search."""
        self.needle, self._hit = needle, -1
        self.refresh()
        self._label()
        return not needle or self.action_next(-1)

    def action_next(self, direction: int) -> bool:
        """The next match in this direction."""
        if not self.needle:
            return False
        start = (
            self._hit + direction if self._hit >= 0 else (len(self.ring) - 1 if direction < 0 else self.scroll_offset.y)
        )
        found = self.ring.find(self.needle, start, direction)
        if found is None:
            return False
        self._hit = found
        self.following = False
        self.scroll_to(y=max(0, found - self.scrollable_content_region.height // 2), animate=False)
        self.refresh()
        return True

    def context_help(self) -> str:
        """Help of this panel."""
        return self.help
