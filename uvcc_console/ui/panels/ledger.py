"""Ledger: who agrees with whom, up to which step, and what the verifier has said. A fork is the loudest thing."""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.core.alerts.failed_proofs import failed_proof
from uvcc_console.core.answers.shown import CHANGED, REFUTED
from uvcc_console.core.snapshot import EpochAgreement, Snapshot
from uvcc_console.ui.drawing.format import short
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, spread, wrap
from uvcc_console.ui.judging.view import View, coord_parts, result_mark
from uvcc_console.ui.widgets.panel import Panel
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.text import counted


def agreement_line(view: View) -> Line:
    """``P0 = P1 = P2  agree @ step 40``, or the fork. A domain of its own sees its own roots until all is exchanged."""
    s, g = view.snap, view.glyphs
    joint = g.differ if s.fork else g.equal
    whole = s.apart and s.phase in s.verdicts and view.result(s.phase).verified  # from the transcripts of all three
    role = "bad" if s.fork else ("ok" if s.agreed_epoch >= 0 or whole else "faint")
    parties: list[Span] = []
    for p in range(PARTIES):
        parties += [(f" {joint} " if p else "", role), (f"P{p}", f"p{p}")]
    if s.fork:
        return [*parties, ("  ", ""), (f" {g.fail} FORK ", "alarm")]
    if s.agreed_epoch < 0 and whole:
        return [*parties, ("  agree", "ok bold"), (" in every epoch", "muted")]
    if s.agreed_epoch < 0:
        seen = max((w.root_epoch for w in s.workers.values()), default=-1)
        late = "the others' roots come at the end" if s.apart else "waiting for every root"
        return [*parties, ("  no epoch agreed yet" if seen < 0 else f"  {late}", "muted")]
    return [*parties, ("  agree", "ok bold"), (" @ step ", "muted"), (f"{s.agreed_step}", "title")]


def _roots(s: Snapshot) -> dict[int, list[str]]:
    """Root prefixes of the newest agreed (else newest) epoch by party, in replica order."""
    known = [a for a in s.agreement if a.epoch == s.agreed_epoch] or list(s.agreement[-1:])
    found: dict[int, list[str]] = {}
    for coord, root in sorted(known[0].roots.items() if known else ()):
        found.setdefault(coord_parts(coord)[0], []).append(root)
    return found


def _verdicts(view: View, width: int) -> list[Line]:
    s, g = view.snap, view.glyphs
    lines: list[Line] = []
    for phase, verdict in s.verdicts.items():
        found = view.result(phase)
        if found.verified:
            lines.append([(f"{g.ok} {phase} VERIFIED ", "ok bold"), (short(verdict.global_root, 12), "text")])
        elif found.mark == REFUTED:
            lines += wrap([(f"{g.fail} {phase} NOT VERIFIED ", "bad"), (clean(verdict.detail), "text")], width)
        else:
            sign, role = (g.fail, "bad") if found.mark == CHANGED else (g.todo, "warn")
            lines += wrap([(f"{sign} {phase} ", role), (clean(found.words(utc=view.utc)), "text")], width)
    return lines or [[(f"{g.todo} nothing verified yet", "muted")]]


