"""The merged event log: a ring buffer drawn line by line, following its end until the operator scrolls up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar, Final, cast

from rich.cells import cell_len
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.drawing.paint import Line, literal
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.log_lines import (
    STAMPS,
    entry_line,
    entry_text,
    histogram,
    indent_of,
    row_count,
    wrapped,
)
from uvcc_console.ui.widgets.panel import HasPalette, Hints
from uvcc_console.ui.widgets.pressed import Pressed
from uvcc_console.ui.widgets.ring import RingLog
from uvcc_engine.contract.run_files.eventlog import LEVELS as SHOWN_LEVELS

WINDOWS: Final = (0, 60, 300, 3600)
COPIED: Final = 5000
_BUCKETS: Final = 30


class LogView(ScrollView, Pressed, can_focus=True):
    """Log lines of the whole run, merged by time of arrival."""

    DEFAULT_CSS = "LogView { scrollbar-size: 1 1; overflow-x: hidden; overflow-y: scroll; }"
    hints: ClassVar[Hints] = (
        ("l", "level"),
        ("e", "error"),
        ("a", "party"),
        ("i", "interval"),
        ("w", "wrap"),
        ("y", "copy"),
        ("S", "save"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("j,down", "line(1)", "down"),
        ("k,up", "line(-1)", "up"),
        ("g,home", "top", "oldest"),
        ("G,end,f", "follow", "follow"),
        ("n", "next(1)", "next match"),
        ("N", "next(-1)", "previous match"),
        ("e", "error(-1)", "error before"),
        ("E", "error(1)", "next error"),
        ("m", "jump(60)", "minute on"),
        ("M", "jump(-60)", "minute back"),
        ("left", "pan(-8)", "left"),
        ("right", "pan(8)", "right"),
        ("w", "wrap", "wrap"),
        ("l", "level", "level"),
        ("i", "window", "interval"),
        ("z", "stamps", "time stamps"),
        ("y", "copy(False)", "copy"),
        ("Y", "copy(True)", "copy all"),
        ("S", "save", "save"),
        ("v", "view", "view"),
        ("enter", "open", "open"),
        ("a", "party(False)", "party"),
        ("A", "party(True)", "party's last minute"),
    ]
    number: ClassVar[str] = "3"
    title: ClassVar[str] = "Log"
    help: ClassVar[str] = (
        "Events of every pod and of the console, in order of arrival; what several pods say at once is one line. It "
        "follows the end until you scroll up; then the border counts what is new. The strip in the border shows how "
        "much came when.\n"
        "f follow · g G oldest, newest · m M a minute on, back · e E errors before, after · l least level · i last 1, "
        "5, 60 minutes · w wrap · z time stamps (clock, ago, date, none) · y Y copy the screen, all of it · S save · "
        "v read the newest stack dump or flight record · enter or a click read one line whole, or the dump it is of · "
        "a only the next party, then all, A the same of the last minute · / filters (level>=warn, pod=p1r0, "
        "!heartbeat) · :find TEXT then n N · left right pan"
    )

    class Taken(Message):
        """Lines to be put into the clipboard, or (``save``) into a file."""

        def __init__(self, lines: Sequence[str], save: bool) -> None:
            super().__init__()
            self.lines, self.save = lines, save

    class LineWanted(Message):
        """The operator wants to read this line, or the long text that it is part of."""

        def __init__(self, entry: LogEntry) -> None:
            super().__init__()
            self.entry = entry

    class PartyWanted(Message):
        """The operator wants the lines of the next party alone."""

    class ViewWanted(Message):
        """The operator wants to read the newest long text."""

    def __init__(self, *, id: str | None = None, classes: str | None = None, cap: int = 200_000) -> None:
        super().__init__(id=id, classes=classes)
        self.ring = RingLog(cap)
        self.view = View()
        self.needle = ""
        self.following = True
        self.unseen = 0
        self.pan = 0
        self.wrap = False
        self.stamp = STAMPS[0]
        self.window = 0
        self.hit = -1
        self._title = ("", "")
        self._rows: list[int] = []  # the first row of every line, when lines are wrapped
        self._high = 0

    def on_mount(self) -> None:
        self._label()

    # ---- lines

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Take new lines; one repaint for the whole batch."""
        if not entries:
            return
        before = self.ring.dropped
        fresh = self.ring.extend(entries)
        trimmed = self.ring.dropped - before
        self._measure(again=bool(trimmed) or fresh < len(entries))
        if self.following:
            self._to_end()
        else:
            self.unseen += fresh
            if trimmed and not self.ring.narrowed and not self.wrap:
                self.scroll_to(y=max(0, self.scroll_offset.y - trimmed), animate=False, force=True)
        self.refresh()
        self._label()

    def replace(self, entries: Sequence[LogEntry]) -> None:
        """Start over with other lines (a jump in a replay)."""
        self.ring.clear()
        self.unseen = 0
        self._measure(again=True)
        self.add(entries)
        if not entries:
            self.refresh()
            self._label()

    def show(self, view: View) -> None:
        """Take over filter and signs of a view."""
        changed = view.filter.source != self.view.filter.source
        moved = int(view.now) != int(self.view.now)
        self.view = view
        if changed:
            self.ring.set_filter(view.filter)
        slid = self.ring.since(self._end - self.window) if self.window and (moved or changed) else False
        if changed or slid:
            self._measure(again=True)
            if changed or self.following:
                self.action_follow()
        if self.stamp == "ago" and moved:
            self.refresh()
        self._label()

    @property
    def _end(self) -> float:
        """What the last minutes are counted from: now, or when the run ended."""
        ended = self.view.snap.ended
        return min(self.view.now, ended) if ended else self.view.now

    def _measure(self, *, again: bool = False) -> None:
        """How many rows the lines take: one each, or as many as wrapping needs."""
        width = max(1, self.scrollable_content_region.width)
        if not self.wrap:
            self._rows, self._high = [], len(self.ring)
        else:
            if again or len(self._rows) > len(self.ring):
                self._rows, self._high = [], 0
            indent = indent_of(self.stamp, wide=self._wide)
            for at in range(len(self._rows), len(self.ring)):
                self._rows.append(self._high)
                self._high += row_count(self.ring[at], width, indent)
        self.virtual_size = Size(width, self._high)

    def _row_of(self, at: int) -> int:
        """The row on which a line begins."""
        return self._rows[at] if self.wrap and at < len(self._rows) else at

    def _at_row(self, row: int) -> tuple[int, int]:
        """(line, which of its rows) at a row."""
        if not self.wrap:
            return row, 0
        at = bisect_right(self._rows, row) - 1
        return (at, row - self._rows[at]) if at >= 0 else (len(self.ring), 0)

    @property
    def _wide(self) -> bool:
        return self.scrollable_content_region.width >= 100

    def _to_end(self) -> None:
        bottom = max(0, self._high - self.scrollable_content_region.height)
        self.scroll_to(y=bottom, animate=False, force=True, immediate=True)

    def _label(self) -> None:
        g = self.view.glyphs
        parts = [f"{self.number} {self.title}"]
        if self.ring.filter:
            parts.append(f"/{self.ring.filter.source}")
        if self.ring.least != "debug":
            parts.append(f"{self.ring.least} and worse")
        if self.window:
            parts.append(f"last {self.window // 60} min" + (" of the run" if self.view.snap.ended else ""))
        if self.ring.narrowed:
            parts.append(f"{len(self.ring)} of {self.ring.total}")
        if self.needle:
            parts.append(f"find {self.needle}")
        state = "follows" if self.following else f"+{self.unseen} new, f follows"
        title = literal(f" {g.dot} ".join(parts))
        if self.has_class("-paged") and self.size.width >= 60:
            tones = {"bad": "$error", "warn": "$warning"}
            strip = histogram(self.ring, _BUCKETS, g)
            title += "  " + "".join(f"[{tones.get(role, '$primary')}]{text}[/]" for text, role in strip)
        if (title, state) != self._title:
            self._title = (title, state)
            self.border_title = title
            self.border_subtitle = state

    def on_resize(self) -> None:
        self._measure(again=True)
        if self.following:
            self._to_end()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        at_end = new_value >= self._high - self.scrollable_content_region.height
        if new_value < old_value and not at_end:
            self.following = False
        elif at_end and new_value > old_value:
            self.following, self.unseen = True, 0
        self._label()

    # ---- drawing

    def _line(self, at: int) -> Line:
        line = entry_line(
            self.ring[at],
            self.view.glyphs,
            wide=self._wide,
            find=self.needle,
            utc=self.view.utc,
            stamp=self.stamp,
            now=self.view.now,
        )
        return [(self.view.glyphs.cursor, "accent"), *line] if at == self.hit else line

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        width = self.scrollable_content_region.width
        at, part = self._at_row(y + self.scroll_offset.y)
        if at >= len(self.ring):
            if y == 0 and not len(self.ring) and self.ring.total:
                words = f"none of {self.ring.total} lines is shown: i the time, l the level, / the filter"
                return cast(HasPalette, self.app).palette.strip([(words, "muted")], width, base)
            return Strip.blank(width, base)
        line = self._line(at)
        palette = cast(HasPalette, self.app).palette
        if self.wrap:
            pieces = wrapped(line, width, indent_of(self.stamp, wide=self._wide))
            return palette.strip(pieces[part] if part < len(pieces) else [], width, base)
        size = sum(cell_len(text) for text, _ in line)
        return palette.strip(line, max(size, width + self.pan), base).crop(self.pan, self.pan + width)

    # ---- keys

    def action_line(self, by: int) -> None:
        """Scroll by lines."""
        self.scroll_relative(y=by, animate=False)

    def action_top(self) -> None:
        """Scroll to the oldest line that is kept."""
        self.following = False
        self.scroll_to(y=0, animate=False)

    def action_follow(self) -> None:
        """To the newest line, and stay there."""
        self.following, self.unseen, self.hit = True, 0, -1
        self._to_end()
        self.refresh()
        self._label()

    def action_pan(self, by: int) -> None:
        """Look at the right part of long lines."""
        self.pan = max(0, self.pan + by)
        self.refresh()

    def action_wrap(self) -> None:
        """Long lines over several rows, or cut."""
        self.wrap, self.pan = not self.wrap, 0
        self._again()

    def look(self, *, wrap: bool, stamp: str) -> None:
        """Show lines so; ``stamp`` is one of ``STAMPS``."""
        if (wrap, stamp) != (self.wrap, self.stamp):
            self.wrap, self.stamp, self.pan = wrap, stamp, 0
            self._again()

    def action_stamps(self) -> None:
        """The next way to show the time."""
        self.stamp = STAMPS[(STAMPS.index(self.stamp) + 1) % len(STAMPS)]
        self._again()

    def action_level(self) -> None:
        """Show lines from the next level on."""
        least = SHOWN_LEVELS[(SHOWN_LEVELS.index(self.ring.least) + 1) % len(SHOWN_LEVELS)]
        self.ring.set_filter(self.view.filter, least)
        self._window()

    def action_window(self) -> None:
        """Only the last minute, five, sixty, or everything."""
        self.window = WINDOWS[(WINDOWS.index(self.window) + 1) % len(WINDOWS)]
        self._window()

    def _window(self) -> None:
        self.ring.since(self._end - self.window if self.window else None)
        self._again()
        self.action_follow()

    def _again(self) -> None:
        at, _ = self._at_row(self.scroll_offset.y)
        self._measure(again=True)
        if self.following:
            self._to_end()
        else:
            self.scroll_to(y=self._row_of(at), animate=False, force=True)
        self.refresh()
        self._label()

    def action_copy(self, everything: bool) -> None:
        """Into the terminal's clipboard: what is on the screen, or the newest lines of all that is shown."""
        first, last = max(0, len(self.ring) - COPIED), len(self.ring) - 1
        if not everything:
            top = self.scroll_offset.y
            first = self._at_row(top)[0]
            last = min(last, self._at_row(top + max(0, self.scrollable_content_region.height - 1))[0])
        self.post_message(self.Taken([entry_text(self.ring[i]) for i in range(first, last + 1)], False))

    def action_save(self) -> None:
        """Everything that is shown, into a file of the run's folder."""
        self.post_message(self.Taken([entry_text(self.ring[i]) for i in range(len(self.ring))], True))

    def action_view(self) -> None:
        """Read the newest stack dump or flight record."""
        self.post_message(self.ViewWanted())

    def action_party(self, lately: bool) -> None:
        """Only the next party, after the last all of them; ``lately``: what was in the last minute."""
        if lately and not self.window:
            self.action_window()
        self.post_message(self.PartyWanted())

    def action_open(self) -> None:
        """Read a line whole: the one that was found, else the newest on the screen."""
        bottom = self._at_row(self.scroll_offset.y + max(0, self.scrollable_content_region.height - 1))[0]
        self._open(self.hit if self.hit >= 0 else min(bottom, len(self.ring) - 1))

    def on_click(self, event: events.Click) -> None:
        """Read the line that was clicked."""
        place = event.get_content_offset(self)
        if place is not None and not self.pulled(event):
            self._open(self._at_row(self.scroll_offset.y + place.y)[0])

    def _open(self, at: int) -> None:
        if 0 <= at < len(self.ring):
            self.post_message(self.LineWanted(self.ring[at]))

    def action_jump(self, seconds: int) -> None:
        """A stretch of time forward or back."""
        if not len(self.ring):
            return
        here = self.ring[min(len(self.ring) - 1, self._at_row(self.scroll_offset.y)[0])]
        self.following = False
        self.scroll_to(y=self._row_of(self.ring.at_time(here.ts + seconds)), animate=False)

    def find(self, needle: str) -> bool:
        """Search backwards from the end; False when nothing matches. An empty needle ends the search."""
        self.needle, self.hit = needle, -1
        self.refresh()
        self._label()
        return not needle or self.action_next(-1)

    def _start(self, direction: int) -> int:
        if self.hit >= 0:
            return self.hit + direction
        return len(self.ring) - 1 if direction < 0 else self._at_row(self.scroll_offset.y)[0]

    def action_next(self, direction: int) -> bool:
        """The next match in this direction."""
        return bool(self.needle) and self._go(self.ring.find(self.needle, self._start(direction), direction))

    def action_error(self, direction: int) -> bool:
        """The next error in this direction."""
        return self._go(self.ring.next_of_level("error", self._start(direction), direction))

    def _go(self, found: int | None) -> bool:
        if found is None:
            return False
        self.hit = found
        self.following = False
        self.scroll_to(y=max(0, self._row_of(found) - self.scrollable_content_region.height // 2), animate=False)
        self.refresh()
        return True

    def context_help(self) -> str:
        """Help of this panel."""
        return self.help
