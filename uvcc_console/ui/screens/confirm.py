"""Questions before what cannot be undone. Nothing is preselected; pasting the word does not enter it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from uvcc_console.ui.drawing.paint import literal


class ConfirmScreen(ModalScreen[bool]):
    """Shows what would happen and wants ``word`` typed. Dismisses with True only then."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(False)", "cancel")]

    def __init__(self, title: str, lines: Sequence[str], word: str) -> None:
        super().__init__()
        self._title = title
        self._lines = lines
        self._word = word

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm", classes="modal"):
            with VerticalScroll(id="lines", can_focus=False):  # what there is no room for; the question always has some
                yield Static("\n".join(literal(line) for line in self._lines))
            word = literal(self._word)
            with Vertical(id="answer"):
                yield Static(f"Type [bold]{word}[/] and press Enter. Esc leaves everything as it is.", id="ask")
                yield Input(id="word", placeholder=self._word)
                yield Static("", id="wrong")

    def on_mount(self) -> None:
        self.query_one("#confirm").border_title = literal(self._title)
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        pasted = getattr(self.app, "cadence", None)
        if pasted is not None and pasted.pasted:
            self.query_one("#wrong", Static).update(
                "[$warning]that came faster than fingers type: press Enter again[/]"
            )
        elif event.value.strip() == self._word:
            self.dismiss(True)
        else:
            self.query_one("#wrong", Static).update("[$error]that is not it; nothing was done[/]")
