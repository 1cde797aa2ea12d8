"""A pod dies in mid-epoch and its disk changes a bit before it goes on: it says so itself, and no peer is accused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from private_kit import SOON_LOST, Fleet, Zygote, direct_links
from private_liars import EPOCH

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.leaves import leaf_file, write_ahead_log
from uvcc_engine.transcript.proof.bundle import assemble_folder
from uvcc_engine.transcript.proof.verifier import verify

JOB = PrivateJob(steps=4, batch=16, checkpoint_every=1, test_rows=50, reveal=("loss", "accuracy"))
FAILED = 1  # whose pod dies


class Interrupted:
    """Three workers of which one died in epoch ``EPOCH``; their run folders as they lay then."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        links = direct_links()
        self.fleet = Fleet(folder / "fleet", zygote, JOB, [{**link, **SOON_LOST} for link in links])
        for party in range(3):
            self.fleet.dir(party).mkdir()
            request: dict[str, Any] = {"spec": self.fleet.spec(party).to_json(), "log": str(folder / f"log{party}")}
            if party == FAILED:
                request["lie"] = "dies_in_an_epoch"
            self.fleet.pids.append(zygote.ask(request)["pid"])
        assert -9 in self.fleet.wait()
        # From here on nobody dies without a word, and a busy machine may keep a worker from speaking for seconds.
        self.fleet.links = links
        self._kept = folder / "kept"
        for party in range(3):
            shutil.copytree(self.fleet.home(party), self._kept / str(party))

    def again(self, *, step: int = EPOCH) -> Path:
        """Everything as it lay, identities' marks with it, and no newer checkpoint than ``step`` on one of the other
        pods, as if it had not been written yet; returns the transcript folder of the pod that died."""
        for party in range(3):
            shutil.rmtree(self.fleet.home(party))
            shutil.copytree(self._kept / str(party), self.fleet.home(party))
        checkpoints = self.fleet.dir(0) / files.CHECKPOINTS
        for newer in (s for s in ck.steps_present(checkpoints) if s > step):
            shutil.rmtree(ck.step_dir(checkpoints, newer))
        return self.fleet.dir(FAILED) / f"transcript_p{FAILED}r0s0t0"

    def resume(self) -> list[int]:
        self.fleet.launch(resume=True)
        return self.fleet.wait()


@pytest.fixture(scope="module")
def interrupted(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return Interrupted(tmp_path_factory.mktemp("interrupted"), zygote)


def middle(path: Path) -> int:
    """A byte in the middle of what a worker cannot do without."""
    if path.name == leaf_file.OPEN_EPOCH:
        return write_ahead_log.PAGE + 3 * write_ahead_log.SLOT + 9
    if path.name == leaf_file.LEAVES:
        block = [block for _, block in leaf_file.blocks(path)][EPOCH - 1]
        return (block.at + block.end) // 2
    return path.stat().st_size // 3


def test_undamaged_it_goes_on_and_the_evidence_holds(interrupted: Interrupted, tmp_path: Path) -> None:
    folder = interrupted.again()
    assert len(list(write_ahead_log.open_records(folder, EPOCH))) > 5
    assert interrupted.resume() == [0, 0, 0], [interrupted.fleet.exit(p) for p in range(3)]
    for p in range(3):
        name = f"transcript_p{p}r0s0t0"
        shutil.copytree(interrupted.fleet.dir(p) / name, tmp_path / name)
    shutil.copy(interrupted.fleet.home(0) / "policy.json", tmp_path / "policy.json")
    shutil.copy(interrupted.fleet.home(0) / "signatures.json", tmp_path / "policy_signatures.json")
    assert verify(assemble_folder(tmp_path)).level == "transcripts"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (leaf_file.OPEN_EPOCH, EPOCH),
        (leaf_file.OPEN_EPOCH, EPOCH - 1),
        (leaf_file.LEAVES, EPOCH),
        (leaf_file.ROOTS, EPOCH),
        pytest.param(leaf_file.LEAVES, EPOCH - 1, marks=pytest.mark.ci(__file__)),
        pytest.param(leaf_file.ROOTS, EPOCH - 1, marks=pytest.mark.ci(__file__)),
        *(
            pytest.param(name, step, marks=pytest.mark.ci(__file__))
            for name in (leaf_file.OPENINGS, leaf_file.PEERS)
            for step in (EPOCH, EPOCH - 1)
        ),
    ],
)
def test_a_changed_bit_is_the_own_disks_doing(interrupted: Interrupted, name: str, step: int) -> None:
    """Also where the epoch that was damaged is to be repeated: no power cut has come since, so nothing may lack."""
    path = interrupted.again(step=step) / name
    data = bytearray(path.read_bytes())
    data[middle(path)] ^= 4
    path.write_bytes(bytes(data))
    assert 0 not in interrupted.resume()
    own = interrupted.fleet.exit(FAILED)
    assert own["status"] == "failed"
    assert f"{path.parent.name}/{path.name}" in own["error"]
    assert own["error"].startswith("evidence: ") or "this worker's own record of" in own["error"]
    assert "next attempt" in own["hint"]
    assert "party" not in own
    for party in (0, 2):
        found = interrupted.fleet.exit(party)
        assert found.get("party", FAILED) == FAILED
        assert f"P{FAILED} stopped: " in found["error"]
        assert not interrupted.fleet.events(party, "protocol_error")
    assert not interrupted.fleet.events(FAILED, "protocol_error")
    assert not list(interrupted.fleet.folder.rglob(leaf_file.CONTRADICTIONS))
