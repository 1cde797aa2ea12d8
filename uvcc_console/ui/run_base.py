"""What commands, palette, evidence and forwarding know of the app that shows a run; ``app.UvccApp`` is that app."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from textual.app import ScreenStackError
from textual.driver import Driver
from textual.widgets import Input

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.app_base import ConsoleApp
from uvcc_console.ui.feed.kept_layout import ScreenLayout
from uvcc_console.ui.feed.run_processes import CONDUCTOR, HALTD, Processes, RunProcesses, see_to
from uvcc_console.ui.feed.source import BEHIND_S, JournalWriter, ReplaySource, SnapshotSource
from uvcc_console.ui.halting.handed import HandedOrders
from uvcc_console.ui.halting.own_halt import OwnHaltRequest
from uvcc_console.ui.halting.uncover import Uncover, make_room
from uvcc_console.ui.halting.urgent import call_in_loop, watched
from uvcc_console.ui.judging.filters import Filter
from uvcc_console.ui.judging.lamps import Lamp, Watchman
from uvcc_console.ui.judging.view import halting
from uvcc_console.ui.registry.keys import Context, UiAction
from uvcc_console.ui.screens.run import RunScreen


class RunConsole(ConsoleApp[int]):
    """One run, what is read of it and where intents are written; the screen that shows it."""

    main: RunScreen

    def get_driver_class(self) -> type[Driver]:
        return watched(super().get_driver_class())

    def __init__(
        self,
        run_dir: Path,
        source: SnapshotSource,
        writer: JournalWriter | None = None,
        *,
        processes: Processes | None = None,
        readonly: bool = False,
        **look: Any,
    ) -> None:
        super().__init__(**look)
        self.run_dir = run_dir
        self.source = source
        self.writer = writer
        self.processes = processes or RunProcesses(run_dir)
        self.asked = OwnHaltRequest()
        self.handed = HandedOrders()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.conductor, self.sidecar = Lamp(), Lamp()
        self._watch = {CONDUCTOR: Watchman(), HALTD: Watchman()}
        self.readonly = readonly
        self.by_name = False  # F9 asks for the run's name, and halts without a hold before
        self.place = "tui"  # where whoever asks sits, for the journal
        self.alone = False  # shows this run and none of the operator's others
        self._held: frozenset[str] = frozenset()
        self.uncover = Uncover()
        self.filter = Filter()
        self.keeps_layout = False
        self.usual_theme = self.theme

    def let_go(self) -> None:
        """Call behind the screen: what was asked for is done, then the journal is closed, and what failed is told."""
        self.source.close()
        if self.writer is not None:
            self.writer.close()
        self.handed.tell_rest()

    def lay_out(self, layout: ScreenLayout) -> None:
        """Show things as this operator chose before."""
        raise NotImplementedError

    @property
    def snap(self) -> Snapshot:
        """The newest snapshot, with what this console asked of the halt itself."""
        return self.asked.over(self.source.snapshot, self.source.now())

    def action_command_palette(self) -> None:
        """Every action by name, but not over a halt."""
        if halting(self.snap):
            self.would_cover("palette", ": takes commands")
        else:
            super().action_command_palette()
            make_room(self.screen, self.main)

    def would_cover(self, what: str, instead: str) -> None:
        """Say that this is not opened over a halt; the keys that were meant for it are not those of the run."""
        self.uncover.gone()
        self.say(f"{what}: a halt is under way and would be covered; {instead}", "warning")

    # ---- F9 and Esc, from the thread that reads the keyboard

    def order(self, event: ev.HaltRequested) -> Future[str] | None:
        """Hand an order over at once; the screen follows when it can."""
        if self.writer is None:
            return None
        self.asked.note(event)
        if event.mode == "hold":
            self._held |= {event.nonce}
        see = partial(see_to, self.processes, event.mode)
        future = self.handed.add(self.writer.order(event, see), f"uvcc halt {self.run_dir.name}")
        call_in_loop(self.loop, self.ordered, event, future)
        return future

    def may_release(self, nonce: str) -> bool:
        """Whether Esc may take back that hold here: read-only, and from within a line of text, only one's own."""
        return nonce in self._held or not (self.readonly or self.in_a_line(nonce))

    def in_a_line(self, nonce: str) -> bool:
        """Whether Esc belongs to the line of text that has the keyboard, for somebody else asked for that hold."""
        try:
            focused = self.focused
        except ScreenStackError:  # a key from before the first picture
            return False
        return nonce not in self._held and isinstance(focused, Input)

    def meant_otherwise(self, nonce: str) -> bool:
        """Whether an Esc of now was meant for what a hold of somebody else has just closed."""
        return nonce not in self._held and self.uncover.left_by_escape()

    @property
    def remembers(self) -> bool:
        """Whether the layout is kept when the operator leaves; a read-only console writes nothing but a halt."""
        return self.keeps_layout and not (self.readonly and self.writer is not None)

    def told(self, text: str) -> None:
        """A word of warning, from any thread."""
        call_in_loop(self.loop, self.say, text, "warning")

    def ordered(self, event: ev.HaltRequested, future: Future[str]) -> None:
        """An order has left: see it through."""
        raise NotImplementedError

    @property
    def behind_s(self) -> float:
        """How old the picture is, where that is worth a word."""
        return self.source.behind_s if self.source.behind_s > BEHIND_S else 0.0

    def now(self) -> float:
        """The time ages are measured against."""
        return self.source.now()

    def context(self) -> Context:
        """What decides which actions are possible."""
        replay = isinstance(self.source, ReplaySource)
        spot = self.main.trail.here
        return Context(
            self.snap,
            True,
            self.readonly,
            replay,
            self.conductor,
            self.behind_s,
            page=spot.page,
            filtered=bool(self.filter) and (not spot.page or self.filter.source != spot.filter),
            moved=self.main.trail.moved,
            own_hold=self.may_release(self.snap.halt.nonce),
        )

    def check_processes(self) -> None:
        """See once a second whether somebody conducts the run and somebody could halt it."""
        seq, behind = self.snap.seq, self.source.behind
        self.conductor = self._watch[CONDUCTOR].look(self.processes.lamp(CONDUCTOR), seq, behind)
        self.sidecar = self._watch[HALTD].look(self.processes.lamp(HALTD), seq, behind)

    def tick(self) -> None:
        """Fold what is new and repaint what that changes."""
        raise NotImplementedError

    def forward_tensorboard(self, pod: str) -> None:
        """Show the address of a pod's TensorBoard once it has one."""
        raise NotImplementedError

    def perform(self, action: UiAction) -> None:
        """Do what the palette chose, or say why not."""
        raise NotImplementedError
