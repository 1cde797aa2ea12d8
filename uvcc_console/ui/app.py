"""The console on one run. It reads a snapshot source, writes intents to the journal, and holds no state of the run."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events, on
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input

from uvcc_console.core import events as ev
from uvcc_console.runs.notices import NoticeWay, ways
from uvcc_console.runs.notify import Notifier, operators_program
from uvcc_console.ui.actions.commands import Commands, tell
from uvcc_console.ui.actions.forwarding import forward
from uvcc_console.ui.actions.layouts import given, taken
from uvcc_console.ui.actions.palette import ActionProvider
from uvcc_console.ui.app_base import ascii_wanted, own
from uvcc_console.ui.drawing.frames import Frames
from uvcc_console.ui.feed.kept_layout import ScreenLayout, keep, load
from uvcc_console.ui.feed.source import JournalWriter, ReplaySource, SnapshotSource, WallTime, open_source
from uvcc_console.ui.halting.hand_over import TypedInput, WaitingKey
from uvcc_console.ui.halting.keyboard import RawKeys
from uvcc_console.ui.halting.pauses import Pauses, orders_first
from uvcc_console.ui.judging.rechecks import Rechecks
from uvcc_console.ui.judging.view import View, holding
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.fleet import FleetPanel
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.panels.pod_page import PodPanel
from uvcc_console.ui.registry.keys import ACTIONS, UiAction, bindings, footer
from uvcc_console.ui.run_base import RunConsole
from uvcc_console.ui.screens.run import RunScreen
from uvcc_console.ui.widgets.bars import FooterBar
from uvcc_console.ui.widgets.panel import action_of
from uvcc_console.ui.widgets.prompt import Prompt
from uvcc_console.ui.widgets.scrub import ScrubBar
from uvcc_engine.contract.errors import UvccError


class UvccApp(RunConsole):
    """One run on the screen."""

    COMMANDS: ClassVar[set[Any]] = {ActionProvider}
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(),
        Binding("ctrl+c", "hint", show=False, priority=True),
        Binding("ctrl+q", "do('detach')", show=False),
    ]

    def why_stay(self) -> str:
        """A hold is decided by keys, and nobody would read them."""
        if holding(self.snap, self.now()) is not None:
            return "a hold is open: Esc releases it, F9 halts"
        return super().why_stay()

    def __init__(
        self,
        run_dir: Path,
        source: SnapshotSource,
        writer: JournalWriter | None = None,
        *,
        hold: bool = False,
        tick_s: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(run_dir, source, writer, **options)
        self.commands = Commands(self)
        self.main = RunScreen(self._begin)
        self.rechecks = Rechecks(run_dir)
        self.notifier = Notifier(partial(tell, self), self._notices() if writer and not self.readonly else None)
        self._hold = hold
        self._tick_s = tick_s
        self._drawn: tuple[object, ...] = ()
        self.frames = Frames()
        self.pauses: Pauses | None = None

    def lay_out(self, layout: ScreenLayout) -> None:
        given(self, layout)

    def exit(self, result: int | None = None, return_code: int = 0, message: Any = None) -> None:
        """Leave, remembering how this operator looks at runs."""
        if self.remembers and self.main.ready:
            try:
                keep(taken(self))
            except UvccError as e:
                message = "\n".join(filter(None, (message, f"the layout is not kept: {e}")))
        super().exit(result, return_code, message)

    def _notices(self) -> NoticeWay | None:
        """Where notices go beside the screen; settings that cannot be read are told, and leave the console alone."""
        try:
            return ways(operators_program(), self._to_terminal, self.told, self.run_dir)
        except UvccError as e:
            self.call_later(self.say, str(e), "warning")
            return None

    def _to_terminal(self, text: str) -> None:
        """Past the screen, to the terminal itself."""
        if self._driver is not None and not self.is_headless:
            self._driver.write(text)
            self._driver.flush()

    def get_default_screen(self) -> RunScreen:
        return self.main

    def _begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        if not self.glyphs.braille:
            self.main.add_class("-ascii")
        self.recolour()
        if self.keeps_layout:
            self.lay_out(load())
        self.tick()
        self.set_interval(self._tick_s, self.tick)
        if self.writer is not None:
            self.set_interval(1.0, self.check_processes)
        if self._hold:
            self.action_do("halt")
        self.pending.deal_with(self.urgent_key)
        self.call_after_refresh(self.opened)

    def tick(self) -> None:
        """Fold what is new and repaint what that changes; ten times a second, and at once after an action.

        Catching up goes before painting: keys first, then the next part, and a picture twice a second.
        """
        if self.pauses is not None:
            self.pauses.look(self.commands.urgent.rhythm.last, holding(self.snap, self.now()) is None)
        self.frames.take(self.source.poll())
        if self.source.behind:
            self.set_timer(0.005, self.tick)
        if not self.frames.due(self.source.behind):
            return
        lines = self.frames.give()
        self.uncover.look(self, self.snap)
        now = self.now()
        pace = 10 if holding(self.snap, now) is not None else 1
        before = self.rechecks.changed
        changed = before if self.source.behind else self.rechecks.look(self.snap, now)
        state = (self.snap.seq, int(now * pace), self._replay_note(), self.behind_s, self.conductor, self.sidecar)
        if state != self._drawn or lines is None or changed != before:
            self._drawn = state
            self.redraw()
        if (lines is None or lines) and self.main.ready:
            self.main.log_lines(lines)
        if not self.source.behind:
            if lines is None and isinstance(self.source, ReplaySource):  # wound on or back: what is there is not news
                self.notifier.forget()
            self.notifier.look(self.snap, now, changed)

    def redraw(self) -> None:
        if not self.main.ready:
            return
        view = View(
            snap=self.snap,
            now=self.now(),
            glyphs=self.glyphs,
            readonly=self.readonly,
            replay=self._replay_note(),
            filter=self.filter,
            run_dir=str(self.run_dir),
            utc=self.utc,
            conductor=self.conductor,
            sidecar=self.sidecar,
            behind_s=self.behind_s,
            changed=self.rechecks.changed,
            pod=self.main.trail.here.pod,
            crumbs=self.main.crumbs(),
        )
        self.main.show(view, footer(self.context()))

    def _replay_note(self) -> str:
        if not isinstance(self.source, ReplaySource):
            return ""
        tape = self.source.tape
        self.main.show_tape(tape)
        return f"{(tape.at - tape.start) / tape.span:.0%} {self.glyphs.times}{tape.speed:g}"

    # ---- keys

    async def _act_on(self, waiting: WaitingKey, *, followed: bool) -> None:
        if isinstance(waiting.event, events.Key):
            self.uncover.typed(waiting.event.time)
        await super()._act_on(waiting, followed=followed)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # outside a hold, and where it was pressed before F9, Esc belongs to whatever has the keyboard
        if parameters != ("release",):
            return True
        s = self.snap
        elsewhere = self.commands.urgent.before_f9(self.acted) or self.in_a_line(s.halt.nonce)
        return holding(s, self.now()) is not None and not elsewhere

    def raw_keys(self) -> RawKeys:
        """What finds F9 and Esc among the keyboard's bytes, in the thread that reads them."""
        urgent = self.commands.urgent
        return RawKeys(
            urgent.noted,
            lambda at: not self.commands.left and urgent.f9(at, self._may_halt),
            lambda: not self.commands.left and urgent.escape(),
            takes_text=self.takes_text,
            ignored=lambda n: self.told(f"{n} pasted keys ignored: nothing here takes text"),
        )

    def takes_text(self) -> bool:
        """Whether what is typed would go into a line of text; asked from the thread that reads the keyboard."""
        return not self.main.ready or isinstance(self.focused, Input) or isinstance(self.screen, ModalScreen)

    def urgent_key(self, event: events.Key, *, noted: bool = False) -> bool:
        """A key before it is queued; ``noted``: its bytes were seen before."""
        return not self.commands.left and self.commands.urgent.key(event, self._may_halt, noted=noted)

    def _may_halt(self) -> bool:
        return not ACTIONS["halt"].reason(self.context())

    def ordered(self, event: ev.HaltRequested, future: Future[str]) -> None:
        self.commands.ordered(event, future)

    def action_do(self, name: str) -> None:
        """Run an action of the registry."""
        self.commands.run(ACTIONS[name])

    def perform(self, action: UiAction) -> None:
        self.commands.run(action, by_key=False)

    def forward_tensorboard(self, pod: str) -> None:
        """Show the address once the forwarder has one; it ends with the console."""
        self.run_worker(forward(self, pod), group="tensorboard", exclusive=True, exit_on_error=False)

    def action_hint(self) -> None:
        """Ctrl+C must not end anything by reflex."""
        self.say("q leaves the console and the run goes on; F9 halts it; t tears it down")

    @on(Prompt.Changed)
    def _draft(self, event: Prompt.Changed) -> None:
        self.commands.typing(event.kind, event.text)

    @on(Prompt.Done)
    def _prompted(self, event: Prompt.Done) -> None:
        self.commands.typed(event.kind, event.text, event.accepted)

    @on(RunScreen.BorderClicked)
    def _border(self, event: RunScreen.BorderClicked) -> None:
        self.commands.open(event.number, self.main.trail.here.pod if event.number == PodPanel.number else "")

    @on(FooterBar.Clicked)
    async def _footer_key(self, event: FooterBar.Clicked) -> None:
        panel = self.main.alone()
        if panel is not None and (event.key, event.name) in panel.hints:
            await self.run_action(action_of(panel.BINDINGS, event.key), panel)
            return
        meant = [a for a in ACTIONS.values() if a.label == event.key]
        named = [a for a in meant if a.name == event.name]  # Esc is both a release and the way back
        for action in (named or meant)[:1]:
            self.commands.run(action, by_key=False)

    @on(ScrubBar.Sought)
    def _sought(self, event: ScrubBar.Sought) -> None:
        self.commands.seek(event.part)

    @on(FleetPanel.Opened)
    def _opened(self, event: FleetPanel.Opened) -> None:
        self.commands.open(PodPanel.number, event.pod)

    @on(LogView.Taken)
    def _taken(self, event: LogView.Taken) -> None:
        self.commands.take(event.lines, event.save)

    @on(LogView.LineWanted)
    def _line_wanted(self, event: LogView.LineWanted) -> None:
        self.commands.read(event.entry)

    @on(LogView.PartyWanted)
    def _party_wanted(self) -> None:
        self.commands.next_party()

    @on(ChartsPanel.OtherWanted)
    def _other_wanted(self) -> None:
        self.commands.next_other()

    @on(LogView.ViewWanted)
    def _view_wanted(self) -> None:
        self.commands.do_view("")

    @on(FleetPanel.ColumnsWanted)
    def _columns(self, event: FleetPanel.ColumnsWanted) -> None:
        self.commands.ask_columns(event.names)

    @on(PodPanel.Wanted)
    def _wanted(self, event: PodPanel.Wanted) -> None:
        if event.log:
            self.commands.open(LogView.number, filtered=f"pod={event.pod}")
        else:
            self.main.query_one(FleetPanel).point_at(event.pod)
            self.commands.open_beside(event.pod)


