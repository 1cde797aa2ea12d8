"""The right-hand panels: ledger (who agrees with whom), rollout (stages and gates), cost."""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.format import duration, money, short
from uvcc_console.ui.paint import Line, Span, clean, cut, fit, spread, wrap
from uvcc_console.ui.view import View, coord_parts
from uvcc_console.ui.widgets.panel import Panel


def agreement_line(view: View) -> Line:
    """``P0 = P1 = P2  agree @ step 40``, or the fork."""
    s, g = view.snap, view.glyphs
    joint = g.differ if s.fork else g.equal
    role = "bad" if s.fork else ("ok" if s.agreed_epoch >= 0 else "faint")
    parties: list[Span] = []
    for p in range(3):
        parties += [(f" {joint} " if p else "", role), (f"P{p}", f"p{p}")]
    if s.fork:
        return [*parties, ("  ", ""), (f" {g.fail} FORK ", "alarm")]
    if s.agreed_epoch < 0:
        seen = max((w.root_epoch for w in s.workers.values()), default=-1)
        return [*parties, ("  no epoch agreed yet" if seen < 0 else "  waiting for every root", "muted")]
    return [*parties, ("  agree", "ok bold"), (" @ step ", "muted"), (f"{s.agreed_epoch}", "title")]


def _roots(s: Snapshot) -> dict[int, list[str]]:
    """Root prefixes of the newest agreed (else newest) epoch by party, in replica order."""
    known = [a for a in s.agreement if a.epoch == s.agreed_epoch] or list(s.agreement[-1:])
    found: dict[int, list[str]] = {}
    for coord, root in sorted(known[0].roots.items() if known else ()):
        found.setdefault(coord_parts(coord)[0], []).append(root)
    return found


