"""Rollout: stages with their times, gates with what they wanted and measured, alerts with their hints."""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.core import pod_states
from uvcc_console.core.answers import triage
from uvcc_console.core.snapshot import StageView
from uvcc_console.plan import plan_score
from uvcc_console.ui.drawing.format import clock, duration
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, spread, width_of, wrap
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.panel import Panel
from uvcc_engine.contract.text import counted

ROLES = {"ok": "ok", "running": "accent bold", "waiting": "warn bold", "failed": "bad", "skipped": "muted"}


def _took(view: View, v: StageView) -> str:
    if not v.started or v.status == "waiting":
        return ""
    until = v.ended or view.snap.ended or view.now
    return duration(max(0.0, until - v.started))


def _name(view: View, v: StageView, wide: int) -> list[Span]:
    role = ROLES.get(v.status, "faint")
    return [(f"{view.glyphs.stage(v.status)} ", role), (fit(v.name, wide), "text" if v.status == "ok" else role)]


def gate_lines(view: View, width: int) -> list[Line]:
    """What was measured against what was wanted."""
    g, lines = view.glyphs, []
    for gate in view.snap.gates:
        sign, role = (g.ok, "ok") if gate.ok else (g.fail, "bad")
        left: list[Span] = [(f"{sign} ", role), (clean(gate.name), "text" if gate.ok else "bad")]
        right: list[Span] = [
            (clean(gate.measured), "text" if gate.ok else "bad"),
            (f"  want {clean(gate.wanted)}", "muted"),
        ]
        lines.append(spread(left, cut(right, max(8, width - width_of(left) - 1)), width))
    return [[("gates", "muted bold")], *lines] if lines else []


def megabytes(count: float) -> str:
    """Three digits of what a run moves."""
    return (
        f"{count / 1e6:.1f} MB"
        if count < 1e8
        else f"{count / 1e6:,.0f} MB"
        if count < 1e10
        else f"{count / 1e9:.0f} GB"
    )


def forecast_lines(view: View, width: int) -> list[Line]:
    """What the smoke said of the full run, with its error, and what became of it."""
    f = view.snap.prediction
    if f is None:
        return []
    off = f"  took {duration(f.took_s)}, off by {f.sigmas:.1f} errors" if f.scored else ""
    if f.scored and f.bytes_were:
        off += f"; moved {megabytes(f.bytes_were)}, off by {f.bytes_sigmas:.1f}"
    said: list[Span] = [
        (f"{duration(f.seconds)} (error {duration(f.seconds_error)})", "text"),
        (f"  ${f.cost:.2f} (error ${f.cost_error:.2f})", "text"),
        (f"  {megabytes(f.bytes)} (error {megabytes(f.bytes_error)})" if f.bytes else "", "text"),
    ]
    head: list[Line] = [[("", "")], [(f"forecast of the full run's {counted(f.steps, 'step')}", "muted bold")]]
    return [*head, *wrap([*said, (off, "ok" if f.sigmas <= 2 else "warn")], width, "  ")]


def score_lines(view: View, width: int) -> list[Line]:
    """What the plan foretold of a step, beside what is measured."""
    found = plan_score.score(view.snap)
    if not found:
        return []
    lines: list[Line] = [[("", "")], [("the plan held against the run", "muted bold")]]
    for one in found:
        said: list[Span] = [(f"a step's {one.name:<8} ", "muted"), (one.words(), "text" if one.held else "warn")]
        lines += wrap(said, width, "  ")
    return lines


