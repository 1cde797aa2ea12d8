"""Stages drill, smoke and full: workers run, are watched, and end in a result, a halt or a named failure."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import shown
from uvcc_console.core.snapshot import HaltView, Snapshot
from uvcc_console.fleet import agent_lines
from uvcc_console.halt import certificate
from uvcc_console.plan import changed_settings, code_tree, long_steps, worker_secrets
from uvcc_console.plan.plan import FULL, SMOKE, Phase
from uvcc_console.plan.schema import CommandJobSettings
from uvcc_console.rollout import ingest, priority
from uvcc_console.rollout.context import Halted, Member, PassingError, Rollout, each
from uvcc_console.rollout.stages.fleet import code, volume
from uvcc_console.rollout.stages.links import relay
from uvcc_console.rollout.stages.links.worlds import meeting_places
from uvcc_console.rollout.stages.migration import earlier_checkpoint, private_migration, share_transfer
from uvcc_console.rollout.stages.training import (
    agree,
    dying_words,
    halts_in_between,
    resume_rehearsal,
    signal_drill,
    triage_rungs,
)
from uvcc_console.rollout.stages.training.awaited_signatures import await_signatures
from uvcc_console.rollout.stages.training.silence import (
    Trouble,
    before,
    by_signal,
    deserted,
    hang,
    may_pass,
    without_result,
    workers_of,
)
from uvcc_engine.contract.agent_protocol.agent_commands import LaunchCommand, SignalCommand, SignalName
from uvcc_engine.contract.errors import PeerLostError, UvccError, VerificationError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files.waiting import FIRST_STEP_S
from uvcc_engine.contract.text import counted
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE

GRACE_S, KILL_S = 3.0, 6.0
DRILL_S = 60.0
START_S = 120.0
LONG_SMOKE = 20
LAST_WORDS_S = 0.7
ASK_S = 5.0  # between looks for pods that their provider took away


async def launch(ctx: Rollout, phase: Phase) -> dict[str, int]:
    """Start (or go on with) the workers of a phase; returns the pids of those started, none if they run already.

    A phase that was started before is resumed under the same policy, from the last checkpoint all parties have, or the
    one that the operator chose. It repeats the same messages under the same masks, so the attempt number that the masks
    depend on stays as it was, unless the run starts over; ``PhaseStarted.attempt`` only counts the resumes.
    """
    s = ctx.bus.snapshot
    known = s.engine_run == phase.engine_run
    for member in ctx.of_phase(phase):
        ingest.listen_for(member, phase)
    if known and _running(s, phase):
        await _watch(ctx, phase)
        if ctx.start_from is not None:
            ctx.start_from = None
            ctx.say(ev.Alert(level="warn", name="resume", text="the workers run: nothing was gone back to", hint="F9"))
        return {}
    if known:
        await await_signatures(ctx, "resume", _stage_of(s, phase))
    if phase.kind == "lm":
        await volume.lay(ctx, phase, ctx.of_phase(phase))
    start = await earlier_checkpoint.chosen(ctx, phase) if known else -1
    masks = await earlier_checkpoint.masks(ctx, phase, start) if known else 0
    cited = await cited_certificate(ctx, phase) if known and start < 0 else ""
    private = phase.kind == "private"
    agreement = await agree.agree(ctx, phase) if private else None
    if phase.job.get("start") and not known:
        await share_transfer.hand_over(ctx, phase, private_migration.latest(ctx)[phase.name])
    found = await relay.links_for(ctx, phase) if private else {}
    worlds = await meeting_places(ctx, phase) if private else {}
    attempt = s.attempt + 1 if known else 0
    started = ev.PhaseStarted(
        phase=phase.name,
        engine_run=phase.engine_run,
        steps=phase.steps,
        sid_job=agreement.policy.sid_job.hex() if agreement else "",
        attempt=attempt,
        certificate=cited,
        start=start,
        masks=masks,
        first_step=int(phase.job.get("start", {}).get("step", 0)) if private else 0,
    )
    known_to = await halts_in_between.heed(ctx, s.halt.nonce, start)
    ctx.say(started)
    await _watch(ctx, phase)

    async def begin(member: Member) -> dict[str, int]:
        mine = [str(c) for c in phase.coords(member.name)]
        env = _environment(ctx, phase)
        await code.work_folder(ctx, member.ssh, phase.engine_run)
        made = [
            _spec(ctx, phase, c, found.get(c, LinkSpec()), env | worlds.get(c, {}), resume=attempt > 0) for c in mine
        ]
        specs = [replace(spec, start=start, attempt=masks) for spec in made]
        patience = _patience(ctx, START_S)
        ack = await member.channel.request(LaunchCommand(run=phase.engine_run, workers=specs), timeout=patience)
        listed = agent_lines.workers(ack, member.name)
        agent_lines.own([w.coord for w in listed], mine.__contains__, member.name)
        return {w.coord: w.pid for w in listed}

    acks = await each(ctx.of_phase(phase), begin)
    halts_in_between.ask_again(ctx, known_to)
    return {coord: pid for by_coord in acks.values() for coord, pid in by_coord.items()}


def _stage_of(s: Snapshot, phase: Phase) -> str:
    """The stage that is under way; before any, the one that the phase is named after."""
    return s.stage.name if s.stage is not None else phase.name


async def cited_certificate(ctx: Rollout, phase: Phase) -> str:
    """Hold the pods' checkpoints against the certificate of the halt that this resumes; its hash, "" if there is none.

    Raises VerificationError naming the first pod that does not hold what it held at the halt.
    """
    certified = await asyncio.to_thread(certificate.in_force, ctx.run_dir)
    if certified is None or certified.engine_run != phase.engine_run:
        return ""

    async def check(member: Member) -> str:
        if member.name not in certified.pods or member.replaced:
            return ""
        listed = await member.ssh.sh(certificate.listing(phase.engine_run))
        return certificate.mismatch(member.name, certified.pods[member.name], listed)

    for name, wrong in (await each(ctx.of_phase(phase), check)).items():
        if wrong:
            hint = f"put {name}'s checkpoints back as they were at the halt, then uvcc resume; or uvcc teardown"
            raise VerificationError(certificate.CHECK, f"{certified.sha256[:12]} does not hold: {wrong}", hint)
    return certified.sha256


async def _shown(ctx: Rollout, pids: dict[str, int]) -> None:
    """Wait until the snapshot shows these processes: before, it may show how those of an earlier attempt ended."""

    def shown(s: Snapshot) -> bool:
        return all(c in s.workers and s.workers[c].pid == pid for c, pid in pids.items())

    await ctx.bus.wait(shown, _patience(ctx, START_S))


def _patience(ctx: Rollout, usual: float) -> float:
    """Seconds to wait for something that takes a start and a step, on a fleet whose steps may be long."""
    workers = max(len(p.coords()) for p in ctx.plan.phases.values())
    slow = priority.stretch(ctx.plan.profile.fleet.kind, workers)
    return max(slow * usual, 3 * ctx.plan.profile.halt.patience)


async def _watch(ctx: Rollout, phase: Phase) -> None:
    await each(ctx.of_phase(phase), lambda m: m.channel.watch(phase.engine_run))


def _spec(ctx: Rollout, phase: Phase, coord: str, link: LinkSpec, env: dict[str, str], *, resume: bool) -> WorkerSpec:
    there = f"runs/{phase.engine_run}"
    private = phase.kind == "private"
    return WorkerSpec(
        run=phase.engine_run,
        kind=phase.kind,
        coord=coord,
        topology=phase.topology,
        job=changed_settings.laid_upon(phase.job, ctx.bus.snapshot.changed_settings),
        policy=f"{there}/{POLICY_FILE}" if private else "",
        signatures=f"{there}/{SIGNATURES_FILE}" if private else "",
        inputs=f"{there}/{agree.INPUTS_FILE}" if private else "",
        link=link,
        resume=resume,
        env=env,
        argv=_argv(ctx, phase),
    )


def _environment(ctx: Rollout, phase: Phase) -> dict[str, str]:
    """The profile's environment and secrets, and whom to give way to; a command is told how many steps it has."""
    profile = ctx.plan.profile
    waits = long_steps.group_timeout(ctx.bus.snapshot.foretold)
    env = {**priority.environment(profile.fleet.kind, *phase.sharing()), **waits, **profile.env}
    env |= code.environment(tree) if (tree := code_tree.kept(ctx.run_dir)) is not None else {}
    steps = {"UVCC_STEPS": str(phase.steps)} if phase.kind == "command" else {}
    return env | worker_secrets.values(profile.secrets) | steps


