"""The conductor: the detached process that takes one rollout through its stages and always tears it down.

``python -m uvcc_console.rollout.conductor RUN [--adopt resume|teardown] [--since SEQ]``. One conductor per run, held
by a lock. It acts on intents written after SEQ; SIGTERM, SIGINT and the run's end of life tear everything down at any
moment. A conductor that was killed is replaced by a new one that adopts the pods from journal and provider; a pod that
does not answer is waited for. Of a run that did not end well the evidence comes home before its pods go.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.folding.reported_state import disagreement
from uvcc_console.core.journal.journal import BUSY_S, Journal, iter_events, read_newest
from uvcc_console.core.log import logger
from uvcc_console.core.supervision import SideTasks
from uvcc_console.federation import seat as seats
from uvcc_console.fleet.failover import failover_provider
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.ssh_keys import operator_key
from uvcc_console.halt.machine import RELEASE
from uvcc_console.plan import changed_settings, forecast
from uvcc_console.plan.federated import of_domain
from uvcc_console.plan.plan import FULL, KEEPING, SMOKE, make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.rollout import actions, finish, going_on, side_tasks, telling
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Federated, Member, Rollout
from uvcc_console.rollout.federated.own_party import FederatedParty
from uvcc_console.rollout.federated.peers import Peers
from uvcc_console.rollout.results import compare_results
from uvcc_console.rollout.spending import Spending
from uvcc_console.rollout.stage_runner import BACK, DECISIONS, StageRunner
from uvcc_console.rollout.stages import acts_of
from uvcc_console.rollout.stages.fleet import adoption, agents
from uvcc_console.rollout.stages.migration import checkpoint_copies, private_migration
from uvcc_console.rollout.stages.training import triage_rungs
from uvcc_console.rollout.stages.verify import window_gates
from uvcc_console.runs import conducting, domain, kept_pods, processes
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.machine.by_itself import exit_code

log = logger(__name__)
SIDECAR_S = 5.0
TEARDOWN_BUSY_S = 0.2  # an end does not wait for whoever is frozen in the middle of a commit


@dataclass
class EndRequest:
    """Why the rollout is to end before its last stage; set once."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def ask(self, reason: str) -> None:
        """Ask for the end of the run. The first reason that is given counts."""
        if not self.reason:
            log.info("the end is asked for: %s", reason)
        self.reason = self.reason or reason
        self.asked.set()


def open_rollout(run_dir: Path, bus: Bus) -> Rollout:
    """Everything a rollout needs, from its journal. Nothing is contacted yet."""
    s = bus.snapshot
    if not s.run:
        raise UnreadableError(f"the journal of {run_dir.name} holds no plan", "start a new run")
    profile = parse(s.profile)
    plan = make_plan(s.run, s.profile_name, profile, s.seed)
    if (seat := seats.of(run_dir)) is not None:
        plan = of_domain(plan, seat.proposal, seat.party)
        profile = plan.profile
    fleet = profile.fleet.model_dump(mode="json", exclude_defaults=True) | {"provider": profile.fleet.provider}
    kept = kept_pods.kept_by(profile.fleet.attach_prefix)
    fleet["ssh_key"] = profile.fleet.ssh_key or kept.ssh_key
    provider = provider_for(fleet, run_dir, ttl_s=profile.limits.ttl)
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    key = operator_key(run_dir, str(fleet["ssh_key"]))
    ctx = Rollout(plan, run_dir, bus, provider, key, members, pins=dict(kept.host_keys))
    failover_provider.listen(provider, lambda text: ctx.say(ev.Alert(level="warn", name="failover", text=text)))
    return ctx


def _spending(ctx: Rollout) -> Spending:
    """The run's spending so far; the provider knows the caps from here on."""
    found = Spending(ctx.plan.profile.limits, ctx.provider, RunClock(ctx.run_dir), ctx.bus.snapshot.created)
    ctx.bus.listen(found.heard)
    found.replay(event for _, event in iter_events(ctx.run_dir / processes.JOURNAL, Spending.KINDS))
    return found


