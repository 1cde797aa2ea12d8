"""Steps between three processes: what they train, over every kind of link, and a party that fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.machine import host
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.simulate import step_processes, step_rehearsal
from uvcc_engine.simulate.step_processes import StepTimes, steps_for
from uvcc_engine.simulate.step_rehearsal import waiting_parties

MODEL = model_to_json(model_of_list([{"linear": 3}, "relu", "linear"], 4, 2))
JOB = PrivateJob.from_json({"model": MODEL, "steps": 3, "batch": 8, "test_rows": 8, "reveal": ["loss"]})


@pytest.mark.parametrize(("link", "verify"), [("direct", "off"), ("relay", "off"), ("stream", "proofs")])
def test_three_processes_train_over_every_link(link: str, verify: str) -> None:
    with waiting_parties(PrivateJob.from_json(JOB.to_json() | {"verify": verify}), link) as parties:
        found = parties.measure(3)
    assert len(found.wall) == 3
    assert min(found.wall) > 0
    assert len(found.party_cpu) == 3
    assert min(found.party_cpu) > 0
    assert (found.relay_cpu > 0) <= (link != "direct")
    said = found.to_json()
    assert said["low"] <= said["wall"] <= said["high"]
    assert said["all_cpu"] == pytest.approx(sum(found.party_cpu) + found.relay_cpu)


def test_fewer_trees_than_steps_are_timed_are_rehearsed_all_the_same() -> None:
    asked = {"momentum": 0.0, "min_rows": 2}
    few = model_to_json(model_of_list([{"trees": {"count": 1, "depth": 1}}], 4, 2))
    job = PrivateJob.from_json(JOB.to_json() | asked | {"model": few, "steps": 1})
    assert step_rehearsal.rehearse(job).rounds > 0
    with waiting_parties(job, "direct") as parties:
        assert len(parties.measure(4).wall) == 4


def test_a_party_that_fails_is_named_and_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(party: int, *rest: object) -> dict[str, list[float]]:
        if party == 1:
            raise ValueError("out of memory")
        return trained(party, *rest)  # type: ignore[arg-type]

    trained = step_processes.trained
    monkeypatch.setattr(step_processes, "trained", failing)
    with waiting_parties(JOB, "direct") as parties:
        pids = [process.pid or 0 for process in parties.processes]
        with pytest.raises(UvccError, match=r"party 1 of the rehearsal failed: ValueError: out of memory"):
            parties.measure(2)
    assert [host.process(pid) for pid in pids] == [None] * 3


def test_the_numbers_that_a_plan_takes_follow_from_the_steps() -> None:
    found = StepTimes(wall=(0.4, 0.2, *[0.1] * 18), party_cpu=(0.05, 0.06, 0.04), relay_cpu=0.03, cores=2.0).to_json()
    assert found["wall"] == 0.1
    assert (found["low"], found["high"]) == (0.1, 0.1)
    assert found["early"] == pytest.approx(3.0)
    assert (found["party_cpu"], found["all_cpu"]) == (0.06, pytest.approx(0.18))
    even = StepTimes(wall=(0.1, 0.1), party_cpu=(0.1,) * 3, relay_cpu=0.0, cores=2.0).to_json()
    assert even["early"] == 1.0
    assert (steps_for(10.0), steps_for(0.2), steps_for(1e-9)) == (2, 15, step_processes.MOST_STEPS)


def test_the_command_tells_counts_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(replace(JOB, batch=4).to_json()))
    assert step_rehearsal.main(["--job", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rounds"] > 0
    assert set(said["processes"]) == {"wall", "low", "high", "early", "party_cpu", "all_cpu", "cores"}