def _argv(ctx: Rollout, phase: Phase) -> list[str]:
    """The command of a command job, in its work folder where it brought its code along."""
    job, tree = ctx.plan.profile.job, code_tree.kept(ctx.run_dir)
    if not isinstance(job, CommandJobSettings):
        return []
    return list(job.argv) if tree is None else code.command(job, tree, phase.engine_run)


def _running(s: Snapshot, phase: Phase) -> bool:
    """Whether every worker of the phase was started and none has ended."""
    views = workers_of(s, phase)
    return len(views) == len(phase.coords()) and all(w.state == "started" for w in views)


def _all_ended(s: Snapshot, phase: Phase) -> bool:
    views = workers_of(s, phase)
    return len(views) == len(phase.coords()) and all(w.state == "exited" for w in views)


async def drill(ctx: Rollout, resumed: bool) -> str:
    """Start the smoke and rehearse the halt on it: hold on every pod, then release, timed.

    A short smoke would be over before a hold reached it, so there the hold is asked for as soon as the processes
    exist and its time includes their start; a long one is first seen to train.
    """
    phase = ctx.plan.phases[SMOKE]
    if resumed and _finished(ctx.bus.snapshot, phase):
        earlier_checkpoint.begin_again(ctx, phase, "the smoke had ended before it was held")
    pids = await launch(ctx, phase) if resumed or not _started(ctx.bus.snapshot, phase) else {}
    if by_signal(phase):
        await _shown(ctx, pids)
        return await signal_drill.drill(ctx, phase)
    if phase.steps >= LONG_SMOKE:
        await _shown(ctx, pids)
        await first_steps(ctx, phase)
    before, nonce = ctx.bus.snapshot.halt.nonce, secrets.token_hex(8)
    ctx.say(ev.HaltRequested(nonce=nonce, mode="hold", by="conductor", drill=True, reason="halt drill"))
    await _shown(ctx, pids)

    def done(s: Snapshot) -> bool:
        overtaken = s.halt.nonce not in (nonce, before) and not s.halt.drill
        return (s.halt.nonce != before and s.halt.done) or overtaken or trouble(s, phase) is not None

    limit = _patience(ctx, DRILL_S)
    try:
        await ctx.bus.wait(done, limit)
    except TimeoutError:
        raise UvccError(f"the halt drill gave no verdict in {limit:.0f} s", "uvcc logs tells more; retry") from None
    halt = ctx.bus.snapshot.halt
    if not halt.drill:  # an operator's drill that came in between is one as good as this
        return "overtaken by a real halt"
    if halt.verified < halt.total or halt.step < 0:
        with contextlib.suppress(TimeoutError):  # a worker that died explains it, but its end may be told a bit later
            await ctx.bus.wait(lambda s: trouble(s, phase), LAST_WORDS_S)
        await _check(ctx, phase)
        raise UvccError(*_why_not_held(phase, halt))
    return f"{halt.verified}/{halt.total} held and released at step {halt.step} in {halt.seconds:.1f} s"


