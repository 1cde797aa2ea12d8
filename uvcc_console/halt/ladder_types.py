"""What a halt is made of: its rungs and their times, what is to be done, and what each pod has shown so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from uvcc_console.core import events as ev
from uvcc_console.core.rungs import HALT as HALT
from uvcc_console.core.rungs import HOLD as HOLD
from uvcc_console.core.rungs import KILL as KILL
from uvcc_console.core.rungs import RELEASE as RELEASE
from uvcc_console.core.rungs import TERM as TERM
from uvcc_console.core.rungs import TERMINATE as TERMINATE
from uvcc_engine.contract.agent_protocol.wire import Lacks

AFTER = {HALT: TERM, TERM: KILL, KILL: TERMINATE}
RUNG_RANK = {HOLD: 1, RELEASE: 1, HALT: 2, TERM: 3, KILL: 4, TERMINATE: 5}
# evidence in the order in which it counts; "released" belongs to the release rung alone
NOTHING = "nothing was started here"  # shown of a pod that has nothing to halt
EXCUSED = frozenset({Lacks.NOTHING, Lacks.DONE})  # a worker that is gone and lacks this was not cut off
EVIDENCE_RANK = {"": 0, "sent": 1, "seen": 2, "held": 3, "halted": 4, "gone": 5}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. ``commit``: a hold becomes a halt; the others: when a pod that said nothing is unknown on that rung."""

    commit: float = 3.0
    hold: float = 10.0
    release: float = 5.0
    halt: float = 60.0
    term: float = 15.0
    kill: float = 5.0
    terminate: float = 120.0
    drill: float = 30.0  # for the hold of a drill, which may have to wait for the workers' start
    resend: float = 0.5
    resend_late: float = 2.0

    @classmethod
    def patient(cls, hold_s: float) -> Times:
        """For a fleet whose steps may take ``hold_s``; never less than the defaults. A drill has the start beside."""
        start_s = cls().drill - cls().hold
        hold = max(cls().hold, hold_s)
        return cls(hold=hold, drill=start_s + hold, halt=max(cls().halt, 6 * hold_s))

    def of(self, rung: str, drill: bool = False) -> float:
        """When a pod that showed nothing of ``rung`` is unknown on it."""
        return {
            HOLD: self.drill if drill else self.hold,
            RELEASE: self.release,
            HALT: self.halt,
            TERM: self.term,
            KILL: self.kill,
            TERMINATE: self.terminate,
        }[rung]


@dataclass(frozen=True, slots=True)
class Send:
    """Send this rung's command to the pod; ``deadline_s``: seconds from now after which a hold is a halt by itself."""

    pod: str
    rung: str
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Journalled:
    """Append this event to the journal."""

    event: ev.Event


LadderAction = Send | Journalled


@dataclass(frozen=True, slots=True)
class PodEvidence:
    """One pod's end: its last ``stage``, and per worker coordinate the step and the checkpoint's SHA-256.

    ``gone``: its processes are absent. A worker that owed no checkpoint is not in ``checkpoints``.
    """

    stage: str
    gone: bool
    steps: dict[str, int]
    checkpoints: dict[str, str]


@dataclass(slots=True)
class PodState:
    workers: int
    up: bool = True
    sent_at: float = float("-inf")
    halting_since: float = float("inf")  # when the agent acknowledged the halt
    acked: str = ""  # the rung whose command the agent acknowledged
    recorded: str = ""
    unknown: bool = False
    vouched: int = -1  # the step at which its peers' words say it voted to stop
    held_by: set[str] = field(default_factory=set)  # who ever said that it is held
    released_by: set[str] = field(default_factory=set)
    unproven: dict[str, str] = field(default_factory=dict)  # workers gone without proof, and what is missing
    halted: bool = False  # a worker said that it obeyed this order as a halt
    stage: str = ""
    coords: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return max(self.steps.values(), default=-1)

    @property
    def checkpoint(self) -> str:
        return next((c for _, c in sorted(self.checkpoints.items()) if c), "")

    @property
    def released(self) -> bool:
        return "" in self.released_by or len(self.released_by) >= self.workers

    @property
    def was_held(self) -> bool:
        """Every worker said that it was held, wherever it is now: one that ran to its end was not."""
        return "" in self.held_by or len(self.held_by) >= self.workers

    @property
    def verified(self) -> bool:
        """Every worker is gone and left what a resume needs."""
        return self.stage == "gone" and not self.unproven

    @property
    def hopeless(self) -> bool:
        """Every worker is gone, but not all with proof."""
        return self.stage == "gone" and bool(self.unproven)

    def learn(self, stage: str, coord: str) -> str:
        """Fold one report; the pod is as far as its slowest worker. ``coord`` empty speaks for the whole pod."""
        if stage == "held":
            self.held_by.add(coord)
        self.halted = self.halted or stage == "halted"
        if coord:
            if EVIDENCE_RANK[stage] > EVIDENCE_RANK[self.coords.get(coord, "")]:
                self.coords[coord] = stage
            slowest = min(self.coords.values(), key=EVIDENCE_RANK.__getitem__)
            stage = slowest if len(self.coords) >= self.workers else min(slowest, "seen", key=EVIDENCE_RANK.__getitem__)
        if EVIDENCE_RANK[stage] > EVIDENCE_RANK[self.stage]:
            self.stage = stage
        return self.stage
