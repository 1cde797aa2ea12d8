"""Whether a phase is silent: its workers hang, or stopped though nobody asked for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from uvcc_console.core.snapshot import Snapshot, WorkerView
from uvcc_console.plan.plan import SIGTERM, Phase
from uvcc_engine.contract.errors import PeerLostError, UnreachableError

DESERTED_S = 15.0
UNEXPECTED = 70  # the exit code of an engine's process behind an error that nobody expected


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a phase cannot go on; ``coord`` names the worker whose last words explain it, ``early`` those that stopped in
    good order though nobody here asked for it; ``gone``: pods that nothing can be asked of any more. ``passing``:
    nothing speaks against going on as before.
    """

    what: str
    hint: str = "uvcc resume goes on from the last common checkpoint"
    coord: str = ""
    early: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    passing: bool = True


def may_pass(phase: Phase, worker: WorkerView) -> bool:
    """Whether a worker that ended badly was killed or lost somebody, and did not itself say what has to be mended.

    Of programs of others no exit code means that; of a language model's an error that nobody expected may be a GPU's.
    """
    codes = {PeerLostError.exit_code, UnreachableError.exit_code, *([UNEXPECTED] if phase.kind == "lm" else [])}
    return bool(worker.signal) or phase.kind == "command" or worker.rc in codes


def by_signal(phase: Phase) -> bool:
    """Whether its processes never look at a control file: SIGTERM alone ends them."""
    return phase.job.get("halt") == SIGTERM


def workers_of(s: Snapshot, phase: Phase) -> list[WorkerView]:
    return [s.workers[str(c)] for c in phase.coords() if str(c) in s.workers]


def without_result(s: Snapshot, phase: Phase) -> list[str]:
    """Workers that have not reported the result that they owe."""
    reporting = phase.coords() if phase.kind == "private" else phase.coords()[:1]
    return [str(c) for c in reporting if f"{phase.name}/{c}" not in s.result_hashes]


def last_beat(s: Snapshot, phase: Phase, began: float, now: float) -> float:
    """When a worker was last heard, from the time stamp ``began`` on.

    A beat of later than now is of before the clock was set back.
    """
    return max([began, *(w.beat_ts for w in workers_of(s, phase) if w.beat_ts <= now)])


def deserted(s: Snapshot, phase: Phase, now: float, began: float = 0.0) -> Trouble | None:
    """Workers stopped in good order though nobody here asked for it, and the rest is silent. Pure.

    So it ends when a machine is shut down (its agent stops the workers, who take the others along by their vote), or
    when a pod's lease ran out. ``began``: a time stamp in seconds before which nobody counts as silent.
    """
    if phase.kind == "command" or (s.halt.nonce and not s.halt.drill):
        return None
    owing = without_result(s, phase)
    early = [w for w in workers_of(s, phase) if w.coord in owing and w.state == "exited" and w.rc == 0]
    if not early or now - last_beat(s, phase, began, now) <= DESERTED_S:
        return None
    names = tuple(w.coord for w in early)
    return Trouble(f"{', '.join(names)} stopped before the last step though nobody here asked for it", early=names)


def before(s: Snapshot, found: Trouble, began: float) -> bool:
    """Whether all of those had stopped when a resume took the run up at the time stamp ``began`` (0.0: none did): of
    the end of each was heard in the seconds behind it.
    """
    heard = [s.workers[coord].exited for coord in found.early]
    return bool(began and heard) and max(heard) - began <= DESERTED_S


def hang(s: Snapshot, phase: Phase, began: float, stall_s: float, now: float) -> Trouble | None:
    """No worker gave a sign of life for ``stall_s``, and nobody holds them. Pure; ``began`` is a time stamp."""
    if s.halt.nonce and not s.halt.done:
        return None
    if by_signal(phase) and not any(w.beat_ts for w in workers_of(s, phase)):
        return None  # it writes no heartbeats either: that its process lives is all there is
    quiet = now - last_beat(s, phase, began, now)
    return Trouble(f"no worker gave a sign of life for {quiet:.0f} s") if quiet > stall_s else None