def _going_on(ctx: Rollout) -> going_on.GoingOn:
    """How often the run may still go on by itself."""
    found = going_on.GoingOn(ctx.plan.profile.limits.resumes, ctx.bus.commit)
    found.replay(event for _, event in iter_events(ctx.run_dir / processes.JOURNAL, (ev.Intent.kind,)))
    return found


def compare_roots(bus: Bus) -> None:
    """Hold the parties' words about each epoch against each other as they arrive; the first disagreement is a fork."""
    told: set[int] = set()

    def heard(event: ev.Event) -> None:
        s = bus.snapshot
        if not isinstance(event, ev.RootReported) or s.fork or told:
            return
        agreement = next((a for a in reversed(s.agreement) if a.epoch == event.epoch), None)
        pair = disagreement(agreement) if agreement is not None else None
        if pair is not None:
            parties = sorted({Coord.parse(c).party for c in pair})
            detail = f"{pair[0]} and {pair[1]} recorded different messages"
            bus.record([ev.ForkDetected(epoch=event.epoch, parties=parties, detail=detail)])
            told.add(event.epoch)

    bus.listen(heard)


def forecast_full_run(ctx: Rollout) -> None:
    """Once the smoke is through, say what the full run will take; once that is through, how good the word was."""

    def heard(event: ev.Event) -> None:
        s = ctx.bus.snapshot
        if not isinstance(event, ev.StageChanged) or event.status != "ok":
            return
        said: ev.Event | None = None
        if event.name == SMOKE and s.phase == SMOKE:
            full = ctx.plan.phases[FULL]
            said = forecast.predict(s, full.steps, len(full.coords()), len(full.pods()))
        elif event.name == FULL:
            view = next(v for v in s.stages if v.name == FULL)
            said = forecast.score(s, view.ended - view.started)
        if said is not None:
            ctx.bus.record([said])

    ctx.bus.listen(heard)


def _obey_intents(
    ctx: Rollout, stages: StageRunner, end_request: EndRequest, runner: actions.ActionRunner, since: int
) -> None:
    """Act on intents written after ``since``: what was asked for while this process started counts too."""

    def heard(event: ev.Event) -> None:
        if not isinstance(event, ev.Intent):
            return
        if event.action in ("teardown", "stop"):
            if why := domain.missing(ctx.bus.snapshot, "terminate"):
                ctx.bus.record([ev.ActionDone(action=event.action, pod="", ok=False, detail=why)])
                return
            end_request.ask(f"{event.action} asked by {event.by}")
        elif ctx.federated is not None and event.action in (*DECISIONS, "consent"):
            _sign(ctx, ctx.federated, event)
        elif not runner.take(event):
            if stages.begun and not stages.deciding and {"from", "set"} & event.args.keys():
                text = "the run goes on already: nothing was gone back to or changed"
                ctx.bus.record([ev.Alert(level="warn", name="resume", text=text, hint="halt it, then resume")])
                return
            if "set" in event.args:
                _change(ctx, event)
            _decide(ctx, stages, event)

    for seq, event in iter_events(ctx.run_dir / processes.JOURNAL, (ev.Intent.kind, ev.HaltRequested.kind), since):
        if seq <= ctx.bus.snapshot.seq:
            heard(event)
            if isinstance(event, ev.Intent) and event.action == "resume" and ctx.federated is None:
                stages.decided_before(ctx.bus.snapshot.halt.nonce, partial(_decide, ctx, stages, event))
            elif isinstance(event, ev.HaltRequested) and event.mode != RELEASE:
                stages.decided_before("", lambda: None)
    ctx.bus.listen(heard)


def _decide(ctx: Rollout, stages: StageRunner, event: ev.Intent) -> None:
    """Hand on what was decided, with the checkpoint that was chosen."""
    start = event.args.get("from")
    if event.action == "resume" and isinstance(start, int) and start >= 0:
        ctx.start_from = start
        stages.decide(BACK)
    else:
        stages.decide(event.action)


