"""The one kind of panel: lines drawn by a pure function from a view, repainted only where they changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, cast

from textual.binding import BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from uvcc_console.ui.drawing.paint import Line, Palette, ascii_text, literal
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.pressed import Pressed

Hints = tuple[tuple[str, str], ...]


class HasPalette(Protocol):
    """What a panel needs of its app."""

    palette: Palette


def action_of(bindings: Sequence[BindingType], key: str) -> str:
    """What a panel does at a key of its own; empty for a key that it does not have."""
    own = (b for b in bindings if isinstance(b, tuple))
    return next((b[1] for b in own if key in b[0].split(",")), "")


def _same(a: object, b: object) -> bool:
    return isinstance(a, (int, float, str)) and a == b


class Panel(ScrollView, Pressed, can_focus=True):
    """A bordered panel. Subclasses give ``title`` and ``draw``; ``help`` tells the operator what it shows."""

    DEFAULT_CSS = """
    Panel { scrollbar-size: 1 1; overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("j", "line(1)", "down"),
        ("k", "line(-1)", "up"),
        ("g", "scroll_home", "top"),
        ("G", "scroll_end", "end"),
    ]
    title: ClassVar[str] = ""
    number: ClassVar[str] = ""
    help: ClassVar[str] = ""
    hints: ClassVar[Hints] = ()  # keys of its own that its page's last line names, and for what
    grows: ClassVar[bool] = False  # whether the panel's height follows its lines (bounded by its CSS)

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.view = View()
        self.lines: list[Line] = []
        self._inputs: tuple[object, ...] = ()
        self._drawn_for = Size(0, 0)

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        """The panel's lines for a content area of this size."""
        raise NotImplementedError

    def inputs(self, view: View) -> tuple[object, ...]:
        """What ``draw`` depends on; a panel is drawn anew only when one of these is another object."""
        return (view,)

    def heading(self, view: View) -> tuple[str, str]:
        """Texts in the upper and the lower border."""
        return self.title, ""

    def on_mount(self) -> None:
        self._head()

    def on_resize(self) -> None:
        self.redraw()

    def show(self, view: View) -> None:
        """Take a new view; cheap when nothing that this panel draws has changed."""
        self.view = view
        new = self.inputs(view)
        old, self._inputs = self._inputs, new
        unchanged = len(old) == len(new) and all(a is b or _same(a, b) for a, b in zip(old, new, strict=True))
        if self.is_attached and self.display and not (unchanged and self.lines):
            self.redraw()

    def _head(self) -> None:
        g = self.view.glyphs
        top, bottom = self.heading(self.view)
        label = f"{self.number if len(self.number) == 1 else ''} {top}".strip()
        for name, text in (("border_title", label), ("border_subtitle", bottom)):
            safe = literal(text if g.braille else ascii_text(text))
            if getattr(self, f"_{name}_text", None) != safe:
                setattr(self, f"_{name}_text", safe)
                setattr(self, name, safe)

    def redraw(self) -> None:
        """Draw anew and repaint the lines that differ."""
        self._drawn_for = self.content_region.size
        width, height = self._drawn_for
        if width <= 0:
            return
        self._head()
        old, whole = self.lines, width
        bar = self.styles.scrollbar_size_vertical
        if len(old) > height > 0:  # it had a scrollbar, and most likely needs it still
            width = whole - bar
        self.lines = list(self.draw(self.view, width, height))
        needed = whole - bar if len(self.lines) > height > 0 else whole
        if needed != width:
            width = needed
            self.lines = list(self.draw(self.view, width, height))
        if len(old) != len(self.lines) or self.virtual_size.width != width:
            self.virtual_size = Size(width, len(self.lines))
            if self.grows and len(old) != len(self.lines):
                self.refresh(layout=True)
            self.refresh()
            return
        top = self.scroll_offset.y
        for y in range(top, min(len(self.lines), top + self.size.height)):
            if old[y] != self.lines[y]:
                self.refresh_line(y)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return (
            max(1, len(self.draw(self.view, width, 0)))
            if self.grows
            else super().get_content_height(container, viewport, width)
        )

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        width = self.content_region.width
        if self._drawn_for != self.content_region.size:  # a border or padding came or went without a resize
            self._drawn_for = self.content_region.size
            self.call_later(self.redraw)
        at = y + self.scroll_offset.y
        if at >= len(self.lines):
            return Strip.blank(width, base)
        return cast(HasPalette, self.app).palette.strip(self.lines[at], width, base)

    def action_line(self, by: int) -> None:
        """Move by a line; panels with a cursor move that instead."""
        self.scroll_relative(y=by, animate=False)

    def context_help(self) -> str:
        """Help of this very panel, shown first by ``?``."""
        return self.help
