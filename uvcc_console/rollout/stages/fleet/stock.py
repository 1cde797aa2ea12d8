"""Waiting for stock: the market is asked again until something fits, while nothing is rented and nothing is billed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.fleet.provider import NoOffer, Quote
from uvcc_console.fleet.runclock import run_now
from uvcc_console.rollout.context import Rollout
from uvcc_engine.contract.errors import UnreachableError, UvccError

STAGE = "quote"
LOOK_S = 60.0


async def wait(
    ctx: Rollout,
    now: Callable[[Path], float] = run_now,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Quote:
    """The quote of the whole fleet; without fitting offers, the one of ``fleet.wait_for_stock`` hours later at most.

    Only what passes by itself is waited for: stock and price, and once it waits also an API that does not answer. A
    halt or a tear-down ends the wait like any stage. Raises NoOffer when the time is over.
    """
    requests = [m.request for m in ctx.members.values()]
    patience = ctx.plan.profile.fleet.wait_for_stock * 3600.0
    began = now(ctx.run_dir)
    last: NoOffer | None = None
    while True:
        try:
            found = await ctx.provider.quote(requests)
        except NoOffer as e:
            if not e.passing:
                raise
            last, trouble = e, UvccError(e.what)
        except UnreachableError as e:
            if last is None:
                raise
            trouble = UvccError(e.what)
        else:
            if last is not None:
                ctx.say(ev.StageChanged(name=STAGE, status="running"))
            return found
        left = began + patience - now(ctx.run_dir)
        if left <= 0:
            if not patience:
                raise last
            what = f"no stock in {ctx.plan.profile.fleet.wait_for_stock:g} h: {last.what}"
            raise NoOffer(what, "wait longer with fleet.wait_for_stock, or loosen a constraint") from last
        until = datetime.fromtimestamp(began + patience, UTC)
        said = f"waits for stock until {until:%Y-%m-%d %H:%M} UTC, nothing is rented: {trouble.what}"
        ctx.say(ev.StageChanged(name=STAGE, status="running", detail=said))
        await sleep(min(LOOK_S, left))
