"""Stages quote, provision, bootstrap and teardown: pods come into being, and are proven gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger
from uvcc_console.fleet import wheel_cache
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.bootstrap import Bootstrapped, Progress, bootstrap
from uvcc_console.fleet.provider import Pod, Quote, Remembers, TellsWaits
from uvcc_console.fleet.provider_kinds import runs_here
from uvcc_console.fleet.runclock import run_now
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.ssherrors import HostKeyChanged
from uvcc_console.fleet.wheel import build_wheel
from uvcc_console.plan.plan import SMOKE, derive
from uvcc_console.rollout import ingest, priority
from uvcc_console.rollout.context import Member, Rollout, each, readdress
from uvcc_console.rollout.stages.fleet import code, stock, volume
from uvcc_console.runs import domain, processes
from uvcc_engine.contract.agent_protocol.agent_commands import ProbeCommand
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.parsing.untrusted import bounded_copy, scalar_text
from uvcc_engine.contract.text import counted

log = logger(__name__)

DELETE_TRIES = 3
BACKOFF_S = 0.5
LONG_S = 60.0
KEEPER_GRACE_S = 45.0
TELL_S = 5.0
NOTHING_S = 15.0  # so long a provider is asked for pods of a run that has asked for none
MOST_TOLD = 30


async def quote(ctx: Rollout) -> str:
    """Price the fleet and hold it against the caps and the wallet; nothing is created yet."""
    limits = ctx.plan.profile.limits
    found = await stock.wait(ctx)
    hourly = found.hourly
    most = min(limits.total, hourly * limits.ttl / 3600.0)
    ctx.quoted = {line.request.name: line.price_hr for line in found.lines}
    first = sum(ctx.quoted[m.request.name] for name, m in ctx.members.items() if name not in ctx.plan.later)
    ctx.say(_quoted(found, most))
    if hourly > limits.hourly:
        raise ConfigError(
            f"the fleet costs {hourly:.2f} $/h, limits.hourly is {limits.hourly:.2f}",
            "raise the cap or take fewer pods",
        )
    for whose, part in (found.parts or {"": found}).items():
        share = most * part.hourly / hourly if hourly else most
        if part.wallet is not None and part.wallet < share:
            # an empty wallet ends pods without a word, so a run that it cannot see through is not begun
            what = f"{whose}{': ' if whose else ''}the wallet holds {part.wallet:.2f} $, the run may cost {share:.2f}"
            raise ConfigError(what, "top it up, or lower limits.total or limits.ttl")
    ctx.say(ev.CostTick(hourly=0.0, spent=0.0, forecast=most, runway_h=found.runway_h))
    at_most = f", {most:.2f} $ at most" if hourly else ""
    lasts = f", the wallet lasts {found.runway_h:.1f} h" if found.runway_h is not None else ""
    each = "".join(f", {whose} {part.hourly:.2f} $/h" for whose, part in found.parts.items())
    smoke = _for_the_smoke(ctx, first, hourly)
    return f"{counted(len(found.lines), 'pod')}, {hourly:.2f} $/h{each}{smoke}{at_most}{lasts}"


def _for_the_smoke(ctx: Rollout, first: float, hourly: float) -> str:
    """What the smoke rents of the fleet, or what is paid for pods that it leaves idle."""
    if ctx.plan.later:
        return f", of these {len(ctx.members) - len(ctx.plan.later)} for {first:.2f} $/h until the smoke has passed"
    used = ctx.plan.phases[SMOKE].pods() if SMOKE in ctx.plan.phases else list(ctx.members)
    if idle := [m for name, m in ctx.members.items() if name not in used]:
        cost = sum(ctx.quoted[m.request.name] for m in idle)
        return f", of these {len(idle)} idle through the smoke for {cost:.2f} $/h (fleet.reserve)"
    return ""


def _quoted(found: Quote, most: float) -> ev.EngineEvent:
    """The quote for the log: each pod's offer and price, and how many offers each constraint removed."""
    fields = {
        "hourly": round(found.hourly, 4),
        "at_most": round(most, 2),
        "wallet": found.wallet,
        "pods": [f"{line.request.name} {line.provider} {line.price_hr:.2f} $/h" for line in found.lines],
        "funnel": [f"{s.constraint}: {s.left} left, {s.removed} removed" for s in found.funnel],
    }
    return ev.EngineEvent(pod="", level="info", event="quote", fields=fields)


