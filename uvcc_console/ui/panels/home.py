"""Panels of the start screen: runs, profiles, and what the one under the cursor is about."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.binding import BindingType

from uvcc_console.core.answers.shown import REPORTED, UNCHECKED, VERIFIED, shown
from uvcc_console.core.words import value_words
from uvcc_console.ui.drawing.format import duration, money, number
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, wrap
from uvcc_console.ui.feed.home_model import Draft, RunSummary, draft_lines
from uvcc_console.ui.judging.condition import status_word
from uvcc_console.ui.judging.filters import Filter
from uvcc_console.ui.judging.lamps import DEAD, Lamp
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.bars import shape_words
from uvcc_console.ui.widgets.list_panel import ListPanel, ListRow
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.table import Column, body, choose, head
from uvcc_engine.contract.job.rollout_phases import PHASES


def run_view(summary: RunSummary, view: View) -> View:
    """The view of one run, for the judgements shared with the run screen."""
    snap = summary.snap
    return View(
        snap=snap,
        now=view.now,
        glyphs=view.glyphs,
        conductor=Lamp() if summary.live or snap.ended else Lamp(DEAD),
        utc=view.utc,
        changed=summary.changed,
    )


def when(ts: float, utc: bool) -> str:
    """A time as date, hour and minute."""
    return time.strftime("%d %b %H:%M", time.gmtime(ts) if utc else time.localtime(ts))


COLUMNS = (
    Column("state", "state", 15),
    Column("run", "run", 26),
    Column("stage", "stage", 13, "l", 3),
    Column("step", "step", 11, "r", 1),
    Column("loss", "loss", 8, "r", 2),
    Column("spent", "spent", 8, "r", 4),
    Column("took", "took", 9, "r", 5),
    Column("created", "created", 12, "l", 6),
)
SORTS = ("created", "run", "loss", "spent", "step", "took")


def fields_of(summary: RunSummary) -> dict[str, str | float]:
    """What a search can ask of a run."""
    s = summary.snap
    found: dict[str, str | float] = {
        "run": summary.run_dir.name,
        "profile": s.profile_name,
        "job": s.job_kind,
        "status": s.status,
        "live": "yes" if summary.live else "no",
        "step": float(s.step),
        "spent": s.spent,
        "took": max(0.0, (s.ended or s.updated) - s.created),
        "created": s.created,
    }
    reported = [beat for w in s.workers.values() if isinstance(beat := w.beat.get("loss"), float)]
    for phase in reversed(PHASES):
        values = summary_values(summary, phase)
        found.update({name: value for name, value in values.items() if name not in found})
    trains = s.phase in PHASES and "loss" not in summary_values(summary, s.phase)
    if trains:  # the loss of the phase before is not that of this one
        found.pop("loss", None)
    if reported and "loss" not in found:
        found["loss"] = reported[0]
    return found


def row_cells(summary: RunSummary, view: View) -> dict[str, Span]:
    """A run's cells, by the keys of :data:`COLUMNS`."""
    s = summary.snap
    word, role = status_word(run_view(summary, view))
    loss = fields_of(summary).get("loss")
    return {
        "state": (word, role.split()[0] if role == "ok bold" else role),
        "run": (clean(summary.run_dir.name), "title" if summary.live else "text"),
        "stage": (s.stage.name if s.stage and not s.ended else "", "muted"),
        "step": (f"{max(0, s.step)}/{s.steps_planned}" if s.steps_planned and s.workers else "", "text"),
        "loss": (number(loss) if isinstance(loss, float) else "", "text"),
        "spent": (money(s.spent), "text" if s.spent else "faint"),
        "took": (duration(max(0.0, (s.ended or view.now) - s.created)), "muted"),
        "created": (when(s.created, view.utc), "muted"),
    }


def summary_values(summary: RunSummary, phase: str) -> Mapping[str, float]:
    """A phase's values as every screen shows them."""
    return shown(summary.snap, phase, summary.changed).values


def words_of(summary: RunSummary) -> str:
    """The text that a word is searched in."""
    s = summary.snap
    return f"{summary.run_dir.name} {s.profile_name} {s.job_kind} {s.status} {s.detail}".lower()


def _sortable(value: str | float | None) -> tuple[bool, float, str]:
    return (isinstance(value, float), value if isinstance(value, float) else 0.0, str(value or ""))


