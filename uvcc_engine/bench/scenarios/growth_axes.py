"""What ``bench scale`` measures: one cost after the other while one cause grows and all else stays.

Of parameters and batch, three simulated parties say what a step costs each of them, of ``proved`` rows under ``verify:
proofs``. Of replicas, stages and tensor ranks, fleets of real workers train with their transcripts, and every cost but
``rounds`` is that of all workers together: replicas bring their own rows, stages and tensor ranks share the same ones.
Of ``members`` of a party's group it is what they send each other. Of replicas of eight workers a party, ``evidence`` is
what an auditor has to read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from uvcc_engine.bench.launch.fleet import Fleet, Forker, until, whole_lines
from uvcc_engine.bench.launch.parties import said_by
from uvcc_engine.bench.scenarios.whole_scale import held_bytes, lives
from uvcc_engine.bench.work.rehearsal import rehearse
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.machine.growth import Costs
from uvcc_engine.contract.run_files import files
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import SENT, Leaf

INPUTS: Final = 64
CLASSES: Final = 10
STEPS: Final = 3
FLEET_STEPS: Final = 8
RUNS: Final = 3
MIDDLE: Final = 1
"""The step of a fleet whose leaves are counted: neither the first, which also meets, nor the last."""
ROWS: Final = 16  # of a replica's step
FLEET_MODEL: Final = "mlp4-digits"
LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Axis:
    """One cause: its ``points`` in rising order, how one is measured, and by which power each cost may grow with it.

    A point may measure its own cause (``parameters``), which then stands among its costs under the axis's name.
    """

    name: str
    points: Sequence[int]
    measure: Callable[[int], Costs]
    allowed: dict[str, float]

    def measured(self, points: Sequence[int] = ()) -> list[tuple[float, Costs]]:
        """Cause and costs of every point."""
        found = [(float(point), self.measure(point)) for point in points or self.points]
        return [(costs.pop(self.name, cause), costs) for cause, costs in found]


def _step(width: int, batch: int, **more: Any) -> Costs:
    layers: list[Any] = [{"linear": width}, "relu", {"linear": width}, "relu", {"linear": CLASSES}]
    model = model_to_json(model_of_list(layers, INPUTS, CLASSES))
    asked = {"model": model, "steps": STEPS, "batch": batch, "reveal": ["loss"]} | more
    found: Costs = said_by("growth_step", asked, LIMIT_S, count=1)[0]
    return found


def fleet_costs(size: Topology, rows: int, beside: int = 1, runs: int = RUNS) -> Costs:
    """What a step of ``rows`` rows a replica costs all workers of a fleet together.

    ``beside``: so many fleets train at the same time and ``cpu`` is that of one of them, so that as many workers share
    this machine at every point of an axis. A worker's processor time grows with what else runs on its processor, whose
    caches it finds cold at each of its turns, and that is no growth of the fleet's. ``cpu`` is the least of so many
    ``runs``, since what else runs on the machine can only add to it. Raises UvccError if a worker fails.
    """
    job = PrivateJob(model=FLEET_MODEL, steps=FLEET_STEPS, batch=rows, test_rows=8 * size.replicas)
    found: list[Costs] = []
    for _ in range(runs):
        with _trained(job, size, beside) as (fleet, burden):
            found.append(costs_of(fleet) | burden)
    return found[0] | {"cpu": min(costs["cpu"] for costs in found)}


@contextmanager
def _trained(job: PrivateJob, size: Topology, beside: int) -> Iterator[tuple[Fleet, Costs]]:
    """One of the fleets, when all have trained, and its ``cpu``: processor seconds of a step, the end of the run shared
    out over them; ``memory``: what its workers hold together after the first step, shared pages counted once.

    A fleet is stopped at its first step until the last one is there: reading what many workers hold takes longer than
    their steps, and all shall train at the same time.
    """
    with TemporaryDirectory() as folder:
        forker = Forker(Path(folder))
        try:
            fleets = [Fleet(Path(folder) / f"fleet{n}", forker, job, size) for n in range(beside)]
            with _held(fleets):
                held = float(sum(map(held_bytes, fleets[0].pids.values())))
                done = sum(fleet.steps(c) for fleet in fleets for c in fleet.coords)
                before = sum(_cpu_s(pid) for fleet in fleets for pid in fleet.pids.values())
            if any(set(fleet.wait(LIMIT_S).values()) != {0} for fleet in fleets):
                raise UvccError("a worker of the scale benchmark failed", "".join(f.logs() for f in fleets)[-2000:])
            workers = beside * len(fleets[0].coords)
            left = job.steps * workers - min(done, (job.steps - 1) * workers)
            spent = max(0.01, forker.children_s() - before) * workers / left
            yield fleets[0], {"memory": held, "cpu": spent / beside}
        finally:
            forker.close()


@contextmanager
def _held(fleets: Sequence[Fleet]) -> Iterator[None]:
    """Launch the fleets; each has taken its first step and stands still within the context, and all go on behind it."""
    for fleet in fleets:
        fleet.launch()
        until(partial(_begun, fleet), LIMIT_S, "the first step")
        _tell(fleet, signal.SIGSTOP)
    try:
        yield
    finally:
        for fleet in fleets:
            _tell(fleet, signal.SIGCONT)


def _begun(fleet: Fleet) -> bool:
    """Whether its last worker has taken a step, or one has ended."""
    return fleet.steps(fleet.coords[-1]) > 0 or not all(map(lives, fleet.pids.values()))


def _tell(fleet: Fleet, number: signal.Signals) -> None:
    for pid in fleet.pids.values():  # the forker waits for them later, so that no other process has their number
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def costs_of(fleet: Fleet) -> Costs:
    """Of all workers together: payload bytes between parties and transcript leaves of the step in the middle, and of
    the whole run, shared out over its steps, the bytes of transcripts and of what a console follows (``events``).
    ``rounds``: of the worker that has most of them, where those of several streams follow each other."""
    sent = leaves = rounds = evidence = 0.0
    for c in fleet.coords:
        beats = whole_lines(fleet.dir(c) / files.heartbeat_name(fleet.size.local_rank(c)))
        rounds = max([rounds, *(float(json.loads(line).get("step_rounds", 0.0)) for line in beats)])
        folder = fleet.dir(c) / leaf_file.folder_name(c)
        evidence += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for file, block in leaf_file.blocks(fleet.dir(c) / leaf_file.folder_name(c) / leaf_file.LEAVES):
            if block.epoch == MIDDLE:
                found = [Leaf.unpack(record) for record in leaf_file.records(file, block)]
                leaves += len(found)
                sent += sum(leaf.size for leaf in found if leaf.direction == SENT and leaf.src != leaf.dst)
    homes = {fleet.dir(c) for c in fleet.coords}
    told = sum(path.stat().st_size for home in homes for path in home.iterdir() if path.suffix == ".jsonl")
    steps = fleet.job.steps
    return {
        "bytes": sent,
        "leaves": leaves,
        "rounds": rounds,
        "transcript": evidence / steps,
        "events": told / steps,
    }


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def group_costs(members: int) -> Costs:
    """What the members of one of a party's groups send each other in a step, all of them together."""
    found: Costs = said_by("group_messages", {"members": members}, LIMIT_S, count=1)[0]
    return found


