"""The run screen: one overview, and a page for each panel. It keeps no state of the run, only of looking at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.feed.tape import Tape
from uvcc_console.ui.judging.condition import undecided
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.halt_panel import HaltPanel
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.panels.pod_page import PodPanel
from uvcc_console.ui.panels.result import ResultPanel
from uvcc_console.ui.registry.panels import Place, panels
from uvcc_console.ui.screens.borders import Borders, Grip, grip_at
from uvcc_console.ui.screens.trail import Spot, Trail
from uvcc_console.ui.widgets.bars import BannerBar, Bar, FooterBar, HeaderBar, TrackBar
from uvcc_console.ui.widgets.panel import Hints, Panel
from uvcc_console.ui.widgets.prompt import Prompt
from uvcc_console.ui.widgets.scrub import ScrubBar


def _made(place: Place) -> Iterator[Widget]:
    """The widgets of the panels that stand here, each with its page."""
    for spec in panels():
        if spec.place == place:
            widget = spec.load()(id=spec.id)
            widget.add_class("-panel", *(("-page-only",) if place == "page" else ()))
            yield widget


class RunScreen(Screen[None]):
    """Everything about one run."""

    AUTO_FOCUS = "#fleet"

    class BorderClicked(Message):
        """A click on the upper border of the panel with this number."""

        def __init__(self, number: str) -> None:
            super().__init__()
            self.number = number

    def __init__(self, on_ready: Callable[[], None]) -> None:
        super().__init__()
        self.trail = Trail()
        self.shape = Borders()
        self._free_log = True
        self._grip: Grip = ""
        self._pressed = (-1, -1)
        self.view = View()
        self._mounted = False
        self._on_ready = on_ready

    @property
    def ready(self) -> bool:
        """Whether all of it is there: it is made before the first picture, and taken down after the last."""
        return self._mounted and bool(self.query(FooterBar))

    def on_mount(self) -> None:
        self._mounted = True
        self._on_ready()

    def compose(self) -> ComposeResult:
        yield HeaderBar(id="header")
        yield TrackBar(id="track")
        yield ScrubBar(id="scrub")
        yield BannerBar(id="banner")
        yield HaltPanel(id="halt")
        yield ResultPanel(id="result")
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield from _made("left")
            with Vertical(id="right"):
                yield from _made("right")
        yield from _made("page")
        yield from _made("below")
        with Vertical(id="keys"):  # always there, whatever else finds no room
            yield Prompt(id="prompt")
            yield FooterBar(id="footer")

    def panels(self) -> Iterator[Panel | LogView]:
        """The panels that have a page, as they stand on the screen."""
        for widget in self.query(".-panel"):
            yield cast("Panel | LogView", widget)

    def show(self, view: View, keys: Sequence[tuple[str, str, bool]]) -> None:
        """Give every visible part the new view."""
        self.view = view
        self.query_one(FooterBar).keys = [*keys, *((key, name, True) for key, name in self.hints())]
        for bar in self.query(Bar):
            bar.show(view)
        for panel in (self.query_one(HaltPanel), self.query_one(ResultPanel)):
            panel.show(view)
        self.set_class(self.query_one(HaltPanel).display, "-halting")
        self.set_class(self.query_one(ResultPanel).display, "-result")
        self.set_class(undecided(view.snap) and not view.snap.ended, "-undecided")
        self.set_class(bool(view.snap.job_kind) and not view.snap.proves, "-plain-job")
        if self._free_log != self._logs_height_is_free():
            self.apply_shape()
        for part in self.panels():
            part.show(view)

    def show_tape(self, tape: Tape) -> None:
        """Show where the replay stands."""
        for bar in self.query(ScrubBar):  # none any more where the app is about to end
            bar.show_tape(tape)

    def log_lines(self, lines: Sequence[LogEntry] | None) -> None:
        """New log lines; None = draw the log anew from the snapshot."""
        log = self.query_one(LogView)
        if lines is None:
            log.replace(self.view.snap.log)
        else:
            log.add(lines)

    @property
    def page(self) -> str:
        """The number of the panel that is shown alone; empty in the overview."""
        return self.trail.here.page

    def crumbs(self) -> tuple[str, ...]:
        """The way here in words; nothing in the overview."""
        named = {p.number: spec.name for p in self.panels() for spec in panels() if spec.id == p.id}
        path = self.trail.path
        return ("overview", *(s.pod if s.page == PodPanel.number else named.get(s.page, "") for s in path[1:])) * (
            len(path) > 1
        )

    def alone(self) -> Panel | LogView | None:
        """The panel that is shown alone."""
        return next((p for p in self.panels() if self.page and p.number == self.page), None)

    def hints(self) -> Hints:
        """The keys that the panel's own page has beside everybody's, with what they are for."""
        panel = self.alone()
        return panel.hints if panel is not None else ()

    def leave(self, filtered: str) -> None:
        """Remember how this view looks, for whoever comes back to it."""
        self.trail.leave(filter=filtered, focus=str(self.focused.id or "") if self.focused is not None else "")

    def open_page(self, number: str, pod: str = "", *, filtered: str = "", toggle: bool = True) -> None:
        """Show one panel alone; the same number again, or an empty one, goes back to the overview."""
        self.leave(filtered)
        here = self.trail.here
        again = toggle and (number, pod) == (here.page, here.pod)
        self.trail.go(Spot() if again else Spot(number, pod, filtered))
        self.lay_out()

    def lay_out(self) -> None:
        """Lay the panels out as the trail says, with the focus where it was."""
        self.set_class(bool(self.page), "-page")
        for panel in self.panels():
            mine = panel.number == self.page
            panel.set_class(bool(self.page) and not mine, "-out")
            panel.set_class(mine, "-paged")
        for box in ("#left", "#right"):
            column = self.query_one(box)
            column.set_class(all(child.has_class("-out") for child in column.children), "-out")
        body = self.query_one("#body")
        body.set_class(all(child.has_class("-out") for child in body.children), "-out")
        known = {p.id: p for p in self.panels() if not p.has_class("-out")}
        target = known.get(self.trail.here.focus)
        target = target or next((p for p in self.panels() if p.number == (self.page or "1")), None)
        if target is not None:
            target.focus()
        self.apply_shape()
        self.call_after_refresh(lambda: [p.show(self.view) for p in self.panels()])

    # ---- borders

    def apply_shape(self) -> None:
        """Give columns and log the sizes that were chosen, in an overview that is large enough to have both."""
        right, log = self.query_one("#right"), self.query_one(LogView)
        shape = self.shape.fitting(self.size.width, self.size.height) if not self.page else Borders()
        right.styles.width = shape.right if shape.right and self.has_class("-wide") else None
        self._free_log = self._logs_height_is_free()
        lines = shape.log if self.has_class("-tall") else shape.low
        log.styles.height = lines if lines and self._free_log else None

    def _logs_height_is_free(self) -> bool:
        """On a short screen a halt, a result and what wants a decision have the room that they need."""
        return self.has_class("-tall") or not any(map(self.has_class, ("-halting", "-result", "-undecided")))

    def on_resize(self) -> None:
        if self.ready:
            self.call_after_refresh(self.apply_shape)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Take hold of a border."""
        at = (int(event.screen_x), int(event.screen_y))
        self._pressed, self._grip = at, ""
        if not self.page:
            regions = (self.query_one(name).region for name in ("#body", "#right", "#log"))
            grip = grip_at(*at, *regions)
            movable = self.has_class("-wide") if grip == "column" else self._logs_height_is_free()
            self._grip = grip if movable else ""

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Move the border that is held."""
        if not self._grip or not event.button:
            self._grip = ""
            return
        at = (int(event.screen_x), int(event.screen_y))
        right, log = self.query_one("#right").region, self.query_one(LogView).region
        short = not self.has_class("-tall")
        new = self.shape.pulled(self._grip, *at, right, log, short=short) if at != self._pressed else self.shape
        if new != self.shape:
            self.shape, self._pressed = new, (-1, -1)
            self.apply_shape()

    def on_mouse_up(self, event: events.MouseUp) -> None:
        """Let go of the border."""
        self._grip = ""

    def on_click(self, event: events.Click) -> None:
        """A click on a panel's upper border opens its page, or leaves it; the panel itself has had the click before."""
        at, pressed = (int(event.screen_x), int(event.screen_y)), self._pressed
        self._pressed = (-1, -1)
        if at == pressed:
            hit = next((p for p in self.panels() if p.display and p.region.y == at[1] and p.region.contains(*at)), None)
            if hit is not None and hit.styles.border_top[0]:
                self.post_message(self.BorderClicked(hit.number))

    def focused_panel(self) -> Widget | None:
        """The panel that has the keyboard."""
        return self.focused if isinstance(self.focused, (Panel, LogView)) else None