def ledger_lines(view: View, width: int, *, compact: bool = False) -> list[Line]:
    """Agreement, the parties' roots, what the verifier has said. ``compact``: one line."""
    s, g = view.snap, view.glyphs
    last_verdict = next(reversed(list(s.verdicts)), None)
    short_form: list[Span] = []
    if compact and last_verdict:
        sign, said, tone = result_mark(view.result(last_verdict), g)
        role = {"green": "ok", "alarm": "bad"}.get(tone, "warn")
        short_form = [(f"{sign} {last_verdict} {said.lower() if role == 'ok' else said}", role)]
    lines: list[Line] = [spread(agreement_line(view), short_form, width)]
    if compact:
        return lines
    if s.fork:
        lines += wrap([(clean(s.fork), "bad")], width)
    lines += wrap([(failed, "bad")], width) if (failed := failed_proof(s)) else []
    for party, roots in sorted(_roots(s).items()):
        room = max(1, (width - 9) // 14)
        shown = "  ".join(short(r, 12) for r in roots[:room])
        rest = f" +{len(roots) - room}" if len(roots) > room else ""
        lines.append(cut([(f"P{party}", f"p{party}"), (" roots ", "muted"), (shown, "text"), (rest, "muted")], width))
    last = max((w.root_epoch for w in s.workers.values()), default=-1)
    if last >= 0 and s.agreed_epoch >= 0:
        behind = last - s.agreed_epoch
        tail = "" if not behind else f"  {g.dot} {behind} behind"
        lines.append(
            [
                ("newest root ", "muted"),
                (f"step {s.first_step + last}", "text"),
                (tail, "warn" if behind > 2 else "muted"),
            ]
        )
    lines += _verdicts(view, width)
    return lines + [row for sentence in s.operation for row in wrap([(sentence, "muted")], width)]


def disagreement(a: EpochAgreement) -> tuple[str, str] | None:
    """The first two workers whose records of their common channel differ in an epoch."""
    for coord in sorted(a.pairs):
        for peer, digest in sorted(a.pairs[coord].items()):
            other = a.pairs.get(peer, {}).get(coord)
            if other is not None and other != digest:
                return coord, peer
    return None


def history_line(view: View, width: int) -> Line:
    """The newest epochs in a row: agreed, still open, forked."""
    s, g = view.snap, view.glyphs
    expected = 3 * s.replicas * s.pipeline_stages * s.tensor
    shown = s.agreement[-max(1, width - 24) :]
    if not shown:
        return [("no epoch finalised yet", "muted")]
    line: list[Span] = [(f"{shown[0].epoch:>6} ", "muted")]
    for a in shown:
        if disagreement(a):
            line.append((g.differ, "alarm"))
        elif len(a.roots) >= expected:
            line.append((g.equal, "ok"))
        else:
            line.append((g.dot, "muted"))
    began = f" since step {s.first_step}" if s.first_step else ""  # a replaced pod: the epochs of another policy
    return cut([*line, (f" {shown[-1].epoch}", "muted"), (f"   epochs{began}", "muted")], width)


def board_lines(view: View, width: int) -> list[Line]:
    """The whole board: agreement, history, newest root of every worker by party, sessions, verdicts, result hashes."""
    s, g = view.snap, view.glyphs
    lines: list[Line] = [agreement_line(view), history_line(view, width)]
    if s.fork:
        lines += wrap([(f" {g.differ} {clean(s.fork)} ", "alarm")], width)
    lines += wrap([(failed, "bad")], width) if (failed := failed_proof(s)) else []
    places = sorted({coord_parts(c)[1:] for c in s.workers})
    each = max(16, min(40, (width - 12) // 3))
    if places:
        head: list[Span] = [(fit("", 12), "")]
        head += [(fit(f"P{p}", each), f"p{p} bold") for p in range(PARTIES)]
        lines += [[("", "")], cut(head, width)]
    agreed = {a.epoch: a for a in s.agreement}
    for r, stage, tensor in places:
        line: list[Span] = [(fit(f"r{r:02d} s{stage} t{tensor}", 12), "muted")]
        for p in range(PARTIES):
            w = s.workers.get(f"p{p}r{r}s{stage}t{tensor}")
            line += _root_cell(view, w.root if w else "", w.root_epoch if w else -1, agreed, each)
        lines.append(cut(line, width))
    lines += [[("", "")], *_verdicts(view, width)]
    for name, value in (("sid_job", s.sid_job), ("engine run", s.engine_run)):
        if value:
            lines += wrap([(f"{name:<12}", "muted"), (clean(value), "text")], width, " " * 12)
    for phase, verdict in s.verdicts.items():
        said_root: Line = [(f"{phase:<12}", "muted"), (f"global root {verdict.global_root}", "text")]
        lines += wrap(said_root, width, " " * 12)  # nobody can compare a part of it
    for phase in dict.fromkeys((*s.results, *s.verdicts)):
        found = view.result(phase)
        for value in found.hashes:
            said = [
                key.split("/")[1]
                for key, h in s.result_hashes.items()
                if key == f"{phase}/{key[len(phase) + 1 :]}" and h == value
            ]
            who = counted(len(said), "worker") if len(found.hashes) == 1 or found.certified else ", ".join(said)
            tail = f"  {g.ok} verified, {who}" if found.verified else f"  {found.caveat}: {who}"
            told: Line = [(f"{phase:<12}", "muted"), (f"result {value}", "text"), (tail, "muted")]
            lines += wrap(told, width, " " * 12)
    return lines


def _root_cell(view: View, root: str, epoch: int, agreed: dict[int, EpochAgreement], width: int) -> list[Span]:
    g, s = view.glyphs, view.snap
    if not root:
        return [(fit(g.dot, width), "faint")]
    known = agreed.get(epoch)
    if known is not None and disagreement(known):
        sign, role = g.differ, "alarm"
    elif epoch <= s.agreed_epoch:
        sign, role = g.equal, "ok"
    else:
        sign, role = g.todo, "muted"
    text = f" {short(root, max(8, min(24, width - 12)))} {g.dot} {epoch}"
    return [(sign, role), (fit(text, width - 1), "text")]


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
        if self.has_class("-paged") and view.snap.job_kind and not view.snap.proves:
            none = "no ledger: only a private run has parties that commit to what they sent and received"
            return list(wrap([(none, "muted")], width))
        if self.has_class("-paged"):
            return board_lines(view, width)
        return ledger_lines(view, width, compact=self.screen.has_class("-short"))

    def show(self, view: View) -> None:
        self.set_class(bool(view.snap.fork), "-fork")
        super().show(view)
