"""What an operator can have done to pods while a run goes on: each an intent in the journal, each with its answer."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.answers import triage
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.download_folder import DownloadFolder, PartialDownload
from uvcc_console.plan.plan import Phase
from uvcc_console.report import collector
from uvcc_console.rollout import file_listing, flight
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_console.rollout.stages.fleet import replacing
from uvcc_console.rollout.stages.migration import lm_migration, private_migration
from uvcc_console.rollout.stages.training import phases, triage_rungs
from uvcc_engine.contract.agent_protocol.agent_commands import SignalCommand
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.parsing.untrusted import scalar_text
from uvcc_engine.contract.text import counted

log = logger(__name__)

STOPPED = ("waiting", "failed")
STOP_S = 180.0


def _phase(ctx: Rollout) -> Phase:
    """The phase whose workers run, or ran last. Raises ConfigError before the first."""
    name = ctx.bus.snapshot.phase
    if name not in ctx.plan.phases:
        raise ConfigError("no phase was started yet", "wait for the smoke")
    return ctx.plan.phases[name]


def _member(ctx: Rollout, args: Mapping[str, Any]) -> Member:
    name = str(args.get("pod", ""))
    if name not in ctx.members:
        raise ConfigError(f"the run has no pod {name!r}", f"its pods: {', '.join(ctx.members)}")
    return ctx.members[name]


async def stackdump(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """SIGUSR1 to one pod's workers: their stacks arrive in the log as ``stackdump_*.txt``."""
    run, member = _phase(ctx).engine_run, _member(ctx, args)
    ack = await member.channel.request(SignalCommand(run=run, signal="USR1"))
    sent = [scalar_text(c, 32) for c in ack["sent"]] if isinstance(ack.get("sent"), list) else []
    if not sent:
        raise UvccError(f"no worker of {run} lives on {member.name}", "start it first")
    return f"{', '.join(sent)} write their stacks; see the log, panel 3"


