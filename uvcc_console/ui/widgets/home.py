"""Panels of the start screen: runs, profiles, and what the one under the cursor is about."""

from __future__ import annotations

import time
from collections.abc import Sequence

from uvcc_console.core.shown import REPORTED, UNCHECKED, VERIFIED
from uvcc_console.ui.drawing.format import duration, money
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, wrap
from uvcc_console.ui.home.home_model import Draft, RunSummary, draft_lines
from uvcc_console.ui.judging.condition import status_word
from uvcc_console.ui.judging.lamps import DEAD, Lamp
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.list_panel import ListPanel, Row
from uvcc_console.ui.widgets.panel import Panel


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
    """Date and minute."""
    return time.strftime("%d %b %H:%M", time.gmtime(ts) if utc else time.localtime(ts))


class RunsPanel(ListPanel):
    """Every run of this machine, the newest first."""

    title = "Runs"
    number = "1"
    help = "The runs of this machine. Enter shows one, p plays it back, F9 opens a live one and holds it."

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.runs: list[RunSummary] = []

    def empty(self) -> str:
        return "no runs yet: choose a profile and press Enter"

    def head(self, view: View, width: int) -> Sequence[Line]:
        names = f"  {'':<15} {'run':<26} {'stage':<13} {'step':>9}"
        return [cut([(names + f"  {'spent':>8}  created", "muted")], width)] if self.runs else []

    def rows(self, view: View, width: int) -> Sequence[Row]:
        out: list[Row] = []
        for summary in self.runs:
            s = summary.snap
            word, role = status_word(run_view(summary, view))
            stage = s.stage.name if s.stage and not s.ended else ""
            step = f"{max(0, s.step)}/{s.steps_planned}" if s.steps_planned and s.workers else ""
            line: list[Span] = [(fit(word, 15), role.split()[0] if role in ("ok bold",) else role), (" ", "")]
            line += [
                (fit(clean(summary.run_dir.name), 26), "title" if summary.live else "text"),
                (f" {fit(stage, 13)}", "muted"),
            ]
            line += [(f" {step:>9}", "text"), (f"  {money(s.spent):>8}", "text" if s.spent else "faint")]
            line += [(f"  {when(s.created, view.utc)}", "muted")]
            out.append((summary.run_dir.name, line))
        return out

    def heading(self, view: View) -> tuple[str, str]:
        live = sum(r.live for r in self.runs)
        return f"Runs {view.glyphs.dot} {len(self.runs)}" + (f" {view.glyphs.dot} {live} live" if live else ""), ""


class ProfilesPanel(ListPanel):
    """The profiles that can be started."""

    title = "Profiles"
    number = "2"
    grows = True
    help = "The ways of running. Enter shows plan and price and asks before anything is started."

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.profiles: list[tuple[str, str]] = []

    def rows(self, view: View, width: int) -> Sequence[Row]:
        wide = max((len(name) for name, _ in self.profiles), default=0)
        rows: list[Row] = []
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

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        if isinstance(self.subject, Draft):
            return draft_lines(self.subject, width, view.glyphs)
        if self.subject is None:
            return list(wrap([("Choose a run to watch or a profile to start.", "muted")], width))
        return run_lines(self.subject, view, width)

    def heading(self, view: View) -> tuple[str, str]:
        if isinstance(self.subject, Draft):
            return f"Profile {self.subject.profile}", "Enter starts"
        return (f"Run {clean(self.subject.run_dir.name)}", "Enter opens") if self.subject else ("About", "")


def run_lines(summary: RunSummary, view: View, width: int) -> list[Line]:
    """A run in a dozen lines."""
    s, g = summary.snap, view.glyphs
    seen = run_view(summary, view)
    word, role = status_word(seen)
    lines: list[Line] = [[(f" {word} ", role), ("  ", ""), (clean(s.detail), "text")]]
    took = (s.ended or view.now) - s.created
    lines.append([(f"{s.profile_name}, {s.job_kind}, 3 parties {g.times} {s.replicas}, {duration(took)}", "muted")])
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
