"""Halts that are asked for while workers are being started: their ladder finds none, and is done at once."""

from __future__ import annotations

import contextlib
import secrets

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.halt.machine import HALT, HOLD, RELEASE
from uvcc_console.rollout.context import HaltedEarly, Rollout
from uvcc_console.runs import processes

HOLD_S = 15.0


async def heed(ctx: Rollout, known: str, start: int) -> int:
    """Raises HaltedEarly for a halt other than ``known`` that came while a start from step ``start`` was prepared.

    Workers started after it would run though the run was told as halted. A hold is waited for until it is either.
    Returns up to where in the journal this is known.
    """

    def other(s: Snapshot) -> bool:
        return s.halt.nonce not in ("", known) and not s.halt.drill

    with contextlib.suppress(TimeoutError):  # no sidecar made a halt of it, and nobody released it: it counts as one
        await ctx.bus.wait(lambda s: not other(s) or s.halt.mode != HOLD or s.halt.done, HOLD_S)
    s = ctx.bus.snapshot
    if other(s) and s.halt.mode in (HOLD, HALT):
        ctx.start_from = start if start >= 0 else None  # what was chosen stays chosen
        raise HaltedEarly(s.stage.name if s.stage is not None else s.phase, began=bool(s.engine_run))
    return s.seq


def ask_again(ctx: Rollout, since: int) -> None:
    """Ask once more for a hold or halt that came after ``since``, while the workers were started: it may have found
    none of them.

    ``since`` is a sequence number of the journal, which is read for it: the beginning of a phase clears the snapshot of
    every halt before.
    """
    last: ev.HaltRequested | None = None
    for _, event in iter_events(ctx.run_dir / processes.JOURNAL, (ev.HaltRequested.kind,), since):
        if isinstance(event, ev.HaltRequested) and not event.drill:
            last = event
    if last is not None and last.mode != RELEASE:
        mode, why = HOLD if last.mode == HOLD else HALT, f"{last.by} asked for it while the workers were being started"
        ctx.say(ev.HaltRequested(nonce=secrets.token_hex(8), mode=mode, by="conductor", reason=why))
