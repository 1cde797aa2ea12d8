"""What the start screen shows: the runs of this machine, the profiles, and what a profile would do."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.answers.shown import Changes
from uvcc_console.core.folding import bad_records
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import EMPTY, Snapshot
from uvcc_console.fleet.provider_kinds import FleetSettings, runs_here
from uvcc_console.runs.order import number_of
from uvcc_console.ui.drawing.glyphs import Glyphs
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, wrap
from uvcc_console.ui.judging.rechecks import Rechecks
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.text import counted

if TYPE_CHECKING:
    from uvcc_console.fleet.provider import Quote
    from uvcc_console.plan.plan import Plan

# few and small: enough to say how a run stands without folding its telemetry
_KINDS = tuple(
    e.kind for e in (ev.RunCreated, ev.StageChanged, ev.PodChanged, ev.PhaseStarted, ev.ForkDetected, ev.HaltRequested)
) + tuple(
    e.kind for e in (ev.HaltAck, ev.HaltDone, ev.CostTick, ev.ResultReported, ev.PhaseVerdict, ev.Alert, ev.RunEnded)
)
_TAIL = 400


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: a snapshot without its telemetry but with the newest heartbeats, and whether somebody conducts it."""

    run_dir: Path
    snap: Snapshot
    live: bool
    seq: int
    rechecks: Rechecks
    changed: Changes = field(default_factory=lambda: EMPTY)


def summarise(run_dir: Path, known: RunSummary | None = None) -> RunSummary | None:
    """How a run stands; ``known`` is returned as it is when nothing happened since. None where no run was planned.

    A run that cannot be read is listed as such, with the reason; it keeps no other from being shown.
    """
    try:
        return _summarise(run_dir, known) if (run_dir / JOURNAL).exists() else None
    except (UvccError, OSError, *bad_records.ERRORS) as e:
        why = clean(e.what if isinstance(e, UvccError) else f"{type(e).__name__}: {e}")
        return RunSummary(
            run_dir, Snapshot(run=run_dir.name, status="unreadable", detail=why), False, -1, Rechecks(run_dir)
        )


def _summarise(run_dir: Path, known: RunSummary | None) -> RunSummary | None:
    journal = Journal(run_dir / JOURNAL, readonly=True)
    try:
        last = journal.last_seq()
        rechecks = known.rechecks if known is not None else Rechecks(run_dir)
        if known is not None and known.seq == last:
            live = _live(run_dir, known.snap)
            changed = rechecks.look(known.snap, time.time())
            if (known.live, known.changed) == (live, changed):
                return known
            return dataclasses.replace(known, live=live, changed=changed)
        snap = fold(event for _, event in journal.since(0, 100_000, _KINDS))
        beats = journal.since(max(0, last - _TAIL), _TAIL, (ev.HeartbeatRead.kind,))
        snap = fold((event for _, event in beats), snap)
        if not snap.run:
            return None
        snap = dataclasses.replace(snap, run=run_dir.name)  # a copied folder is what it is called, as for every command
        return RunSummary(run_dir, snap, _live(run_dir, snap), last, rechecks, rechecks.look(snap, time.time()))
    finally:
        journal.close()


def _live(run_dir: Path, snap: Snapshot) -> bool:
    """Whether somebody conducts it. A run that was just made waits for its conductor to come up."""
    from uvcc_console.runs import processes

    if snap.ended:
        return bool(processes.running(run_dir, processes.CONDUCTOR))
    return processes.going(run_dir, snap.created, time.time())


def find_runs(known: dict[str, RunSummary]) -> list[RunSummary]:
    """Every run of this machine, the newest first; none while their folder cannot be listed."""
    try:
        folders = paths.run_folders()
    except UvccError:
        folders = []
    found = [s for p in folders if (s := summarise(p, known.get(p.name))) is not None]
    return sorted(found, key=lambda s: (-number_of(s.run_dir), -s.snap.created, s.snap.run))