class RunsPanel(ListPanel):
    """Every run of this machine, the newest first."""

    title = "Runs"
    number = "1"
    BINDINGS: ClassVar[list[BindingType]] = [("o", "sort", "sort"), ("c", "beside", "compare")]
    help = (
        "The runs of this machine. Enter shows one, p plays it back, F9 opens a live one and holds it. / searches by "
        "name, profile, job and state (loss<0.5, spent>10, status=failed), Esc shows all again, o sorts by the next "
        "column, c holds a run beside the one under the cursor, A packs one away (uvcc runs --unpack brings it back), "
        "X deletes one."
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.known: list[RunSummary] = []
        self.packed = 0  # runs that were packed away, where no other is there
        self.search = Filter()
        self.sort = SORTS[0]
        self.beside = ""

    @property
    def runs(self) -> list[RunSummary]:
        """The runs that are shown, in their order."""
        found = [r for r in self.known if self.search.matches(fields_of(r), words_of(r))]
        if self.sort == "created":
            return found
        return sorted(found, key=lambda r: _sortable(fields_of(r).get(self.sort)), reverse=self.sort != "run")

    @runs.setter
    def runs(self, found: list[RunSummary]) -> None:
        self.known = found

    def empty(self) -> str:
        if self.known and self.search:
            return f"no run matches /{self.search.source}: Esc shows all {len(self.known)}"
        if self.packed:
            return f"no runs here, {self.packed} packed away: uvcc runs --unpack brings one back"
        return "no runs yet: choose a profile and press Enter"

    def _columns(self, width: int) -> list[tuple[Column, int]]:
        """What fits beside run ids that stay whole as long as the state fits, too; costs only where there are any."""
        longest = max((len(r.run_dir.name) for r in self.runs), default=0)
        names = min(max(20, longest), max(20, width - 2 - 16))
        spent = any(r.snap.spent for r in self.runs)
        listed = [Column(c.key, c.title, names if c.key == "run" else c.width, c.align, c.importance) for c in COLUMNS]
        return choose([c for c in listed if c.key != "spent" or spent], width - 2)

    def head(self, view: View, width: int) -> Sequence[Line]:
        mark = view.glyphs.up if self.sort == "run" else view.glyphs.down
        line = head(self._columns(width), sorted_by=self.sort, mark=mark)
        return [[("  ", ""), *line]] if self.runs else []

    def rows(self, view: View, width: int) -> Sequence[ListRow]:
        columns = self._columns(width)
        return [(r.run_dir.name, body(columns, row_cells(r, view), more=view.glyphs.more)) for r in self.runs]

    def heading(self, view: View) -> tuple[str, str]:
        live, dot = sum(r.live for r in self.known), view.glyphs.dot
        shown = f"{len(self.runs)} of {len(self.known)} {dot} /{self.search.source}" if self.search else len(self.known)
        words = f"Runs {dot} {shown}" + (f" {dot} {live} live" if live else "")
        return words, ("" if self.sort == "created" else f"by {self.sort}")

    def action_sort(self) -> None:
        """Sort by the next column that is shown, at last by the age of the runs again."""
        shown = {c.key for c, _ in self._columns(self.content_region.width)}
        order = [*SORTS[SORTS.index(self.sort) + 1 :], *SORTS]
        self.sort = next(name for name in order if name == SORTS[0] or name in shown)
        self.redraw()

    def action_beside(self) -> None:
        """Hold this run beside the others, or no longer."""
        self.beside = "" if self.beside == self.current else self.current
        self.post_message(self.Moved(self, self.current))


def compare_lines(a: RunSummary, b: RunSummary, view: View, width: int) -> list[Line]:
    """Two runs side by side: what differs is bright."""
    lines: list[Line] = [[(fit("", 14), ""), (fit("held beside", 28), "muted"), ("under the cursor", "muted")]]
    one, two = fields_of(a), fields_of(b)
    for name in dict.fromkeys((*one, *two)):
        left, right = (_shown(name, f.get(name), view) for f in (one, two))
        role = "muted" if left == right else "title"
        lines.append(cut([(fit(name, 14), "muted"), (fit(left, 28), role), (right, role)], width))
    wanted, given = a.snap.profile, b.snap.profile
    for key, left, right in differing(wanted, given)[:20]:
        lines.append(cut([(fit(key, 24), "muted"), (fit(left, 18), "accent"), (right, "accent")], width))
    return lines


def _shown(name: str, value: str | float | None, view: View) -> str:
    if value is None:
        return ""
    if name == "created":
        return when(float(value), view.utc)
    if name == "took":
        return duration(float(value))
    if name == "step":
        return f"{int(float(value))}"
    return money(float(value)) if name == "spent" else number(value) if isinstance(value, float) else clean(value)


def differing(a: object, b: object, path: str = "") -> list[tuple[str, str, str]]:
    """(key, here, there) of the settings in which two profiles differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = dict.fromkeys((*a, *b))
        return [d for k in keys for d in differing(a.get(k), b.get(k), f"{path}.{k}" if path else clean(str(k)))]
    return [] if a == b else [(path, clean(value_words(a)), clean(value_words(b)))]


class ProfilesPanel(ListPanel):
    """The profiles that can be started."""

    title = "Profiles"
    number = "2"
    grows = True
    help = "The ways of running. Enter shows plan and price and asks before anything is started."

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.profiles: list[tuple[str, str]] = []

    def rows(self, view: View, width: int) -> Sequence[ListRow]:
        wide = max((len(name) for name, _ in self.profiles), default=0)
        rows: list[ListRow] = []
        for name, about in self.profiles:
            rows.append((name, [(fit(name, wide + 2), "title"), (clean(about), "muted")]))
        return rows


class AboutPanel(Panel):
    """The run or the profile under the cursor."""

    title = "About"
    help = "What the run under the cursor did, or what the profile under the cursor would do."

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.subject: RunSummary | Draft | None = None
        self.beside: RunSummary | None = None
        self.holds = ""  # how much room the run takes

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        if isinstance(self.subject, Draft):
            return draft_lines(self.subject, width, view.glyphs)
        if self.subject is None:
            return list(wrap([("Choose a run to watch or a profile to start.", "muted")], width))
        if self.beside is not None and self.beside is not self.subject:
            return compare_lines(self.beside, self.subject, view, width)
        lines = run_lines(self.subject, view, width)
        return [lines[0], [(self.holds, "muted")], *lines[1:]] if self.holds else lines

    def heading(self, view: View) -> tuple[str, str]:
        if isinstance(self.subject, Draft):
            return f"Profile {self.subject.profile}", "Enter: settings and price"
        return (f"Run {clean(self.subject.run_dir.name)}", "Enter opens") if self.subject else ("About", "")


def run_lines(summary: RunSummary, view: View, width: int) -> list[Line]:
    """A run in a dozen lines."""
    s, g = summary.snap, view.glyphs
    seen = run_view(summary, view)
    word, role = status_word(seen)
    lines: list[Line] = [[(f" {word} ", role), ("  ", ""), (clean(s.detail), "text")]]
    took = (s.ended or view.now) - s.created
    lines.append([(f"{s.profile_name}, {s.job_kind}, {shape_words(s, g)}, {duration(took)}", "muted")])
    for phase in dict.fromkeys((*s.results, *s.verdicts)):
        found = seen.result(phase)
        if found.values:
            text = "  ".join(f"{k} {v:.4f}" for k, v in found.values.items())
            caveat = f"  {found.caveat}" if found.caveat else ""
            lines.append(cut([(f"{phase:<9}", "muted"), (text, "title"), (caveat, "warn")], width))
        if found.mark in ("", REPORTED):
            continue
        sign, tone = {VERIFIED: (g.ok, "ok"), UNCHECKED: (g.todo, "warn")}.get(found.mark, (g.fail, "bad"))
        said = f"verified {found.global_root[:16]}" if found.verified else found.words(utc=view.utc)
        lines += wrap([(f"{phase:<9}", "muted"), (f"{sign} {clean(said)}", tone)], width, " " * 9)
    if s.halt.last_drill_s is not None:
        lines.append([(f"{'drill':<9}", "muted"), (f"{g.ok} {s.halt.last_drill_s:.1f} s", "text")])
    lines.append([("", "")])
    for v in s.stages:
        mark = {"ok": "ok", "running": "accent bold", "waiting": "warn", "failed": "bad"}.get(v.status, "faint")
        lines.append(cut([(f"{g.stage(v.status)} {v.name:<14}", mark), (clean(v.detail), "muted")], width))
    for a in s.alerts[-5:]:
        lines.append(cut([(f"{g.warn} {clean(a.text)}", "bad" if a.level == "error" else "warn")], width))
    return lines
