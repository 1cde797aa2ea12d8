"""Are the pods well, reachable, and within what was to be spent?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from uvcc_console.core import pod_states
from uvcc_console.core.alerts.expense import expected
from uvcc_console.core.alerts.failed_proofs import failed_proof
from uvcc_console.core.alerts.finding import ENOUGH, Finding, line, middle, training
from uvcc_console.core.snapshot import Snapshot

CREEP = 1.3
LEAST_MIB = 64.0
STEADY = 0.2  # of the whole growth, between each third and the next
DISK_FULL_S = 3600.0
PATH_DEAD_S = 30.0
SPENT = 0.9


def memory_creep(s: Snapshot, now: float) -> Iterator[Finding]:
    """Memory, also a GPU's, grows and does not come back: well higher in each third of what is known than before."""
    hint = "something is kept from step to step; a stack dump may show it"
    for w in training(s):
        grown = [words for name, where in _MEMORIES if (words := _grown(line(s, w.coord, name).ys(), where))]
        if grown:
            yield Finding("memory_creep", "; ".join(grown), hint, w.coord)


_MEMORIES: Final = (("mem_mib", ""), ("gpu_mem_alloc_mib", " of GPU memory"))


def _grown(ys: Sequence[float], where: str) -> str:
    if len(ys) < 3 * ENOUGH:
        return ""
    third = len(ys) // 3
    early, mid, late = (middle(ys[k * third : (k + 1) * third]) for k in range(3))
    least = STEADY * (late - early)  # what is loaded once, such as a compiled loop, is one step and no creep
    if mid - early > least and late - mid > least and late > CREEP * early and late - early > LEAST_MIB:
        return f"{late:.0f} MiB{where}, was {early:.0f} MiB"
    return ""


def disk_filling(s: Snapshot, now: float) -> Iterator[Finding]:
    """Nearly full, or full within the hour at the pace so far."""
    gates = s.profile.get("gates")
    least = float(gates.get("disk_free_mib", 512)) if isinstance(gates, Mapping) else 512.0
    for pod in s.pods.values():
        if pod.disk.last is None or pod.state in pod_states.OVER:
            continue
        at, free = pod.disk.last
        first_at, first = next(iter(pod.disk))
        pace = (first - free) / (at - first_at) if at > first_at else 0.0
        if free < least:
            yield Finding(
                "disk_filling", f"{free:.0f} MiB free, {least:.0f} wanted", "free some: df -h, du", pod.pod, "error"
            )
        elif pace > 0 and len(pod.disk) >= ENOUGH and free / pace < DISK_FULL_S:
            text = f"{free:.0f} MiB free, full in {free / pace / 60:.0f} min at this pace"
            yield Finding("disk_filling", text, "keep fewer checkpoints, or a larger disk", pod.pod)


def spend_above_plan(s: Snapshot, now: float) -> Iterator[Finding]:
    """What is spent already, or will be when the run is done at its own pace, meets the profile's cap."""
    limits = s.profile.get("limits")
    cap = float(limits.get("total", 0.0)) if isinstance(limits, Mapping) else 0.0
    done = expected(s) or 0.0
    if cap > 0 and (s.spent > SPENT * cap or done > cap):
        text = f"spent ${s.spent:.2f}, {f'about ${done:.2f} when it is done, ' if done else ''}cap ${cap:.2f}"
        yield Finding("spend_above_plan", text, "raise limits.total, or halt and tear down in time")


def path_dead(s: Snapshot, now: float) -> Iterator[Finding]:
    """A way to a pod has been down for a while: a halt would not go that way."""
    for pod in s.pods.values():
        if pod.state in pod_states.LEAVING:
            continue
        for path, (up, since) in pod.paths.items():
            if not up and now - since > PATH_DEAD_S:
                left = [p for p, (other, _) in pod.paths.items() if other]
                text = f"path {path} down for {now - since:.0f} s; left: {', '.join(left) or 'none'}"
                yield Finding(
                    "path_dead",
                    text,
                    "a halt still goes the other ways; replace the pod if none is left",
                    pod.pod,
                    "error",
                )


def root_fork(s: Snapshot, now: float) -> Iterator[Finding]:
    """Two parties signed different transcripts."""
    if s.fork:
        yield Finding("root_fork", s.fork, "F9; do not resume; keep both transcripts", level="error")


def proof_failed(s: Snapshot, now: float) -> Iterator[Finding]:
    """The proof of a step did not hold."""
    if said := failed_proof(s):
        yield Finding(
            "proof_failed", said, "keep every finding_*.json; uvcc verify tells what is signed", level="error"
        )


DETECTORS = (memory_creep, disk_filling, spend_above_plan, path_dead, root_fork, proof_failed)