async def read_flight(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """What the collectives of all workers are at, laid side by side; see panel 4."""
    return await flight.read(ctx, _phase(ctx))


async def fetch(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """Bring what one pod may give home now, while it is written: evidence, tables, logs, stack dumps."""
    phase, member = _phase(ctx), _member(ctx, args)
    remote, home = f".uvcc/runs/{phase.engine_run}", ctx.artifacts / "fetched" / f"{phase.name}-{member.name}"
    coords = {str(c) for c in phase.coords(member.name)}
    await asyncio.to_thread(collector.reopen, ctx.run_dir)  # the run lives: its manifest is signed again at its end
    with DownloadFolder(home) as downloads:
        offer, sums = await bring_files(member, remote, downloads, coords)
        left = await _different(member, remote, sums)
        if left:  # replaced meanwhile, where others only grow
            offer, again = await bring_files(member, remote, downloads, coords, left)
            left = await _different(member, remote, again)
    if left:
        raise UvccError(f"{', '.join(left)} of {member.name} changed while they were fetched", "fetch again")
    complaint = offer.complaint()
    return f"{counted(len(sums), 'file')} in {home.relative_to(ctx.run_dir)}" + (f"; {complaint}" if complaint else "")


async def bring_files(
    member: Member, remote: str, downloads: DownloadFolder, coords: Collection[str], only: Collection[str] = ()
) -> tuple[file_listing.Listing, dict[str, PartialDownload]]:
    """Fetch what is offered now, or ``only`` these: of each file as much as it has at this moment."""
    listed = await member.ssh.sh(file_listing.SIZES.format(folder=remote), timeout=120.0, limit=file_listing.LISTING)
    offer = file_listing.read_offer(listed, coords, hashed=False)
    return offer, {
        name: await member.ssh.get(f"{remote}/{name}", downloads, file.parts, limit=file.size, growing=True)
        for name, file in sorted(offer.files.items())
        if not only or name in only
    }


async def _different(member: Member, remote: str, arrived: Mapping[str, PartialDownload]) -> list[str]:
    """Files whose beginning on the pod is not what arrived; what was appended since does not count."""
    script = "".join(f"head -c {a.size} {shlex.quote(name)} | sha256sum\n" for name, a in arrived.items())
    sums = (await member.ssh.sh(f"cd {remote}\n{script}", timeout=120.0)).splitlines() if arrived else []
    if len(sums) != len(arrived):
        raise UvccError(
            f"pod {member.name} gives {counted(len(sums), 'sum')} of {counted(len(arrived), 'file')}", "fetch again"
        )
    found = dict(zip(arrived, (line.partition(" ")[0] for line in sums), strict=True))
    return [n for n, a in arrived.items() if found[n] != a.sha256]


async def restart(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """End one pod's workers and go on from the last common checkpoint: in a run in step, none can come back alone."""
    run, member = _phase(ctx).engine_run, _member(ctx, args)
    stage = ctx.bus.snapshot.stage
    if stage is None or stage.status not in STOPPED:
        await member.channel.request(SignalCommand(run=run, signal="KILL"))
        await _stopped(ctx)
    stages.decide("resume")
    return f"the workers of {member.name} were ended; the run goes on from the last common checkpoint"


async def replace_pod(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """Delete one pod, with proof, and create another in its place, up to its agent.

    A phase that had begun goes on from the last common checkpoint, under a policy that names the new pod; a language
    model's from the newest that came home.
    """
    member = _member(ctx, args)
    if busy := [m.name for m in ctx.members.values() if m.replacing]:
        raise ConfigError(f"{', '.join(busy)} is being replaced", "one at a time: wait for its answer")
    member.replacing = True
    try:
        return await _replaced(ctx, stages, member)
    finally:
        member.replacing = False


async def _replaced(ctx: Rollout, stages: StageRunner, member: Member) -> str:
    if not ctx.bus.snapshot.engine_run or ctx.plan.profile.job.kind == "command":
        there = await replacing.replace_pod(ctx, member.name)
        stage = ctx.bus.snapshot.stage
        if stage is not None and stage.name in ctx.plan.phases and stage.status not in STOPPED:
            await _stopped(ctx)  # the phase sees that a pod is another
        stages.decide("retry")
        return there
    model = ctx.plan.profile.job.kind == "lm"
    phase = (lm_migration.check if model else private_migration.check)(ctx, [member.name])
    if model:
        await lm_migration.rescue(ctx, phase, member.name)  # before anything is ended for it
    stage = ctx.bus.snapshot.stage
    if stage is None or stage.status not in STOPPED:
        try:
            await member.channel.request(SignalCommand(run=phase.engine_run, signal="KILL"))
        except UnreachableError as e:
            log.warning("its workers could not be ended: %s", e, pod=member.name)
            await phases.stop_workers(ctx, phase)  # those of the others might wait long for it, and for a relay there
        await _stopped(ctx)
    told = await (lm_migration.go_on if model else private_migration.go_on)(ctx, [member.name])
    stages.decide("resume")
    return told


async def try_next(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """Triage: stop the run, apply the next single change, go on from the last checkpoint with it.

    Workers that hang in a collective do nothing of what a halt asks: once its ladder is over, they are killed.
    """
    s = ctx.bus.snapshot
    if why := triage.impossible(s):
        raise ConfigError(why, "see what was tried in panel 6")
    rung = triage.BY_WORD[str(args["rung"])] if args.get("rung") in triage.BY_WORD else triage.propose(s)
    assert rung is not None
    if s.stage is None or s.stage.status not in STOPPED:
        nonce = secrets.token_hex(8)
        ctx.say(
            ev.HaltRequested(
                nonce=nonce, mode="halt", by=str(args.get("by", "triage")), reason=f"triage: {rung.change}"
            )
        )
        await _stopped(ctx, nonce)
    ctx.say(ev.TriageTried(rung=rung.word, step=ctx.bus.snapshot.step, by=str(args.get("by", ""))))
    triage_rungs.apply(ctx)
    stages.decide("resume")
    return f"{rung.change}: {rung.why}"


async def nccl_debug(ctx: Rollout, stages: StageRunner, args: Mapping[str, Any]) -> str:
    """NCCL's own log for one window: the run goes on from its last checkpoint with it, out of the ladder's turn."""
    return await try_next(ctx, stages, {**args, "rung": "loud"})


async def _stopped(ctx: Rollout, nonce: str = "") -> None:
    """Wait until the stage asks what to do; whom the halt ``nonce`` does not stop is killed. Raises UvccError if it
    does not.
    """

    def asks(s: Snapshot) -> bool:
        return s.stage is not None and s.stage.status in STOPPED

    def unstopped(s: Snapshot) -> bool:
        return s.halt.nonce == nonce and s.halt.done and s.halt.verified < s.halt.total

    try:
        await ctx.bus.wait(lambda s: asks(s) or (nonce and unstopped(s)), STOP_S)
        if not asks(ctx.bus.snapshot):
            await phases.stop_workers(ctx, _phase(ctx))
        await ctx.bus.wait(asks, STOP_S)
    except TimeoutError:
        raise UvccError(f"the run did not stop in {STOP_S:.0f} s", "F9 shows who does not answer") from None


ACTIONS: Mapping[str, Callable[[Rollout, StageRunner, Mapping[str, Any]], Awaitable[str]]] = {
    "stackdump": stackdump,
    "flight": read_flight,
    "fetch": fetch,
    "restart": restart,
    "replace": replace_pod,
    "triage": try_next,
    "nccl_debug": nccl_debug,
}


class ActionRunner:
    """Takes intents, one task each, and answers every one in the journal."""

    def __init__(self, ctx: Rollout, stages: StageRunner) -> None:
        self._ctx = ctx
        self._stages = stages
        self._busy: set[asyncio.Task[None]] = set()

    def take(self, intent: ev.Intent) -> bool:
        """Whether this is an action on pods; it is then under way."""
        act = ACTIONS.get(intent.action)
        if act is None:
            return False
        task = asyncio.create_task(self._do(intent, act), name=intent.action)
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        return True

    async def _do(
        self, intent: ev.Intent, act: Callable[[Rollout, StageRunner, Mapping[str, Any]], Awaitable[str]]
    ) -> None:
        pod, order = (str(intent.args.get(name, "")) for name in ("pod", "order"))
        try:
            detail = await act(self._ctx, self._stages, {**intent.args, "by": intent.by})
        except Exception as e:
            if not isinstance(e, UvccError):
                log.error("%s failed", intent.action, pod=pod, exc_info=e)
            detail, ok = str(describe(e)), False
        else:
            ok = True
        self._ctx.say(ev.ActionDone(action=intent.action, pod=pod, ok=ok, detail=detail, order=order))

    def close(self) -> None:
        for task in self._busy:
            task.cancel()
