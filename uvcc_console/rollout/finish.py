"""How a rollout ends, whatever came before: evidence home, pods gone, costs told, artifacts signed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger, within
from uvcc_console.fleet.cloud.intents import unended
from uvcc_console.fleet.provider import Rents
from uvcc_console.report import collector
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.spending import Spending
from uvcc_console.rollout.stages.fleet.provision import teardown
from uvcc_console.rollout.stages.training.phases import stop_workers
from uvcc_console.rollout.stages.verify.collect import last_words, make_durable
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import counted

log = logger(__name__)
LAST_WORDS_S = 20.0
PATIENT_WORDS_S = 300.0
WRITTEN_S = 10.0


async def finish(
    ctx: Rollout, status: str, detail: str, spending: Spending | None = None, *, pressed: bool = False
) -> tuple[str, str]:
    """Bring evidence home, tear down and write the run's last event; a full disk delays none of it.

    ``pressed``: the end was asked for, by somebody or by a cap.
    """
    ctx.tolerant = True
    if status != "ok":
        await evidence_home(ctx, LAST_WORDS_S if pressed else PATIENT_WORDS_S)
        await _durably(ctx)
    keep = ctx.plan.profile.fleet.keep_pods and status == "ok"
    left: list[str] = []
    if keep:
        there = counted(len(ctx.members), "pod")
        said = f"{there} kept (fleet.keep_pods): fleet.attach_prefix {ctx.plan.prefix} takes what it needs of them, "
        said += f"uvcc pods --end {ctx.plan.prefix}... ends one, limits.ttl all"
        ctx.say(ev.StageChanged(name="teardown", status="skipped", detail=said))
    else:
        ctx.say(ev.StageChanged(name="teardown", status="running"))
        try:
            with within(stage="teardown"):
                left = await teardown(ctx)
        except Exception as e:
            log.error("the teardown failed", exc_info=e)
            left = [f"{ctx.plan.prefix}*: {describe(e)}"]
        word = "failed" if left else "ok"
        said = f"not proven gone: {', '.join(left)}" if left else "every pod is proven gone"
        shown = ctx.bus.snapshot.status
        ctx.say(ev.StageChanged(name="teardown", status=word, detail=said))
        if left and shown == "ok":
            status = "failed"
    if spending is not None:
        ctx.say(*spending.look())  # the provider's bill of what is gone has come by now
    watched = await _unproven(ctx, keep)
    log.info("the run ends: %s. %s", status, detail)
    ctx.say(ev.RunEnded(status=status, detail=detail, leaks=left))
    if watched and not processes.running(ctx.run_dir, processes.HALTD):
        ctx.sidecar = processes.start(ctx.run_dir, processes.HALTD)  # it sees that the run is over, and stays for these
    if ctx.artifacts.is_dir():
        _last_artifacts(ctx)
    return status, detail


async def evidence_home(ctx: Rollout, limit_s: float) -> None:
    """What the pods of a run that did not end well recorded comes home before they go: a delay, never an obstacle."""
    if not ctx.bus.snapshot.engine_run or not ctx.live():
        return
    try:
        async with asyncio.timeout(limit_s):
            phase = ctx.plan.phases.get(ctx.bus.snapshot.phase)
            if phase is not None:
                await stop_workers(ctx, phase)  # what is still being written cannot be fetched whole
            await last_words(ctx)
    except TimeoutError:
        text = f"not all evidence came home in {limit_s:.0f} s"
        ctx.say(ev.Alert(level="error", name="collect", text=text, hint="what arrived lies in artifacts"))
    except Exception as e:
        log.error("evidence did not come home", exc_info=e)
        ctx.say(ev.Alert(level="error", name="collect", text=f"evidence did not come home: {describe(e)}"))


async def _durably(ctx: Rollout) -> None:
    """What came home outlives a power cut before the pods go; told where it does not, and never an obstacle."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await make_durable(ctx)
    except (UvccError, TimeoutError) as e:
        why = e.what if isinstance(e, UvccError) else f"the disk takes longer than {LAST_WORDS_S:.0f} s"
        text = f"a power cut may still take the evidence that came home: {why}"
        ctx.say(ev.Alert(level="error", name="collect", text=text, hint="look at the disk of the data folder"))


async def written(bus: Bus) -> None:
    """Wait a while for a disk that took the last events not yet; after that the sidecar has the end told anew."""
    end = time.monotonic() + WRITTEN_S
    while bus.behind and time.monotonic() < end:
        await asyncio.sleep(0.1)


def _last_artifacts(ctx: Rollout) -> None:
    """The run's log with its last line, and the manifest of all that a run leaves, however it ended."""
    try:
        write_artifacts(ctx.run_dir)
        if not collector.check(ctx.run_dir):
            collector.seal(ctx.run_dir)
    except UvccError as e:
        ctx.say(ev.Alert(level="error", name="manifest", text=str(e)))


async def _unproven(ctx: Rollout, keep: bool) -> Sequence[str]:
    """Creates that never had an answer and that the market has still time to show: told, and watched on."""
    if not isinstance(ctx.provider, Rents):
        return []
    try:
        left: Sequence[str] = await ctx.provider.prove(
            ended=True, keep=[m.request.name for m in ctx.members.values()] if keep else ()
        )
    except UvccError as e:
        left = [f"{ctx.plan.prefix}* ({e.what})"]
    if left:
        volumes = {t.name for t in unended(ctx.run_dir)}
        if never := [name for name in left if name not in volumes]:
            text = f"never answered, and not proven to be nothing: {', '.join(never)}"
            text += "; the sidecar stays and ends what comes"
            ctx.say(ev.Alert(level="warn", name="unanswered", text=text, hint="uvcc pods --sweep looks as well"))
        if stay := [name for name in left if name in volumes]:
            text = f"volumes not proven gone, which cost on: {', '.join(stay)}; the sidecar stays and asks again"
            ctx.say(ev.Alert(level="error", name="volume", text=text, hint="uvcc pods --sweep looks as well"))
    return left
