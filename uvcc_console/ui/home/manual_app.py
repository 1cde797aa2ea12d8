"""``uvcc docs`` on a terminal: the manual's screen as an app of its own."""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.report import manual
from uvcc_console.report.manual import ManualPage
from uvcc_console.ui.app_base import ConsoleApp, ascii_wanted
from uvcc_console.ui.screens.manual_screen import ManualScreen


class ManualApp(ConsoleApp[None]):
    """Ends when its screen is closed."""

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, known: Sequence[ManualPage], address: str = manual.START) -> None:
        super().__init__(ascii_only=ascii_wanted())
        self._manual = ManualScreen(known, address)

    def on_mount(self) -> None:  # textual calls the base's as well
        self.push_screen(self._manual, lambda _: self.exit())
        self.call_after_refresh(self.opened)
