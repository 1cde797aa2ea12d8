"""A pod whose agent has died gets another: it takes over the workers that the one before it left running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import provision

log = logger(__name__)
LOOK_S: Final = 0.5
AGAIN_S: Final = 30.0  # one that cannot live is not tried without a pause


def _dead(ctx: Rollout, member: Member) -> bool:
    """Whether the pod answers and has no agent though it had one; not while it is replaced or leaves."""
    known = ctx.bus.snapshot.pods.get(member.name)
    stays = known is not None and known.state == pod_states.AGENT and not member.in_hand
    return stays and member.agent is not None and member.agent.agentless and ctx.wheel is not None


async def keep_agents(ctx: Rollout, clock: Callable[[], float] = time.monotonic) -> None:
    """Look after every pod's agent, until the run ends."""
    tried: dict[str, float] = {}
    while True:
        await asyncio.sleep(LOOK_S)
        if ctx.bus.snapshot.ended:
            continue
        due = [m for m in ctx.members.values() if _dead(ctx, m) and clock() >= tried.get(m.name, 0.0)]
        tried |= {m.name: clock() + AGAIN_S for m in due}
        await asyncio.gather(*(_start(ctx, m) for m in due))


async def _start(ctx: Rollout, member: Member) -> None:
    """Start one agent and tell of it; what fails is told, and tried again later."""
    try:
        member.boot = await provision.bootstrapped(ctx, member)
    except Exception as e:  # noqa: BLE001  (one pod's trouble is told; it must not end the care for the others)
        error = describe(e)
        text, hint = f"its agent has died, and no other could be started: {error}", error.hint
        log.warning("%s", text, pod=member.name)
    else:
        text, hint = "its agent had died; another has taken its place", "agent.log on the pod may say why"
        log.warning("%s", text, pod=member.name)
    ctx.bus.record([ev.Alert(level="error", name="agent", text=text, hint=hint, subject=member.name)])
