"""The console. It reads a snapshot source, writes intents to the journal, and holds no state of any run itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual import events, on
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import Provider

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.commands import Commands
from uvcc_console.ui.filters import Filter
from uvcc_console.ui.glyphs import choose
from uvcc_console.ui.halt_switch import Cadence
from uvcc_console.ui.keys import ACTIONS, Context, bindings, footer
from uvcc_console.ui.paint import Palette
from uvcc_console.ui.processes import CONDUCTOR, Processes, RunProcesses
from uvcc_console.ui.screens.run import RunScreen
from uvcc_console.ui.source import Clock, JournalSource, JournalWriter, ReplaySource, Source
from uvcc_console.ui.theme import DARK, LIGHT, THEMES
from uvcc_console.ui.view import View, holding
from uvcc_console.ui.widgets.fleet import FleetPanel
from uvcc_console.ui.widgets.prompt import Prompt

Severity = Literal["information", "warning", "error"]
JOURNAL = "journal.sqlite"
TICK_S = 0.1


def _palette_provider() -> type[Provider]:
    from uvcc_console.ui.palette import ActionProvider

    return ActionProvider


class UvccApp(App[int]):
    """One run on the screen. ``clock`` and ``key_time`` are injected so that tests need no waiting."""

    TITLE = "UVCC"
    CSS_PATH = "screens/run.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]  # noqa: RUF012
    COMMANDS: ClassVar[set[Any]] = {_palette_provider}
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(),
        Binding("ctrl+c", "hint", show=False, priority=True),
        Binding("ctrl+q", "do('detach')", show=False),
    ]

    def __init__(
        self,
        run_dir: Path,
        source: Source,
        writer: JournalWriter | None = None,
        *,
        processes: Processes | None = None,
        readonly: bool = False,
        key_time: Callable[[events.Key], float] = lambda event: event.time,
        ascii_only: bool = False,
        utc: bool = False,
        tick_s: float = TICK_S,
    ) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.source = source
        self.writer = writer
        self.processes = processes or RunProcesses(run_dir)
        self.conducted = True
        self.readonly = readonly
        self.filter = Filter()
        self.cadence = Cadence()
        self.commands = Commands(self)
        self.palette = Palette({})
        self.key_time = key_time
        self._glyphs = choose(ascii_only)
        self._utc = utc
        self._tick_s = tick_s
        self._drawn: tuple[int, int, str] = (-1, -1, "")
        self._main = RunScreen(self._begin)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = (
            os.environ.get("UVCC_THEME", "uvcc-dark")
            if os.environ.get("UVCC_THEME") in self.available_themes
            else "uvcc-dark"
        )

    # ---- the picture

    @property
    def snap(self) -> Snapshot:
        """The newest snapshot."""
        return self.source.snapshot

    def now(self) -> float:
        """The time ages are measured against."""
        return self.source.now()

    def context(self) -> Context:
        """What decides which actions are possible."""
        return Context(self.snap, True, self.readonly, isinstance(self.source, ReplaySource), self.conducted)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        base = DARK if self.current_theme.dark else LIGHT
        return {key: value for key, value in base.variables.items() if key.startswith("uvcc-")}

    def get_default_screen(self) -> RunScreen:
        return self._main

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, lambda _: self._repaint())
        if self._glyphs.name == "ascii":
            self.add_class("-ascii")
            self._main.add_class("-ascii")

    def _begin(self) -> None:
        self._repaint()
        self.tick()
        self.set_interval(self._tick_s, self.tick)
        if self.writer is not None:
            self.set_interval(1.0, self.check_processes)

    def _repaint(self) -> None:
        self.palette = Palette(self.theme_variables, colour=not self.no_color, ascii_only=self._glyphs.name == "ascii")
        self.refresh_view()
        self._main.refresh(layout=True)

    def tick(self) -> None:
        """Fold what is new and repaint what that changes; ten times a second, and at once after an action."""
        lines = self.source.poll()
        now = self.now()
        pace = 10 if holding(self.snap, now) is not None else 1
        state = (self.snap.seq, int(now * pace), self._replay_note())
        if state != self._drawn or lines is None:
            self._drawn = state
            self.refresh_view()
        if lines is None or lines:
            self._main.log_lines(lines)
        if self.source.behind:  # catching up: keys first, then the next part
            self.set_timer(0.005, self.tick)

    def check_processes(self) -> None:
        """See once a second whether somebody conducts the run; a conductor that just starts gets 5 s."""
        quiet = self.now() - self.snap.updated > 5.0
        self.conducted = bool(self.snap.ended) or not quiet or self.processes.alive(CONDUCTOR)

    def refresh_view(self) -> None:
        """Give the screen a new view."""
        if not self._main.ready:
            return
        view = View(
            snap=self.snap,
            now=self.now(),
            glyphs=self._glyphs,
            readonly=self.readonly,
            replay=self._replay_note(),
            filter=self.filter,
            run_dir=str(self.run_dir),
            utc=self._utc,
            conducted=self.conducted,
        )
        self._main.show(view, footer(self.context()))

    def _replay_note(self) -> str:
        if not isinstance(self.source, ReplaySource):
            return ""
        state = "" if self.source.playing else " paused"
        return f"{self.source.progress:.0%} {self._glyphs.times}{self.source.speed:g}{state}"

    def say(self, text: str, severity: Severity = "information") -> None:
        """A short word to the operator."""
        self.notify(text, severity=severity, timeout=4 if severity == "information" else 7, markup=False)

    # ---- keys

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and not event.is_forwarded:
            self.cadence.note(self.key_time(event))
        await super().on_event(event)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "do" and parameters == ("release",):  # outside a hold, Esc belongs to whatever has the keyboard
            return holding(self.snap, self.now()) is not None
        return super().check_action(action, parameters)

    def action_do(self, name: str) -> None:
        """Run an action of the registry."""
        self.commands.run(ACTIONS[name])

    def action_hint(self) -> None:
        """Ctrl+C must not end anything by reflex."""
        self.say("q leaves the console and the run goes on; F9 halts it; t tears it down")

    def leave(self) -> None:
        """Leave the console."""
        self.exit(
            0,
            message=f"detached; the run goes on. Come back with: uvcc attach {self.snap.run}"
            if self._alive()
            else None,
        )

    def _alive(self) -> bool:
        return not isinstance(self.source, ReplaySource) and not self.snap.ended

    @on(Prompt.Changed)
    def _draft(self, event: Prompt.Changed) -> None:
        if event.kind == "filter":
            self.commands.set_filter(event.text, final=False)

    @on(Prompt.Done)
    def _prompted(self, event: Prompt.Done) -> None:
        self._main.query_one(FleetPanel).focus()
        if event.kind == "filter":
            self.commands.set_filter(event.text, final=event.accepted)
        elif event.accepted:
            if self.cadence.pasted:
                self.say("command ignored: it came faster than fingers type", "warning")
            else:
                self.commands.line(event.text)

    @on(FleetPanel.Opened)
    def _opened(self, event: FleetPanel.Opened) -> None:
        self.commands.set_filter(f"pod={event.pod}", final=True)
        self._main.open_page("3")


def open_app(
    run_dir: Path,
    *,
    readonly: bool = False,
    replay: bool = False,
    clock: Clock = time.time,
    budget_s: float = 0.03,
    **options: Any,
) -> UvccApp:
    """The app over a run's journal. Raises UnreadableError when there is none."""
    path = run_dir / JOURNAL
    if replay:
        return UvccApp(run_dir, ReplaySource(path, clock=clock), None, readonly=readonly, **options)
    source, writer = JournalSource(path, clock=clock, budget_s=budget_s), JournalWriter(path, "tui", clock=clock)
    return UvccApp(run_dir, source, writer, readonly=readonly, **options)


def run_app(run_dir: Path, *, readonly: bool = False, replay: bool = False, ascii_only: bool = False) -> int:
    """Show a run until the operator leaves; the exit code for the shell. Read-only still halts."""
    app = open_app(
        run_dir, readonly=readonly, replay=replay, ascii_only=ascii_only or os.environ.get("UVCC_ASCII") == "1"
    )
    try:
        return app.run() or 0
    finally:
        app.source.close()
        if app.writer:
            app.writer.close()


__all__ = ["UvccApp", "open_app", "run_app"]
