"""A pod that is lost for good is replaced by another of its party, replica and name; the others stay as they are."""

from __future__ import annotations

from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import provision
from uvcc_console.rollout.stages.links import relay
from uvcc_engine.contract.errors import ConfigError, UvccError


async def replace_pod(ctx: Rollout, name: str) -> str:
    """End what is left of pod ``name``, rent another, bring its agent up; returns what there is now.

    The old pod is proven gone first, so that the fleet never costs more than it was quoted. The new one is another
    machine: new address, new host key, and a new identity, which no policy names yet (the migration sees to that).
    Raises ConfigError for an unknown pod or one that was taken over, UvccError if the old one may still cost something
    or no new one can be had.
    """
    member = ctx.members.get(name)
    if member is None:
        raise ConfigError(f"the run has no pod {name}", f"it has {', '.join(ctx.members)}")
    if ctx.plan.profile.fleet.attach_prefix:
        raise ConfigError(f"pod {name} was taken over, not rented", "start it again where it came from")
    member.in_hand = True
    try:
        await _another(ctx, member)
    finally:
        member.in_hand = False
    assert member.pod is not None
    return f"{name} is now {member.pod.address} ({member.pod.provider})"


async def _another(ctx: Rollout, member: Member) -> None:
    await provision.detach(member)
    if member.pod is not None:
        ctx.say(ctx.pod_event(member, "deleting", "to be replaced"))
        try:
            await ctx.provider.delete(member.pod)
        except UvccError as e:
            ctx.say(ctx.pod_event(member, "lost", e.what))
            raise
    ctx.say(ctx.pod_event(member, "gone", "to be replaced"))
    member.pod, member.boot, member.identity, member.probe = None, None, {}, {}
    member.replaced += 1
    member.decoders.clear()
    ctx.cursors.pop(member.name, None)  # files of the old pod
    ctx.pins.pop(member.name, None)
    relay.forget_certificate(ctx, member)
    ctx.say(ctx.pod_event(member, "creating", "instead of one that was lost"))
    await provision.one_pod(ctx, member)
    if ctx.wheel is not None:
        await provision.one_agent(ctx, member)