@dataclass(frozen=True, slots=True)
class Draft:
    """A profile with settings, on its way to a rollout: the plan and the quote, or what is wrong with it."""

    profile: str
    settings: tuple[str, ...] = ()
    plan: Plan | None = None
    quote: Quote | None = None
    error: str = ""
    doubt: str = ""  # why a command could not be held
    asking: bool = False  # whether the provider is being asked for the price

    @property
    def hourly(self) -> float | None:
        """Dollars an hour, None before the quote."""
        return self.quote.hourly if self.quote is not None else None

    @property
    def free(self) -> bool:
        """Whether nothing can be spent: pods are processes of this machine."""
        return self.plan is not None and runs_here({"provider": self.plan.profile.fleet.kind})


def make_draft(profile: str, settings: Sequence[str]) -> Draft:
    """Read, override, check and plan. Errors become part of the draft."""
    from uvcc_console.plan import code_tree, command_halt
    from uvcc_console.plan.plan import make_plan, new_run_id
    from uvcc_console.plan.profile import load
    from uvcc_console.plan.schema import CommandJobSettings

    try:
        name, checked = load(profile, settings)
        plan = make_plan(new_run_id(name, token="0000"), name, checked)
        doubt = ""
        if isinstance(checked.job, CommandJobSettings):
            tree = code_tree.survey(checked.job) if checked.job.code else None
            doubt = command_halt.doubt(checked.job, tree)
    except UvccError as e:
        return Draft(profile, tuple(settings), error=str(e))
    return Draft(profile, tuple(settings), plan, doubt=doubt)


def ask_price(draft: Draft, scratch: Path) -> Draft:
    """The draft with its provider's quote. Blocking; for a worker thread."""
    from uvcc_console.fleet.provider_kinds import provider_for

    plan = draft.plan
    if plan is None:
        return draft

    async def ask() -> Quote:
        provider = provider_for(plan.profile.fleet.model_dump(mode="json"), scratch)
        try:
            return await provider.quote(list(plan.requests.values()))
        finally:
            await provider.close()

    try:
        return dataclasses.replace(draft, quote=asyncio.run(ask()))
    except UvccError as e:
        return dataclasses.replace(draft, error=str(e))


def start(draft: Draft) -> Path:
    """Create the run and start its conductor; the run's folder. Raises UvccError."""
    from uvcc_console.runs import processes

    run_dir = processes.create_run(draft.profile, draft.settings, patient=True)
    processes.start(run_dir, processes.CONDUCTOR)
    return run_dir


def _pair(name: str, text: str, width: int, role: str = "text") -> list[Line]:
    return list(wrap([(f"{name:<10}", "muted"), (clean(text), role)], width, " " * 10))


def _elsewhere(fleet: FleetSettings) -> str:
    """What happens where nothing that fits is offered: who is asked next, and how long is waited."""
    said: dict[str, list[str]] = {}
    for party in range(PARTIES):
        mine = fleet.of(party)
        names = []
        for other in mine.fallbacks:
            differs = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in other.items()}
            more = ", ".join(f"{k} {v}" for k, v in differs.items() if k != "provider")
            names.append(f"{other.get('provider', mine.provider)}" + (f" ({more})" if more else ""))
        if names:
            said.setdefault(", then ".join(names), []).append(f"P{party}")
    words = [f"{'' if len(who) == PARTIES else ' '.join(who) + ': '}else {names}" for names, who in said.items()]
    if fleet.wait_for_stock:
        words.append(f"waits up to {fleet.wait_for_stock:g} h with nothing rented")
    return "; ".join(words)