def _sign(ctx: Rollout, federated: Federated, event: ev.Intent) -> None:
    """Whatever is decided in one domain's part of a run is a signature, and counts when enough others are there."""
    try:
        if event.action not in ("resume", "consent") or {"from", "set"} & event.args.keys():
            raise ConfigError("one domain alone does not decide this", "uvcc resume signs for the last checkpoint")
        federated.sign(str(event.args.get("what", "")) if event.action == "consent" else "resume")
    except ConfigError as e:
        ctx.bus.record([ev.ActionDone(action=event.action, pod="", ok=False, detail=str(e))])


def _change(ctx: Rollout, event: ev.Intent) -> None:
    """Write down which settings a resume changes, for this attempt and all after it."""
    try:
        if ctx.bus.snapshot.job_kind != "lm":
            raise ConfigError("only a language model's settings can be changed in a run")
        changes = changed_settings.well_formed(event.args["set"])
    except ConfigError as e:
        ctx.bus.record([ev.ActionDone(action="resume", pod="", ok=False, detail=str(e))])
        return
    ctx.bus.record([ev.SettingsChanged(changes=changes, by=event.by)])


async def conduct(ctx: Rollout, adopted: str, since: int = 0) -> str:
    """Take the rollout to its end; returns the final status. Whatever happens, teardown is the last thing done.

    ``since``: the journal's sequence number after which intents are new; that of the order itself for a resume.
    """
    end_request = EndRequest()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end_request.ask, f"the conductor got {number.name}")
    profile = ctx.plan.profile
    acts = acts_of(ctx)
    peers = None
    if (seat := seats.of(ctx.run_dir)) is not None:
        party = FederatedParty(ctx, seat)
        ctx.federated, peers = party, party.peers
        acts = party.acts(ctx, acts)
    spending = _spending(ctx)
    stages = StageRunner(
        ctx.bus,
        acts,
        KEEPING,
        profile.limits.wait,
        patient=ctx.bus.snapshot.patient,
        adopted=bool(adopted),
        end=time.time() + spending.remaining,
        going_back=lambda: ctx.start_from is not None,
        by_itself=_going_on(ctx),
        halts_only=peers is not None,  # what three domains began, none goes on with alone
    )
    if peers is not None:
        peers.attach(stages)
    runner = actions.ActionRunner(ctx, stages)
    triage_rungs.apply(ctx)
    private_migration.apply(ctx)
    forecast_full_run(ctx)
    own = max(0, since - 1) if adopted == "resume" else since  # the order that started this process is its first
    _obey_intents(ctx, stages, end_request, runner, own)
    compare_roots(ctx.bus)
    compare_results(ctx.bus)
    async with asyncio.TaskGroup() as group:
        ctx.beside = SideTasks(group, lambda event: ctx.bus.record([event]), end_request.ask)
        return await _driven(ctx, stages, end_request, runner, spending, adopted, peers)


async def _driven(
    ctx: Rollout,
    stages: StageRunner,
    end_request: EndRequest,
    runner: actions.ActionRunner,
    spending: Spending,
    adopted: str,
    peers: Peers | None = None,
) -> str:
    """The stages, with everything that runs beside them, up to the end of the run."""
    beside = ctx.beside
    following = beside.start("the journal", ctx.bus.run, vital=True)
    beating = beside.start("the beat", lambda: side_tasks.beat(ctx.run_dir), vital=True)
    guarding = beside.start("the guard of the sidecar", lambda: side_tasks.guard_sidecar(ctx))
    notifying = beside.start("the notices", lambda: telling.tell_operator(ctx.run_dir, ctx.bus))
    listening = beside.start("the watch over the provider's API", lambda: side_tasks.tell_silence(ctx))
    aside = [
        beside.start("the spend guard", lambda: side_tasks.keep_costs(ctx, spending, end_request.ask), vital=True),
        beside.start("the detectors", lambda: side_tasks.detect(ctx)),
        beside.start("the gates of the full run", lambda: window_gates.hold_at_gates(ctx)),
        beside.start("the sweep", lambda: side_tasks.sweep_others(ctx)),
        beside.start("the copies of checkpoints", lambda: checkpoint_copies.keep_home(ctx)),
        beside.start("the care for agents", lambda: agents.keep_agents(ctx)),
    ]
    if peers is not None and not adopted:
        aside.append(beside.start("the other domains", peers.run))
    status, detail = "failed", ""
    try:
        if adopted == "teardown":
            ctx.tolerant = True  # it shall end whatever the disk says
            end_request.ask("teardown asked for")
        status, detail = await _stages_or_end(ctx, stages, end_request, adopted)
    except Exception as e:
        log.error("the rollout met a defect, and is torn down", exc_info=e)
        detail = str(describe(e))
    finally:
        runner.close()
        for task in aside:
            task.cancel()
        if ctx.federated is not None:
            await ctx.federated.part(ctx, status, detail)
        status, detail = await finish.finish(ctx, status, detail, spending, pressed=end_request.asked.is_set())
        guarding.cancel()
        notifying.cancel()
        listening.cancel()
        if ctx.sidecar is not None:  # it ends with the run; who waits for the conductor shall find neither
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(ctx.sidecar.wait, SIDECAR_S)
        await finish.written(ctx.bus)
        for member in ctx.members.values():  # pods that are kept have their channels still
            if member.ingesting is not None:
                member.ingesting.cancel()
        beating.cancel()
        following.cancel()
        await asyncio.wait({following})
        await ctx.provider.close()
    return status