async def provision(ctx: Rollout) -> str:
    """Create every pod that is due and log in. Idempotent: a pod that exists under its name is adopted.

    Stage "provision-full" is this one again, for the pods that the smoke did not need. The intent is in the journal
    before the provider hears of it, so that a crash in between leaks nothing; and the halt sidecar, which ends a run
    that lost its conductor, runs before there is anything to pay for.
    """
    missing = [m for m in ctx.due() if m.agent is None]
    ctx.say(*(ctx.pod_event(m, "creating") for m in missing if m.pod is None))
    if not processes.running(ctx.run_dir, processes.HALTD):
        ctx.sidecar = processes.start(ctx.run_dir, processes.HALTD)
    await each(missing, lambda m: one_pod(ctx, m))
    more = f", {len(ctx.plan.later)} more after the smoke" if len(ctx.due()) < len(ctx.members) else ""
    return f"{counted(len(ctx.due()), 'pod')}{more}"


async def one_pod(ctx: Rollout, member: Member) -> None:
    """Rent (or take over) one pod and log in to it."""
    make = take_over(ctx, member) if ctx.plan.profile.fleet.attach_prefix else ctx.provider.create(member.request)
    creating = asyncio.ensure_future(make)
    try:
        readdress(member, await asyncio.shield(creating))
    except asyncio.CancelledError:
        # what a create under way has made must be known before anything is deleted, or it would be missed
        try:
            readdress(member, await creating)
            ctx.say(ctx.pod_event(member, "booting"))  # it is there, and may cost money
        except UvccError as e:
            log.info("its create was cancelled, and failed: %s", e, pod=member.name)
            ctx.say(ctx.pod_event(member, "creating", e.what))  # whoever mends one host hears of the others, too
        raise
    except UvccError as e:
        ctx.say(ctx.pod_event(member, "creating", e.what))
        raise
    assert member.pod is not None
    ctx.say(ctx.pod_event(member, "booting"))
    met = bool(member.pod.host_key)
    telling = asyncio.ensure_future(_what_it_waits_for(ctx, member))
    try:
        readdress(member, await ctx.provider.wait_ready(member.pod))
    finally:
        telling.cancel()
    if member.pod.host_key and not met:
        ctx.say(ctx.pod_event(member, "booting", "its host key is pinned"))  # before anything is sent there
    await connect(ctx, member)
    ctx.say(ctx.pod_event(member, "ready"))


async def _what_it_waits_for(ctx: Rollout, member: Member) -> None:
    """Tell what the provider tells of a pod that is not ready, each word once: it may stand in a queue for hours."""
    told = {""}
    while isinstance(ctx.provider, TellsWaits):
        await asyncio.sleep(TELL_S)
        if (said := scalar_text(ctx.provider.waits(member.request.name), 200)) not in told and len(told) < MOST_TOLD:
            told.add(said)
            ctx.say(ctx.pod_event(member, "booting", said))


async def take_over(ctx: Rollout, member: Member) -> Pod:
    """The pod of this name that an earlier run kept; none is created. Raises ConfigError if there is none."""
    found = {p.name: p for p in await ctx.provider.list(ctx.plan.prefix)}
    if member.request.name not in found:
        have = ", ".join(found) or "none"
        what = f"there is no pod {member.request.name} to attach to; under this prefix: {have}"
        raise ConfigError(what, "leave out fleet.attach_prefix to create pods, or see: uvcc pods")
    return found[member.request.name]


async def connect(ctx: Rollout, member: Member, patience_s: float = 60.0) -> None:
    """Log in to the pod, and to no other machine: its one host key is what the journal or the provider knows.

    Where neither does, the first contact tells.
    """
    pod = member.pod
    assert pod is not None
    if member.link is None:
        known = ctx.bus.snapshot.pods.get(member.name)
        pinned = (known.host_key if known else "") or pod.host_key or ctx.pins.get(member.name, "")
        hint = f"another machine may answer in its place; uvcc pod {ctx.plan.run} replace {member.name} gives it up"
        member.link = PodLink(member.name, pod.address, ctx.key, host_key=pinned, hint=hint, jump=pod.jump)
    await member.link.connect_until(patience_s)