def draft_lines(draft: Draft, width: int, g: Glyphs) -> list[Line]:
    """What would happen, in the order in which it would."""
    if draft.plan is None:
        return (
            list(wrap([(f"{g.fail} {clean(draft.error)}", "bad")], width)) if draft.error else [[("reading", "muted")]]
        )
    plan, p = draft.plan, draft.plan.profile
    job: dict[str, Any] = p.job.model_dump(mode="json")
    from uvcc_console.plan.command_halt import WORDS
    from uvcc_console.plan.gate_words import gate_words
    from uvcc_console.plan.owndata import model_words
    from uvcc_console.plan.plan import operation_of

    job |= {"model": model_words(job["model"])} if "model" in job else {}
    shown = ", ".join(f"{k} {v}" for k, v in job.items() if k in ("model", "config", "batch", "lr", "seed") and v != "")
    lines: list[Line] = [[(clean(plan.profile_name), "title"), (f"  {job['kind']}", "muted")]]
    lines += _pair("job", f"{counted(job['steps'], 'step')}, {shown}", width)
    t = p.topology
    if job["kind"] != "private":
        lines += _pair("shape", f"{counted(int(job['ranks']), 'rank')} on one pod", width)
    if job["kind"] == "command":
        lines += _pair("command", " ".join(job["argv"]), width)
        lines += _pair("a halt", WORDS[job["halt"]], width)
        lines += _pair("", draft.doubt, width, "warn") if draft.doubt else []
    if job["kind"] == "private":
        lines += _pair("shape", f"3 parties {g.times} {t.replicas} {g.times} {t.stages} {g.times} {t.tensor}", width)
        lines += _pair("reveals", ", ".join(job["reveal"]), width)
        lines += _pair("operated", "; ".join(operation_of(plan)), width, "warn")
    providers = p.fleet.where
    lines += _pair("pods", f"{len(plan.requests)} on {providers}" + (f", {p.fleet.gpu}" if p.fleet.gpu else ""), width)
    if elsewhere := _elsewhere(p.fleet):
        lines += _pair("stock", elsewhere, width)
    lines.append(price_line(draft, width, g))
    lines += _pair("link", p.link, width) if job["kind"] == "private" else []
    smoke = plan.phases.get("smoke")
    lines += _pair(
        "smoke",
        f"{counted(smoke.steps, 'step')} on {counted(len(smoke.pods()), 'pod')}, with a halt drill"
        if smoke
        else "none",
        width,
    )
    lines += _pair("gates", gate_words(p.gates, job["kind"]), width)
    cap = "nothing may be spent" if not p.limits.total else f"${p.limits.hourly:.2f}/h, ${p.limits.total:.2f} in total"
    lines += _pair("limits", f"{cap}, {p.limits.ttl / 3600:g} h at most", width)
    lines += _pair("stages", f" {g.dot} ".join(plan.stages), width)
    if draft.settings:
        lines += _pair("set", "  ".join(draft.settings), width, "accent")
    if more := _quote_lines(draft, width, g):
        lines += [[("", "")], *more]
    return lines


def price_line(draft: Draft, width: int, g: Glyphs) -> Line:
    """What an hour costs, or that nobody can tell yet."""
    if draft.error:
        return [("price     ", "muted"), (f"{g.fail} none: see below", "bad")]
    if draft.quote is None:
        words = ("asking the provider", "warn") if draft.asking else ("asked of the provider before it starts", "muted")
        return [("price     ", "muted"), words]
    q = draft.quote
    line: list[Span] = [
        ("price     ", "muted"),
        (f"${q.hourly:.2f}/h", "title"),
        (f" for {counted(len(q.lines), 'pod')}", "muted"),
    ]
    if q.wallet is not None:
        line.append((f", wallet ${q.wallet:.2f}", "muted"))
    return cut(line, width)


def _quote_lines(draft: Draft, width: int, g: Glyphs) -> list[Line]:
    """What is wrong with the plan; else the pods' prices one by one, and how many offers each wish has left."""
    if draft.error:
        return list(wrap([(f"{g.fail} {clean(draft.error)}", "bad")], width))
    if draft.quote is None:
        return []
    q = draft.quote
    lines: list[Line] = []
    for line in q.lines[:24] if q.hourly else ():
        request = line.request
        where = f"{line.provider} {line.region}".strip()
        text = f"  {fit(request.name, 34)} ${line.price_hr:>6.2f}/h  {where}"
        lines.append(cut([(clean(text), f"p{request.party}" if request.party < 3 else "text")], width))
    for step in q.funnel:
        lines.append(cut([(f"  {step.constraint}: {step.left} left, {step.removed} removed", "muted")], width))
    return lines
