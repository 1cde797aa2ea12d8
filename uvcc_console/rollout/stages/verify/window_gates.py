"""Gates of the full run itself: at chosen steps (``gates.at``) the steps since the last such one are measured.

A run that misses one is held, and halted unless somebody releases it within the time that a hold has: its checkpoint
is whole, its pods wait, and whoever decides resumes it or tears it down.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import figure
from uvcc_console.plan.measurable import STEP_MARK, windows
from uvcc_console.plan.plan import FULL
from uvcc_console.plan.schema import GatesPart
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.training import resume_rehearsal

log = logger(__name__)
LOOK_EVERY_S: Final = 1.0
LATE_STEPS: Final = 2  # rows and heartbeats come from different files: so many steps later every row is there
_HINT: Final = "uvcc resume goes on all the same, --from STEP --set changes settings; uvcc teardown ends it"


def measure(s: Snapshot, gates: GatesPart, since: int, until: int) -> Iterator[ev.GateMeasured]:
    """Every gate that a window can show, over the steps ``since`` < step <= ``until``. Pure."""

    def within(name: str) -> list[list[float]]:
        lines = [line for by_name in s.series.values() if (line := by_name.get(name)) is not None]
        found = [[y for x, y in line if since < x <= until] for line in lines]
        return [ys for ys in found if ys]

    if gates.loss_falls:
        falls = [_fall(ys) for ys in within("loss")]
        shown = f"{min(falls):+.4f}" if falls else "no loss"
        yield _result("loss_falls", until, bool(falls) and min(falls) > 0, "> 0", shown)
    for name, column, floor in (
        ("toks_per_s", "toks_per_s", gates.toks_per_s),
        ("gate_entropy", "gate_entropy_mean", gates.gate_entropy),
    ):
        if floor > 0:
            least = min((median(ys) for ys in within(column)), default=None)
            yield _result(name, until, least is not None and least >= floor, f">= {floor:g}", _shown(least))
    for name, column, ceiling, off in (
        ("gate_collapse", "gate_collapse_frac", gates.gate_collapse, 1.0),
        ("fetch_s", "dt_fetch_s", gates.fetch_s, 0.0),
    ):
        if ceiling != off:
            most = max((median(ys) for ys in within(column)), default=None)
            yield _result(name, until, most is not None and most <= ceiling, f"<= {ceiling:g}", _shown(most))


def _fall(ys: Sequence[float]) -> float:
    """How far the middle of the last quarter lies below that of the first."""
    part = max(1, len(ys) // 4)
    return median(ys[:part]) - median(ys[-part:]) if len(ys) > 1 else 0.0


def _shown(value: float | None) -> str:
    return "not reported" if value is None else figure(value)


def _result(name: str, step: int, ok: bool, wanted: str, shown: str) -> ev.GateMeasured:
    return ev.GateMeasured(name=f"{name}{STEP_MARK}{step}", ok=ok, wanted=wanted, measured=shown)


def arrived(s: Snapshot, step: int) -> bool:
    """Whether every row up to ``step`` of the full run is in the snapshot."""
    lines = [line for by_name in s.series.values() if (line := by_name.get("loss")) is not None and line.last]
    complete = bool(lines) and all(line.last is not None and line.last[0] >= step for line in lines)
    return s.phase == FULL and (complete or s.step >= step + LATE_STEPS)


def judged_before(s: Snapshot) -> set[int]:
    """Steps whose gates were measured already, also by a conductor before this one."""
    marks = [g.name.rpartition(STEP_MARK) for g in s.gates]
    return {int(step) for _, mark, step in marks if mark and step.isdecimal()}


async def hold_at_gates(ctx: Rollout, sleep: Callable[[float], asyncio.Future[None]] | None = None) -> None:
    """Measure the full run's gates as it comes to them, and hold it where one is missed. ``sleep``: for tests.
    A halt that is to be rehearsed is asked for.

    What is gone back before by ``uvcc resume --from`` is measured again; anything else is measured once.
    """
    gates = ctx.plan.profile.gates
    judged = judged_before(ctx.bus.snapshot)

    def heard(event: ev.Event) -> None:
        if isinstance(event, ev.PhaseStarted) and event.phase == FULL and event.start >= 0:
            judged.difference_update([step for step in judged if step > event.start])

    ctx.bus.listen(heard)
    while gates.at or gates.resume_at:
        await (sleep or asyncio.sleep)(LOOK_EVERY_S)
        look(ctx, judged)
        resume_rehearsal.look(ctx)


def look(ctx: Rollout, judged: set[int]) -> None:
    """Measure every window that is over and not in ``judged``, which it enters; hold the run if a gate is missed."""
    s, gates = ctx.bus.snapshot, ctx.plan.profile.gates
    for since, until in windows(gates.at):
        if until in judged or not arrived(s, until):
            continue
        judged.add(until)
        found = list(measure(s, gates, since, until))
        ctx.say(*found)
        missed = [f"{g.name} (wanted {g.wanted}, measured {g.measured})" for g in found if not g.ok]
        if missed and not (s.halt.nonce and not s.halt.done):
            why = f"gate not passed: {', '.join(missed)}"
            log.warning("%s", why)
            hold = ev.HaltRequested(nonce=secrets.token_hex(8), mode="hold", by="conductor", reason=why)
            ctx.say(hold, ev.Alert(level="error", name="gate", text=why, hint=_HINT, subject=f"step {until}"))
