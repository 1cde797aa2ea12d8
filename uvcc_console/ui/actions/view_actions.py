"""How the operator looks at things: the way there and back, the fleet's order and columns, other runs in the charts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from textual.screen import Screen

from uvcc_console.ui.actions import compared
from uvcc_console.ui.actions.layouts import changes, taken
from uvcc_console.ui.actions.pod_actions import PodActions
from uvcc_console.ui.feed.kept_layout import ScreenLayout
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.fleet import FleetPanel
from uvcc_console.ui.panels.fleet_columns import COLUMNS as ALL_COLUMNS
from uvcc_console.ui.panels.fleet_columns import parsed as parse_columns
from uvcc_console.ui.panels.halt_panel import HaltPanel
from uvcc_console.ui.panels.pod_page import PodPanel
from uvcc_console.ui.panels.result import ResultPanel
from uvcc_console.ui.screens.jump import JumpScreen, signs
from uvcc_console.ui.screens.trail import Spot
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.text import counted

ALONE = "this page shows one run: uvcc compare lays others beside it"


class ViewActions(PodActions):
    """Part of ``Commands``: needs ``app``, ``set_filter`` and ``_prompt``."""

    def set_filter(self, text: str, *, final: bool) -> None:
        raise NotImplementedError

    def _prompt(self, kind: str, sign: str, text: str, hint: str) -> None:
        raise NotImplementedError

    def _open(self, screen: Screen[Any], answered: Callable[[Any], None] | None = None) -> None:
        raise NotImplementedError

    # ---- the way there and back

    def open(self, number: str, pod: str = "", *, filtered: str | None = None) -> None:
        """A panel's page, which the way back leads away from; ``filtered``: with another filter there."""
        main, before = self.app.main, self.app.filter.source
        main.open_page(number, pod, filtered=before, toggle=filtered is None)
        if filtered is not None:
            self.set_filter(filtered, final=True)
            main.trail.leave(filter=filtered, focus="")
        self.app.redraw()

    def open_beside(self, pod: str) -> None:
        """Another pod's page in the place of this one: the way back does not lead through every pod."""
        main = self.app.main
        main.trail.turn(pod)
        main.lay_out()
        self.app.redraw()

    def do_jump(self, _: str) -> None:
        """A sign on every panel in sight; its key focuses that panel."""
        main = self.app.main
        seen = {str(p.id): p for p in main.panels() if p.display and p.region.area and p.can_focus}
        seen |= {str(p.id): p for p in (main.query_one(HaltPanel), main.query_one(ResultPanel)) if p.region.area}
        keys = signs({name: p.number for name, p in seen.items()})

        def answered(name: str | None) -> None:
            if name in seen:
                seen[name].focus()

        self._open(JumpScreen({name: p.region for name, p in seen.items()}, keys), answered)

    def do_layout(self, text: str) -> None:
        """Say what is kept of the layout; ``usual`` takes all of it back."""
        app, word = self.app, text.strip()
        if word == "usual":
            app.lay_out(ScreenLayout())
            app.redraw()
            app.say("everything is laid out as usual")
        elif word:
            self.app.say(f"layout takes usual, not {word[:20]!r}", "warning")
        else:
            mine = changes(taken(app))
            kept = "kept when you leave" if app.remembers else "not kept by this screen"
            app.say(f"{', '.join(mine)}: {kept}; :layout usual forgets it" if mine else "everything is as usual")

    def do_pod(self, text: str) -> None:
        """The page of the pod that is named, or of the one under the cursor."""
        pod = self._pod(text.strip())
        if pod is not None:
            self.app.main.query_one(FleetPanel).point_at(pod.pod)
            self.open(PodPanel.number, pod.pod)

    def do_back(self, _: str) -> None:
        """The filter as it was when this view was opened; then the view before."""
        main, here = self.app.main, self.app.main.trail.here
        opened_with = here.filter if here.page else ""
        if self.app.filter.source != opened_with:
            self.set_filter(opened_with, final=True)
            return
        main.leave(self.app.filter.source)
        self._restore(main.trail.back())

    def do_last(self, _: str) -> None:
        """Go back to the view before this one."""
        self.app.main.leave(self.app.filter.source)
        self._restore(self.app.main.trail.last())

    def _restore(self, spot: Spot | None) -> None:
        if spot is not None:
            self.app.main.lay_out()
            self.set_filter(spot.filter, final=True)

    # ---- fleet and charts

    def do_sort(self, text: str) -> None:
        """Sort the fleet by a column, ``worst`` or ``place``; ``asc`` and ``desc`` of a column say which way."""
        name, _, way = text.strip().partition(" ")
        try:
            key = name if name in ("worst", "place") else (parse_columns(name) or ("worst",))[0]
        except ConfigError as e:
            self.app.say(str(e), "warning")
            return
        fleet = self.app.main.query_one(FleetPanel)
        if key in ALL_COLUMNS and way[:1] in ("a", "d"):
            fleet.sort_by(key, falling=way.startswith("d"))
        else:
            fleet.sort_by(key, reverse=way.startswith(("d", "r")))

    def do_columns(self, text: str) -> None:
        """Choose the fleet's columns; ``usual`` brings those back that this kind of run has."""
        fleet = self.app.main.query_one(FleetPanel)
        if not text.strip():
            self.ask_columns(fleet.shown_columns)
            return
        try:
            fleet.show_columns(() if text.strip() == "usual" else parse_columns(text))
        except ConfigError as e:
            self.app.say(str(e), "warning")

    def ask_columns(self, names: Sequence[str]) -> None:
        """Open the ``:`` line with the columns that are shown, to be changed there."""
        more = " ".join(c for c in ALL_COLUMNS if c not in names)
        self._prompt("command", ":", "columns " + " ".join(names), f"also {more}")

    def do_compare(self, text: str) -> None:
        """Lay another run over the charts; without a name, take all of them away."""
        charts = self.app.main.query_one(ChartsPanel)
        if not text.strip():
            charts.compare("", None)
        elif self.app.alone:
            self.app.say(ALONE, "warning")
        else:
            self._lay_over(text.strip())

    def next_other(self) -> None:
        """The newest other run, those of the same profile first; then the one before it, and at last none."""
        app, charts = self.app, self.app.main.query_one(ChartsPanel)
        if app.alone:
            app.say(ALONE, "warning")
            return
        known = compared.others(app.run_dir)
        shown = [name for name, _ in charts.look.others]
        at = known.index(shown[-1]) + 1 if shown and shown[-1] in known else 0
        charts.compare("", None)
        if at < len(known):
            self._lay_over(known[at])
        else:
            app.say("no other run is laid over the charts" if known else "it is the only run here")

    def next_party(self) -> None:
        """The lines of the next party alone, after the last those of all."""
        if not self.app.snap.proves:
            self.app.say("this run has no parties", "warning")
            return
        asked = [f"party={p}" for p in range(PARTIES)] + [""]
        source = self.app.filter.source
        self.set_filter(asked[(asked.index(source) + 1) % len(asked) if source in asked else 0], final=True)

    def _lay_over(self, word: str) -> None:
        charts = self.app.main.query_one(ChartsPanel)

        async def read() -> None:
            try:
                name, snap = await asyncio.to_thread(compared.read, self.app.run_dir, word)
            except UvccError as e:
                self.app.say(str(e), "warning")
                return
            charts.compare(name, snap)
            self.app.say(
                f"{name} is laid over the charts: {snap.profile_name}, {counted(snap.step, 'step')};"
                " :compare takes it away"
            )

        self.app.run_worker(read(), group="compare", exit_on_error=False)
