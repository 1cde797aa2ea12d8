"""Fleets of real workers: one result everywhere, one step to halt at, the same end after a kill, a stop or a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from uvcc_engine.bench.launch.fleet import Fleet, Forker, pod_identity, until
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.run_files.control import HALT, HOLD, RELEASE
from uvcc_engine.contract.run_files.waiting import Waiting

SIZE = Topology(2, 2, 1, 2)
JOB = PrivateJob(steps=6, batch=8, checkpoint_every=2, test_rows=40)
FIRST, LAST = Coord(0, 0, 0, 0), Coord(1, 2, 1, 0)


def same_end(fleet: Fleet, whole: Fleet) -> None:
    assert fleet.hashes() == whole.hashes()
    for c in whole.coords:
        roots = [{e["epoch"]: e["root"] for e in f.events(c, "epoch_root")} for f in (fleet, whole)]
        assert roots[0] == roots[1], c


def test_all_workers_sign_one_result_and_the_evidence_verifies(whole: Fleet, tmp_path: Path) -> None:
    assert len(whole.hashes()) == 1
    certificate = whole.verified(tmp_path / "bundle")
    assert certificate.epochs == JOB.steps + 1
    assert list(certificate.result_hashes) == list(whole.hashes())
    for c in whole.coords:
        names = [name for name in ("dp_ready", "dp_ok") if len(whole.events(c, name)) == 1]
        assert names == ["dp_ready", "dp_ok"]
        assert {e["group"] for e in whole.events(c, "group_ready")} == {"dp", "pp"}
        assert sum(e["count"] for e in whole.events(c, "fwd_open_ok")) == SIZE.microbatches * JOB.steps
        assert [e["phase"] for e in whole.events(c, "pipeline_tick")].count("B") == SIZE.microbatches


def test_a_hold_and_a_halt_on_one_pod_stop_everybody_at_one_step(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet", forker, JOB, SIZE)
    fleet.launch(halt=(HOLD, LAST))
    until(lambda: all(fleet.events(c, "held") for c in fleet.coords), 500, "the hold")
    assert len({fleet.events(c, "held")[0]["step"] for c in fleet.coords}) == 1
    fleet.halt(HALT, FIRST, "n2")  # while all are held: on a fast machine what is left of the run is over in a second
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    ends = [fleet.exit(c) for c in fleet.coords]
    assert {e["status"] for e in ends} == {"halted"}
    assert len({e["step"] for e in ends}) == 1
    fleet.launch(resume=True)
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    same_end(fleet, whole)


@pytest.mark.ci("tests/engine/private/test_private_worker.py")
def test_a_killed_worker_ends_all_and_a_resume_comes_to_the_same_end(
    forker: Forker, whole: Fleet, tmp_path: Path
) -> None:
    """The one that is killed has its replicas on two machines, as it were, and both runs of it are the calm one's."""
    fleet = Fleet(tmp_path / "fleet", forker, JOB, SIZE, env={"UVCC_GROUP_BACKEND": "sealed"})
    fleet.launch()
    victim = Coord(1, 1, 0, 0)
    until(lambda: fleet.events(victim, "checkpoint_written"), 500, "the first checkpoint")
    os.kill(fleet.pids[victim], signal.SIGKILL)
    codes = fleet.wait()
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {4}, fleet.logs()  # each lost a peer or a sister rank, and says so
    fleet.launch(resume=True)
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    same_end(fleet, whole)
    carried = {e["group"]: e["backend"] for e in fleet.events(victim, "group_ready")}
    assert carried == {"dp": "sealed", "pp": "unix"}


def long_wait(waiting: Waiting | None, whom: str = "") -> bool:
    """Whether a heartbeat tells of a wait (for ``whom``) that is no passing one."""
    return waiting is not None and waiting.whom.startswith(whom) and (waiting.since_s or 0.0) >= 1.5


@pytest.mark.ci("tests/engine/plane/test_plane_live.py")
def test_a_stopped_worker_delays_all_and_changes_nothing(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet", forker, JOB, SIZE)
    fleet.launch(halt=(HOLD, LAST))
    victim = Coord(0, 2, 1, 0)
    until(lambda: all(fleet.events(c, "held") for c in fleet.coords), 500, "the hold")  # nobody is done before
    os.kill(fleet.pids[victim], signal.SIGSTOP)
    fleet.halt(RELEASE, LAST)
    # of its two peers one waits for it by name; the other may wait for that one, and the rest of the fleet for them
    peers = [Coord(victim.replica, p, victim.stage, victim.tensor) for p in (0, 1)]
    until(
        lambda: any(long_wait(fleet.waiting_on(c), "p2") for c in peers), 120, "a peer that names the one it waits for"
    )
    until(lambda: long_wait(fleet.waiting_on(FIRST)), 500, "being told whom it waits for")
    os.kill(fleet.pids[victim], signal.SIGCONT)
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    same_end(fleet, whole)


def test_a_pod_with_anothers_keys_is_refused(forker: Forker, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet", forker, JOB, SIZE)
    home = fleet.home(1, 1)
    for name in ("ed25519", "x25519", "public.json"):
        (home / "identity" / name).unlink()
    pod_identity(1, 0).store(home / "identity")
    fleet.launch()
    refused, sister = Coord(1, 1, 0, 0), Coord(0, 1, 1, 0)
    until(lambda: (fleet.dir(refused) / "exit.json").exists(), 500, "the refusal")
    assert "another pod of P1" in fleet.exit(refused)["error"]
    until(lambda: (fleet.dir(sister) / "exit_rank1.json").exists(), 500, "the end of a wait in vain")
    said = fleet.exit(sister)
    assert said["status"] == "failed"
    assert "will not come to the meeting" in said["error"]
    assert "another pod of P1" in said["error"]
    fleet.end()
