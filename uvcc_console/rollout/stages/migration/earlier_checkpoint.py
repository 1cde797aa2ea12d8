"""Going on from an earlier checkpoint, which only the operator decides: ``uvcc resume RUN --from STEP``.

A private run repeats from there the very messages that it sent before, under the same masks, and every one of them must
match what was recorded. Where that cannot be, because the record is damaged, ``--from 0`` starts over under the next
attempt number, whose masks are others; transcripts and checkpoints of the attempt before are moved aside on the pods.
The same happens, unasked, where a pod's identity has been further than its transcript shows (``worker.high_water``).
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.plan.plan import FULL, Phase
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.stages.migration import checkpoint_copies
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing.untrusted import as_int, as_object

_LIST: Final = (
    'cd .uvcc/runs/{run}/checkpoints 2>/dev/null || exit 0; for d in step-*; do [ -d "$d" ] && echo "$d"; done; :'
)
_DEMANDS: Final = "cat .uvcc/runs/{run}/least_attempt_*.json 2>/dev/null | head -c 65536; :"
MOST: Final = 1 << 20
HIGHER: Final = 64
"""A pod that asks for an attempt further ahead than this is not obeyed: numbers that ran out would end the session."""
_STEP: Final = re.compile(r"step-(\d{1,9})")


def begin_again(ctx: Rollout, phase: Phase, why: str) -> None:
    """Let the next start of a phase that has nothing left to do be from its first step, unless a step was chosen.

    One domain among three does not decide that alone, and a command starts from its beginning anyway.
    """
    if ctx.federated is None and ctx.start_from is None and phase.kind != "command":
        ctx.start_from = 0
        ctx.say(ev.Alert(level="info", name="resume", text=f"{why}: it starts over", hint="F9"))


async def chosen(ctx: Rollout, phase: Phase) -> int:
    """The step that was chosen to go on from, -1 if none was; each choice counts once.

    A language model's checkpoint that is only home is brought to its pod. Raises UvccError naming the steps that every
    pod has if it is none of them.
    """
    wanted, ctx.start_from = ctx.start_from, None
    if wanted is None and phase.kind == "lm" and phase.name == FULL:
        await each(ctx.of_phase(phase), lambda m: _put_back(ctx, phase, m))
    if wanted is None or wanted == 0:
        return -1 if wanted is None else 0
    if phase.kind == "command":
        raise UvccError("a command has no checkpoints that could be chosen", "uvcc resume starts it again")
    held = await each(ctx.of_phase(phase), lambda m: steps_on(m, phase))
    common = set.intersection(*held.values())
    if wanted in common:
        return wanted
    home = checkpoint_copies.steps_at_home(ctx, phase) if phase.kind == "lm" else set()
    if wanted in home:
        await each(ctx.of_phase(phase), lambda m: checkpoint_copies.bring_back(ctx, phase, m, wanted))
        return wanted
    there = ", ".join(map(str, sorted(common | home))) or "none"
    raise UvccError(
        f"there is no checkpoint of step {wanted}; there are those of steps {there}", "uvcc resume --from one"
    )


async def _put_back(ctx: Rollout, phase: Phase, member: Member) -> None:
    """A machine without any checkpoint gets the newest from home: it came instead of one that was lost.

    Who replaced it may have died before it came to that, and a training never starts over unasked. Raises
    VerificationError if that checkpoint was altered.
    """
    if await steps_on(member, phase):
        return
    newest = await asyncio.to_thread(checkpoint_copies.newest_at_home, ctx, phase, member.name)
    if newest is not None:
        await checkpoint_copies.bring_back(ctx, phase, member, newest.step)
        text = f"{member.name} had no checkpoint: that of step {newest.step} was put back from home"
        ctx.say(ev.Alert(level="warn", name="pod_replaced", text=text, subject=member.name))


async def steps_on(member: Member, phase: Phase) -> set[int]:
    """Steps of the committed checkpoints on a pod, whole or not."""
    listed = (await member.ssh.sh(_LIST.format(run=phase.engine_run))).splitlines()
    return {int(m[1]) for line in listed if (m := _STEP.fullmatch(line.strip()))}


async def masks(ctx: Rollout, phase: Phase, start: int) -> int:
    """The attempt number that the next start's masks depend on: one more where a run starts over, else as before.

    It is higher where a pod's identity needs that, because it cannot vouch for all that it did under the one before.
    """
    before = _masks_before(ctx, phase)
    if phase.kind != "private":
        return before
    found = await each(ctx.of_phase(phase), lambda m: demanded(m, phase))
    return max([before + (start == 0), *(least for least in found.values() if least <= before + HIGHER)])


async def demanded(member: Member, phase: Phase) -> int:
    """The least attempt that the workers of a pod have asked for; 0 if none did."""
    listed = (await member.ssh.sh(_DEMANDS.format(run=phase.engine_run))).splitlines()
    told = (as_object(line, 256) or {} for line in listed)
    return max((as_int(found.get("least"), 0, MOST) or 0 for found in told), default=0)


def _masks_before(ctx: Rollout, phase: Phase) -> int:
    before = 0
    journal = Journal(ctx.run_dir / processes.JOURNAL, readonly=True)
    try:
        for _, event in journal.since(0, limit=1_000_000, kinds=(ev.PhaseStarted.kind,)):
            if isinstance(event, ev.PhaseStarted) and event.engine_run == phase.engine_run:
                before = event.masks
    finally:
        journal.close()
    return before
