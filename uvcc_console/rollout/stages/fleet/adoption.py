"""Adoption: a new conductor takes up a rollout that another one left. It waits, asks and keeps.

A pod that does not answer may be back in a minute, and it holds what nobody else has. So a failure here never ends
anything: the stage says who is missing and until when the pods can be kept, tries again by itself, and is through when
every pod answers or its provider has stopped listing it. Only the run's time to live, its caps and the operator end
pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from dataclasses import replace
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.failures import describe
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.fleet.pins import split_address
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.wheel import Wheel
from uvcc_console.rollout.context import Member, Rollout, readdress
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_console.rollout.stages.fleet import provision
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.text import counted

STAGE: Final = "adopt"
AGAIN_S: Final = (0.5, 15.0)  # between two looks: the first pause, and the longest
LISTED_S: Final = 20.0  # so long a provider must not list a pod before it counts as lost
ANSWER_S: Final = 45.0  # for one try to log in to a pod and to reach its agent
PROVIDER: Final = "the provider"


async def adopt(ctx: Rollout, stages: StageRunner) -> None:
    """Find the run's pods, log in again, go on reading where the journal ends; returns when all that exist are back."""
    ctx.say(ev.StageChanged(name=STAGE, status="running"))
    shown, pause, unlisted = "", AGAIN_S[0], dict[str, float]()
    while missing := await look(ctx, unlisted):
        told = "; ".join(f"{who}: {error.what}" for who, error in sorted(missing.items()))
        if told != shown:
            until = time.strftime("%H:%M", time.localtime(stages.end))
            keys = "it is tried again by itself; uvcc pod RUN replace POD (P) gives one up, uvcc teardown (t) ends all"
            detail = f"{told}; pods kept until {until}, the end of limits.ttl; {keys}"
            ctx.say(ev.StageChanged(name=STAGE, status="waiting", detail=detail, until=stages.end))
            shown, pause = told, AGAIN_S[0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stages.decisions.get()  # whoever asks to resume or retry wants it tried now
        pause = min(2 * pause, AGAIN_S[1])
    due = ctx.due()
    back = sum(m.pod is not None for m in due)
    ctx.say(ev.StageChanged(name=STAGE, status="ok", detail=f"{back} of {counted(len(due), 'pod')}"))


async def look(ctx: Rollout, unlisted: dict[str, float] | None = None) -> dict[str, UvccError]:
    """One round: reach whoever is not reached yet; returns who does not answer, and why.

    ``unlisted`` remembers since when a known pod was missing from the provider's list; without it nobody is waited for.
    """
    if not ctx.cursors:
        _read_cursors(ctx)
    try:
        listed = {p.name: p for p in await ctx.provider.list(ctx.plan.prefix)}
    except Exception as e:  # noqa: BLE001  (whatever a provider's answer leads to, it must not end the run)
        return {PROVIDER: describe(e)}
    for member in ctx.members.values():
        if (pod := listed.get(member.request.name)) is not None and not member.in_hand:
            readdress(member, _where_it_was(ctx, member, pod))
    if not ctx.done("provision"):
        return {}  # the stages themselves find what exists
    if not processes.running(ctx.run_dir, processes.HALTD):
        ctx.sidecar = processes.start(ctx.run_dir, processes.HALTD)
    if ctx.done("bootstrap") and ctx.wheel is None:
        ctx.wheel = _built_wheel(ctx)
    found: dict[str, UvccError] = {}
    begun = [m for m in ctx.due() if m.name not in ctx.plan.later or ctx.done("provision-full")]
    for member in begun:  # the stages themselves find what exists of the others
        if member.in_hand:
            found[member.name] = UnreachableError("it is being replaced")
        elif member.request.name not in listed and (error := _unlisted(ctx, member, unlisted)) is not None:
            found[member.name] = error
    away = [m for m in begun if m.pod is not None and m.agent is None and m.name not in found]
    tried = await asyncio.gather(*(_reach(ctx, m, ctx.done(_bootstrap_of(ctx, m))) for m in away))
    return found | {m.name: error for m, error in zip(away, tried, strict=True) if error is not None}


def _bootstrap_of(ctx: Rollout, member: Member) -> str:
    """The stage that brings up this pod's agent."""
    return "bootstrap-full" if member.name in ctx.plan.later else "bootstrap"


def _unlisted(ctx: Rollout, member: Member, unlisted: dict[str, float] | None) -> UvccError | None:
    """A list that lacks a pod once proves nothing; one that does so for a while means that it is lost."""
    known = ctx.bus.snapshot.pods.get(member.name)
    if member.agent is not None or (known is not None and known.state in (pod_states.GONE, pod_states.LOST)):
        return None
    since = unlisted.setdefault(member.name, time.monotonic()) if unlisted is not None else 0.0
    if time.monotonic() - since < LISTED_S:
        return UnreachableError("the provider does not list it")
    member.pod = None
    ctx.say(ctx.pod_event(member, "lost", "the provider does not know it"))
    return None


async def _reach(ctx: Rollout, member: Member, with_agent: bool) -> UvccError | None:
    """Log in to one pod and open its agent's channel; what is half open when it fails is closed again."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await provision.connect(ctx, member, patience_s=0.0)
            if with_agent:
                await provision.attach(ctx, member)
        return None
    except TimeoutError:
        error: UvccError = UnreachableError(f"pod {member.name} gave no answer in {ANSWER_S:.0f} s")
    except Exception as e:  # noqa: BLE001  (one pod's trouble is told; it must not end the others)
        error = describe(e)
    await provision.detach(member)
    return error


def _read_cursors(ctx: Rollout) -> None:
    for _, event in iter_events(ctx.run_dir / processes.JOURNAL, (ev.CursorMoved.kind,)):
        if isinstance(event, ev.CursorMoved):
            ctx.cursors.setdefault(event.pod, {}).update(event.cursors)


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
