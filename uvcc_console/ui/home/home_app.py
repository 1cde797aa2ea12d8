"""The start screen: the runs of this machine, the profiles, and the way from a profile to a rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.worker import get_current_worker

from uvcc_console.core import paths
from uvcc_console.runs import keeping
from uvcc_console.ui.app_base import ConsoleApp, KeyTime
from uvcc_console.ui.drawing.format import clock
from uvcc_console.ui.drawing.paint import Line, Span, spread, width_of
from uvcc_console.ui.feed import home_model
from uvcc_console.ui.feed.home_model import Draft, RunSummary
from uvcc_console.ui.feed.kept_layout import keep, load
from uvcc_console.ui.feed.source import WallTime
from uvcc_console.ui.halting.hand_over import TypedInput
from uvcc_console.ui.judging import filters
from uvcc_console.ui.judging.filters import Filter
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.home import AboutPanel, ProfilesPanel, RunsPanel, fields_of
from uvcc_console.ui.panels.result import home_short
from uvcc_console.ui.screens.confirm import ConfirmScreen
from uvcc_console.ui.screens.viewer import ViewerScreen
from uvcc_console.ui.widgets.bars import Bar
from uvcc_console.ui.widgets.list_panel import ListPanel
from uvcc_console.ui.widgets.prompt import Prompt
from uvcc_engine.contract.errors import ConfigError, UvccError

LOOK_S = 1.0
READ_ONLY = "read-only: start uvcc without --read-only"
KEYS = (
    ("enter", "open"),
    ("p", "replay"),
    ("n", "new run"),
    ("/", "search"),
    ("?", "help"),
    ("q", "leave"),
    ("c", "compare"),
    ("o", "sort"),
    ("A", "archive"),
    ("X", "delete"),
    ("T", "themes"),
    ("tab", "other panel"),
)
HELP = (
    "1, 2, n, Tab: the runs, the profiles, the other panel",
    "F9: open the live run under the cursor and hold it; with one live run from anywhere",
    "T: the list of themes; the one that is chosen is kept",
    "q: leave; live runs go on",
)


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The run to show next: as it is, played back, or with F9 pressed at once."""

    run_dir: Path
    replay: bool = False
    hold: bool = False


class HomeHeader(Bar):
    """Who we are and where things lie."""

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        where = home_short(str(paths.data_dir()))
        right: Line = [(where, "muted"), ("  ", ""), (clock(view.now, utc=view.utc), "muted"), (" ", "")]
        about = "private training over three domains, verified"
        return [spread([(" UVCC ", "blue"), ("  ", ""), (about, "text")], right, width)]


class HomeFooter(Bar):
    """The keys; F9 first here too."""

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        live = any(r.live for r in self.screen.query_one(RunsPanel).runs)
        line: list[Span] = [(" F9 ", "grey"), (" HALT", "faint")]
        line = [(" F9 ", "alarm"), (" HALT the live run", "title")] if live else line
        barred = ("n", "A", "X") if cast("HomeApp", self.app).readonly else ()
        for key, name in KEYS:
            part: list[Span] = [("  ", ""), (key, "key"), (f" {name}", "muted")]
            if key in barred:
                continue
            if width_of(line) + width_of(part) > width - 2:
                break
            line += part
        return [spread(line, [], width)]


class HomeScreen(Screen[None]):
    """Runs and profiles at the left, the one under the cursor at the right."""

    AUTO_FOCUS = "#runs"

    def compose(self) -> ComposeResult:
        yield HomeHeader(id="home-header")
        with Horizontal(id="home-body"):
            with Vertical(id="home-left"):
                yield RunsPanel(id="runs")
                yield ProfilesPanel(id="profiles")
            yield AboutPanel(id="about")
        yield Prompt(id="prompt")
        yield HomeFooter(id="home-footer")


