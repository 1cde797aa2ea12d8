"""The halt drill of a command that never looks at a control file: SIGTERM ends its processes, timed.

It cannot be held, so the drill costs the smoke its start: the smoke begins anew afterwards.
"""

from __future__ import annotations

import time
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.context import Rollout, each
from uvcc_engine.contract.agent_protocol.agent_commands import SignalCommand
from uvcc_engine.contract.errors import UvccError

RUNS_S: Final = 1.0  # a program that is ended while it is still loaded would prove nothing
LIMIT_S: Final = 30.0


async def drill(ctx: Rollout, phase: Phase) -> str:
    """End the processes of a phase by SIGTERM. Raises UvccError where one is still there after half a minute."""
    coords = [str(c) for c in phase.coords()]

    def ended(s: Snapshot) -> bool:
        return all(c in s.workers and s.workers[c].state == "exited" for c in coords)

    try:
        await ctx.bus.wait(ended, RUNS_S)
        raise UvccError("the command ended before the drill", "see its log, or make the smoke longer")
    except TimeoutError:
        began = time.monotonic()
    command = SignalCommand(run=phase.engine_run, signal="TERM")
    await each(ctx.of_phase(phase), lambda m: m.channel.request(command, timeout=LIMIT_S))
    try:
        await ctx.bus.wait(ended, LIMIT_S)
    except TimeoutError:
        alive = [c for c in coords if ctx.bus.snapshot.workers[c].state != "exited"]
        what = f"SIGTERM did not end {', '.join(alive)} in {LIMIT_S:.0f} s"
        raise UvccError(what, "have the program end at SIGTERM, or give halt.auto the rung kill") from None
    took, s = time.monotonic() - began, ctx.bus.snapshot
    pods = len(phase.pods())
    ctx.say(
        ev.HaltDone(nonce=s.halt.nonce, mode="hold", verified=pods, total=pods, step=s.step, seconds=took, drill=True)
    )
    return f"SIGTERM ended {len(coords)} of {len(coords)} processes in {took:.1f} s; they cannot be held"
