"""Nothing stands before a halt: what covers the screen is closed when one begins, and what opens later makes room."""

from __future__ import annotations

import time
from typing import Any, Final

from textual.app import App
from textual.screen import ModalScreen, Screen

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.judging.view import halting
from uvcc_console.ui.panels.halt_panel import HaltPanel

HUSH_S: Final = 1.5  # whoever was typing into what has just closed did not mean the keys of the run


class Uncover:
    """Remembers for which halt the screen was cleared."""

    def __init__(self) -> None:
        self._nonce = ""
        self._until = float("-inf")

    def look(self, app: App[Any], s: Snapshot) -> None:
        """Close the palette and every dialog when a halt begins that is no drill."""
        if not halting(s) or s.halt.nonce == self._nonce:
            return
        self._nonce = s.halt.nonce
        while isinstance(app.screen, ModalScreen):
            self._until = time.monotonic() + HUSH_S
            app.pop_screen()

    @property
    def hushed(self) -> bool:
        """Whether something has just been closed under the operator's fingers."""
        return time.monotonic() < self._until


def make_room(screen: Screen[Any], main: Screen[Any]) -> None:
    """Have a dialog stand below the halt panel while that is shown."""
    screen.set_class(any(panel.display for panel in main.query(HaltPanel)), "-halting")
