"""A sign on every panel that is in sight: its key takes the keyboard there and leaves the view as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.widgets import Static

from uvcc_console.ui.panels.fleet import labels


def signs(numbers: Mapping[str, str]) -> dict[str, str]:
    """A key for every panel, by its id: its own digit where it has one, else a letter."""
    free = iter(labels(len(numbers)))
    return {name: number if len(number) == 1 else next(free) for name, number in numbers.items()}


class JumpScreen(ModalScreen[str]):
    """Answers the id of the panel whose sign was typed; anything else closes it."""

    DEFAULT_CSS = """
    JumpScreen { background: transparent; }
    JumpScreen Static {
        position: absolute; width: 5; height: 1; content-align: center middle;
        background: $uvcc-focus; color: $background; text-style: bold;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "close")]

    def __init__(self, places: Mapping[str, Region], keys: Mapping[str, str]) -> None:
        super().__init__()
        self._places, self._keys = places, keys

    def compose(self) -> ComposeResult:
        for name, place in self._places.items():
            sign = Static(self._keys[name], markup=False)
            sign.styles.offset = (place.x + max(0, place.width // 2 - 2), place.y + min(1, max(0, place.height - 1)))
            yield sign

    def on_key(self, event: events.Key) -> None:
        event.stop()
        name = next((n for n, key in self._keys.items() if key == event.character), None)
        self.dismiss(name)
