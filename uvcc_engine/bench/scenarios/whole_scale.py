"""The whole scale on one machine: 8 replicas x 4 stages x 2 tensor ranks of three parties, 32 microbatches, twice.

Every run trains the same job under the same policy, so both must come to the same global roots. Counted from the
workers' own events: roots, forward and backward opens, timeouts and aborts. Memory is what all workers hold together,
shared pages counted once (PSS), as seen while they train.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.bench.launch.fleet import Fleet, Forker, until
from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.transcript.leaves.roots import epoch_roots

SIZE: Final = Topology(8, 4, 2, 32)
MEMORY_BAR: Final = 9 << 30
_LIMIT_S: Final = 900.0
_TIMEOUTS: Final = ("peer_lost", "timeout", "group_timeout")
_ABORTS: Final = ("protocol_error", "transport_abort", "run_failed")


@dataclass(frozen=True, slots=True)
class Scale:
    """What one run of one step came to. ``roots``: global roots in the order of the epochs, the final one included."""

    seconds: float
    memory: int
    workers: int
    forward: int
    backward: int
    timeouts: int
    aborts: int
    roots: tuple[bytes, ...]


def run_scale(size: Topology, job: PrivateJob, limit_s: float = _LIMIT_S) -> Scale:
    """Train ``job`` on all workers of ``size``. Raises UvccError, with the workers' logs, if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        forker = Forker(Path(folder), {"UVCC_GROUP_TIMEOUT_S": f"{limit_s:g}"})
        try:
            fleet = Fleet(Path(folder) / "fleet", forker, job, size)
            began = time.monotonic()
            fleet.launch()
            # the last stage's first worker ends its first step when all have: memory is at its highest then
            last = fleet.coords[-1]
            until(lambda: fleet.steps(last) or not all(map(lives, fleet.pids.values())), limit_s, "the first step")
            memory = sum(map(held_bytes, fleet.pids.values()))
            codes = fleet.wait(limit_s)
            if set(codes.values()) != {0}:
                raise UvccError("a worker of the scale run failed", fleet.logs()[-2000:])
            return _counted(fleet, time.monotonic() - began, memory)
        finally:
            forker.close()


def _counted(fleet: Fleet, seconds: float, memory: int) -> Scale:
    size, job = fleet.size, fleet.job
    by_epoch: dict[int, dict[str, bytes]] = {}
    for c in fleet.coords:
        for event in fleet.events(c, "epoch_root"):
            by_epoch.setdefault(int(event["epoch"]), {})[str(c)] = bytes.fromhex(event["root"])
    roots = [
        epoch_roots(fleet.policy.sid_job, size, epoch, {c: found[str(c)] for c in fleet.coords})[1]
        for epoch, found in sorted(by_epoch.items())
    ]
    if len(roots) != job.steps + 1:
        raise VerificationError("roots", f"{len(roots)} epochs have roots, {job.steps + 1} were trained")

    def opens(name: str) -> int:
        return sum(int(e["count"]) for c in fleet.coords for e in fleet.events(c, name)) // job.steps

    def count(names: tuple[str, ...]) -> int:
        told = (e for c in fleet.coords for name in names for e in fleet.events(c, name))
        return sum(not e.get("dropped") for e in told)  # a dropped frame is sent again and ends nothing

    forward, backward = opens("fwd_open_ok"), opens("bwd_open_ok")
    workers = min(len(found) for found in by_epoch.values())
    return Scale(seconds, memory, workers, forward, backward, count(_TIMEOUTS), count(_ABORTS), tuple(roots))


def lives(pid: int) -> bool:
    """Whether this process goes on: one that has ended is seen until somebody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def held_bytes(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def phase6_rows(runs: int, size: Topology = SIZE) -> list[Row]:
    """The scale's rows, per step where that makes a difference. Raises VerificationError if two runs differ."""
    least = size.microbatches * size.tensor  # every tensor rank has a line of every microbatch
    job = PrivateJob(model="mlp4-digits", steps=1, batch=least, test_rows=8 * size.replicas)
    found = [run_scale(size, job) for _ in range(runs)]
    if len({one.roots for one in found}) != 1:
        raise VerificationError("roots", "two runs of one policy came to different global roots")
    whole = 3 * size.workers_per_party
    name = f"phase6_{whole}"
    opens = float(whole * size.microbatches)
    return [
        row(name, "seconds", "s", [one.seconds for one in found]),
        row(f"{name}_memory", "bytes", "B", [float(one.memory) for one in found], float(MEMORY_BAR)),
        row(f"{name}_roots", "share", "workers", [one.workers / whole for one in found], 1.0),
        row(f"{name}_forward_opens", "share", f"{opens:.0f}", [one.forward / opens for one in found], 1.0),
        row(f"{name}_backward_opens", "share", f"{opens:.0f}", [one.backward / opens for one in found], 1.0),
        row(f"{name}_timeouts", "share", "count", [float(one.timeouts) for one in found]),
        row(f"{name}_aborts", "share", "count", [float(one.aborts) for one in found]),
    ]