async def bring_up(ctx: Rollout) -> str:
    """Wheel, Python and agent on every pod that has none; one channel per agent stays open from here on."""
    wheel = ctx.wheel
    if wheel is None or not ctx.done("bootstrap"):  # the smoke's pods and the others run the same code
        wheel = ctx.wheel = await asyncio.to_thread(build_wheel, ctx.run_dir / "wheel")
    await each([m for m in ctx.due() if m.agent is None], lambda m: one_agent(ctx, m))
    return f"{counted(len(ctx.due()), 'agent')}, code {wheel.sha256[:12]}"


async def one_agent(ctx: Rollout, member: Member) -> None:
    """Wheel, Python and agent on one pod, and the agent's channel."""

    def progress(step: str, detail: str) -> None:
        ctx.bus.record([ctx.pod_event(member, "ready", f"{step} {detail}".rstrip())])

    member.boot = await bootstrapped(ctx, member, progress)
    await code.bring(ctx, member.ssh, member.boot.python, progress)
    await attach(ctx, member)


async def bootstrapped(ctx: Rollout, member: Member, progress: Progress | None = None) -> Bootstrapped:
    """One pod with an agent that answers; one that runs there already stays. Raises UvccError, UnreachableError."""
    assert ctx.wheel is not None
    seed = ctx.plan.seed
    party, replica = member.request.party, member.request.replica
    who = f"{party}/{replica}" if replica else str(party)
    # what replaces a lost pod is somebody else, also in a run that can be repeated
    secret = derive(seed, "identity", who).hex() if seed is not None and not member.replaced else ""
    profile = ctx.plan.profile
    return await bootstrap(
        member.ssh,
        ctx.wheel,
        progress,
        identity_seed=secret,
        domain=_obeyed(ctx, party) if profile.job.kind == "private" else "",
        packages=profile.fleet.packages,
        wheels=await wheel_cache.read_in_thread(profile.fleet.wheels),
        preload="none" if profile.job.kind == "command" else "",
        life_s=life_left(ctx),
        give_way=priority.give_way(profile.fleet.kind, len(ctx.members)),
    )


def _obeyed(ctx: Rollout, party: int) -> str:
    """The key of the domain that a pod obeys: this domain's own, or one that the run makes for each party."""
    return ctx.federated.domain if ctx.federated is not None else domain.own_key(ctx.run_dir, party)


def life_left(ctx: Rollout) -> float:
    """Seconds after which a pod ends the run's processes by itself: ours do it before, if they are still there.

    Local pods have a time to live of their own. No market that we know ends a pod at a time given with the order, so
    there it is the work that ends, not the bill.
    """
    if runs_here({"provider": ctx.plan.profile.fleet.kind}):
        return 0.0
    lived = run_now(ctx.run_dir) - ctx.bus.snapshot.created
    return max(0.0, ctx.plan.profile.limits.ttl - lived) + KEEPER_GRACE_S


async def attach(ctx: Rollout, member: Member) -> None:
    """Open the agent's channel and start turning what it says into events."""

    def on_link(up: bool, detail: str) -> None:
        ctx.bus.record([ev.LinkChanged(pod=member.name, path="ssh", up=up, detail=detail)])

    cursors = {key: (v[0], v[1]) for key, v in ctx.cursors.get(member.name, {}).items()}
    lease = ctx.plan.profile.halt.lease
    member.agent = AgentClient(member.ssh, holder="conductor", lease_s=lease, cursors=cursors, on_link=on_link)
    member.ingesting = ingest.start(ctx.beside, ctx.bus, member)
    hello = await member.agent.start()
    shown = hello.get("identity")
    member.identity = bounded_copy(shown) if isinstance(shown, Mapping) else {}
    member.probe = await member.agent.request(ProbeCommand())
    ctx.say(ctx.pod_event(member, "agent", identity=scalar_text(member.identity.get("ed25519"), 500)))


async def detach(member: Member) -> None:
    """Close channel and link; pod, agent and workers stay."""
    if member.ingesting is not None:
        member.ingesting.cancel()
    if member.agent is not None:
        await member.agent.close()
    if member.link is not None:
        await member.link.close()
    member.agent, member.link, member.ingesting = None, None, None