def open_app(
    run_dir: Path, *, replay: bool = False, clock: WallTime = time.time, budget_s: float = 0.03, **options: Any
) -> UvccApp:
    """The app over a run's journal. Raises UnreadableError when there is none."""
    source, writer = open_source(run_dir, replay=replay, clock=clock, budget_s=budget_s)
    return UvccApp(run_dir, source, writer, **options)


def _look() -> dict[str, Any]:
    """How the operator's settings want every screen."""
    return {"ascii_only": ascii_wanted(), "utc": own("utc") is True}


def run_app(run_dir: Path, *, readonly: bool = False, replay: bool = False) -> int:
    """Show a run until the operator leaves; the exit code for the shell. Read-only still halts.

    Raises UnreadableError when there is no journal.
    """
    return _shown(open_app(run_dir, readonly=readonly, replay=replay, **_look()))


def _shown(app: UvccApp) -> int:
    app.keeps_layout = True
    try:
        with orders_first() as app.pauses:
            return app.run() or 0
    finally:
        app.let_go()


def run_home(*, readonly: bool = False) -> int:
    """The start screen over all runs and profiles, and from there any run, until the operator leaves.

    ``readonly``: nothing is started, deleted or kept, and every run is shown read-only; a halt is still possible.
    """
    from uvcc_console.ui.home.home_app import HomeApp

    typed: list[TypedInput] = []
    while True:
        home = HomeApp(**_look(), readonly=readonly, keeps_layout=True, typed_before=typed)
        choice = home.run()
        if choice is None:
            return 0
        how: dict[str, Any] = {"readonly": readonly or choice.replay, "replay": choice.replay, "hold": choice.hold}
        app = open_app(choice.run_dir, typed_before=home.pending.take(), **how, **_look())
        app.hands_on = True
        _shown(app)
        typed = app.pending.take()
