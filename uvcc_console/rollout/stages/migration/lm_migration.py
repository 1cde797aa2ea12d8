"""A language model's pod that was lost is replaced, and its newest checkpoint from home put onto the new one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.plan.plan import FULL, Phase
from uvcc_console.plan.schema import LmJobSettings
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.fleet import preflight, replacing, volume
from uvcc_console.rollout.stages.migration import checkpoint_copies
from uvcc_console.runs import processes
from uvcc_engine.contract.checkpoints.checkpoint import CheckpointManifest
from uvcc_engine.contract.errors import ConfigError, UvccError

EVENT: Final = "pod_restored"


def count(ctx: Rollout) -> int:
    """How many pods of this run were restored so far, from the journal."""
    rows = iter_events(ctx.run_dir / processes.JOURNAL, (ev.EngineEvent.kind,))
    told = [e for _, e in rows if isinstance(e, ev.EngineEvent)]
    return sum(len(e.fields["pods"]) for e in told if e.event == EVENT and not e.pod)


def check(ctx: Rollout, names: Sequence[str]) -> Phase:
    """The phase that would go on without these pods. Raises ConfigError where it cannot, before anything is deleted."""
    s = ctx.bus.snapshot
    phase = ctx.plan.phases.get(s.phase)
    if not isinstance(ctx.plan.profile.job, LmJobSettings) or phase is None or s.engine_run != phase.engine_run:
        raise ConfigError("no phase was started yet", "before the smoke a pod is replaced as it is")
    if ctx.plan.profile.fleet.attach_prefix:
        raise ConfigError(f"{', '.join(names)} was taken over, not rented", "start it again where it came from")
    return phase


async def go_on(ctx: Rollout, names: Sequence[str]) -> str:
    """Replace the pods ``names``; their workers must have ended. Returns what was done.

    A pod that still answers gives its newest checkpoint first. Raises ConfigError if a pod has the only checkpoint of
    the run, VerificationError if the one at home was altered; then nothing was deleted.
    """
    phase = check(ctx, names)
    held = {name: await rescue(ctx, phase, name) for name in names}
    for name in names:
        await replacing.replace_pod(ctx, name)
    await preflight.preflight(ctx)
    await volume.lay(ctx, phase, [ctx.members[name] for name in names])
    steps: dict[str, int] = {}
    found: list[str] = []
    for name, manifest in held.items():
        there = await volume.has(ctx, phase, ctx.members[name]) if phase.name == FULL else -1
        if there > (manifest.step if manifest is not None else 0):
            found.append(name)
            steps[name] = there
            continue
        if manifest is None and _only_there(ctx, phase, name):
            what = f"the volume of {name} has not the checkpoint that {name} told of, and none has come home"
            raise ConfigError(what, "uvcc resume looks again; a new run starts over")
        if manifest is not None and there < manifest.step:
            await checkpoint_copies.bring_back(ctx, phase, ctx.members[name], manifest.step)
        steps[name] = manifest.step if manifest is not None else 0
    fields = {"pods": list(names), "steps": steps, "engine_run": phase.engine_run, "volumes": found}
    ctx.say(ev.EngineEvent(pod="", level="warn", event=EVENT, fields=fields))
    step = min(steps.values())
    whence = "found on its volume" if len(found) == len(names) else "restored from home"
    where = f"step {step}, {whence}" if step else "the beginning: no checkpoint had been written"
    return f"{', '.join(names)} replaced; {phase.engine_run} goes on from {where}"


def _only_there(ctx: Rollout, phase: Phase, name: str) -> bool:
    """Whether the pod had told of a checkpoint."""
    return phase.name == FULL and ctx.bus.snapshot.checkpoints.get(name, (-1, ""))[0] >= 0


async def rescue(ctx: Rollout, phase: Phase, name: str) -> CheckpointManifest | None:
    """See that the newest checkpoint of a pod is home; None if there never was one, or of the smoke: it starts over,
    or if its volume has it.

    Raises ConfigError if the pod has the only one, VerificationError if that at home was altered.
    """
    if phase.name != FULL:
        return None
    member, job = ctx.members[name], ctx.plan.profile.job
    assert isinstance(job, LmJobSettings)
    step, sha256 = ctx.bus.snapshot.checkpoints.get(name, (-1, ""))
    there = volume.wanted(ctx, member)  # nothing is fetched: the pod in its place has it
    if not there and member.agent is not None and step >= 0 and ctx.bus.snapshot.home.get(name) != (step, sha256):
        try:
            await checkpoint_copies.bring_home(ctx, phase, member, step, sha256, keep=job.fetch_keep, rate=math.inf)
        except UvccError as e:
            text = f"the checkpoint of step {step} stays with the pod that goes: {describe(e).what}"
            ctx.say(ev.Alert(level="warn", name="checkpoint_home", text=text, subject=name))
    found = checkpoint_copies.newest_at_home(ctx, phase, name)
    if found is None and step >= 0 and not there:
        what = f"{name} holds the only checkpoints of this run: none has come home"
        raise ConfigError(what, "restart its workers; job.fetch_checkpoint brings them home while the run goes on")
    return found