async def teardown(ctx: Rollout) -> list[str]:
    """Delete every pod of the run and prove that none is left; returns the names of those that could not be proven.

    Works from what the provider lists as well as from what the journal and the provider's own notes know, so a
    half-made fleet goes too. Every pod for itself: one that will not go keeps no other, and each that may be left is
    told once, with the command that ends it. What was never asked for is no leak.
    """
    known = {m.request.name: m for m in ctx.due()}
    ctx.say(*(ctx.pod_event(m, "deleting") for m in known.values() if m.pod is not None))
    await volume.clear(ctx)
    for member in ctx.members.values():
        await detach(member)
    unlisted: list[UvccError] = []
    begun = ctx.provider.begun(ctx.plan.prefix) if isinstance(ctx.provider, Remembers) else None
    nothing = begun is not None and not begun and all(m.pod is None for m in ctx.members.values())
    listed = await _listed(ctx, unlisted, nothing)
    found = {p.name: p for p in listed or ()}
    for m in ctx.members.values():
        if m.pod is not None:
            found.setdefault(m.pod.name, m.pod)
        elif listed is None and begun is not None and m.request.name in begun:
            found.setdefault(m.request.name, _unseen(ctx, m))
    ends = await asyncio.gather(*(_delete(ctx, p) for p in found.values()))
    left = {name: error for name, error in zip(found, ends, strict=True) if error is not None}
    after = None if nothing and listed is None else await _listed(ctx, unlisted)
    for pod in after or ():
        left.setdefault(pod.name, UnreachableError(pod.doubt or "it is still listed"))
    if after is None:  # a provider that does not answer proves nothing about pods that were never asked to be deleted
        for name in known if begun is None else begun:
            if name not in found:
                left.setdefault(name, unlisted[-1])
    _tell_left(ctx, left, [] if nothing and not left else unlisted)
    gone = [ctx.pod_event(m, "gone") for name, m in known.items() if name not in left]
    lost = [ctx.pod_event(m, "lost", _not_gone(name, left[name])) for name, m in known.items() if name in left]
    ctx.say(*gone, *lost)
    return list(left)


def _unseen(ctx: Rollout, member: Member) -> Pod:
    """A pod that may exist and that the provider does not show: all that is known of it is its name."""
    request = member.request
    return Pod(request.name, request.party, request.replica, ctx.provider.name, "")


def _tell_left(ctx: Rollout, left: Mapping[str, UvccError], unlisted: list[UvccError]) -> None:
    """Each thing once, however often it was tried."""
    if unlisted:
        text = f"the provider did not list its pods ({len(unlisted)} times): {unlisted[-1]}"
        ctx.say(ev.Alert(level="error", name="list", text=text, hint="uvcc pods --sweep looks again"))
    for name, error in left.items():
        text = f"pod {name} is not proven gone: {error}"
        ctx.say(ev.Alert(level="error", name="delete", text=text, hint=end_command(name, error), subject=name))


def _not_gone(name: str, error: UvccError) -> str:
    return f"not proven gone: {error.what}; end it with: {end_command(name, error)}"


def end_command(name: str, error: UvccError) -> str:
    """What ends this pod once the cause is mended; a machine with a new key needs the operator's word for it."""
    accept = f" --host-key {error.seen}" if isinstance(error, HostKeyChanged) else ""
    return f"uvcc pods --end {name}{accept}"


async def _listed(ctx: Rollout, unlisted: list[UvccError], nothing: bool = False) -> list[Pod] | None:
    """The run's pods at the provider; None when it does not answer, which is not the same as none.

    ``nothing``: none was ever asked for, by the provider's own notes, so that one look is enough, and a short one.
    """
    for attempt in range(1 if nothing else DELETE_TRIES):
        try:
            async with asyncio.timeout(NOTHING_S if nothing else None):
                return await ctx.provider.list(ctx.plan.prefix)
        except Exception as e:  # noqa: BLE001  (whatever a list comes to, what is known is deleted all the same)
            unlisted.append(describe(e))
        if attempt + 1 < DELETE_TRIES and not nothing:
            await asyncio.sleep(BACKOFF_S * 2**attempt)
    return None


async def _delete(ctx: Rollout, pod: Pod) -> UvccError | None:
    """End one pod; why it is not proven gone, or None."""
    began, error = time.monotonic(), UvccError("it was not tried")
    for attempt in range(DELETE_TRIES):
        try:
            await ctx.provider.delete(pod)
            return None
        except Exception as e:  # noqa: BLE001  (one pod's trouble is told; it must not keep the others)
            error = describe(e)
        if isinstance(error, HostKeyChanged) or time.monotonic() - began > LONG_S:
            break  # it will not be another in a second; a provider that was asked for long has had its tries
        if attempt + 1 < DELETE_TRIES:
            await asyncio.sleep(BACKOFF_S * 2**attempt)
    return error
