"""Real workers whose table of letters lies in one stage and is used in two: evidence, a kill, another topology."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from uvcc_engine.bench.launch.fleet import Fleet, Forker, pod_identity, until
from uvcc_engine.checkpoint.encryption import decrypt, rest_key, state_name
from uvcc_engine.checkpoint.reshard import join_state
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.owner.client import dataset_for
from uvcc_engine.parallel.pipeline import BACKWARD, FORWARD
from uvcc_engine.sharding.microbatches import stream_of
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf
from uvcc_engine.transcript.leaves.leaf_file import LEAVES
from uvcc_engine.transcript.terms.migration_plan import migration_after
from uvcc_engine.worker.checkpoints import about

SIZE = Topology(1, 2, 1, 2)
TIED = [{"tied": [{"embedding": {"vocabulary": 27, "width": 4}}, {"residual": [{"linear": 4}, "relu"]}]}]
JOB = PrivateJob.from_json(
    {"model": model_to_json(model_of_list(TIED, 4 * 27, 27, 4)), "steps": 3, "batch": 4, "test_rows": 8, "lr": 0.5}
    | {"checkpoint_every": 1, "momentum": 0.9, "verify": "proofs", "reveal": ["loss", "accuracy", "weights"]}
)


def weights(fleet: Fleet) -> dict[str, np.ndarray]:
    """The state in clear, from the last checkpoint of the first replica's pods, each tensor under its one name."""
    parts: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for c in fleet.coords:
        rank, key = fleet.size.local_rank(c), rest_key(pod_identity(c.party, 0), fleet.policy.sid_job)
        sealed = (ck.step_dir(fleet.dir(c) / "checkpoints", JOB.steps) / state_name(rank)).read_bytes()
        mine = parts.setdefault((c.stage, c.tensor), {})
        for name, value in load(decrypt(key, sealed, about(str(c), JOB.steps))).items():
            if name.endswith(".lo"):
                mine[name[:-3]] = mine.get(name[:-3], 0) + value
    assert all("weight.0" not in part for (stage, _), part in parts.items() if stage)
    return {n: value / 2.0**JOB.frac_bits for n, value in join_state(find_model(JOB.model), fleet.size, parts).items()}


def test_a_proved_run_is_verified_and_its_table_moves_as_the_clear_twins(whole: Fleet, tmp_path: Path) -> None:
    assert whole.verified(tmp_path / "bundle").epochs == JOB.steps + 1
    clear = train_plaintext(JOB, dataset_for(JOB))
    for number, theirs in enumerate(clear.weights):
        assert np.abs(weights(whole)[f"weight.{number}"] - theirs).max() < 256 * 2.0**-16
    there_and_back = [handed(whole.dir(c) / f"transcript_{c}" / LEAVES) for c in (Coord(0, 1, s, 0) for s in (0, 1))]
    out, back = stream_of(FORWARD, 0), stream_of(BACKWARD, 0)
    assert there_and_back == [{(out, 3), (back, 2)}, {(out, 2), (back, 3)}]


def handed(path: Path) -> set[tuple[int, int]]:
    """Stream and number of what a stage of the first step lent and had back (3: as the sender, 2: as who took it)."""
    blocks = leaf_file.blocks(path)
    leaves = map(Leaf.unpack, leaf_file.records(*next(blocks)))
    found = {(leaf.stream, leaf.op) for leaf in leaves if leaf.kind == kinds.PIPELINE and leaf.op > 1}
    blocks.close()
    return found


@pytest.mark.ci(__file__)
def test_a_worker_that_is_killed_resumes_to_the_same_end(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    fleet, victim = Fleet(tmp_path / "fleet", forker, JOB, SIZE), Coord(0, 2, 1, 0)
    fleet.launch()
    until(lambda: fleet.events(victim, "checkpoint_written"), 240, "the first checkpoint")
    os.kill(fleet.pids[victim], signal.SIGKILL)
    fleet.wait()
    fleet.launch(resume=True)
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    assert fleet.hashes() == whole.hashes()


def test_one_worker_per_party_goes_on_with_what_two_stages_had(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    root = whole.dir(Coord(0, 0, 0, 0)) / "checkpoints"
    records = {step: ck.step_dir(root, step) / "COMMIT.json" for step in range(1, JOB.steps)}
    at = max(step for step, path in records.items() if path.exists())  # a slow disk's are overtaken by the next one's
    commit = json.loads(records[at].read_text())
    fleet = Fleet(
        tmp_path / "fleet", forker, JOB, Topology(), goes_on=lambda p: migration_after(whole.policy, commit, p)
    )
    assert set(whole.hand_over(fleet, at, [(0, 0), (1, 0), (2, 0)]).values()) == {0}, whole.logs()
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    one, two = weights(fleet), weights(whole)
    assert one.keys() == two.keys()
    assert max(float(np.abs(one[name] - two[name]).max()) for name in one) < 32 * 2.0**-16
