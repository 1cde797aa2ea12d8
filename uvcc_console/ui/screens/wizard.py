"""From a profile to a rollout: settings, plan, price, and a typed word where money can be spent."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.worker import get_current_worker

from uvcc_console.ui.drawing.paint import Line, Span, clean, literal, spread
from uvcc_console.ui.feed import home_model
from uvcc_console.ui.feed.home_model import Draft, draft_lines
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.plan_fields import FieldsPanel
from uvcc_console.ui.widgets.bars import Bar
from uvcc_console.ui.widgets.list_panel import ListPanel
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.prompt import Prompt
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import counted

if TYPE_CHECKING:
    from uvcc_console.ui.app_base import ConsoleApp


class PlanPanel(Panel):
    """The plan as it stands."""

    title = "Plan"
    help = "What would happen. Nothing has been started or created yet."

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.plan = Draft("")

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return draft_lines(self.plan, width, view.glyphs)


class WizardFooter(Bar):
    """The keys."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.ready = False

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        key, word = ("green", "title") if self.ready else ("grey", "faint")
        start: list[Span] = [(" s ", key), (" start  ", word)]
        rest: list[Span] = [("Enter e", "key"), (" change a setting  ", "muted"), ("u", "key")]
        rest.append((" undo the last  ", "muted"))
        return [spread([*start, *rest, ("Esc", "key"), (" back", "muted")], [], width)]


class WizardScreen(Screen[Path | None]):
    """Dismisses with the folder of the run that was started, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("s", "start", "start"),
        ("e", "edit", "change a setting"),
        ("u", "undo", "undo"),
        ("escape", "back", "back"),
    ]
    AUTO_FOCUS = "#fields"

    def __init__(self, profile: str) -> None:
        super().__init__()
        self._profile = profile
        self._settings: tuple[str, ...] = ()
        self._starting = False
        self._choices: Mapping[str, tuple[str, ...]] = {}

    def compose(self) -> ComposeResult:
        with Horizontal(id="wizard"):
            yield FieldsPanel(id="fields")
            yield PlanPanel(id="plan")
        yield Prompt(id="prompt")
        yield WizardFooter(id="wizard-footer")

    def on_mount(self) -> None:
        self.query_one(PlanPanel).border_title = literal(f"Rollout of {self._profile}")
        self._think(self._settings)
        self._look_up()

    @work(thread=True, exit_on_error=False, group="choices")
    def _look_up(self) -> None:
        """What settings may be, for Tab; every installed provider is asked, so it is not waited for."""
        from uvcc_console.plan.key_choices import choices

        self._choices = choices()

    @property
    def plan(self) -> Draft:
        """The draft on the screen."""
        return self.query_one(PlanPanel).plan

    def _show(self, draft: Draft) -> None:
        self.query_one(PlanPanel).plan = draft
        fields = draft.plan.profile.model_dump(mode="json", by_alias=True) if draft.plan is not None else None
        self.query_one(FieldsPanel).take(fields, draft.settings, draft.error)
        self.query_one(WizardFooter).ready = draft.plan is not None and draft.quote is not None and not draft.error
        view = View(glyphs=cast("ConsoleApp[object]", self.app).glyphs)
        for panel in self.query(Panel):
            panel.show(view)

    @work(thread=True, exclusive=True, exit_on_error=False, group="draft")
    def _think(self, settings: tuple[str, ...]) -> None:
        worker, app = get_current_worker(), self.app
        draft = replace(home_model.make_draft(self._profile, settings), asking=True)
        if not worker.is_cancelled:
            app.call_from_thread(self._show, draft)
        if draft.error or worker.is_cancelled:
            return
        with tempfile.TemporaryDirectory(prefix="uvcc-quote-") as scratch:
            draft = home_model.ask_price(draft, Path(scratch))
        if not worker.is_cancelled:
            app.call_from_thread(self._show, draft)

    def action_edit(self) -> None:
        """Type ``key=value``; Tab completes the key."""
        self._edit("")

    def _edit(self, text: str) -> None:
        from uvcc_console.plan.meanings import MEANINGS

        said = MEANINGS.get(text.partition("=")[0], "job.steps=100   topology.replicas=2   link=direct")
        self.query_one(Prompt).ask("set", "set ", text, said, self._offers)

    def _offers(self, line: str) -> list[str]:
        """The keys that there are; after ``=`` the values that this one may have."""
        key, sign, _ = line.partition("=")
        if sign:
            return [f"{key}={value}" for value in self._choices.get(key.strip(), ())]
        return [f"{name}=" for name in self.query_one(FieldsPanel).fields]

    @on(ListPanel.Moved)
    def _moved(self, event: ListPanel.Moved) -> None:
        event.stop()  # the start screen below has lists of its own

    @on(ListPanel.Chosen)
    def _chosen(self, event: ListPanel.Chosen) -> None:
        event.stop()
        value = self.query_one(FieldsPanel).fields.get(event.name, "")
        self._edit(f"{event.name}={value}")

    def action_undo(self) -> None:
        """Drop the last setting."""
        self._settings = self._settings[:-1]
        self._think(self._settings)

    def action_back(self) -> None:
        """Leave the wizard; nothing was started."""
        if not self._starting:
            self.dismiss(None)

    @on(Prompt.Done)
    def _typed(self, event: Prompt.Done) -> None:
        if event.accepted and event.text.strip():
            key = event.text.split("=")[0].strip()
            kept = tuple(s for s in self._settings if s.split("=")[0].strip() != key)
            self._settings = (*kept, event.text.strip())
            self._think(self._settings)

    def action_start(self) -> None:
        """Start at once where nothing can be spent, else after the profile's name was typed."""
        draft, app = self.plan, cast("ConsoleApp[object]", self.app)
        if self._starting or draft.plan is None or draft.quote is None or draft.error:
            app.say("not yet: the plan has no price" if not draft.error else "not like this: see the plan", "warning")
            return
        if draft.settings != self._settings:  # the plan on the screen is that of before
            app.say("not yet: the plan is being made anew", "warning")
            return
        if app.cadence.pasted:
            app.say("start: ignored, it came inside pasted text", "warning")
            return
        if draft.free:
            self._launch(draft)
            return
        from uvcc_console.ui.screens.confirm import ConfirmScreen

        limits = draft.plan.profile.limits
        lines = [
            f"{counted(len(draft.quote.lines), 'pod')} at ${draft.quote.hourly:.2f}/h"
            f" on {draft.plan.profile.fleet.where}.",
            f"Caps: ${limits.hourly:.2f}/h, ${limits.total:.2f} in total, {limits.ttl / 3600:g} h at most.",
        ]

        def answered(yes: bool | None) -> None:
            if yes:
                self._launch(draft)

        app.push_screen(ConfirmScreen(f"Start {clean(self._profile)}", lines, self._profile), answered)

    def _launch(self, draft: Draft) -> None:
        """What is typed from now on is meant for the run."""
        self._starting = True
        cast("ConsoleApp[object]", self.app).pending.leaving = True
        self._start(draft)

    @work(thread=True, exit_on_error=False, group="launch")
    def _start(self, draft: Draft) -> None:
        app = self.app
        try:
            run_dir = home_model.start(draft)
        except UvccError as e:
            app.call_from_thread(self._refused, str(e))
            return
        app.call_from_thread(self.dismiss, run_dir)

    def _refused(self, why: str) -> None:
        app, self._starting = cast("ConsoleApp[object]", self.app), False
        app.say(why, "error")
        app.pending.keeping, app.pending.leaving = True, False
        app.opened()
