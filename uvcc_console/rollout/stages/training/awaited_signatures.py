"""Nothing that needs the word of several domains begins before as many of them have signed for it."""

from __future__ import annotations

from uvcc_console.core import events as ev
from uvcc_console.rollout.context import Rollout
from uvcc_console.runs import domain


async def await_signatures(ctx: Rollout, what: str, stage: str) -> None:
    """Wait, with the stage shown as waiting, until as many domains have signed for ``what`` as the profile wants."""
    if not (why := domain.missing(ctx.bus.snapshot, what)):
        return
    said = f"{why}; uvcc domain consent RUN {what} signs"
    ctx.say(ev.StageChanged(name=stage, status="waiting", detail=said))
    await ctx.bus.wait(lambda s: not domain.missing(s, what))
    ctx.say(ev.StageChanged(name=stage, status="running"))
