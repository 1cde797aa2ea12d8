"""A rehearsal on made-up rows costs what the training costs, and warns where numbers come near the ring's end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, load_digits
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.simulate import step_rehearsal
from uvcc_engine.simulate.fitting import train
from uvcc_engine.simulate.metering import LayerCost
from uvcc_engine.simulate.step_rehearsal import rehearse

JOB = PrivateJob(model="mlp-digits", steps=3, batch=16, test_rows=40)
FEW = PrivateJob.from_json(
    {"model": model_to_json(model_of_list(["linear"], 4, 2)), "steps": 3, "batch": 4, "test_rows": 8, "min_rows": 2}
)
X = np.random.default_rng(3).normal(size=(32, 4))
FEW_ROWS = Dataset(X[8:], np.arange(24) % 2, X[:8], np.arange(8) % 2, 2)


def test_a_step_that_this_machine_has_no_memory_for_is_refused_before_its_processes_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A proved step of LeNet on 128 rows took 22 GiB: a machine of 24 stood still for a quarter of an hour."""
    held = iter((100.0, 10_340.0))  # before the rehearsal and after it
    monkeypatch.setattr(step_rehearsal.host, "peak_mib", lambda: next(held))
    monkeypatch.setattr(step_rehearsal.host, "memory_mib", lambda: {"available_mib": 12 * 1024.0})
    (tmp_path / "job.json").write_text(json.dumps(FEW.to_json()))
    assert step_rehearsal.main(["--job", str(tmp_path / "job.json"), "--steps", "2"]) == UvccError.exit_code
    said = capsys.readouterr().err
    assert "the workers of a step would hold some 15 GiB here, and this machine has 12 free" in said
    assert "uvcc plan --no-rehearsal" in said


@pytest.mark.parametrize("rounds", ["few", pytest.param("sparing", marks=pytest.mark.ci(__file__))])
def test_rounds_and_bytes_are_those_of_the_training(rounds: str) -> None:
    job = replace(JOB, rounds=rounds)
    found, real = rehearse(job), train(job, load_digits(40))
    later = real.step_costs[1:]  # the first step has no momentum to share out yet
    assert found.rounds == sum(cost[0] for cost in later) / 2
    assert found.bytes_sent == pytest.approx(sum(cost[1] for cost in later) / 6)
    assert [(one.layer, one.rounds, one.bytes) for one in found.layers] == [
        (one.layer, one.rounds, one.bytes) for one in real.layers
    ]
    assert found.seconds > 0
    assert found.warnings == ()


def test_audits_that_are_drawn_in_the_run_are_foretold_by_how_many_there_are() -> None:
    job = replace(FEW, steps=6, seed=1, verify="covert", audit_one_in=3)
    found, real = rehearse(job), train(job, FEW_ROWS)
    assert found.audit is not None
    assert (found.audit.audits, found.audit.audited) == (1.0, pytest.approx(19 / 27))
    later, drawn = real.step_costs[1:], [len(one) for one in real.audited[1 : job.steps]]
    assert 0 < sum(drawn) < 15
    assert 0 in drawn
    share = sum(k > 0 for k in drawn) / 5 - found.audit.audited
    more = sum(drawn) / 5 - found.audit.audits
    assert sum(cost[0] for cost in later) / 5 == pytest.approx(found.rounds + share * found.audit.rounds)
    sent = 3 * (found.bytes_sent + more * found.audit.bytes_sent)
    assert sum(cost[1] for cost in later) / 5 == pytest.approx(sent, rel=0.01)
    assert found.to_json()["audit"]["audits"] == 1.0
    assert rehearse(JOB).audit is None


def test_a_loss_that_is_seldom_revealed_is_counted_as_often_as_it_is() -> None:
    every, seldom = rehearse(JOB), rehearse(replace(JOB, steps=100, loss_every=10))
    never = rehearse(replace(JOB, reveal=("accuracy",)))
    share = 11 / 100  # 0, 10, ..., 90 and the last
    assert seldom.rounds == pytest.approx(share * every.rounds + (1 - share) * never.rounds)
    assert seldom.bytes_sent == pytest.approx(share * every.bytes_sent + (1 - share) * never.bytes_sent)
    assert never.bytes_sent < every.bytes_sent


