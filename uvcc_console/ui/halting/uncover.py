"""Nothing stands before a halt: what covers the screen is closed when one begins, and what opens later makes room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from textual.app import App
from textual.screen import ModalScreen, Screen

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.judging.view import halting
from uvcc_console.ui.panels.halt_panel import HaltPanel

HUSH_S: Final = 1.5  # whoever was typing into what has just closed did not mean the keys of the run
LONGEST_S: Final = 10.0  # and who types on means them no more than this


class Uncover:
    """Remembers for which halt the screen was cleared, and what keys are meant for that nobody sees any more.

    ``clock`` is that of the keys, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nonce = ""
        self._closed = self._until = float("-inf")
        self._escape = False
        self.hushed = False  # whether the key that is acted on was typed for something that is not there

    def look(self, app: App[Any], s: Snapshot) -> None:
        """Close the palette and every dialog when a halt begins that is no drill."""
        if not halting(s) or s.halt.nonce == self._nonce:
            return
        self._nonce = s.halt.nonce
        while isinstance(app.screen, ModalScreen):
            self.gone()
            app.pop_screen()

    def gone(self) -> None:
        """Something that takes keys was closed, or did not open, because of a halt."""
        self._closed = self._clock()
        self._until = self._closed + HUSH_S
        self._escape = True

    def typed(self, at: float) -> None:
        """A key of that moment is acted on next; who types on without a pause has not looked up yet."""
        self.hushed = at < self._until
        if self.hushed:
            self._until = max(self._until, min(at + HUSH_S, self._closed + LONGEST_S))

    def left_by_escape(self) -> bool:
        """Whether an Esc of now was meant for what is gone; the next one is not."""
        meant, self._escape = self._escape and self._clock() < self._until, False
        return meant


def make_room(screen: Screen[Any], main: Screen[Any]) -> None:
    """Have a dialog stand below the halt panel while that is shown."""
    screen.set_class(any(panel.display for panel in main.query(HaltPanel)), "-halting")
