"""Steps between three processes: what they train, over every kind of link, and a party that fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.simulate import step_processes, step_rehearsal, step_worker
from uvcc_engine.simulate.step_processes import StepTimes, steps_for
from uvcc_engine.simulate.step_rehearsal import waiting_workers
from uvcc_engine.simulate.step_worker import WorkerSteps, WorkerTask

MODEL = model_to_json(model_of_list([{"linear": 3}, "relu", "linear"], 4, 2))
JOB = PrivateJob.from_json({"model": MODEL, "steps": 3, "batch": 8, "test_rows": 8, "reveal": ["loss"]})


@pytest.mark.parametrize(
    ("link", "verify"),
    [
        pytest.param("direct", "off", marks=pytest.mark.ci(__file__)),
        ("relay", "off"),
        pytest.param("stream", "proofs", marks=pytest.mark.ci(__file__)),
    ],
)
def test_three_processes_train_over_every_link(link: str, verify: str) -> None:
    with waiting_workers(PrivateJob.from_json(JOB.to_json() | {"verify": verify}), link) as parties:
        found = parties.measure(3).times
    assert len(found.wall) == 3
    assert min(found.wall) > 0
    assert len(found.worker_cpu) == 3
    assert min(found.worker_cpu.values()) > 0
    assert (found.relay_cpu > 0) <= (link != "direct")
    said = found.to_json()
    assert said["low"] <= said["wall"] <= said["high"]
    assert said["all_cpu"] == pytest.approx(sum(found.worker_cpu.values()) + found.relay_cpu)


@pytest.mark.ci(__file__)
def test_fewer_trees_than_steps_are_timed_are_rehearsed_all_the_same() -> None:
    asked = {"momentum": 0.0, "min_rows": 2}
    few = model_to_json(model_of_list([{"trees": {"count": 1, "depth": 1}}], 4, 2))
    job = PrivateJob.from_json(JOB.to_json() | asked | {"model": few, "steps": 1})
    assert step_rehearsal.rehearse(job).rounds > 0
    with waiting_workers(job, "direct") as parties:
        assert len(parties.measure(4).times.wall) == 4


def test_a_party_that_fails_is_named_and_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(task: WorkerTask) -> WorkerSteps:
        if task.coord.party == 1:
            raise ValueError("out of memory")
        return trained(task)

    trained = step_worker.trained
    monkeypatch.setattr(step_worker, "trained", failing)
    with waiting_workers(JOB, "direct") as parties:
        pids = [process.pid or 0 for process in parties.processes]
        with pytest.raises(UvccError, match=r"party 1 of the rehearsal failed: ValueError: out of memory"):
            parties.measure(2)
    assert [host.process(pid) for pid in pids] == [None] * 3


_WAITS = """
import json, sys, time
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.simulate.step_rehearsal import waiting_workers
with waiting_workers(PrivateJob.from_json(json.loads(sys.argv[1])), "relay") as parties:
    print(json.dumps([[process.pid for process in parties.processes], str(parties.folder)]), flush=True)
    sys.stdin.read()
"""


def test_nothing_of_a_rehearsal_outlives_who_forked_it_even_where_that_was_killed() -> None:
    """A terminal that is closed ends it without a word; each of the others had all lines, and waited for ever. Their
    folder, up to 200 MiB of messages, stayed."""
    command = [sys.executable, "-c", _WAITS, json.dumps(JOB.to_json())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forker:
        assert forker.stdout is not None
        pids, folder = json.loads(forker.stdout.readline())
        assert len(pids) == 4
        assert Path(folder).is_dir()
        forker.kill()
    limit = time.monotonic() + 500.0  # seconds, for a busy machine
    while any(host.process(pid) is not None for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert not Path(folder).exists()


def cpu(*seconds: float) -> dict[Coord, float]:
    """Processor seconds of the three parties' workers."""
    return {Coord(0, party, 0, 0): took for party, took in enumerate(seconds)}


def test_the_numbers_that_a_plan_takes_follow_from_the_steps() -> None:
    found = StepTimes((0.4, 0.2, *[0.1] * 18), cpu(0.05, 0.06, 0.04), relay_cpu=0.03, cores=2.0).to_json()
    assert found["wall"] == 0.1
    assert (found["low"], found["high"]) == (0.1, 0.1)
    assert found["early"] == pytest.approx(3.0)
    assert (found["party_cpu"], found["all_cpu"]) == (0.06, pytest.approx(0.18))
    even = StepTimes(wall=(0.1, 0.1), worker_cpu=cpu(0.1, 0.1, 0.1), relay_cpu=0.0, cores=2.0).to_json()
    assert even["early"] == 1.0
    assert (steps_for(10.0), steps_for(0.2), steps_for(1e-9)) == (2, 15, step_processes.MOST_STEPS)


def test_stages_compute_one_behind_the_other_and_tensor_ranks_side_by_side() -> None:
    size = Topology(2, 2, 2, 4)
    took = {c: 0.1 if c.stage == 0 else 0.3 for c in size.coords()} | {Coord(1, 2, 0, 1): 0.2}
    found = StepTimes(wall=(1.0, 1.0), worker_cpu=took, relay_cpu=0.0, cores=2.0, size=size)
    assert found.party_cpu == pytest.approx((0.2 + 0.3 + 3 * 0.3) / 4)
    assert (found.to_json()["replicas"], found.to_json()["workers"]) == (2, 24)


def test_the_command_tells_counts_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(replace(JOB, batch=4).to_json()))
    assert step_rehearsal.main(["--job", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rounds"] > 0
    of_times = {"wall", "low", "high", "early", "party_cpu", "all_cpu", "cores"}
    assert set(said["processes"]) == of_times | {"replicas", "workers"}
    assert "fleet" not in said


@pytest.mark.ci(__file__)
def test_the_command_tells_counts_and_times_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(replace(JOB, batch=4).to_json()))
    assert step_rehearsal.main(["--job", str(path), "--workers", "2", "--stages", "2", "--link", "stream"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["processes"]["workers"] == 6
    assert set(said["fleet"]) == {"rounds", "bytes", "pod_bytes", "chain"}
    assert said["fleet"]["rounds"] > said["fleet"]["chain"] / 2 > 0