@pytest.mark.parametrize(("objective", "reveal"), [("binary", "accuracy"), ("mse", "rmse"), ("poisson", "loss")])
def test_every_kind_of_target_is_rehearsed(objective: str, reveal: str) -> None:
    model = model_to_json(model_of_list([{"linear": 3}, "relu", "linear"], 5, 1))
    sizes = {"steps": 50, "batch": 8, "test_rows": 20, "min_rows": 8}
    revealed = list(dict.fromkeys(("loss", reveal)))
    job = PrivateJob.from_json(sizes | {"model": model, "objective": objective, "reveal": revealed})
    assert rehearse(job).rounds > 0


def test_the_manual_s_figures_of_trees_and_clusters_are_those_of_a_rehearsal() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "tutorials" / "own-table.md").read_text().split())
    plain = {"steps": 20, "test_rows": 40, "momentum": 0.0, "schedule": "constant"}
    trees = model_to_json(model_of_list([{"trees": {"count": 20, "depth": 2}}], 210, 1))
    told = {"model": trees, "batch": 440, "objective": "binary", "reveal": ["loss", "weights"], "lr": 0.3}
    found = rehearse(PrivateJob.from_json(plain | told))
    said = f"{found.rounds:.0f} rounds and {found.bytes_sent / 1e6:.1f} MB from each party on average"
    assert f"with 210 bits of 440 rows and depth 2 {said}" in page
    groups = model_to_json(model_of_list([{"kmeans": 3}], 13, 0))
    told = {"model": groups, "batch": 149, "objective": "inertia", "reveal": ["loss", "inertia"], "lr": 1.0}
    found = rehearse(PrivateJob.from_json(plain | told))
    said = f"{found.rounds:.0f} rounds and {found.bytes_sent / 1e6:.2f} MB from each party on average"
    assert f"With 3 clusters of 149 rows and 13 columns a step takes {said}" in page


def test_the_manual_says_how_many_steps_are_rehearsed() -> None:
    page = Path(__file__).parents[3] / "docs" / "tutorials" / "own-table.md"
    assert step_rehearsal.STEPS == 3
    assert "rehearses three steps" in page.read_text()


def test_numbers_that_overflow_are_refused_before_anything_is_rented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(JOB, model=WIDE, objective="mse", frac_bits=24, batch=8, lr=16.0, momentum=0.0, reveal=("loss",))
    (tmp_path / "job.json").write_text(json.dumps(job.to_json()))
    assert step_rehearsal.main(["--job", str(tmp_path / "job.json")]) == ConfigError.exit_code
    said = capsys.readouterr().err
    (tmp_path / "told.json").write_text(json.dumps(replace(JOB, reveal=("loss", "overflow")).to_json()))
    asked = ["--job", str(tmp_path / "told.json"), "--workers", "2", "--replicas", "2"]
    assert step_rehearsal.main(asked) == ConfigError.exit_code  # what does not fit the run's workers, too
    assert "job.reveal: 'overflow' on 2 workers" in capsys.readouterr().err
    assert "with job.frac_bits 24 numbers overflow in the rehearsal: " in said
    assert "pass 2^62 before a truncation" in said


WIDE = PrivateJob.from_json(
    {"model": model_to_json(model_of_list([{"linear": 64}, {"linear": 64}, "linear"], 512, 1))}
).model
"""Outputs of several thousand, once it was trained a step too far."""


def test_a_layer_near_the_rings_end_is_named_with_the_bits_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_rehearsal.fitting.train

    def tight(*args: object, **more: object) -> object:
        found = real(*args, **more)  # type: ignore[arg-type]
        return replace(found, layers=(*found.layers, LayerCost("3 dense", {"forward": 1}, {"forward": 8}, 9e5, 1.0)))

    monkeypatch.setattr(step_rehearsal.fitting, "train", tight)
    (told,) = rehearse(JOB).warnings
    assert "layer 3 dense needs 21 bits" in told
    assert rehearse(JOB).most_frac_bits == JOB.frac_bits - 2
    assert f"job.frac_bits {JOB.frac_bits - 2} instead of {JOB.frac_bits}" in told


def test_the_command_answers_in_json_and_refuses_what_is_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(FEW.to_json()))
    assert step_rehearsal.main(["--job", str(tmp_path / "job.json"), "--steps", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rounds"] > 0
    assert said["layers"][0]["layer"] == "0 dense"
    assert 20.0 < said["memory"]["pod_mib"] < 2_000.0
    assert 2.0 < said["memory"]["all_mib"] / said["memory"]["pod_mib"] <= 3.0
    (tmp_path / "job.json").write_text(json.dumps(FEW.to_json() | {"task": "infer", "reveal": ["predictions"]}))
    assert step_rehearsal.main(["--job", str(tmp_path / "job.json")]) == 2
    assert "only trainings can" in capsys.readouterr().err
