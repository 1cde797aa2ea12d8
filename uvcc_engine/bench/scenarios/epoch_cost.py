"""What a job's training takes where three real workers do it: step by step, with transcripts, over sealed links."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from uvcc_engine.bench.launch.fleet import Fleet, Forker, whole_lines
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.sets import Dataset

LIMIT_S: Final = 1800.0
_WARM: Final = 2  # steps at the beginning that are not counted: loops are loaded, keys are met


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training took. ``ends``: seconds from the beginning of its first step to the end of each.

    ``seconds``: of every step after the first two that revealed no validation; ``accuracies``: by step, on the rows
    held out for validation; ``memory``: the most that a worker held, in bytes.
    """

    ends: Sequence[float]
    seconds: Sequence[float]
    accuracies: Mapping[int, float]
    memory: float

    def reached(self, accuracy: float) -> tuple[float, float]:
        """Seconds until the first validation with such an accuracy, and that accuracy; else until the best one."""
        best = max(self.accuracies.values())
        step = min(s for s, found in self.accuracies.items() if found >= min(accuracy, best))
        return self.ends[step - 1], self.accuracies[step]


def trained(values: Mapping[str, Any], data: Dataset) -> Trained:
    """Train as a job of these ``values`` says. Raises UvccError if a worker fails."""
    job = PrivateJob.from_json(json.loads(json.dumps(values)))
    with TemporaryDirectory() as folder:
        forker = Forker(Path(folder))
        try:
            fleet = Fleet(Path(folder) / "fleet", forker, job, Topology(), data=data)
            fleet.launch()
            if set(fleet.wait(LIMIT_S).values()) != {0}:
                raise UvccError("a worker of this training failed", fleet.logs()[-2000:])
            return _read(fleet)
        finally:
            forker.close()


def _read(fleet: Fleet) -> Trained:
    """From what the first party's worker has written; memory from all three."""
    first = fleet.coords[0]
    roots = _ended(whole_lines(fleet.dir(first) / files.EVENTS), fleet.job.steps)
    steps = _table(fleet.dir(first) / files.TRAINING)
    begun = roots[0] - fleet.job.batch / float(steps[0]["samples_per_s"])
    validated = {int(line["step"]): float(line["accuracy"]) for line in _table(fleet.dir(first) / files.VAL)}
    took = [b - a for a, b in pairwise(roots)]
    counted = [s for step, s in enumerate(took, 2) if step > _WARM and step not in validated]
    held = [json.loads(line)["mem_mib"] for c in fleet.coords for line in _beats(fleet, c)]
    return Trained([at - begun for at in roots], counted, validated, max(held) * 2.0**20)


def _ended(lines: Sequence[str], steps: int) -> list[float]:
    """When the root of each step's epoch was signed, in seconds of the clock."""
    found = [event for event in map(json.loads, lines) if event["event"] == "epoch_root"]
    return [float(event["ts"]) for event in found[:steps]]


def _beats(fleet: Fleet, c: Coord) -> list[str]:
    return whole_lines(fleet.dir(c) / files.heartbeat_name(fleet.size.local_rank(c)))


def _table(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as table:
        return list(csv.DictReader(table))