def evidence_costs(size: Topology) -> Costs:
    """Of the evidence of a finished run: its bundle, and the processor time and the memory that verifying it takes."""
    with TemporaryDirectory() as folder:
        made = rehearse(Path(folder), topology=size, steps=STEPS)
        told = subprocess.run(
            [sys.executable, "-m", "uvcc_engine.bench.party.growth_verify", str(made.bundle)],
            check=True,
            capture_output=True,
        )
        found: Costs = json.loads(told.stdout)
        return found | {"bundle": float(made.bundle.stat().st_size)}


MERGED: Final = 0.3
"""More rows are compared in narrower merges, which take more rounds, until the narrowest are reached: not a power, but
a few steps (``docs/rounds.md``). Parameters do the same, over a longer way."""
HALVED: Final = 0.25
"""A message a member for each time that the group can be halved: n log n, whose power is 1.26 from 32 members to 64."""
IN_INSTALMENTS: Final = 0.5
"""Claims are proved and forgotten wherever they fill a bound; what else a step holds grows with its rows."""
OF_FLEET: Final = {
    "bytes": 1.0,
    "leaves": 1.0,
    "rounds": 0.0,
    "transcript": 1.0,
    "events": 1.0,
    "cpu": 1.0,
    "memory": 1.0,
}
AXES: Final = (
    Axis(
        "parameters",
        (64, 256, 1024, 3072),  # widths: 9 thousand parameters to 10 million
        lambda width: _step(width, 32),
        {"bytes": 1.0, "rounds": 0.0, "cpu": 1.0, "memory": 1.0},
    ),
    Axis(
        "batch",
        (32, 128, 512, 2048),
        lambda rows: _step(256, rows),
        {"bytes": 1.0, "rounds": MERGED, "cpu": 1.0, "memory": 1.0},
    ),
    Axis(
        "proved",
        (4096, 8192, 16384, 32768),
        lambda rows: _step(INPUTS, rows, verify="proofs"),
        {"bytes": 1.0, "rounds": 1.0, "cpu": 1.0, "memory": IN_INSTALMENTS},
    ),
    Axis("replicas", (1, 2, 4, 8), lambda r: fleet_costs(Topology(r, 1, 1, 1), ROWS, 8 // r), OF_FLEET),
    Axis("stages", (1, 2, 4), lambda s: fleet_costs(Topology(1, s, 1, 4), ROWS, 4 // s), OF_FLEET),
    Axis("tensor", (1, 2, 4), lambda t: fleet_costs(Topology(1, 1, t, 1), ROWS, 4 // t), OF_FLEET),
    Axis("members", (16, 32, 64), group_costs, {"messages": 1.0 + HALVED}),
    Axis(
        "evidence",
        (1, 2, 4, 8),
        lambda r: evidence_costs(Topology(r, 4, 2)),
        {"bundle": 1.0, "verify": 1.0, "memory": 1.0},
    ),
)
