"""A click told from a pull: the mouse was let go where it was pressed."""

from __future__ import annotations

from textual import events
from textual.geometry import Offset
from textual.widget import Widget

SHAKE = 1  # columns by which a hand may move between the two


class Pressed(Widget):
    """Knows where the mouse was pressed on it. Who pulls a border over a list means none of its lines.

    To be named behind what a widget is: Textual takes a class's style sheets along its first base.
    """

    _pressed: Offset | None = None

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Remember the place."""
        self._pressed = event.screen_offset

    def pulled(self, event: events.Click) -> bool:
        """Whether this click ends a pull that began elsewhere."""
        began, self._pressed = self._pressed, None
        return began is not None and (began.y != event.screen_y or abs(began.x - event.screen_x) > SHAKE)
