"""Rows held out for validation: which they are, what is revealed of them, when that ends a training, and what of it the
verifiers recompute."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.early_stop import ValidationLog, course, steps_done
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.run_files.control import HALT
from uvcc_engine.data.sets import TEST, TRAIN, VALIDATION, Dataset, load_digits
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.owner import client, program_form
from uvcc_engine.owner.rows import public_sides, rows_of
from uvcc_engine.sealing.inputs import share_dataset
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.release import open_weights
from uvcc_engine.sharding.validation import check_counts
from uvcc_engine.simulate.step_rehearsal import rehearse
from uvcc_engine.transcript.proof import derived_files, standalone_verify
from uvcc_engine.transcript.proof.bundle import assemble_folder, read_bundle
from uvcc_engine.transcript.proof.revealed_series import revealed_series
from uvcc_engine.transcript.proof.verifier import verify

torch.set_num_threads(1)
RNG = np.random.default_rng(4)
ROWS = RNG.normal(size=(240, 6))
TRUTH = ROWS @ np.array([1.0, -1.0, 0.5, 0.0, 0.0, 0.3])
NOISY = (RNG.permutation(TRUTH) > 0).astype(np.int64)  # nothing to learn: validation gets worse and worse
OVERFITS = ({"linear": 32}, "relu", "linear")

JOB = PrivateJob(
    model="logistic-digits",
    steps=30,
    batch=16,
    lr=4.0,
    schedule="constant",
    checkpoint_every=4,
    test_rows=100,
    val_rows=120,
    val_every=2,
    patience=2,
    keep_best=True,
    reveal=("loss", "accuracy", "val_loss", "val_accuracy", "weights"),
    class_weights=(2.0, *[1.0] * 8, 0.5),
    label_smoothing=0.05,
)
"""A rate so high that validation soon stops falling."""


@pytest.mark.parametrize(
    ("objective", "y", "reveal"),
    [
        ("cross-entropy", (TRUTH > 0).astype(int), ["val_loss", "val_accuracy", "val_auc", "val_perplexity"]),
        ("mse", TRUTH, ["val_loss", "val_rmse", "val_r2"]),
        ("huber", TRUTH, ["val_loss", "val_rmse"]),
        pytest.param(
            "poisson",
            RNG.poisson(np.exp(0.4 * TRUTH)).astype(float),
            ["val_loss", "val_rmse"],
            marks=pytest.mark.ci(__file__),
        ),
        pytest.param(
            "binary",
            (TRUTH > 0).astype(int),
            ["val_loss", "val_accuracy", "val_precision", "val_recall"],
            marks=pytest.mark.ci(__file__),
        ),
    ],
)
def test_validation_after_every_epoch_is_that_in_clear(objective: str, y: Any, reveal: list[str]) -> None:
    made = simulate.fit(
        ["linear"], ROWS, y, epochs=4, batch=32, lr=0.1, objective=objective, reveal=reveal, validation=0.25
    )
    clear = made.twin()
    per_epoch = -(-len(made.data.train_x) // 32)
    assert made.job.val_every == per_epoch
    assert sorted(made.validated) == sorted(clear.validated) == [min(k * per_epoch, made.steps) for k in range(1, 5)]
    for step, values in clear.validated.items():
        assert made.validated[step].keys() == values.keys() == {n for n in reveal if n.startswith("val_")}
        for name, value in values.items():
            near = 0.03 if name in ("val_accuracy", "val_precision", "val_recall") else 1e-2
            assert made.validated[step][name] == pytest.approx(value, abs=near), (step, name)
    assert np.allclose(made.weights[0], clear.weights[0], atol=0.01)


@pytest.mark.ci(__file__)
def test_a_training_ends_where_validation_stopped_falling_and_keeps_the_best_weights() -> None:
    asked: dict[str, Any] = {"batch": 32, "lr": 0.5, "reveal": ["accuracy", "val_loss"], "validation": 0.3}
    made = simulate.fit(list(OVERFITS), ROWS, NOISY, epochs=40, patience=3, keep_best=True, **asked)
    clear = made.twin()
    assert made.steps == clear.steps < made.job.steps
    least = min(made.validated, key=lambda step: made.validated[step]["val_loss"])
    assert max(made.validated) == made.steps == least + 3 * made.job.val_every
    for mine, theirs in zip(made.weights, clear.weights, strict=True):
        assert np.abs(mine - theirs).max() < 0.03
    last = simulate.fit(list(OVERFITS), ROWS, NOISY, steps=made.steps, val_every=made.job.val_every, **asked)
    assert not np.allclose(last.weights[0], made.weights[0], atol=0.05)  # the last weights are others


@pytest.mark.parametrize(
    ("losses", "patience", "ended", "best"),
    [
        ([3.0, 2.0, 2.0, 1.9, 1.95, 1.9], 2, True, 4),
        ([3.0, 2.0, 2.0, 1.9, 1.95], 2, False, 4),
        ([1.0, 2.0, 3.0, 4.0], 0, False, 1),
        ([float("nan"), float("nan")], 2, True, 0),
    ],
)
def test_the_rule_that_ends_a_training(losses: list[float], patience: int, ended: bool, best: int) -> None:
    log = ValidationLog(patience)
    for step, loss in enumerate(losses, 1):
        assert not log.ended
        log.add(step, loss)
    assert (log.ended, log.best) == (ended, best)
    again = ValidationLog(patience)
    again.restore(json.loads(json.dumps(log.entries)))
    assert (again.ended, again.best, again.waited) == (ended, best, log.waited)
    told = [{"val_loss": loss} for loss in losses]
    assert steps_done({"steps": 99, "patience": patience}, 0, told) == (len(losses) if ended else 99)
    went = course({"steps": 99, "patience": patience}, 0, told)
    assert (went.steps, went.best) == (len(losses) if ended else 99, best)
    assert went.least == (losses[best - 1] if best else float("inf"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"val_rows": 0}, r"job\.val_rows is 0, and job\.reveal lists"),
        ({"reveal": ("loss",), "patience": 0, "keep_best": False}, r"job\.val_rows is 120, and job\.reveal lists loss"),
        ({"reveal": ("val_accuracy",)}, "job.patience without 'val_loss'"),
        ({"reveal": ("val_accuracy",), "patience": 0}, "job.keep_best without 'val_loss'"),
        ({"val_budget": 14}, "revealed 15 times, job.val_budget is 14"),
        ({"patience": -1}, "job.patience is -1"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        replace(JOB, **change)
    assert replace(JOB, val_budget=15).validations == 15


def test_too_few_validation_rows_for_a_revealed_number_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(ConfigError, match=r"a number of 24 rows would be revealed, job\.min_rows is 30"):
        simulate.fit(
            ["linear"], ROWS, NOISY, epochs=1, batch=32, reveal=["val_loss"], validation=0.1, test=0.2, min_rows=30
        )


def test_a_pod_refuses_fewer_rows_than_a_revealed_number_must_be_of() -> None:
    shapes = {"train_x": (50, 64), "test_x": (9, 64), "val_x": (120, 64)}
    check_counts(shapes, JOB)
    check_counts(shapes | {"test_x": (300, 64), "val_x": (360, 64)}, JOB)  # of three owners
    with pytest.raises(ConfigError, match="the inputs have 119 val rows, a revealed number must be of 120"):
        check_counts(shapes | {"val_x": (119, 64)}, JOB)
    with pytest.raises(ConfigError, match="the inputs have 9 test rows, a revealed number must be of 10"):
        check_counts(shapes, replace(JOB, min_rows=10))


def test_the_shipped_digits_split_into_three_by_the_seed() -> None:
    whole, held = load_digits(7, 100), load_digits(7, 100, 50)
    assert np.array_equal(whole.test_x, held.test_x)  # validation takes from training
    assert held.val_x is not None
    assert np.array_equal(np.concatenate([held.val_x, held.train_x]), whole.train_x)
    side = public_sides(7, 3000, 400, 300)
    assert [int((side == one).sum()) for one in (TRAIN, TEST, VALIDATION)] == [2300, 400, 300]
    assert np.array_equal(side == TEST, public_sides(7, 3000, 400, 0) == TEST)


def table(folder: Path, rows: int = 300) -> tuple[Path, Path]:
    lines = [f"{1000 + i},{i % 17},{(7 * i) % 23},{'ab'[(i % 17) > 8]}" for i in range(rows)]
    (folder / "t.csv").write_text("\n".join(["id,u,v,y", *lines]) + "\n")
    schema = "target: {column: y, values: [a, b]}\nsplit: {test: 0.2, validation: 0.3, by: id}\n"
    (folder / "s.yaml").write_text(schema + "columns: {u: standardise, v: minmax, id: drop}\n")
    return folder / "t.csv", folder / "s.yaml"


def asked(folder: Path, **rows: int) -> tuple[PrivateJob, argparse.Namespace]:
    data, schema = table(folder)
    model = model_to_json(model_of_list(["linear"], 2, 2))
    told = {"model": model, "steps": 2, "batch": 8, "reveal": ["val_loss"], **rows}
    args = argparse.Namespace(data=data, labels=None, schema=schema, weights=None, pin=None, fitted=None)
    return PrivateJob.from_json(told), args


def test_both_ways_of_sharing_a_table_hold_out_the_same_rows_and_hold_the_counts_to_the_job(tmp_path: Path) -> None:
    job, args = asked(tmp_path, test_rows=56, val_rows=1)
    with pytest.raises(ConfigError, match=r"job\.(test|val)_rows is \d+, the schema puts \d+ rows into the") as refused:
        rows_of(job, args)
    counts: dict[str, int] = {}
    for _ in range(2):  # each refusal names what to give
        with pytest.raises(ConfigError) as refused:
            rows_of(replace(job, **counts), args)
        key = refused.value.what.split("job.")[1].split(" ")[0]
        counts[key] = int(refused.value.hint.split("give ")[1].split(",")[0])
        if key == "val_rows":
            break
    job = replace(job, **counts)
    streamed = rows_of(job, args)
    whole = client.input_tensors(job, args)
    assert streamed.shapes == {name: values.shape for name, values in whole.items()}
    found: dict[str, list[Any]] = {}
    for name, block in streamed.blocks():
        found.setdefault(name, []).append(block)
    assert found.keys() == whole.keys()
    for name, values in whole.items():
        assert np.abs(np.concatenate(found[name]) - values).max() <= 1
    assert 60 < job.val_rows < 120


# -- three workers, each a process of its own ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = Fleet(tmp_path_factory.mktemp("run"), zygote, JOB, direct_links())
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    return fleet


def collected(fleet: Fleet, folder: Path) -> Path:
    for p in range(3):
        shutil.copytree(fleet.dir(p) / f"transcript_p{p}r0s0t0", folder / f"transcript_p{p}r0s0t0")
    shutil.copy(fleet.home(0) / "policy.json", folder / "policy.json")
    shutil.copy(fleet.home(0) / "signatures.json", folder / "policy_signatures.json")
    return assemble_folder(folder)


def test_a_run_ends_early_says_so_and_releases_the_best_weights(run: Fleet) -> None:
    clear = train_plaintext(JOB, load_digits(JOB.seed, JOB.test_rows, JOB.val_rows))
    assert clear.steps < JOB.steps
    for p in range(3):
        assert (run.exit(p)["status"], run.exit(p)["step"]) == ("done", clear.steps)
        assert run.events(p, "training_ended_early") == [{"step": clear.steps, "of": JOB.steps, "patience": 2}]
        lines = (run.dir(p) / "val.csv").read_text().splitlines()
        assert lines[0] == "step,accuracy,loss"
        told = {int(one.split(",")[0]): float(one.split(",")[2]) for one in lines[1:]}
        assert told == pytest.approx({step: v["val_loss"] for step, v in clear.validated.items()}, abs=0.02)
    boxes = [(run.dir(p) / f"result_p{p}r0s0t0.box").read_bytes() for p in range(3)]
    weights = open_weights(boxes, owner=OWNER, parties=[p.public for p in PARTIES])
    assert list(weights) == ["weight.0"]  # the best one under the name of any other
    assert np.abs(weights["weight.0"] - clear.weights[0]).max() < 0.02


def test_both_verifiers_recompute_where_the_run_ended(run: Fleet, tmp_path: Path) -> None:
    bundle = collected(run, tmp_path)
    verify(bundle)
    series = revealed_series(read_bundle(bundle))
    assert [step for step, _ in series["val_loss"]] == list(range(2, read_bundle(bundle).steps + 1, 2))
    assert standalone_verify.main([str(tmp_path), "--policy", str(tmp_path / "policy.json")]) == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda rows: [*rows[:1], rows[1].replace(",", ",0.", 1).replace("0.0.", "0.1"), *rows[2:]], "says "),
        (lambda rows: [*rows[:1], rows[1].rpartition(",")[0] + ",", *rows[2:]], "names"),
        # of a step that validated nothing
        pytest.param(lambda rows: [*rows, "3,0.9,0.1"], "names", marks=pytest.mark.ci(__file__)),
        pytest.param(
            lambda rows: [rows[0] + ",auc", *(row + ",0.99" for row in rows[1:])],
            "names",
            marks=pytest.mark.ci(__file__),
        ),
    ],
)
def test_a_table_of_validation_says_what_was_signed_and_no_more(
    run: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, what: str
) -> None:
    bundle, pod = collected(run, tmp_path), tmp_path / "p0r0"
    pod.mkdir()
    table = pod / "val.csv"
    rows = (run.dir(0) / "val.csv").read_text().splitlines()
    asked = [str(tmp_path), "--policy", str(tmp_path / "policy.json")]
    table.write_text("\n".join(rows) + "\n")
    assert derived_files.check_validation_rows(read_bundle(bundle), table) == 2 * (len(rows) - 1)
    assert standalone_verify.main(asked) == 0
    table.write_text("\n".join(change(rows)) + "\n")
    with pytest.raises(VerificationError, match=what):
        derived_files.check_validation_rows(read_bundle(bundle), table)
    assert standalone_verify.main(asked) == 1
    assert what in capsys.readouterr().err


def test_a_run_whose_metrics_are_no_numbers_ends_well_and_says_why(zygote: Zygote, tmp_path: Path) -> None:
    """Test and validation rows of one class: nobody can rank them, and not a number is signed in its place."""
    digits = load_digits(7, 100)
    zeros, ones = (digits.train_x[digits.train_y == k][:60] for k in (0, 1))
    x, y = np.concatenate([zeros[:40], ones[:40]]), np.repeat([0, 1], 40)
    data = Dataset(x, y, ones[40:52], np.ones(12, np.int64), 2, ones[52:60], np.ones(8, np.int64))
    reveal = ("loss", "accuracy", "auc", "recall", "val_loss", "val_auc")
    told = {"model": model_to_json(model_of_list(["linear"], 64, 2)), "steps": 2, "batch": 16, "test_rows": 12}
    job = PrivateJob.from_json(told | {"val_rows": 8, "val_every": 1, "reveal": list(reveal)})
    purpose = Purpose.of(job, [OWNER.public.x25519])
    made = share_dataset(data, job.frac_bits, tuple(p.public for p in PARTIES), OWNER, seed=1, purpose=purpose)
    fleet = Fleet(tmp_path / "fleet", zygote, job, direct_links(), made)
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert fleet.result(0)["values"].keys() == {"accuracy", "recall", "loss"}
    why = "all rows are of one class"
    undefined = [("val_auc", why, 1), ("val_auc", why, 2), ("auc", why, 2)]
    assert [(e["metric"], e["why"], e["step"]) for e in fleet.events(0, "metric_not_defined")] == undefined
    lines = (fleet.dir(0) / "val.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines] == [["step", "auc"], ["1", ""], ["2", ""]]
    out = tmp_path / "collected"
    out.mkdir()
    verify(collected(fleet, out))
    assert standalone_verify.main([str(out), "--policy", str(out / "policy.json")]) == 0


def test_its_messages_are_those_of_the_program_up_to_where_it_ended(run: Fleet, tmp_path: Path) -> None:
    bundle = collected(run, tmp_path)
    found = program_form.check(tmp_path)
    assert found.epochs == found.of == read_bundle(bundle).steps + 1  # the last one tests the best weights
    assert found.messages > 500


def test_a_plan_rehearses_a_step_and_says_that_validation_comes_on_top() -> None:
    found = rehearse(JOB)
    assert found.rounds == rehearse(replace(JOB, **PLAIN)).rounds
    assert [w for w in found.warnings if "revealed at most 15 times, of 120 rows" in w]


PLAIN: dict[str, Any] = {"val_rows": 0, "val_every": 0, "patience": 0, "keep_best": False, "reveal": ("loss",)}


def test_a_run_cut_shorter_than_its_rule_says_is_no_whole_run(run: Fleet, tmp_path: Path) -> None:
    told = json.loads(collected(run, tmp_path).read_text())
    for worker in told["workers"]:
        worker["roots"] = worker["roots"][:-2]
    (tmp_path / "proof_bundle.json").write_text(
        json.dumps(told, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    )
    with pytest.raises(VerificationError, match="epochs"):
        verify(tmp_path / "proof_bundle.json")
    code = subprocess.run(
        [sys.executable, "-I", standalone_verify.__file__, str(tmp_path)], capture_output=True
    ).returncode
    assert code == 1


@pytest.mark.ci(__file__)
def test_a_halted_run_remembers_what_was_validated_and_ends_at_the_same_step(
    run: Fleet, zygote: Zygote, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path / "fleet", zygote, JOB, direct_links())
    for _ in range(3):  # a halt that lies there already stops it after a step
        fleet.launch(halt=HALT, resume=True)
        assert fleet.wait() == [0, 0, 0]
        assert fleet.exit(0)["status"] == "halted"
    fleet.launch(resume=True)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    for p in range(3):
        assert fleet.result(p)["result_hash"] == run.result(0)["result_hash"]
        assert fleet.roots(p) == run.roots(p)
        assert (fleet.dir(p) / "val.csv").read_text() == (run.dir(p) / "val.csv").read_text()
