"""The stages of a rollout, and how a new conductor takes one up that another one left."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from uvcc_console.core import events as ev
from uvcc_console.core.journal import iter_events
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.ssh import split_address
from uvcc_console.fleet.wheel import Wheel
from uvcc_console.rollout import domain, spawn
from uvcc_console.rollout.context import Halted, Member, Rollout, all_of, readdress
from uvcc_console.rollout.machine import Act
from uvcc_console.rollout.plan import FULL, SMOKE, Phase
from uvcc_console.rollout.profile_schema import PrivateJob
from uvcc_console.rollout.stages import agree, collect, evidence, lm, phases, preflight, provision, succession
from uvcc_engine.contract.errors import UvccError

Stage = Callable[[Rollout], Awaitable[str]]


async def _plan(ctx: Rollout) -> str:
    """The plan was made with the run; here its job is held against the engine's models and the data."""
    await agree.check_job(ctx)
    names = ", ".join(f"{p.name} {p.steps} steps on {len(p.pods())} pods" for p in ctx.plan.phases.values())
    return f"{ctx.plan.profile.job.kind}: {names}"


async def _verify_smoke(ctx: Rollout) -> str:
    return await _verify(ctx, ctx.plan.phases[SMOKE])


async def _verify_full(ctx: Rollout) -> str:
    return await _verify(ctx, ctx.plan.phases[FULL])


async def _verify(ctx: Rollout, phase: Phase) -> str:
    return await (lm.verify_phase if phase.kind == "lm" else evidence.verify_phase)(ctx, phase)


async def _full(ctx: Rollout, again: bool) -> str:
    """The full run, once as many domains have signed for it as the profile wants."""
    if why := domain.missing(ctx.bus.snapshot, FULL):
        said = f"{why}; uvcc domain consent RUN full signs"
        ctx.say(ev.StageChanged(name=FULL, status="waiting", detail=said))
        await ctx.bus.wait(lambda s: not domain.missing(s, FULL))
        ctx.say(ev.StageChanged(name=FULL, status="running"))
    return await _with_replacements(partial(phases.to_the_end, ctx, FULL), ctx, again)


async def _with_replacements(act: Act, ctx: Rollout, again: bool) -> str:
    """A phase that failed because a provider took a pod away goes on with another, as often as the profile allows."""
    while True:
        try:
            return await act(again)
        except Halted:
            raise
        except UvccError as e:
            allowed = ctx.plan.profile.fleet.replace_lost - sum(len(one.lost) for one in succession.all_of(ctx))
            begun = ctx.bus.snapshot.engine_run and isinstance(ctx.plan.profile.job, PrivateJob)
            lost = await succession.lost_pods(ctx) if allowed > 0 and begun else []
            if not lost or len(lost) > allowed:
                raise
            text = f"{', '.join(lost)} is lost, its provider does not have it any more: {e.what}"
            ctx.say(ev.Alert(level="warn", name="pod_lost", text=text, subject=lost[0]))
            said = await succession.go_on(ctx, lost)
            ctx.say(ev.Alert(level="info", name="pod_replaced", text=said, subject=lost[0]))
            again = True


def _idempotent(stage: Stage, ctx: Rollout) -> Act:
    """A stage that does the same whether it is entered again or not."""

    async def act(again: bool) -> str:
        return await stage(ctx)

    return act


_STAGES: dict[str, Stage] = {
    "plan": _plan,
    "quote": provision.quote,
    "provision": provision.provision,
    "bootstrap": provision.bring_up,
    "preflight": preflight.preflight,
    "verify-smoke": _verify_smoke,
    "gate": evidence.gate,
    "verify-full": _verify_full,
    "collect": collect.collect,
}


def acts_of(ctx: Rollout) -> dict[str, Act]:
    """The stages of this rollout's plan in order, without the teardown that always comes last."""
    runs: dict[str, Act] = {
        "drill": partial(_with_replacements, partial(phases.drill, ctx), ctx),
        SMOKE: partial(_with_replacements, partial(phases.to_the_end, ctx, SMOKE), ctx),
        FULL: partial(_full, ctx),
    }
    acts = {name: runs.get(name) or _idempotent(_STAGES[name], ctx) for name in ctx.plan.stages if name != "teardown"}
    return acts


async def adopt(ctx: Rollout) -> None:
    """Take up a rollout whose conductor died: find its pods, log in again, go on reading where the journal ends."""
    for _, event in iter_events(ctx.run_dir / spawn.JOURNAL):
        if isinstance(event, ev.CursorMoved):
            ctx.cursors.setdefault(event.pod, {}).update(event.cursors)
    listed = {p.name: p for p in await ctx.provider.list(ctx.plan.prefix)}
    for member in ctx.members.values():
        if (pod := listed.get(member.request.name)) is not None:
            readdress(member, _where_it_was(ctx, member, pod))
    done = {v.name for v in ctx.bus.snapshot.stages if v.status in ("ok", "skipped")}
    if "provision" not in done:
        return  # the stages themselves find what exists
    if "bootstrap" in done:
        ctx.wheel = _built_wheel(ctx)
    for member in ctx.members.values():
        if member.pod is None:
            ctx.say(ctx.pod_event(member, "lost", "the provider does not know it"))
    await all_of(_reconnect(ctx, m, "bootstrap" in done) for m in ctx.members.values() if m.pod is not None)
    if not spawn.running(ctx.run_dir, spawn.HALTD):
        spawn.start(ctx.run_dir, spawn.HALTD)


def _where_it_was(ctx: Rollout, member: Member, pod: Pod) -> Pod:
    """A provider's list need not say how to log in; the journal does, for a pod that was ready once."""
    known = ctx.bus.snapshot.pods.get(member.name)
    if pod.host or known is None or not known.address:
        return pod
    user, host, port = split_address(known.address)
    return replace(pod, user=user, host=host, port=port)


def _built_wheel(ctx: Rollout) -> Wheel | None:
    """The wheel that the pods run: the one this run built, whatever the sources are now."""
    for path in (ctx.run_dir / "wheel").glob("*.whl"):
        return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest())
    return None


async def _reconnect(ctx: Rollout, member: Member, with_agent: bool) -> None:
    await provision.connect(ctx, member)
    if with_agent:
        await provision.attach(ctx, member)
