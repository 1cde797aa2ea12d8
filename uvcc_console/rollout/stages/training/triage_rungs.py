"""What the triage ladder changes of a plan, by what the journal says was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from uvcc_console.core.answers import triage
from uvcc_console.rollout.context import Rollout
from uvcc_engine.contract.job.topology import Topology


def apply(ctx: Rollout) -> None:
    """Make the plan say what the rung in force says, and nothing of those before it; asked before each attempt.

    A window is for one attempt: when that has ended, the newest rung that is none is in force again.
    """
    taken = ctx.bus.snapshot.triage
    if not taken:
        return
    known = [(triage.BY_WORD[t.rung], t.outcome) for t in taken if t.rung in triage.BY_WORD]
    rung = next((r for r, outcome in reversed(known) if not r.window or (not outcome and r is known[-1][0])), None)
    planned = ctx.bus.snapshot.profile.get("env")
    env = {**(planned if isinstance(planned, Mapping) else {}), **(rung.env if rung else {})}
    profile, phases = ctx.plan.profile, dict(ctx.plan.phases)
    if rung is not None and rung.single:
        phases = {name: replace(phase, topology=Topology(1)) for name, phase in phases.items()}
    ctx.plan = replace(ctx.plan, profile=profile.model_copy(update={"env": env}), phases=phases)
