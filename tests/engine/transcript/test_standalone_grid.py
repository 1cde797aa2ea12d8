"""``verify.py`` over a run of 24 workers: it recomputes every worker's every root, and those of the whole from them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from uvcc_engine.bench.work.rehearsal import MODEL_JOB, in_form, rehearse
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.proof import standalone_verify
from uvcc_engine.transcript.proof.verifier import verify

EPOCHS = 3


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    rehearse(folder, topology=Topology(2, 2, 2), steps=EPOCHS - 1, ops=2, traffic=in_form, job=MODEL_JOB)
    return folder


def judged(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-I", standalone_verify.__file__, str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_all_roots_of_24_workers_are_recomputed(grid: Path) -> None:
    bundle = json.loads((grid / "proof_bundle.json").read_text())
    assert len(bundle["workers"]) == 24
    done = judged(grid, "--policy", str(grid / "policy.json"))
    assert (done.returncode, done.stderr) == (0, "")
    certificate = verify(grid / "proof_bundle.json", policy=grid / "policy.json")
    assert certificate.level == "transcripts"
    for word in (certificate.run_root, certificate.policy_hash, f"{certificate.leaves} leaves"):
        assert word in done.stdout, done.stdout


@pytest.mark.ci("tests/engine/transcript/test_one_key.py")
def test_a_leaf_of_any_worker_in_any_epoch_counts(grid: Path) -> None:
    rng = random.Random(24)
    leaves = sorted(grid.rglob("leaves.bin"))
    assert len(leaves) == 24
    for path in rng.sample(leaves, 5):
        data = path.read_bytes()
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        try:
            assert judged(grid).returncode in (1, 2), (path, at)
        finally:
            path.write_bytes(data)
    assert judged(grid).returncode == 3


@pytest.mark.parametrize(
    "name",
    [
        "run_root",
        pytest.param("global_root", marks=pytest.mark.ci(__file__)),
        pytest.param("replica_roots", marks=pytest.mark.ci(__file__)),
    ],
)
def test_a_root_of_the_whole_follows_from_those_of_the_workers(name: str, grid: Path) -> None:
    path = grid / "proof_bundle.json"
    genuine = path.read_text()
    found = json.loads(genuine)
    stated = found["run_root"] if name == "run_root" else found["epochs"][1][name]
    old = stated if isinstance(stated, str) else stated[1]
    path.write_text(genuine.replace(old, old[:-1] + ("0" if old[-1] != "0" else "1")))
    try:
        done = judged(grid)
        assert done.returncode == 1
        assert "recomputed" in done.stderr
    finally:
        path.write_text(genuine)
