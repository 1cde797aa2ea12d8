"""The 1F1B pipeline schedule (PipeDream-flush; Narayanan et al. 2021, figure 4) as data. Standard library only.

A stage's program is a list of actions in the order in which it performs them. Receives belong to their microbatch:
an action's receive is posted right before it, never ahead of a send that the peer waits for. Posting the receive of a
gradient ahead of a forward send on the same stream is the deadlock that ``find_deadlock`` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from uvcc_engine.contract.errors import ConfigError, UvccError

Kind = Literal["recv_act", "forward", "send_act", "recv_grad", "backward", "send_grad"]


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """One thing a stage does for one microbatch."""

    kind: Kind
    microbatch: int


@dataclass(frozen=True, slots=True)
class PipelineTick:
    """One unit of time of one stage: F or B of a microbatch, or idle (kind "")."""

    kind: str
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" if self.kind else "."


def one_f_one_b(stage: int, stages: int, microbatches: int, depth: int = 1) -> list[tuple[str, int]]:
    """Order of forwards ("F") and backwards ("B") of one stage. Raises ConfigError on impossible sizes.

    Warm-up: ``stages - stage - 1`` forwards; then one forward, one backward in turn; then the rest backwards. A stage
    that works on ``depth`` microbatches at a time warms up on ``depth - 1`` more, so that it always finds as many.
    """
    if not 0 <= stage < stages or min(microbatches, depth) < 1:
        raise ConfigError(f"stage {stage} of {stages} with {microbatches} microbatches", "0 <= stage < stages, M >= 1")
    warm_up = min(stages - stage - 1 + depth - 1, microbatches)
    order = [("F", m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        order += [("F", m), ("B", m - warm_up)]
    order += [("B", m) for m in range(microbatches - warm_up, microbatches)]
    return order


def program(stage: int, stages: int, microbatches: int, depth: int = 1) -> list[PipelineAction]:
    """The stage's actions with its transfers, each receive right before its computation."""
    actions: list[PipelineAction] = []
    for kind, m in one_f_one_b(stage, stages, microbatches, depth):
        if kind == "F":
            if stage > 0:
                actions.append(PipelineAction("recv_act", m))
            actions.append(PipelineAction("forward", m))
            if stage < stages - 1:
                actions.append(PipelineAction("send_act", m))
        else:
            if stage < stages - 1:
                actions.append(PipelineAction("recv_grad", m))
            actions.append(PipelineAction("backward", m))
            if stage > 0:
                actions.append(PipelineAction("send_grad", m))
    return actions


def table(stages: int, microbatches: int) -> list[list[PipelineTick]]:
    """The schedule in time, one row a stage, forward and backward one tick each: what a Gantt chart should show.

    Raises UvccError for a schedule that cannot end.
    """
    orders = [one_f_one_b(s, stages, microbatches) for s in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    rows: list[list[PipelineTick]] = [[] for _ in range(stages)]
    at = [0] * stages
    tick = 0
    while any(at[s] < len(orders[s]) for s in range(stages)):
        ready: list[tuple[int, str, int]] = []
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            kind, m = orders[s][at[s]]
            needs = (kind, s - 1, m) if kind == "F" else (kind, s + 1, m)
            first = (kind == "F" and s == 0) or (kind == "B" and s == stages - 1)
            if first or done.get(needs, tick) < tick:
                ready.append((s, kind, m))
        if not ready:
            raise UvccError("the schedule cannot go on", "this is a bug in one_f_one_b")
        for s in range(stages):
            rows[s].append(PipelineTick(""))
        for s, kind, m in ready:
            done[kind, s, m] = tick
            at[s] += 1
            rows[s][-1] = PipelineTick(kind, m)
        tick += 1
    return rows


def bubble(stages: int, microbatches: int) -> float:
    """Idle share of the ideal schedule: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def render(stages: int, microbatches: int) -> str:
    """The table as text, for ``--print-schedule`` and the documents."""
    rows = table(stages, microbatches)
    width = max(len(str(t)) for row in rows for t in row) + 1
    return "\n".join(f"stage {s} |" + "".join(str(t).rjust(width) for t in row) for s, row in enumerate(rows))


def find_deadlock(programs: Sequence[Sequence[PipelineAction]]) -> list[str]:
    """Run the programs on in-order streams where a send waits for its receive (rendezvous), as one NCCL stream does.

    Empty if all finish; else one line per stage: what it waits for.
    """
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for s, actions in enumerate(programs):
            while at[s] < len(actions):
                a = actions[at[s]]
                if a.kind in ("forward", "backward"):
                    at[s] += 1
                    moved = True
                    continue
                peer, match = _other_end(s, a)
                if at[peer] < len(programs[peer]) and programs[peer][at[peer]] == match:
                    at[s] += 1
                    at[peer] += 1
                    moved = True
                    continue
                break
    return [
        f"stage {s} waits in {actions[at[s]].kind} of microbatch {actions[at[s]].microbatch}"
        for s, actions in enumerate(programs)
        if at[s] < len(actions)
    ]


def _other_end(stage: int, action: PipelineAction) -> tuple[int, PipelineAction]:
    ends: dict[str, tuple[int, Kind]] = {
        "send_act": (stage + 1, "recv_act"),
        "recv_act": (stage - 1, "send_act"),
        "send_grad": (stage - 1, "recv_grad"),
        "recv_grad": (stage + 1, "send_grad"),
    }
    peer, kind = ends[action.kind]
    return peer, PipelineAction(kind, action.microbatch)
