"""A panel with a cursor: rows with a name each, one of them current."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message

from uvcc_console.ui.drawing.paint import BLOCKS, Line, cut, width_of
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.panel import Panel

ListRow = tuple[str, Line]


class ListPanel(Panel):
    """Subclasses give ``rows`` (name and line of each) and ``head`` (lines above that do not scroll out of meaning)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down", "line(1)", "down"),
        ("up", "line(-1)", "up"),
        ("enter", "choose", "open"),
    ]

    class Chosen(Message):
        """The message that a row was chosen with Enter."""

        def __init__(self, panel: ListPanel, name: str) -> None:
            super().__init__()
            self.panel, self.name = panel, name

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, panel: ListPanel, name: str) -> None:
            super().__init__()
            self.panel, self.name = panel, name

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.current = ""
        self.opens: Callable[[str], None] | None = None  # what Enter does, before the next key is looked at

    def rows(self, view: View, width: int) -> Sequence[ListRow]:
        """The rows in order."""
        raise NotImplementedError

    def head(self, view: View, width: int) -> Sequence[Line]:
        """Lines above the rows."""
        return ()

    def empty(self) -> str:
        """What to say when there is no row."""
        return "nothing here yet"

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        lines: list[Line] = list(self.head(view, width))
        rows = self.rows(view, width)
        if not rows:
            return [*lines, [(self.empty(), "muted")]]
        if self.current not in {name for name, _ in rows}:
            self.current = rows[0][0]
        for name, line in rows:
            if name == self.current:
                under = "sel" if self.has_focus else ""
                sign = view.glyphs.cursor if self.has_focus else view.glyphs.dot
                shown = cut([(t, role if role in BLOCKS else f"{role} {under}".strip()) for t, role in line], width - 2)
                pad = (" " * max(0, width - 2 - width_of(shown)), under)
                lines.append([(f"{sign} ", f"accent {under}".strip()), *shown, pad])
            else:
                lines.append([("  ", ""), *cut(line, width - 2)])
        return lines

    def on_focus(self) -> None:
        self.redraw()
        self.post_message(self.Moved(self, self.current))

    def on_blur(self) -> None:
        self.redraw()

    def action_line(self, by: int) -> None:
        """Move the cursor."""
        width = self.content_region.width
        names = [name for name, _ in self.rows(self.view, width)]
        if not names:
            return
        at = min(len(names) - 1, max(0, (names.index(self.current) if self.current in names else 0) + by))
        self.current = names[at]
        self.redraw()
        line, height = at + len(self.head(self.view, width)), self.content_region.height
        if not self.scroll_offset.y <= line < self.scroll_offset.y + height:
            self.scroll_to(y=max(0, line - height // 2), animate=False, force=True)
        self.post_message(self.Moved(self, self.current))

    def action_choose(self) -> None:
        """Open the current row, if it is one of those that are shown."""
        if self.current not in {name for name, _ in self.rows(self.view, self.content_region.width)}:
            return
        if self.current and self.opens is not None:
            self.opens(self.current)
        elif self.current:
            self.post_message(self.Chosen(self, self.current))

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor, a second one on the same row opens it."""
        width = self.content_region.width
        at = event.y - 1 + self.scroll_offset.y - len(self.head(self.view, width))
        rows = self.rows(self.view, width)
        if 0 <= at < len(rows) and not self.pulled(event):
            again, self.current = rows[at][0] == self.current, rows[at][0]
            self.redraw()
            self.post_message(self.Chosen(self, self.current) if again else self.Moved(self, self.current))