def _why_not_held(phase: Phase, halt: HaltView) -> tuple[str, str]:
    """What a drill that not every pod passed says, and its hint."""
    what = f"the halt drill verified {halt.verified} of {counted(halt.total, 'pod')}"
    if phase.kind != "command":
        return what, "see the acknowledgements; where a start or a step takes long, raise halt.patience"
    never = "a command that does not look at the control file cannot be held"
    return f"{what}: {never}", "call RunWriter.step once a step (uvcc docs own-trainer), or make the smoke longer"


async def first_steps(ctx: Rollout, phase: Phase) -> None:
    """Wait until every worker has made a step. Raises what prevents it."""

    def ready(s: Snapshot) -> bool:
        views = workers_of(s, phase)
        return all(w.step > 0 for w in views) or trouble(s, phase) is not None

    limit = _patience(ctx, FIRST_STEP_S if phase.kind == "lm" else START_S)
    try:
        await ctx.bus.wait(ready, limit)
    except TimeoutError:
        raise UvccError(f"the workers made no step in {limit:.0f} s", "see their logs; retry") from None
    await _check(ctx, phase)


async def to_the_end(ctx: Rollout, name: str, resumed: bool) -> str:
    """Run a phase to its end. Entered again, workers that ended are started from the last common checkpoint."""
    triage_rungs.apply(ctx)
    phase = ctx.plan.phases[name]
    s = ctx.bus.snapshot
    drilled = by_signal(phase) and name == SMOKE and not resumed and _all_ended(s, phase)
    await resume_rehearsal.goes_on(ctx, phase)  # a conductor before this one may not have come to it
    taken = 0.0  # when workers were taken over that run, as far as the journal tells
    if drilled or not _started(s, phase) or (resumed and (not _finished(s, phase) or ctx.start_from is not None)):
        began, pids = time.time(), await launch(ctx, phase)
        taken = began if not pids and ctx.federated is None else 0.0
        await _shown(ctx, pids)
    while True:
        try:
            found = await outcome(ctx, phase)
            if found is None or not before(ctx.bus.snapshot, found, taken):
                break
            taken = 0.0  # their lease had run out while nobody conducted: to go on is what the resume was asked for
        except Halted:
            if not await resume_rehearsal.goes_on(ctx, phase):
                raise
        await _shown(ctx, await launch(ctx, phase))
    if found is not None:
        await _give_up(ctx, phase, found)
    if name == FULL:
        resume_rehearsal.close(ctx)
    figures = shown(ctx.bus.snapshot, phase.name).figures()
    return counted(phase.steps, "step") + (f", {figures}" if figures else "")