def ledger_lines(view: View, width: int, *, compact: bool = False) -> list[Line]:
    """Agreement, the parties' roots, what the verifier has said."""
    s, g = view.snap, view.glyphs
    last_verdict = next(reversed(list(s.verdicts.items())), None)
    short_form: list[Span] = []
    if compact and last_verdict:
        phase, verdict = last_verdict
        word, role = (f"{g.ok} {phase} verified", "ok") if verdict.ok else (f"{g.fail} {phase} NOT VERIFIED", "bad")
        short_form = [(word, role)]
    lines: list[Line] = [spread(agreement_line(view), short_form, width)]
    if compact:
        return lines
    if s.fork:
        lines += wrap([(clean(s.fork), "bad")], width)
    for party, roots in sorted(_roots(s).items()):
        room = max(1, (width - 9) // 13)
        shown = "  ".join(short(r, 12) for r in roots[:room])
        rest = f" +{len(roots) - room}" if len(roots) > room else ""
        lines.append([(f"P{party}", f"p{party}"), (" roots ", "muted"), (shown, "text"), (rest, "muted")])
    last = max((w.root_epoch for w in s.workers.values()), default=-1)
    if last >= 0 and s.agreed_epoch >= 0:
        behind = last - s.agreed_epoch
        tail = "" if not behind else f"  {g.dot} {behind} behind"
        lines.append([("newest root ", "muted"), (f"step {last}", "text"), (tail, "warn" if behind > 2 else "muted")])
    for phase, verdict in s.verdicts.items():
        if verdict.ok:
            lines.append([(f"{g.ok} {phase} VERIFIED ", "ok bold"), (short(verdict.global_root, 12), "text")])
        else:
            lines += wrap([(f"{g.fail} {phase} NOT VERIFIED ", "bad"), (clean(verdict.detail), "text")], width)
    if not s.verdicts:
        lines.append([(f"{g.todo} nothing verified yet", "muted")])
    return lines


def rollout_lines(view: View, width: int, height: int = 0) -> list[Line]:
    """Stages with their time, gates with their measured values; what is done becomes one line where room is short."""
    s, g = view.snap, view.glyphs
    roles = {"ok": "ok", "running": "accent bold", "waiting": "warn bold", "failed": "bad", "skipped": "muted"}
    lines: list[Line] = []
    wide = min(14, max((len(v.name) for v in s.stages), default=0))
    left: list[Span]
    over = len(s.stages) + (len(s.gates) + 1 if s.gates else 0) - height
    done = next((i for i, v in enumerate(s.stages) if v.status not in ("ok", "skipped")), len(s.stages))
    folded = min(done, over + 1) if over > 0 and height else 0
    if folded > 1:
        took_all = sum(max(0.0, v.ended - v.started) for v in s.stages[:folded])
        lines.append(
            spread([(f"{g.ok} ", "ok"), (f"{folded} stages done", "text")], [(duration(took_all), "muted")], width)
        )
    for v in s.stages[folded if folded > 1 else 0 :]:
        role = roles.get(v.status, "faint")
        took = ""
        if v.started and v.status != "waiting":
            until = s.ended or view.now
            took = duration((v.ended or max(until, v.started)) - v.started)
        right: list[Span] = [(took, "muted")]
        name: list[Span] = [(f"{g.stage(v.status)} ", role), (fit(v.name, wide), role if v.status != "ok" else "text")]
        if v.detail and v.status != "pending":
            name += [(" ", ""), (clean(v.detail), "bad" if v.status == "failed" else "muted")]
        lines.append(spread(name, right, width))
    if s.gates:
        lines.append([("gates", "muted bold")])
    for gate in s.gates:
        sign, role = (g.ok, "ok") if gate.ok else (g.fail, "bad")
        left = [(f"{sign} ", role), (clean(gate.name), "text" if gate.ok else "bad")]
        lines.append(
            spread(
                left,
                [(clean(gate.measured), "text" if gate.ok else "bad"), (clean(f"  want {gate.wanted}"), "muted")],
                width,
            )
        )
    return lines or [[("nothing planned yet", "muted")]]


def cost_lines(view: View, width: int) -> list[Line]:
    """Rate, spent, forecast, runway, against the profile's limits."""
    s, g = view.snap, view.glyphs
    lines: list[Line] = []
    line: list[Span] = [(money(s.hourly), "title"), ("/h   ", "muted"), (money(s.spent), "title"), (" spent", "muted")]
    if s.forecast:
        line += [("   ", ""), (money(s.forecast), "text"), (" at the end", "muted")]
    lines.append(cut(line, width))
    limits = s.profile.get("limits")
    total = limits.get("total") if isinstance(limits, dict) else None
    notes: list[Span] = []
    if isinstance(total, (int, float)) and total > 0:
        part = s.spent / total
        role = "bad" if part > 0.9 else "warn" if part > 0.7 else "text"
        notes += [(f"{part:.0%} of {money(float(total))}", role)]
    if s.runway_h is not None:
        notes += [(f" {g.dot} " if notes else "", "muted"), (f"runway {duration(s.runway_h * 3600)}", "text")]
    if notes:
        lines.append(cut(notes, width))
    elif not s.hourly and not s.spent:
        lines.append([("local pods cost nothing" if s.pods else "nothing is running", "muted")])
    return lines


class LedgerPanel(Panel):
    """Agreement of the three parties."""

    title = "Ledger"
    number = "5"
    grows = True
    help = (
        "After each step every party commits to what it sent and received. The line says up to which step all three "
        "tell the same story; a FORK names the pair that does not. Roots differ between parties by design: each "
        "holds other leaves."
    )

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return ledger_lines(view, width, compact=self.screen.has_class("-short") and not self.has_class("-paged"))

    def show(self, view: View) -> None:
        self.set_class(bool(view.snap.fork), "-fork")
        super().show(view)


class RolloutPanel(Panel):
    """Stages and gates."""

    title = "Rollout"
    number = "6"
    help = "The stages of this rollout with their times, then the gates: what was measured against what was wanted."

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return rollout_lines(view, width, height)


class CostPanel(Panel):
    """Money."""

    title = "Cost"
    number = "7"
    grows = True
    help = "What runs per hour, what is spent, the forecast at the end of the run and the limits of the profile."

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return cost_lines(view, width)
