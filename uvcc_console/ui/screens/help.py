"""Help: the focused panel first, then every key, with the reason where something is not possible now; m: the manual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from uvcc_console.ui.drawing.paint import Line, Span, wrap
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.registry.keys import ACTIONS, Context
from uvcc_console.ui.widgets.panel import Panel

MANUAL = "manual"
_GROUPS = (("run", "The run"), ("pods", "Pods"), ("panels", "Panels"), ("screen", "Screen"), ("replay", "Replay"))
_OFTEN: Final = 4


def help_lines(context: Context, panel: str, panel_help: str, width: int) -> list[Line]:
    """The overlay's lines."""
    lines: list[Line] = []
    if panel_help:
        lines.append([(panel, "accent bold")])
        for paragraph in panel_help.split("\n"):
            lines += wrap([(paragraph, "text")], width)
        lines.append([("", "")])
    shown = [a for a in ACTIONS.values() if a.group != "replay" or context.replay]
    often = _often(a.reason(context) for a in shown)
    if often:
        lines += wrap([("not now", "warn"), (f", where no more is said: {often}", "text")], width)
        lines.append([("", "")])
    for group, title in _GROUPS:
        if group == "replay" and not context.replay:
            continue
        lines.append([(title, "accent bold")])
        for a in ACTIONS.values():
            if a.group != group:
                continue
            why = a.reason(context)
            line: list[Span] = [(f"{a.label:<8}", "key"), (f"{a.name:<13}", "title"), (a.description, "text")]
            if why:
                line.append(("  not now" if why == often else f"  not now: {why}", "warn"))
            elif a.cli:
                line.append((f"  {a.cli}", "muted"))
            lines += wrap(line, width, " " * 21)
        lines.append([("", "")])
    last = (
        "Tab moves between panels, j k and the arrows inside them. m opens the manual, at the newest alert. Esc closes."
    )
    lines += wrap([(last, "muted")], width)
    return lines


def _often(reasons: Iterable[str]) -> str:
    """The reason that so many keys share that it is said once; empty where none is."""
    ((why, times),) = Counter(filter(None, reasons)).most_common(1) or [("", 0)]
    return why if times >= _OFTEN else ""


class HelpPanel(Panel):
    """The overlay's content."""

    title = "Help"
    grows = True

    def __init__(self, context: Context, panel: str, panel_help: str) -> None:
        super().__init__(id="help", classes="modal")
        self._about = (context, panel, panel_help)

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return help_lines(*self._about, width)


class HelpScreen(ModalScreen[str]):
    """Closes with Esc, q or ?; answers ``MANUAL`` where the manual is wanted."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,question_mark", "dismiss", "close"),
        ("m", f"dismiss('{MANUAL}')", "manual"),
    ]

    def __init__(self, context: Context, panel: str = "", panel_help: str = "") -> None:
        super().__init__()
        self._about = (context, panel, panel_help)

    def compose(self) -> ComposeResult:
        yield HelpPanel(*self._about)

    def on_mount(self) -> None:
        self.query_one(HelpPanel).focus()