def _started(s: Snapshot, phase: Phase) -> bool:
    return s.engine_run == phase.engine_run


async def _check(ctx: Rollout, phase: Phase) -> None:
    """Raise what stands in the way of this phase, with its workers stopped."""
    if (found := trouble(ctx.bus.snapshot, phase)) is not None:
        await _give_up(ctx, phase, found)


async def _give_up(ctx: Rollout, phase: Phase, found: Trouble) -> NoReturn:
    """Stop what still runs, so that a dead party never leaves the others hanging, and say what happened."""
    await stop_workers(ctx, phase, found.gone)
    kind = PassingError if found.passing else UvccError
    if not found.coord:
        raise kind(found.what, found.hint)

    def said(s: Snapshot) -> tuple[str, str] | None:
        return dying_words.last_words(s, found.coord)

    try:
        words, hint = await ctx.bus.wait(said, LAST_WORDS_S)
    except TimeoutError:
        if (full := await dying_words.full_disk(ctx.bus, found.coord)) is not None:
            raise UvccError(f"{found.what}: {full[0]}", full[1]) from None
        link = ctx.members[phase.pod_of(Coord.parse(found.coord))].link
        if link is not None and (stuck := await dying_words.read_only(link, phase.engine_run)) is not None:
            raise UvccError(f"{found.what}: {stuck[0]}", stuck[1]) from None
        line = dying_words.last_line(ctx.bus.snapshot, found.coord)
        raise kind(f"{found.what}: {line}" if line else found.what, found.hint) from None
    raise kind(f"{found.what}: {words}", hint or found.hint)


async def outcome(ctx: Rollout, phase: Phase) -> Trouble | None:
    """Wait for the end; None when it is a good one. Raises Halted. Looks every second for what only time shows."""
    began, stall = time.monotonic(), ctx.plan.profile.limits.stall
    ask_at, replaced = began + ASK_S, _replacements(ctx, phase)

    def over(s: Snapshot) -> Trouble | str | None:
        if s.halt.done and s.halt.mode == "halt" and not s.halt.drill and _all_ended(s, phase):
            return "halted"
        if _finished(s, phase):
            return "done"
        now = time.time()
        heard = now - min(time.monotonic() - began, ctx.bus.settled_s)
        return (
            trouble(s, phase)
            or deserted(s, phase, now, heard)
            or hang(s, phase, heard, stall, now)
            or _replaced(ctx, phase, replaced)
        )

    while True:
        try:
            found = await ctx.bus.wait(over, 1.0)
        except TimeoutError:
            if phase.kind == "lm" and time.monotonic() >= ask_at:  # a private worker's peers notice its end at once
                ask_at = time.monotonic() + ASK_S
                if gone := await private_migration.taken_away(ctx, time.time()):
                    return Trouble(f"nothing reaches {', '.join(gone)}", gone=tuple(gone))
            continue
        if found == "halted" and not _finished(ctx.bus.snapshot, phase):
            raise Halted(ctx.bus.snapshot.halt.step)
        return found if isinstance(found, Trouble) else None


