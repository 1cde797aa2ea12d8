"""``uvcc status RUN``: one picture of a run, as text or JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.cli.follow import jsonview
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.cli.view import status_line
from uvcc_console.core import pod_states
from uvcc_console.core.answers.shown import Shown, clock
from uvcc_console.core.answers.shown import shown as result_of
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import ack_words, halt_words
from uvcc_console.plan import plan_score
from uvcc_console.report.recheck import recheck
from uvcc_console.runs.disk_space import cure, full_disk
from uvcc_console.runs.processes import CONDUCTOR, running
from uvcc_console.ui.drawing.format import duration

CLOCK_S = 5.0  # by so much two clocks may differ, and ages are still worth telling
_MARK = {"ok": "+", "failed": "x", "running": ">", "waiting": "=", "skipped": "-", "pending": "."}


def text(s: Snapshot, run_dir: Path, now: float) -> str:
    """The snapshot for a reader: stages, pods, workers, agreement, halt, results."""
    changed = recheck(run_dir, s)
    live = running(run_dir, CONDUCTOR)
    verbs = "uvcc teardown" if s.apart else "uvcc resume or uvcc teardown"  # a domain's part is not taken up alone
    state = s.status if live or s.ended else f"{s.status} (nobody conducts it: {verbs})"
    lines = [f"{s.run}  {s.profile_name}  {state}" + (f": {s.detail}" if s.detail else "")]
    lines.append("stages   " + " ".join(f"{_MARK.get(v.status, '?')}{v.name}" for v in s.stages))
    for v in s.stages:
        if v.status in ("failed", "waiting", "running") and v.detail:
            lines.append(f"         {v.name} {v.status}: {v.detail}")
    if s.phase:
        loss = jsonview.last_value(s, "loss")
        shown = f", loss {loss:.4f}" if loss is not None else ""
        planned = f" of {s.steps_planned}" if s.steps_planned else ""
        early = ", ended early by its validation" if s.ended_early else ""
        lines.append(f"phase    {s.phase} attempt {s.attempt}: step {max(s.step, 0)}{planned}{shown}{early}")
        lines += [f"agreed   {words}" for words in _agreement(s, changed)]
    if s.fork:
        lines.append(f"FORK     {s.fork}")
    if room := "" if s.ended else full_disk(run_dir):
        lines.append(f"DISK     {room} ({cure(room)})")
    ahead = s.updated - now
    if ahead > CLOCK_S:
        lines.append(
            f"CLOCK    this machine's clock is {duration(ahead)} behind that of the newest event: ages cannot be told "
            "(set it, or read the run where it is conducted)"
        )
    for p in s.pods.values():
        ways = " ".join(f"{n}{'+' if up else '-'}" for n, (up, _) in p.paths.items())
        waits = p.said if p.state == pod_states.BOOTING else ""
        lines.append(f"pod      {p.pod:<8} {p.provider:<12} {p.state:<8} {p.address} {ways}{waits}".rstrip())
    for d in s.domains.values():
        heard = "" if ahead > CLOCK_S else f", heard {max(0.0, now - d.ts):.0f} s ago"
        heard = f" when last heard, at {clock(d.ts)}" if s.ended else heard  # it has gone on since
        lines.append(f"domain   P{d.party} {d.words()}{heard}")
    for coord in sorted(s.workers):
        w = s.workers[coord]
        age = f"{max(0.0, now - w.beat_ts):.0f} s" if w.beat_ts and not s.ended and ahead <= CLOCK_S else "-"
        step = w.step if w.step >= 0 else "-"  # a program of one's own need not tell any
        end = f" {w.signal or f'exit {w.rc}'}" if w.state == "exited" else ""
        lines.append(f"worker   {coord:<10} {w.phase:<8} step {step:<5} heartbeat {age:<6} {w.root[:12]}{end}".rstrip())
    lines += _halt(s)
    for g in s.gates:
        lines.append(f"gate     {g.name}: {'ok' if g.ok else 'FAILED'} (wanted {g.wanted}, measured {g.measured})")
    for phase in dict.fromkeys((*s.results, *s.verdicts)):
        lines += _result(result_of(s, phase, changed))
    lines += [f"plan     {line}" for line in plan_score.lines(s)]
    lines += [f"odd      {where}: malformed lines: {n}" for where, n in sorted(s.malformed.items())]
    lines += [f"operated {sentence}" for sentence in s.operation]
    lines.append(f"cost     {s.spent:.2f} spent, {s.hourly:.2f} an hour")
    lines += [f"alert    {a.level} {a.source}: {a.text}" for a in s.alerts[-5:]]
    return "\n".join(lines)


def _agreement(s: Snapshot, changed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Up to where the parties agree; nothing of a job that has no roots. A domain of its own has those of its own
    party until all is exchanged.
    """
    if s.agreed_epoch >= 0:
        return [f"epoch {s.agreed_epoch}" + (f", step {s.agreed_step} of the run" if s.first_step else "")]
    if not s.proves or s.followed:
        return []
    if s.apart:
        if (
            s.phase in s.verdicts
        ):  # by the transcripts of all three; where that does not hold, the result's line says so
            return ["in every epoch, as verified"] if result_of(s, s.phase, changed).verified else []
        return ["the others' roots did not come" if s.ended else "not told yet: the others' roots come at the end"]
    return ["in no epoch" if s.ended else "not yet"]


def _halt(s: Snapshot) -> list[str]:
    """The last halt; of one that is under way, or did not reach all, also what each pod has proved that is not gone."""
    h = s.halt
    if not h.nonce:
        return []
    ended = f"{halt_words(h.verified, h.total, h.step)}, {h.seconds:.1f} s"
    word = "drill" if h.drill else h.mode
    lines = [f"halt     {word} by {h.by}: {ended if h.done else 'under way'}"]
    if h.done and (h.mode != "halt" or h.verified == h.total):
        return lines
    said: dict[str, list[str]] = {}
    for p in s.pods.values():
        if p.state != "gone":
            stage, step, checkpoint, _ = h.acks.get(p.pod, ("unknown", -1, "", 0.0))
            said.setdefault(ack_words(stage, step, checkpoint), []).append(p.pod)
    return [*lines, *(f"         {' '.join(pods)}: {words}" for words, pods in said.items())]


def _result(found: Shown) -> list[str]:
    """A phase's result: whose word it is and whether that holds now, then the values, then what they stand on."""
    lines = [f"result   {found.phase}: {found.words()}"]
    values = ", ".join(f"{k} {v:.4f}" for k, v in found.values.items())
    if values:
        lines.append(f"         {values}" + (f" ({found.caveat})" if found.caveat else ""))
    if found.global_root:
        lines.append(f"         global root {found.global_root}")
    lines += [f"         result hash {h}" + (f" ({found.caveat})" if found.caveat else "") for h in found.hashes]
    return lines


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "status",
        "What a run is doing now, from its journal. Of what was verified the files are held against the checksums that "
        "were noted then: exit code 1 if one has changed since.",
    )
    parser.add_run()
    parser.add_json()
    parser.add_argument("--line", action="store_true", help="one short line, for a status bar")
    parser.add_argument("--tmux", action="store_true", help="the same in tmux's colours")
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    if args.line or args.tmux:
        common.hand_out(status_line.line(s, run_dir, time.time(), colours=args.tmux))
        return OK
    if args.json:
        common.emit(jsonview.document(s, run_dir))
    else:
        common.show(text(s, run_dir, time.time()))
    return FAILED if recheck(run_dir, s) else OK