class HomeApp(ConsoleApp[RunChoice | None]):
    """Returns what to show next, or None to leave."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f9", "halt", "halt", priority=True),  # also from under the help, a question, the list of themes
        ("q,ctrl+q,ctrl+c", "leave", "leave"),
        ("p", "replay", "replay"),
        ("n,2", "profiles", "profiles"),
        ("1", "runs", "runs"),
        ("slash", "search", "search"),
        ("escape", "everything", "everything"),
        ("A", "archive", "archive"),
        ("X", "delete", "delete"),
        ("question_mark", "help", "help"),
        ("T", "themes", "themes"),
    ]

    def __init__(
        self,
        *,
        now: WallTime = time.time,
        look_s: float = LOOK_S,
        ascii_only: bool = False,
        utc: bool = False,
        key_time: KeyTime = lambda event: event.time,
        typed_before: Sequence[TypedInput] = (),
        readonly: bool = False,
        keeps_layout: bool = False,
    ) -> None:
        super().__init__(ascii_only=ascii_only, utc=utc, key_time=key_time, typed_before=typed_before)
        self.readonly = readonly
        self._keeps = keeps_layout
        self._usual_theme = self.theme
        self._weighed = ""
        self._now = now
        self._look_s = look_s
        self._known: dict[str, RunSummary] = {}
        self._home = HomeScreen()

    def get_default_screen(self) -> HomeScreen:
        return self._home

    def on_mount(self) -> None:  # textual calls the base's as well
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        if not self.glyphs.braille:
            self._home.add_class("-ascii")
        if self._keeps and (kept := load().theme) in self.available_themes:
            self.theme = kept
        self._home.query_one(RunsPanel).opens = lambda name: self._open(self._known[name])
        self.recolour()
        self.look()
        self.set_interval(self._look_s, self.look)
        self.find_profiles()
        self.call_after_refresh(self.opened)

    def look(self) -> None:
        """Read how the runs stand."""
        found = home_model.find_runs(self._known)
        self._known = {r.run_dir.name: r for r in found}
        panel = self._home.query_one(RunsPanel)
        panel.runs = found
        panel.packed = 0 if found else len(keeping.archived())
        panel.beside = panel.beside if panel.beside in self._known else ""
        about = self._home.query_one(AboutPanel)
        if not isinstance(about.subject, Draft):
            about.subject = self._current_run()
            about.beside = self._known.get(panel.beside)
            if about.subject is not None and about.subject.run_dir.name != self._weighed:
                self._weigh(about.subject.run_dir)
        self.redraw()

    @work(thread=True, exit_on_error=False, group="profiles")
    def find_profiles(self) -> None:
        from uvcc_console.plan.profile import available

        found = [(f.name, f.about) for f in available()]
        self.call_from_thread(self._show_profiles, found)

    def _show_profiles(self, found: list[tuple[str, str]]) -> None:
        self._home.query_one(ProfilesPanel).profiles = found
        self.redraw()

    def redraw(self) -> None:
        view = View(now=self._now(), glyphs=self.glyphs, utc=self.utc)
        for panel in self._home.query("Panel"):
            panel.show(view)  # type: ignore[attr-defined]

    def _current_run(self) -> RunSummary | None:
        panel = self._home.query_one(RunsPanel)
        shown = {r.run_dir.name: r for r in panel.runs}
        return shown.get(panel.current) or next(iter(shown.values()), None)

    # ---- the cursor

    @on(ListPanel.Moved)
    def _moved(self, event: ListPanel.Moved) -> None:
        about = self._home.query_one(AboutPanel)
        if isinstance(event.panel, RunsPanel):
            about.subject = self._current_run()
            about.beside = self._known.get(event.panel.beside)
            about.holds = ""
            self.redraw()
            if about.subject is not None:
                self._weigh(about.subject.run_dir)
        elif event.name:
            self._draft(event.name)

    @work(thread=True, exclusive=True, exit_on_error=False, group="draft")
    def _draft(self, profile: str) -> None:
        worker = get_current_worker()
        draft = home_model.make_draft(profile, ())
        if not worker.is_cancelled:
            self.call_from_thread(self._show_draft, draft)

    @work(thread=True, exclusive=True, exit_on_error=False, group="size")
    def _weigh(self, run_dir: Path) -> None:
        worker, self._weighed = get_current_worker(), run_dir.name
        words = keeping.size_words(keeping.size_of(run_dir))
        if not worker.is_cancelled:
            self.call_from_thread(self._show_size, run_dir, words)

    def _show_size(self, run_dir: Path, words: str) -> None:
        about = self._home.query_one(AboutPanel)
        if isinstance(about.subject, RunSummary) and about.subject.run_dir == run_dir:
            about.holds = f"{words} on this disk"
            self.redraw()

    def _show_draft(self, draft: Draft) -> None:
        if isinstance(self._home.focused, ProfilesPanel):
            self._home.query_one(AboutPanel).subject = draft
            self.redraw()

    @on(ListPanel.Chosen)
    def _chosen(self, event: ListPanel.Chosen) -> None:
        if isinstance(event.panel, RunsPanel):
            self._open(self._known[event.name])
            return
        if self.readonly:
            self.say(f"new run: {READ_ONLY}", "warning")
            return
        from uvcc_console.ui.screens.wizard import WizardScreen

        def done(run_dir: Path | None) -> None:
            if run_dir is not None:
                self.exit(RunChoice(run_dir))

        self.push_screen(WizardScreen(event.name), done)

    # ---- keys

    def exit(self, result: RunChoice | None = None, return_code: int = 0, message: Any = None) -> None:
        """Leave, remembering the theme where it was chosen here."""
        if self._keeps and not self.readonly:
            theme = "" if self.theme == self._usual_theme else self.theme
            try:
                if load().theme != theme:
                    keep(replace(load(), theme=theme))
            except UvccError as e:
                message = f"the theme is not kept: {e}"
        self.hands_on = result is not None
        super().exit(result, return_code, message)

    def action_themes(self) -> None:
        """The list of themes, searched by typing."""
        self.search_themes()

    def action_leave(self) -> None:
        """Leave the console; live runs go on."""
        self.exit(None)

    def action_replay(self) -> None:
        """Play the run under the cursor back."""
        if run := self._current_run():
            self._open(run, replay=True)

    def _open(self, run: RunSummary, *, replay: bool = False) -> None:
        if run.snap.status == "unreadable":
            self.say(f"{run.run_dir.name} cannot be read: {run.snap.detail}", "error")
        else:
            self.exit(RunChoice(run.run_dir, replay=replay))

    def action_halt(self) -> None:
        """Open the live run and hold it: the one under the cursor if it lives, else the only one that does."""
        live = [r for r in self._known.values() if r.live]
        current = self._current_run()
        if current is not None and current.live:
            live = [current]
        if len(live) == 1:
            self.exit(RunChoice(live[0].run_dir, hold=True))
        else:
            self.say("several runs are live: put the cursor on one" if live else "no run is live", "warning")

    def action_search(self) -> None:
        """Narrow the list of runs while typing."""
        panel = self._home.query_one(RunsPanel)
        said = "status=failed loss<0.5 spent>10 demo"
        self._home.query_one(Prompt).ask("search", "/", panel.search.source, said, self._offers)

    def _offers(self, _: str) -> list[str]:
        """What a search may ask: every field of these runs, and of words the values that there are."""
        asked: dict[str, None] = {}
        for run in self._known.values():
            for name, value in fields_of(run).items():
                asked |= dict.fromkeys((f"{name}<", f"{name}>") if isinstance(value, float) else (f"{name}={value}",))
        return sorted(asked)

    def action_everything(self) -> None:
        """Every run again, none held beside another."""
        panel = self._home.query_one(RunsPanel)
        panel.search, panel.beside = Filter(), ""
        self._home.query_one(AboutPanel).beside = None
        self.redraw()

    @on(Prompt.Changed)
    def _searching(self, event: Prompt.Changed) -> None:
        if event.kind == "search":
            self._narrow(event.text)

    @on(Prompt.Done)
    def _searched(self, event: Prompt.Done) -> None:
        if event.kind == "search":
            self._narrow(event.text)

    def _narrow(self, text: str) -> None:
        try:
            self._home.query_one(RunsPanel).search = filters.parse(text)
        except ConfigError as e:
            self._home.query_one(Prompt).hint(e.what)
            return
        self.redraw()

    def action_archive(self) -> None:
        """Pack the run under the cursor away, after asking."""
        self._part_with("Archive", "Its folder becomes one packed file; uvcc runs --unpack brings it back.")

    def action_delete(self) -> None:
        """Delete the run under the cursor, after asking."""
        self._part_with("Delete", "Its journal, evidence, results and checkpoints are gone then, for ever.")

    def _part_with(self, what: str, warning: str) -> None:
        run = self._current_run()
        if run is None or not isinstance(self._home.focused, RunsPanel):
            return
        if self.readonly:
            self.say(f"{what.lower()}: {READ_ONLY}", "warning")
            return
        if why := keeping.must_stay(run.run_dir, run.snap, run.live):
            self.say(f"{what.lower()}: {why}", "warning")
            return
        name = run.run_dir.name
        size = keeping.size_words(keeping.size_of(run.run_dir))

        def answered(yes: bool | None) -> None:
            if yes:
                self._part(what, run.run_dir)

        self.push_screen(ConfirmScreen(f"{what} {name}", [f"{name}, {size}.", warning], name), answered)

    @work(thread=True, exit_on_error=False, group="keeping")
    def _part(self, what: str, run_dir: Path) -> None:
        try:
            if what == "Archive":
                made = keeping.archive(run_dir)
                said = f"{run_dir.name} is packed in {made}, {keeping.size_words(made.stat().st_size)}"
            else:
                keeping.delete(run_dir)
                said = f"{run_dir.name} is deleted"
        except UvccError as e:
            self.call_from_thread(self.say, str(e), "error")
            return
        self.call_from_thread(self.say, said)
        self.call_from_thread(self.look)

    def action_profiles(self) -> None:
        """Show the profiles."""
        self._home.query_one(ProfilesPanel).focus()

    def action_runs(self) -> None:
        """Show the runs."""
        self._home.query_one(RunsPanel).focus()

    def action_help(self) -> None:
        """What the panel under the cursor is for, then the keys of all of them."""
        focused = self._home.focused
        about = [focused.context_help(), ""] if isinstance(focused, ListPanel | AboutPanel) else []
        self.push_screen(ViewerScreen("Help", [*about, *HELP]))
