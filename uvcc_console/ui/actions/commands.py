"""What actions do. Each method ``do_<id>`` belongs to one entry of ``keys.ACTIONS``; a test holds the two together."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from textual.screen import Screen

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.runs.notices import Note
from uvcc_console.ui.actions import saved_screens, typing_offers
from uvcc_console.ui.actions.log_actions import LogActions
from uvcc_console.ui.actions.view_actions import ViewActions
from uvcc_console.ui.drawing.theme import theme_named
from uvcc_console.ui.feed.run_processes import see_to
from uvcc_console.ui.feed.source import ReplaySource
from uvcc_console.ui.halting.halt_switch import PASTE_WAIT_S
from uvcc_console.ui.halting.uncover import make_room
from uvcc_console.ui.halting.urgent import UrgentKeys
from uvcc_console.ui.judging import filters
from uvcc_console.ui.judging.view import halting
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.registry.keys import ACTIONS, COMMANDS, UiAction
from uvcc_console.ui.run_base import RunConsole
from uvcc_console.ui.screens.run import RunScreen
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.prompt import Prompt
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest
from uvcc_engine.contract.text import clean, counted

RUNBOOKS = "runbooks/index"


def tell(app: RunConsole, note: Note) -> None:
    """Something new, said once; errors ring."""
    app.say(note.text, "error" if note.level == "error" else "warning" if note.level == "warn" else "information")
    if note.level == "error":
        app.bell()


def who(place: str = "tui") -> str:
    """Who asks, for the journal: ``user@host tui``; in a page ``user@host browser``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "operator"
    return f"{user}@{socket.gethostname()} {place}"