async def _stages_or_end(ctx: Rollout, stages: StageRunner, end_request: EndRequest, adopted: str) -> tuple[str, str]:
    if adopted == "teardown":
        with contextlib.suppress(TimeoutError):  # whom it reaches still gives its evidence
            async with asyncio.timeout(finish.LAST_WORDS_S):
                await adoption.look(ctx)
        return "torn_down", end_request.reason

    async def drive() -> tuple[str, str]:
        if adopted:
            await adoption.adopt(ctx, stages)
        return await stages.run()

    driving = asyncio.create_task(drive(), name="stages")
    asked = asyncio.create_task(end_request.asked.wait())
    await asyncio.wait({driving, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if driving.done():
        return driving.result()
    stage = ctx.bus.snapshot.stage
    driving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await driving
    if stage is not None and stage.status == "running":
        ctx.say(ev.StageChanged(name=stage.name, status="failed", detail=end_request.reason))
    return "torn_down", end_request.reason


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process. Exit code 0 only if the rollout ended ok."""
    return conducting.main("uvcc_console.rollout.conductor", run_conductor, argv)


def run_conductor(run_dir: Path, adopted: str, since: int) -> int:
    """Conduct a run that was created. See :func:`conduct` for ``since``, a sequence number; returns the exit code."""
    log.info("conducting%s", f", to {adopted}" if adopted else "")
    busy_s = TEARDOWN_BUSY_S if adopted == "teardown" else BUSY_S
    journal = Journal(run_dir / processes.JOURNAL, source="conductor", busy_s=busy_s)
    try:
        known = read_newest(journal)
        if known.ended:
            raise UvccError(f"{run_dir.name} has ended", "start a new run")
        if adopted == "resume" and (run_dir / seats.FILE).exists():
            hint = "uvcc teardown ends it here; the three domains begin the next attempt with uvcc rollout --domain"
            raise UvccError(f"{run_dir.name} is one domain's part of a run, which none resumes alone", hint)
        bus = Bus(journal, known)
        try:
            ctx = open_rollout(run_dir, bus)
        except UvccError as e:
            if any(p.state != "gone" for p in bus.snapshot.pods.values()):  # a run that has pods has not ended
                hint = "its pods stay; mend that, then uvcc resume or uvcc teardown"
                bus.commit(ev.Alert(level="error", name="conductor", text=f"nobody conducts: {e}", hint=hint))
                raise
            bus.commit(ev.StageChanged(name="plan", status="failed", detail=str(e)))
            bus.commit(ev.RunEnded(status="failed", detail=str(e)))
            raise
        return 0 if asyncio.run(conduct(ctx, adopted, since)) == "ok" else 1
    finally:
        journal.close()


if __name__ == "__main__":
    sys.exit(exit_code(main))
