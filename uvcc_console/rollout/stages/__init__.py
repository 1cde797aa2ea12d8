"""The stages of a rollout, in the order of its plan."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from uvcc_console.core import events as ev
from uvcc_console.fleet import wheel_cache
from uvcc_console.fleet.provider import TellsEnds
from uvcc_console.plan import code_tree, plan_refusals
from uvcc_console.plan.command_halt import doubt
from uvcc_console.plan.plan import FULL, SIGTERM, SMOKE, Phase, operation_of
from uvcc_console.plan.schema import CommandJobSettings, LmJobSettings, PrivateJobSettings
from uvcc_console.rollout.context import Halted, Rollout
from uvcc_console.rollout.stage_runner import StageFunction
from uvcc_console.rollout.stages.fleet import preflight, provision
from uvcc_console.rollout.stages.migration import lm_migration, private_migration
from uvcc_console.rollout.stages.training import agree, lm, phases
from uvcc_console.rollout.stages.training.awaited_signatures import await_signatures
from uvcc_console.rollout.stages.verify import collect, verification
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import counted

RolloutStep = Callable[[Rollout], Awaitable[str]]


async def _plan(ctx: Rollout) -> str:
    """The plan was made with the run; here its job is held against its image, its gates, the engine's models and the
    data."""
    job = ctx.plan.profile.job
    await wheel_cache.read_in_thread(ctx.plan.profile.fleet.wheels)
    await asyncio.to_thread(plan_refusals.check, ctx.plan)  # it asks the engine, a process of its own
    await agree.check_job(ctx)
    names = ", ".join(
        f"{p.name} {counted(p.steps, 'step')} on {counted(len(p.pods()), 'pod')}" for p in ctx.plan.phases.values()
    )
    operated = operation_of(ctx.plan)
    tree = code_tree.kept(ctx.run_dir)
    code = (f"uploads {tree.words}",) if tree is not None else ()
    halts: tuple[str, ...] = ()
    if isinstance(job, CommandJobSettings):
        by_signal = job.halt == SIGTERM
        halts = ("it cannot be held: SIGTERM alone ends it",) if by_signal else tuple(filter(None, [doubt(job, tree)]))
    return "; ".join((f"{ctx.plan.profile.job.kind}: {names}", *code, *halts, *operated))


async def _verify_smoke(ctx: Rollout) -> str:
    return await _verify(ctx, ctx.plan.phases[SMOKE])


async def _verify_full(ctx: Rollout) -> str:
    return await _verify(ctx, ctx.plan.phases[FULL])


async def _verify(ctx: Rollout, phase: Phase) -> str:
    return await (lm.verify_phase if phase.kind == "lm" else verification.verify_phase)(ctx, phase)


async def _full(ctx: Rollout, resumed: bool) -> str:
    """The full run, once as many domains have signed for it as the profile wants."""
    await await_signatures(ctx, FULL, FULL)
    return await _with_replacements(partial(phases.to_the_end, ctx, FULL), ctx, resumed)


async def _with_replacements(act: StageFunction, ctx: Rollout, resumed: bool) -> str:
    """A phase that failed because a provider took a pod away goes on with another, as often as the profile allows."""
    while True:
        try:
            return await act(resumed)
        except Halted:
            raise
        except UvccError as e:
            job = ctx.plan.profile.job
            before = sum(len(one.lost) for one in private_migration.all_of(ctx)) + lm_migration.count(ctx)
            allowed = ctx.plan.profile.fleet.replacements - before
            begun = ctx.bus.snapshot.engine_run and isinstance(job, PrivateJobSettings | LmJobSettings)
            lost = await private_migration.lost_pods(ctx) if allowed > 0 and begun else []
            if not lost or len(lost) > allowed:
                raise
            text = f"{', '.join(lost)} is lost, {_why_lost(ctx, lost)}: {e.what}"
            ctx.say(ev.Alert(level="warn", name="pod_lost", text=text, subject=lost[0]))
            said = await (lm_migration if isinstance(job, LmJobSettings) else private_migration).go_on(ctx, lost)
            ctx.say(ev.Alert(level="info", name="pod_replaced", text=said, subject=lost[0]))
            resumed = True


def _why_lost(ctx: Rollout, lost: Sequence[str]) -> str:
    """What the providers say of it, else that they do not have them."""
    tells = ctx.provider
    names = [ctx.members[n].request.name for n in lost if n in ctx.members]
    said = [tells.taken(name) for name in names] if isinstance(tells, TellsEnds) else []
    return "; ".join(filter(None, said)) or "its provider does not have it any more"


def _idempotent(stage: RolloutStep, ctx: Rollout) -> StageFunction:
    """A stage that does the same whether it is entered again or not."""

    async def act(resumed: bool) -> str:
        return await stage(ctx)

    return act


_STAGES: dict[str, RolloutStep] = {
    "plan": _plan,
    "quote": provision.quote,
    "provision": provision.provision,
    "bootstrap": provision.bring_up,
    "preflight": preflight.preflight,
    "provision-full": provision.provision,
    "bootstrap-full": provision.bring_up,
    "preflight-full": preflight.preflight,
    "verify-smoke": _verify_smoke,
    "gate": verification.gate,
    "verify-full": _verify_full,
    "collect": collect.collect,
}


def acts_of(ctx: Rollout) -> dict[str, StageFunction]:
    """The stages of this rollout's plan in order, without the teardown that always comes last."""
    runs: dict[str, StageFunction] = {
        "drill": partial(_with_replacements, partial(phases.drill, ctx), ctx),
        SMOKE: partial(_with_replacements, partial(phases.to_the_end, ctx, SMOKE), ctx),
        FULL: partial(_full, ctx),
    }
    known = [name for name in ctx.plan.stages if name in runs or name in _STAGES]  # a domain's own stages are elsewhere
    return {name: runs.get(name) or _idempotent(_STAGES[name], ctx) for name in known}
