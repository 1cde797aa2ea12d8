"""Reads a long text: a stack dump, a flight record, a file that came home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from uvcc_console.ui.drawing.paint import Line, clean, wrap
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.panel import Panel

MOST = 20_000


class TextPanel(Panel):
    """The text, wrapped to the width there is."""

    title = "Text"

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__(id="text", classes="modal")
        self._heading = title
        self._text = [clean(line) for line in lines[:MOST]]

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        out: list[Line] = []
        for text in self._text:
            role = _role(text)
            out += wrap([(text, role)], width, "    ") if len(text) > width else [[(text, role)]]
        return out or [[("nothing in it", "muted")]]

    def heading(self, view: View) -> tuple[str, str]:
        return self._heading, "Esc closes"


def _role(line: str) -> str:
    """How a line is coloured. A stack dump is Python's own text, and nothing but its words tells a head from the rest;
    nothing but the colour hangs on it.
    """
    if "Error" in line:
        return "bad"
    return "accent" if line.startswith(("Thread ", "Current thread")) else "text"


class ViewerScreen(ModalScreen[None]):
    """Closes with Esc or q."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss", "close")]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._about = (title, lines)

    def compose(self) -> ComposeResult:
        yield TextPanel(*self._about)

    def on_mount(self) -> None:
        self.query_one(TextPanel).focus()