def _replacements(ctx: Rollout, phase: Phase) -> dict[str, int]:
    """How often each pod of a command's phase was replaced. Other phases are stopped before that is done."""
    return {m.name: m.replaced for m in ctx.of_phase(phase)} if phase.kind == "command" else {}


def _replaced(ctx: Rollout, phase: Phase, before: Mapping[str, int]) -> Trouble | None:
    """Pods that are others now, and no more in hand: nobody will hear of what ran on those before them."""
    now = _replacements(ctx, phase)
    gone = [name for name, times in before.items() if now[name] != times and not ctx.members[name].in_hand]
    if not gone:
        return None
    return Trouble(f"what ran on {', '.join(gone)} went with the pod that was replaced", "uvcc resume starts it there")


def _finished(s: Snapshot, phase: Phase) -> bool:
    """Every worker exited with 0 and reported its result; of a language model's ranks the first one does.

    Workers that halted exit with 0 as well. A command need not report anything: it is done unless a halt was asked.
    """
    views = workers_of(s, phase)
    if len(views) < len(phase.coords()) or any(w.state != "exited" or w.rc != 0 for w in views):
        return False
    if phase.kind == "command":
        return not (s.halt.nonce and s.halt.mode == "halt" and not s.halt.drill)
    return not without_result(s, phase)


def trouble(s: Snapshot, phase: Phase) -> Trouble | None:
    """The first reason why this phase cannot end well; None while there is hope. Pure."""
    if s.fork:
        hint = "do not resume: two parties recorded different messages; keep the transcripts"
        return Trouble(s.fork, hint, passing=False)
    bad = [w for w in workers_of(s, phase) if w.state == "exited" and (w.signal or w.rc != 0)]
    if not bad:
        return None
    if s.halt.nonce and not s.halt.drill and s.halt.mode == "halt":
        if not (s.halt.done and _all_ended(s, phase)):
            return None  # the ladder is at work and has the word
        return Trouble(f"the halt had to end {', '.join(w.coord for w in bad)} without a checkpoint", passing=False)
    # one that was killed explains the others; one that lost a peer is explained by another
    first = min(bad, key=lambda w: (not w.signal, w.rc == PeerLostError.exit_code, w.coord))
    end = f"was killed by {first.signal}" if first.signal else f"ended with exit code {first.rc}"
    what = f"worker {first.coord} of P{Coord.parse(first.coord).party} {end}"
    return Trouble(what, coord=first.coord, passing=all(may_pass(phase, w) for w in bad))


async def stop_workers(ctx: Rollout, phase: Phase, gone: Sequence[str] = ()) -> None:
    """End what still runs of a failed phase, but on pods that are ``gone``: SIGTERM, then SIGKILL, to the groups."""
    ladder: tuple[tuple[SignalName, float], ...] = (("TERM", GRACE_S), ("KILL", KILL_S))
    for name, patience in ladder:
        if _none_runs(ctx.bus.snapshot, phase, gone):
            return
        await asyncio.gather(
            *(
                m.channel.request(SignalCommand(run=phase.engine_run, signal=name), timeout=patience)
                for m in ctx.of_phase(phase)
                if m.agent is not None and m.name not in gone
            ),
            return_exceptions=True,
        )
        try:
            await ctx.bus.wait(lambda s: _none_runs(s, phase, gone) or None, patience)
        except TimeoutError:
            continue


def _none_runs(s: Snapshot, phase: Phase, gone: Sequence[str]) -> bool:
    return all(w.state != "started" or w.pod in gone for w in workers_of(s, phase))
