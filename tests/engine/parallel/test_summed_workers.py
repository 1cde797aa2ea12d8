"""Real workers on replicas grow trees, or move centroids: one end after a kill, and the owner's replay of a run."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from test_summed_replicas import job_for, rows

from uvcc_engine.bench.launch.fleet import OWNER, Fleet, Forker, until
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.run_files.control import HOLD
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.owner import audit as owners_audit
from uvcc_engine.owner.client import sealed_name
from uvcc_engine.sealing.release import open_weights

SIZE, VICTIM, LAST = Topology(2), Coord(1, 1, 0, 0), Coord(1, 2, 0, 0)


def job_with(classes: int) -> PrivateJob:
    told = ["loss", "val_loss", "weights", "seeds"] + (["inertia"] if not classes else ["accuracy"])
    return job_for(classes, 2, 36, checkpoint_every=1, reveal=told)


@pytest.mark.ci("tests/engine/parallel/test_parallel_worker.py")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("classes", [3, 0], ids=["trees of three classes", "k-means"])
def test_a_killed_replica_ends_all_and_a_resume_comes_to_the_end_of_an_undisturbed_run(
    classes: int, forker: Forker, tmp_path: Path
) -> None:
    """The replay is another run of the program: it has the messages of the first attempt and of the second."""
    job, data = job_with(classes), rows(classes)
    fleet = Fleet(tmp_path / "fleet", forker, job, SIZE, data=data)
    fleet.launch(halt=(HOLD, LAST))
    until(lambda: all(fleet.events(c, "held") for c in fleet.coords), 500, "the hold")
    until(lambda: fleet.events(VICTIM, "checkpoint_committed"), 500, "a checkpoint that all have")
    os.kill(fleet.pids[VICTIM], signal.SIGKILL)
    codes = fleet.wait()
    assert codes.pop(VICTIM) == -signal.SIGKILL
    assert set(codes.values()) == {4}, fleet.logs()
    fleet.launch(resume=True)
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    assert fleet.events(VICTIM, "resumed")[0]["step"] >= 1
    whole = Fleet(tmp_path / "whole", forker, job, SIZE, data=data)
    whole.launch()
    assert set(whole.wait().values()) == {0}, whole.logs()
    assert len(whole.hashes()) == 1
    assert fleet.hashes() == whole.hashes()
    assert fleet.verified(tmp_path / "bundle").epochs == job.steps + 1
    _learned(fleet, job, classes)
    _replayed(whole, tmp_path / "sealed")


def _learned(fleet: Fleet, job: PrivateJob, classes: int) -> None:
    boxes = [(fleet.dir(Coord(0, p, 0, 0)) / f"result_p{p}r0s0t0.box").read_bytes() for p in range(3)]
    parties = [fleet.policy.public(p, 0) for p in range(3)]
    found = open_weights(boxes, owner=OWNER, parties=parties)["weight.0"]
    clear = train_plaintext(job_for(classes, 1, 36), rows(classes))
    if classes:  # of questions that gain the same either may be asked
        assert set(np.unique(found[:, :-2])) == {0.0, 1.0}
    else:
        assert np.abs(found - clear.weights[0]).max() < 4e-3


def _replayed(fleet: Fleet, sealed: Path) -> None:
    sealed.mkdir()
    for p in range(3):
        for r in range(SIZE.replicas):
            shutil.copy(fleet.home(p, r) / "inputs", sealed / sealed_name(p, r))
    found = owners_audit.audit(fleet.folder, OWNER, sealed, fleet.home(0) / "policy.json")
    assert found.parties == ()
    assert found.epochs == fleet.job.steps + 1
    assert found.messages > 100
