"""Help: the focused panel first, then every key, then why some are not possible now."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from uvcc_console.ui.keys import ACTIONS, Context

_GROUPS = (("run", "The run"), ("panels", "Panels"), ("screen", "Screen"), ("replay", "Replay"))


def help_text(context: Context, panel: str, panel_help: str) -> str:
    """The overlay's text in textual markup."""
    lines: list[str] = []
    if panel_help:
        lines += [f"[bold $primary]{panel}[/]", *panel_help.replace("[", "\\[").split("\n"), ""]
    for group, title in _GROUPS:
        if group == "replay" and not context.replay:
            continue
        lines.append(f"[bold $primary]{title}[/]")
        for a in ACTIONS.values():
            if a.group != group:
                continue
            why = a.reason(context)
            cli = f"  [$uvcc-faint]{a.cli}[/]" if a.cli else ""
            label = a.label.replace("[", "\\[")
            text = f"[bold]{label:<9}[/]" + f"{a.name:<13}" + f"[$uvcc-muted]{a.description}[/]"
            lines.append(text + (f"  [$warning]not now: {why}[/]" if why else cli))
        lines.append("")
    lines.append("[$uvcc-muted]Tab moves between panels, j k and the arrows inside them. Esc closes.[/]")
    return "\n".join(lines)


class HelpScreen(ModalScreen[None]):
    """Closes with Esc, q or ?."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark", "dismiss", "close")]

    def __init__(self, context: Context, panel: str = "", panel_help: str = "") -> None:
        super().__init__()
        self._text = help_text(context, panel, panel_help)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="modal"):
            yield Static(self._text)

    def on_mount(self) -> None:
        box = self.query_one("#help")
        box.border_title = "Help"
        box.focus()