def checkpoint_lines(view: View, width: int) -> list[Line]:
    """Of which step every pod has a checkpoint, which is what a resume goes back to at most."""
    s = view.snap
    pods = [name for name, p in s.pods.items() if p.state not in pod_states.OVER]
    if not s.engine_run or not pods:
        return []
    steps = {name: s.checkpoints[name][0] for name in pods if name in s.checkpoints}
    line: list[Span] = [("checkpoints", "muted bold"), ("  ", "")]
    if len(steps) < len(pods):
        without = [name for name in pods if name not in steps]
        return [*wrap([*line, (f"none yet on {clean(', '.join(without))}", "warn")], width, "  ")[:2]]
    oldest, newest = min(steps.values()), max(steps.values())
    line += [("every pod has one of step ", "muted"), (f"{oldest}", "title")]
    if newest > oldest:
        line.append((f", the newest is of step {newest}", "muted"))
    if s.step > oldest:
        line.append((f"; {counted(s.step - oldest, 'step')} since then", "muted"))
    return [*wrap(line, width, "  ")]


def rollout_lines(view: View, width: int, height: int = 0) -> list[Line]:
    """Stages with their time, gates with their measured values; what is done becomes one line where room is short."""
    s, g = view.snap, view.glyphs
    gates = gate_lines(view, width)
    wide = min(14, max((len(v.name) for v in s.stages), default=0))
    over = len(s.stages) + len(gates) - height
    done = next((i for i, v in enumerate(s.stages) if v.status not in ("ok", "skipped")), len(s.stages))
    folded = min(done, over + 1) if over > 0 and height else 0
    lines: list[Line] = []
    if folded > 1:
        took = sum(max(0.0, v.ended - v.started) for v in s.stages[:folded])
        left: list[Span] = [(f"{g.ok} ", "ok"), (f"{folded} stages done", "text")]
        lines.append(spread(left, [(duration(took), "muted")], width))
    for v in s.stages[folded if folded > 1 else 0 :]:
        name = _name(view, v, wide)
        if v.detail and v.status != "pending":
            name += [(" ", ""), (clean(v.detail), "bad" if v.status == "failed" else "muted")]
        lines.append(spread(name, [(_took(view, v), "muted")], width))
    return [*lines, *gates] or [[("nothing planned yet", "muted")]]


def page_lines(view: View, width: int) -> list[Line]:
    """Every stage with its whole detail and times, the gates, the alerts with their hints."""
    s, g = view.snap, view.glyphs
    kept = checkpoint_lines(view, width)  # first: it is asked when there is little time to read
    lines: list[Line] = [*kept, [("", "")]] if kept else []
    for v in s.stages:
        began = clock(v.started, utc=view.utc) if v.started else ""
        head: list[Span] = [
            *_name(view, v, 14),
            (fit(began, 10), "muted"),
            (fit(_took(view, v), 10, "r"), "text"),
            ("  ", ""),
        ]
        tone = "bad" if v.status == "failed" else "muted"
        lines += wrap([*head, (clean(v.detail) if v.status != "pending" else "", tone)], width, " " * 38)
    if gates := gate_lines(view, min(width, 90)):
        lines += [[("", "")], *gates]
    lines += forecast_lines(view, width) + score_lines(view, width)
    if s.triage:
        lines += [[("", "")], [("triage: one change at a time (T proposes the next)", "muted bold")]]
    for told in triage.story(s):
        lines += wrap([(f"{g.dot} ", "muted"), (clean(told), "text")], width, "  ")
    if s.alerts:
        lines += [[("", "")], [("alerts", "muted bold")]]
    for a in reversed(s.alerts[-20:]):
        role = {"error": "bad", "warn": "warn"}.get(a.level, "muted")
        when = clock(a.ts, utc=view.utc)
        lines += wrap(
            [(f"{g.warn} ", role), (f"{when} ", "muted"), (clean(f"{a.source}: {a.text}"), role)], width, " " * 11
        )
    return lines or [[("nothing planned yet", "muted")]]


class RolloutPanel(Panel):
    """Stages and gates."""

    title = "Rollout"
    number = "6"
    help = (
        "What a resume goes back to, the stages of this rollout with their times, then the gates: what was measured "
        "against what was wanted.\n"
        "A stage that failed can be taken up again (r), repeated (R) or, for drill and gate, skipped (x)."
    )

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return page_lines(view, width) if self.has_class("-paged") else rollout_lines(view, width, height)
