"""The line at the bottom where commands, filters and searches are typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.events import Key
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label

from uvcc_console.ui.drawing.paint import literal
from uvcc_console.ui.widgets.typed_lines import TypedLines, candidates, completed

Offer = Callable[[str], Sequence[str]]
MOST = 12


class Prompt(Horizontal):
    """Hidden until asked for. ``kind`` is command or filter; Esc puts back what was there before.

    Up and down go through what was typed before, Tab completes the last word.
    """

    DEFAULT_CSS = """
    Prompt { height: 1; display: none; background: $panel; }
    Prompt Label { width: auto; padding: 0 0 0 1; color: $primary; text-style: bold; }
    Prompt Input, Prompt Input:focus { border: none; width: 1fr; height: 1; padding: 0; background: $panel; }
    Prompt #hint { max-width: 50%; color: $uvcc-muted; padding: 0 1; text-style: none; }
    """

    class Changed(Message):
        """The text while it is typed."""

        def __init__(self, kind: str, text: str) -> None:
            super().__init__()
            self.kind, self.text = kind, text

    class Done(Message):
        """Enter (``text`` is meant) or Esc (``text`` is what was there before)."""

        def __init__(self, kind: str, text: str, accepted: bool) -> None:
            super().__init__()
            self.kind, self.text, self.accepted = kind, text, accepted

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.kind = ""
        self._before = ""
        self._back: Widget | None = None
        self._offer: Offer | None = None
        self.history: dict[str, TypedLines] = {}

    def compose(self) -> ComposeResult:
        yield Label(":", id="sign")
        yield Input(id="line", select_on_focus=False)
        yield Label("", id="hint")

    def ask(self, kind: str, sign: str, text: str = "", hint: str = "", offer: Offer | None = None) -> None:
        """Show the line and take the keyboard. ``offer`` tells what the last word of a line may be."""
        self._offer = offer
        self.history.setdefault(kind, TypedLines()).rewind()
        self.kind, self._before, self._back = kind, text, self.screen.focused
        self.query_one("#sign", Label).update(sign)
        self.hint(hint)
        self.display = True
        line = self.query_one(Input)
        line.value = text
        line.cursor_position = len(text)
        self.screen.set_focus(line)  # at once: what is typed next belongs to the line

    def hint(self, text: str) -> None:
        """A word of help or what is wrong with the text."""
        self.query_one("#hint", Label).update(literal(text))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self._offers(event.value)
            self.post_message(self.Changed(self.kind, event.value))

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        self._finish(event.value, True)

    def _offers(self, text: str) -> None:
        """What the last word may become, while it is typed; where nothing is known of it, what stood there stays."""
        if self._offer is None or not text or text == self._before:
            return
        found = candidates(text, self._offer(text))
        if found:
            self.hint(" ".join(found[:MOST]) + (" …" if len(found) > MOST else ""))

    def _complete(self) -> None:
        """As much of the last word as is certain; what it may be is shown beside it."""
        line = self.query_one(Input)
        if self._offer is None:
            return
        line.value, found = completed(line.value, self._offer(line.value))
        line.cursor_position = len(line.value)
        self.hint(" ".join(found[:MOST]) if len(found) != 1 else "")

    def on_key(self, event: Key) -> None:
        if event.key in ("up", "down", "tab"):
            event.stop()
            event.prevent_default()
            line = self.query_one(Input)
            if event.key == "tab":
                self._complete()
            else:
                line.value = self.history[self.kind].move(-1 if event.key == "up" else 1, line.value)
                line.cursor_position = len(line.value)
        if event.key == "escape":
            event.stop()
            self._finish(self._before, False)

    def _finish(self, text: str, accepted: bool) -> None:
        self.display = False
        if accepted:
            self.history[self.kind].add(text)
        if self._back is not None and self._back.is_attached:
            self.screen.set_focus(self._back)
        self.post_message(self.Done(self.kind, text, accepted))
