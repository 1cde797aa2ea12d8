"""One party of the overlap benchmark: ``-m uvcc_engine.bench.party.overlap_party CONFIG`` prints one line of JSON.

It trains a few steps with one microbatch in work at a time, then with several, over a link on which every frame takes
``latency_s`` one way, and says what a step took and how much of that its thread waited for messages.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from uvcc_engine.bench.party.plane_party import identity
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.model.definition.specs import ModelSpec, find_model
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding.microbatches import IN_FLIGHT_VARIABLE
from uvcc_engine.sharding.sharded_training import ParallelTrainer

SID: Final = hashlib.sha256(b"bench overlap").digest()


def rows(job: PrivateJob, model: ModelSpec, party: int) -> PartyInputs:
    """Random rows in components that all parties derive alike, as a benchmark may."""
    rng = np.random.default_rng(1)
    parts: list[dict[str, Any]] = [{}, {}, {}]
    for name, width in (("train_x", model.features), ("train_y", model.targets)):
        ring = rng.integers(0, 1 << job.frac_bits, (job.batch, width), dtype=np.int64)
        if name == "train_y":
            ring = np.eye(width, dtype=np.int64)[rng.integers(0, width, job.batch)] << job.frac_bits
        low, middle = (rng.integers(-(2**63), 2**63, ring.shape, dtype=np.int64) for _ in range(2))
        for part, component in zip(parts, (low, middle, ring - low - middle), strict=True):
            part[name] = component
    parts = [part | {f"test_{k}": part[f"train_{k}"] for k in "xy"} for part in parts]
    mine, next_ = parts[party], parts[(party + 1) % PARTIES]
    return PartyInputs(party, job.frac_bits, {name: (mine[name], next_[name]) for name in mine})


def measure(
    plane: LivePlane, party: int, job: PrivateJob, microbatches: int, in_flight: int
) -> list[tuple[float, float]]:
    """Of every step but the first: its seconds, and for how many of them the thread waited for messages."""
    os.environ[IN_FLIGHT_VARIABLE] = str(in_flight)
    keys = rehearsal_keys(7)[party]

    def runtime(stream: int) -> Runtime:
        return Runtime(party, plane, keys, SID, attempt=in_flight, stream=stream)

    main, model = runtime(0), find_model(job.model)
    place = RankAddress(Coord(0, party, 0, 0), Topology(1, 1, 1, microbatches))
    groups = PartyGroups.open(place, on_event=lambda name, fields: None)
    trainer = ParallelTrainer(main, runtime, job, model, rows(job, model, party), groups, lambda name, fields: None)
    found = []
    for step in range(job.steps):
        main.begin_epoch(1000 * in_flight + step)
        began, waited = time.monotonic(), plane.waited_s
        trainer.step(step)
        found.append((time.monotonic() - began, plane.waited_s - waited))
    return found[1:]


def main() -> int:
    torch.set_num_threads(1)
    config = json.loads(Path(sys.argv[1]).read_text())
    party = int(sys.argv[2])
    job = PrivateJob(model=config["model"], steps=config["steps"], batch=config["batch"], lr=0.1, loss_every=100)
    plane = open_plane(
        party=party,
        coord=f"p{party}r0s0t0",
        sid_sub=SID,
        identity=identity(party),
        peers={p: identity(p).public for p in range(PARTIES)},
        link=LinkSpec.from_json({**config["links"][party], "faults": {"latency_s": config["latency_s"]}}),
        recorder=None,
        state_dir=Path(os.devnull),
        on_event=lambda name, fields: None,
    )
    found = {k: measure(plane, party, job, config["microbatches"], k) for k in (1, config["microbatches"])}
    plane.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