class Commands(ViewActions, LogActions):
    """Runs actions for one app."""

    def __init__(self, app: RunConsole) -> None:
        self.app = app
        self.urgent = UrgentKeys(app, lambda: who(app.place))
        self.paste_wait = PASTE_WAIT_S
        self.left = False
        self._filter_before = ""

    # ---- dispatch

    def run(self, action: UiAction, text: str = "", *, by_key: bool = True) -> None:
        """Do it, or say why not. A guarded key waits a moment to see whether it was the start of a paste."""
        if self.left:
            return
        why = action.reason(self.app.context())
        if why and by_key and action.id == "back":
            return  # Esc is pressed to be sure of the overview, which needs no word
        if why:
            self.app.say(f"{action.name}: {why}", "warning")
            return
        handler: Callable[[str], None] = getattr(self, f"do_{action.id.split('_')[0]}")
        argument = text or (action.id.partition("_")[2])
        if not (action.guarded and by_key):
            handler(argument)
            return
        if self.app.uncover.hushed:
            self.app.say(f"{action.name}: ignored, a halt has closed what you typed into", "warning")
            return
        cadence = self.app.cadence
        seen, pressed, raw = cadence.count, cadence.last, self.urgent.rhythm
        fast = cadence.pasted or cadence.just_pasted or cadence.followed

        def settle() -> None:
            if self.left:
                return
            pasted = raw.burst > 0 and raw.last >= pressed  # what came with it may still wait to be parsed
            if fast or pasted or cadence.just_pasted or cadence.count != seen:
                self.app.say(f"{action.name}: ignored, it came inside pasted text", "warning")
            else:
                handler(argument)

        if self.paste_wait:
            self.app.set_timer(self.paste_wait, settle)
        else:
            settle()

    def line(self, text: str) -> None:
        """A line typed after ``:``."""
        word, _, rest = text.strip().partition(" ")
        if not word:
            return
        action = COMMANDS.get(word)
        if action is None:
            near = nearest(word, COMMANDS, CLOSE)
            self.app.say(f"no command {word!r}" + (f", did you mean {near}?" if near else ": ? lists them"), "warning")
            return
        self.run(action, rest.strip(), by_key=False)

    def typing(self, kind: str, text: str) -> None:
        """A prompt's text while it is typed: a filter narrows at once."""
        if kind == "filter":
            self.set_filter(text, final=False)

    def typed(self, kind: str, text: str, accepted: bool) -> None:
        """A prompt is done; for one that was left, ``text`` is what was there before."""
        if kind == "filter":
            self.set_filter(text, final=accepted)
        elif accepted and self.app.cadence.pasted:
            self.app.say("command ignored: it came faster than fingers type", "warning")
        elif accepted:
            self.line(text)

    def _send(self, event: ev.Event, action: str = "", then: Callable[[], None] | None = None) -> None:
        """Append to the journal, then see that somebody acts on it; what fails is said loudly, with the way around."""
        app = self.app
        if app.readonly:  # no action gets as far as this; one that does is refused here
            app.say(f"NOT DONE: this console is read-only: uvcc attach {app.snap.run}", "error")
            return

        assert app.writer is not None
        see: Callable[[int], str] = partial(see_to, app.processes, action) if action else lambda seq: ""
        asked = app.handed.add(app.writer.append(event, see), f"uvcc status {app.run_dir.name}")

        async def heard() -> None:
            try:
                note = await app.handed.heard(asked)
            except UvccError as e:
                app.say(e.what, "error")
                app.bell()
                return
            app.tick()
            if note:
                app.say(note, "warning")
            if then:
                then()

        self._later(heard())

    def _later(self, work: Awaitable[None]) -> None:
        self.app.run_worker(work, group="journal", exit_on_error=False)

    # ---- halt

    def do_halt(self, _: str) -> None:
        """F9 that came by the queue, by the palette or as a command."""
        if self.app.by_name:
            self._halt_by_name()
        else:
            self.urgent.press(self.app.cadence.last, self.app.cadence.burst)

    def _halt_by_name(self) -> None:
        """Where a page's visitor must not halt by one key: the run's name first."""
        from uvcc_console.ui.screens.confirm import ConfirmScreen

        app, s = self.app, self.app.snap
        if isinstance(app.screen, ConfirmScreen):
            return
        if s.ended:
            app.say(f"nothing to halt: the run has ended ({s.status.replace('_', ' ')})", "warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.urgent.confirmed(app.cadence.last)

        lines = [
            "Every pod stops at the same step and writes a checkpoint.",
            f"r in the operator's console resumes {s.run}.",
        ]
        self._open(ConfirmScreen("HALT", lines, s.run), answered)

    def do_release(self, _: str) -> None:
        """Take a halt back: Esc within the three seconds after F9."""
        self.urgent.escape()

    def ordered(self, event: ev.HaltRequested, future: Future[str]) -> None:
        """See an order through that was handed over already; what fails is said loudly, with the way around."""
        app = self.app

        async def see() -> None:
            try:
                note = await app.handed.heard(future)
            except UvccError as e:
                app.asked.drop(event)
                app.say(e.what, "error")
                app.bell()
                return
            if note is None:
                return app.asked.drop(event)
            app.tick()
            if note:
                app.say(note, "warning")
            if event.mode == "release":  # a hold and a halt have their own panel
                app.say("released, the run goes on")

        self._later(see())

    # ---- the run

    def _intend(self, action: str, **args: Any) -> None:
        on = f" on {args['pod']}" if args.get("pod") else ""
        told = lambda: self.app.say(f"{action}{on} asked for")  # noqa: E731
        self._send(ev.Intent(action=action, by=who(), args=args), action, told)

    def do_resume(self, text: str) -> None:
        """Go on from the last common checkpoint, or from that of the step given."""
        step = text.removeprefix("from").strip()
        if step and not (step.isdecimal() and len(step) < 10):
            self.app.say(f"resume takes the step of a checkpoint, not {step[:20]}", "warning")
            return
        self._intend("resume", **({"from": int(step)} if step else {}))

    def do_retry(self, _: str) -> None:
        """Repeat the failed stage from its beginning."""
        self._intend("retry")

    def do_skip(self, _: str) -> None:
        """Skip a failed drill or gate, after asking."""
        from uvcc_console.ui.screens.confirm import ConfirmScreen

        stage = self.app.snap.stage
        name = stage.name if stage else ""
        lines = [f"{name} failed: {stage.detail if stage else ''}", "Skipping goes on to the next stage without it."]

        def answered(yes: bool | None) -> None:
            if yes:
                self._intend("skip")

        self._open(ConfirmScreen(f"Skip {name}", lines, name), answered)

    def do_teardown(self, _: str) -> None:
        """Ask for the run's name, listing what would be lost."""
        from uvcc_console.ui.screens.confirm import ConfirmScreen

        s = self.app.snap

        def answered(yes: bool | None) -> None:
            if yes:
                self._intend("teardown")

        if s.followed:
            lines = [f"{clean(s.followed)} is followed no longer.", "Nothing there is ended or deleted."]
            self._open(ConfirmScreen("Stop following", lines, s.run), answered)
            return
        pods = [p for p in s.pods.values() if p.state not in pod_states.ABSENT]
        lines = []
        if s.status == "running" and s.phase:
            lines.append(
                f"At step {s.step} of {s.steps_planned} and not halted: steps since the last checkpoint are lost."
            )
        ends = f"This ends {s.run}, which has no pod."
        lines.append(f"This deletes {counted(len(pods), 'pod')} of {s.run}:" if pods else ends)
        lines += [f"  {p.pod}  {p.provider}  {p.state}  ${p.price_hr:.2f}/h" for p in pods[:12]]
        if len(pods) > 12:
            lines.append(f"  and {len(pods) - 12} more")
        self._open(ConfirmScreen("Tear down", lines, s.run), answered)

    def do_snapshot(self, _: str) -> None:
        """Keep the screen as evidence."""
        try:
            kept = saved_screens.save(self.app)
        except (OSError, UvccError) as e:
            self.app.say(f"snapshot not kept: {e}", "error")
            return
        if not self.app.context().replay:
            self._send(ev.Intent(action="snapshot", by=who(), args=dict(kept.hashes)))
        self.app.say(f"kept {kept.stem} in {kept.folder}")

    # ---- the screen

    def do_detach(self, _: str) -> None:
        """Leave; the run does not notice."""
        self.left = True
        goes_on = not self.app.snap.ended and not isinstance(self.app.source, ReplaySource)
        note = f"detached; the run goes on. Come back with: uvcc attach {self.app.snap.run}" if goes_on else None
        self.app.exit(0, message=note)

    def do_help(self, _: str) -> None:
        """Show the help, that of the focused panel first."""
        from uvcc_console.ui.screens.help import MANUAL, HelpScreen

        def answered(word: str | None) -> None:
            if word == MANUAL:
                self.do_docs("")

        screen = self.app.screen
        panel = screen.focused_panel() if isinstance(screen, RunScreen) else None
        if isinstance(panel, (Panel, LogView)):
            key = panel.number if len(panel.number) == 1 else ""
            help_screen = HelpScreen(self.app.context(), f"{key} {panel.title}".strip(), panel.context_help())
        else:
            help_screen = HelpScreen(self.app.context())
        self._open(help_screen, answered)

    def do_docs(self, text: str) -> None:
        """The manual, at a topic; without one at the newest alert's runbook. It does not cover a halt."""
        from uvcc_console.report import manual
        from uvcc_console.ui.screens.manual_screen import ManualScreen

        if halting(self.app.snap):
            self.app.would_cover("manual", "uvcc docs shows it elsewhere")
            return
        told = [f"runbooks/alerts#{entry.alert}" for entry in self.app.snap.alerts if entry.level in ("warn", "error")]
        try:
            known = manual.pages()
            topic = text or next((t for t in reversed(told) if manual.knows(t, known)), RUNBOOKS)
            manual.look_up(topic, known)
        except UvccError as e:
            self.app.say(str(e), "warning")
            return
        self._open(ManualScreen(known, topic))

    def _open(self, screen: Screen[Any], answered: Callable[[Any], None] | None = None) -> None:
        """Open a dialog, beside a halt that is shown and not over it."""
        make_room(screen, self.app.main)
        self.app.push_screen(screen, answered)

    def do_command(self, _: str) -> None:
        """Open the ``:`` line."""
        self._prompt("command", ":", "", " ".join(list(COMMANDS)[:8]) + " …")

    def do_filter(self, text: str) -> None:
        """Open the ``/`` line, or filter at once."""
        if text:
            self.set_filter(text, final=True)
            return
        self._filter_before = self.app.filter.source
        self._prompt("filter", "/", self._filter_before, "party=1 loss>3 !word level>=warn")

    def _prompt(self, kind: str, sign: str, text: str, hint: str) -> None:
        if isinstance(self.app.screen, RunScreen):
            offer = lambda line: typing_offers.words(self.app, kind, line)  # noqa: E731
            self.app.screen.query_one(Prompt).ask(kind, sign, text, hint, offer)

    def set_filter(self, text: str, *, final: bool) -> None:
        """Apply a filter; one that cannot be read changes nothing and says why."""
        prompt = self.app.screen.query_one(Prompt) if isinstance(self.app.screen, RunScreen) else None
        try:
            self.app.filter = filters.parse(text)
        except ConfigError as e:
            if final:
                self.app.say(str(e), "warning")
            elif prompt:
                prompt.hint(e.what)
            return
        if prompt:
            prompt.hint("")
        self.app.redraw()

    def do_find(self, text: str) -> None:
        """Search the log backwards from its end."""
        if isinstance(self.app.screen, RunScreen):
            log = self.app.screen.query_one(LogView)
            if not log.find(text):
                self.app.say(f"no line contains {text!r}", "warning")
            elif text:
                log.focus()

    def do_palette(self, _: str) -> None:
        """Open the palette, which lists every action by name."""
        self.app.action_command_palette()

    def do_theme(self, text: str) -> None:
        """The theme that is named, light or dark; without a name the list of all."""
        name = theme_named(text.strip())
        if not name:
            if halting(self.app.snap):
                self.app.would_cover("theme", ":theme NAME sets one")
            else:
                self.app.search_themes()
                make_room(self.app.screen, self.app.main)
            return
        if name and name not in self.app.available_themes:
            self.app.say(f"no theme {name!r}; there are {', '.join(sorted(self.app.available_themes))}", "warning")
            return
        self.app.theme = name

    def do_panel(self, which: str) -> None:
        """Show one panel alone, or all of them again."""
        if isinstance(self.app.screen, RunScreen):
            action = ACTIONS.get(f"panel_{which}") or next((a for a in ACTIONS.values() if a.command == which), None)
            if action is not None:
                self.open(action.keys)

    def do_overview(self, _: str) -> None:
        """Show all panels."""
        if isinstance(self.app.screen, RunScreen):
            self.open("")

    # ---- replay

    def seek(self, part: float) -> None:
        """To this part (0..1) of a recording."""
        source = self.app.source
        if isinstance(source, ReplaySource):
            source.seek(source.start + part * (source.end - source.start))
            self.app.tick()

    def do_goto(self, text: str) -> None:
        """To a moment of the recording."""
        source = self.app.source
        if not isinstance(source, ReplaySource):
            return
        try:
            source.seek(source.find(text, utc=self.app.utc))
        except ConfigError as e:
            self.app.say(str(e), "warning")
            return
        self.app.tick()

    def do_replay(self, what: str) -> None:
        """Pause a replay, jump in it or change its speed."""
        source = self.app.source
        if not isinstance(source, ReplaySource):
            return
        span = (source.end - source.start) / 20
        if what == "toggle":
            source.toggle()
        elif what in ("next", "before"):
            mark = source.next_mark(1 if what == "next" else -1)
            source.seek((source.end if what == "next" else source.start) if mark is None else mark)
        elif what in ("back", "on"):
            source.seek(source.now() + (span if what == "on" else -span))
        else:
            source.faster(2.0 if what == "faster" else 0.5)
        self.app.tick()
