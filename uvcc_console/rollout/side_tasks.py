"""What a conductor does beside the stages, each as a task of its own that ``supervision`` keeps alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from uvcc_console.core import alerts, pod_states
from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.fleet import pulse
from uvcc_console.fleet.provider import TellsSilence
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.spending import Spending
from uvcc_console.runs import processes, sweep
from uvcc_engine.contract.errors import UvccError

log = logger(__name__)
COST_EVERY_S = 5.0
WATCH_EVERY_S = 2.0
GUARD_EVERY_S, GUARD_LONGEST_S = 0.5, 30.0


async def keep_costs(ctx: Rollout, spending: Spending, end: Callable[[str], None]) -> None:
    """Keep the spend in the journal, and have the run end when it meets a cap or its time to live."""
    while True:
        ctx.bus.record(spending.look())
        if why := spending.over():
            end(why)
        await asyncio.sleep(min(COST_EVERY_S, max(0.1, spending.remaining)))


async def detect(ctx: Rollout) -> None:
    """Have the detectors look at the run, and write down what they find that is new."""
    watch = alerts.Watch()
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        if ctx.bus.settled_s < alerts.SETTLES_S:
            continue  # what the workers said is not in the snapshot yet, or at times of another clock
        ctx.bus.record(watch.look(ctx.bus.snapshot, time.time(), time.monotonic()))


async def tell_silence(ctx: Rollout, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Tell of a provider's API that is silent while it is asked again: once, and when it is back."""
    told = False
    while isinstance(ctx.provider, TellsSilence):
        await sleep(WATCH_EVERY_S)
        what, hint = ctx.provider.silence()
        if what and not told:
            ctx.bus.record([ev.Alert(level="warn", name="api", text=what, hint=hint)])
        elif told and not what:
            ctx.bus.record([ev.Alert(level="info", name="api", text="the provider's API answers again")])
        told = bool(what)


async def beat(run_dir: Path) -> None:
    """Show the sidecar that this loop moves, until the process ends: what it does is worth a beat, not that it is."""
    own = pulse.Beat(run_dir, processes.CONDUCTOR)
    try:
        while True:
            own.beat()
            processes.renew_record(run_dir, processes.CONDUCTOR)
            await asyncio.sleep(pulse.BEAT_S)
    finally:
        own.close()


async def guard_sidecar(ctx: Rollout) -> None:
    """While there is anything to halt there is somebody to halt it: a sidecar that died or is frozen is replaced."""
    begun, pause = float("-inf"), GUARD_EVERY_S
    while True:
        await asyncio.sleep(pause)
        s = ctx.bus.snapshot
        if s.ended or all(p.state in pod_states.ABSENT for p in s.pods.values()):
            continue
        starting = ctx.sidecar is not None and ctx.sidecar.poll() is None
        sidecar = processes.vital(ctx.run_dir, processes.HALTD)
        if sidecar.moving or (starting and sidecar.who is None):
            continue
        again = time.monotonic() - begun < GUARD_LONGEST_S  # one that cannot live is not tried without a pause
        begun, pause = time.monotonic(), min(2 * pause, GUARD_LONGEST_S) if again else GUARD_EVERY_S
        word = "has died" if sidecar.who is None else f"is frozen ({sidecar.words()})"
        if sidecar.who is not None:
            await asyncio.to_thread(pulse.end, sidecar.who)
        try:
            ctx.sidecar = processes.start(ctx.run_dir, processes.HALTD)
        except UvccError as e:
            word += f", and no other could be started: {e}"
        text = f"the halt sidecar {word}; another takes its place"
        log.warning("%s", text)
        ctx.bus.record([ev.Alert(level="error", name="sidecar", text=text, hint="uvcc logs may say why")])


async def sweep_others(ctx: Rollout) -> None:
    """End what other runs of this folder left at the provider, and what is beside our own pods, every minute."""
    await sweep.keep_sweeping(ctx.provider, ctx.plan.prefix, lambda event: ctx.bus.record([event]))
