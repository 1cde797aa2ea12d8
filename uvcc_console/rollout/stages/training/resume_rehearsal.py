"""The rehearsal of a halt and an exact resume (``gates.resume_at``), in the full run itself.

At that step the run is halted for good: its workers save and end. Then they are started from the checkpoint before the
halt's, so that they do the steps up to it again, and say whether losses and tensors came out the same
(``steps_repeated``). What they say is the gate; where it is missed, the run is held for a decision.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import engine_words, repeats_exactly
from uvcc_console.plan.measurable import STEP_MARK
from uvcc_console.plan.plan import FULL, Phase
from uvcc_console.rollout.context import Rollout, each
from uvcc_console.rollout.stages.migration import earlier_checkpoint
from uvcc_engine.contract.parsing.untrusted import as_int
from uvcc_engine.contract.run_files.files import STEPS_REPEATED

log = logger(__name__)
WANTED: Final = "the same losses and tensors"
_HINT: Final = "uvcc resume goes on all the same; a GPU's kernels may add up in another order each time"


def gate_name(at: int) -> str:
    """``exact_resume@60``."""
    return f"exact_resume{STEP_MARK}{at}"


def nonce_of(s: Snapshot, at: int) -> str:
    """The rehearsal's own order: any conductor of this run knows it again."""
    return hashlib.sha256(f"{s.engine_run} resume_at {at}".encode()).hexdigest()[:16]


def measured(repeated: Mapping[str, Any], at: int) -> ev.GateMeasured:
    """The gate by what the workers said of the steps that they repeated. Pure."""
    text, _ = engine_words(STEPS_REPEATED, repeated)
    first, last, at_step = (as_int(repeated.get(name), 0) for name in ("first", "last", "checkpoint"))
    ok = repeats_exactly(repeated) and None not in (first, last, at_step)
    if ok:
        text = f"steps {first} to {last} again"
    return ev.GateMeasured(name=gate_name(at), ok=ok, wanted=WANTED, measured=text)


def look(ctx: Rollout) -> None:
    """Ask for the halt when the step is reached; measure the gate when the steps up to it have been repeated."""
    s, at = ctx.bus.snapshot, ctx.plan.profile.gates.resume_at
    if not at or s.phase != FULL or _judged(s, at) or (s.halt.nonce and not s.halt.done):
        return
    if s.repeated:
        _judge(ctx, measured(s.repeated, at))
    elif s.attempt == 0 and s.step >= at and s.halt.mode != "halt":
        why = f"rehearsal: halted at step {at} or after, then resumed from the checkpoint before"
        log.info("%s", why)
        ctx.say(ev.HaltRequested(nonce=nonce_of(s, at), mode="halt", by="conductor", reason=why))


def _judged(s: Snapshot, at: int) -> bool:
    return any(g.name == gate_name(at) for g in s.gates)


def _judge(ctx: Rollout, gate: ev.GateMeasured) -> None:
    ctx.say(gate)
    if not gate.ok:
        why = f"gate not passed: {gate.name} (wanted {gate.wanted}, measured {gate.measured})"
        log.warning("%s", why)
        hold = ev.HaltRequested(nonce=secrets.token_hex(8), mode="hold", by="conductor", reason=why)
        ctx.say(hold, ev.Alert(level="error", name="gate", text=why, hint=_HINT, subject=gate.name))


async def goes_on(ctx: Rollout, phase: Phase) -> bool:
    """Whether it is the rehearsal that halted this phase; then the step to go on from is chosen, and the phase is to be
    started again.

    Without an earlier checkpoint nothing would be repeated: the gate is missed, and the run goes on from the halt's.
    """
    s, at = ctx.bus.snapshot, ctx.plan.profile.gates.resume_at
    ours = at > 0 and phase.name == FULL and s.halt.nonce == nonce_of(s, at) and s.halt.done
    if not ours or ctx.start_from is not None:
        return ours
    held = await each(ctx.of_phase(phase), lambda m: earlier_checkpoint.steps_on(m, phase))
    earlier = [step for step in set.intersection(*held.values()) if step < s.halt.step]
    if earlier:
        ctx.start_from = max(earlier)
    else:
        missing = f"no checkpoint before that of step {s.halt.step} is left"
        ctx.say(ev.GateMeasured(name=gate_name(at), ok=False, wanted=WANTED, measured=missing))
    return True


def close(ctx: Rollout) -> None:
    """The full run is over: whatever was not measured by now is said."""
    s, at = ctx.bus.snapshot, ctx.plan.profile.gates.resume_at
    if not at or s.phase != FULL or _judged(s, at):
        return
    gate = ev.GateMeasured(name=gate_name(at), ok=False, wanted=WANTED, measured="no step was repeated")
    ctx.say(measured(s.repeated, at) if s.repeated else gate)
