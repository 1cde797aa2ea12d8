"""Predictions in clear with a training's weights; what is refused; and how near shares come to floats on real data."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.features import Prepared, prepare
from uvcc_engine.data.infer import infer
from uvcc_engine.data.schema import load_schema, parse_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import Floats
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import reconstruct
from uvcc_engine.owner import own_data
from uvcc_engine.sealing.inputs import open_inputs, share_dataset

LAYERS: list[Any] = [{"linear": 6}, "relu", "linear"]


def write(path: Path, rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def rows_of(count: int) -> list[list[Any]]:
    """Patients with a number that may be missing, a category, an id; who is older than the dose says is ill."""
    rng = np.random.default_rng(2)
    rows: list[list[Any]] = [["patient", "age", "ward", "dose", "ill"]]
    for i in range(count):
        age, dose = float(rng.uniform(20, 80)), float(rng.uniform(20, 80))
        ward = ["north", "south", "east"][i % 3]
        rows.append(
            [f"P{i:03}", "" if i % 17 == 5 else f"{age:.2f}", ward, f"{dose:.3f}", "yes" if age > dose else "no"]
        )
    return rows


def job_for(made: Prepared, **values: Any) -> PrivateJob:
    model = model_of_list(values.pop("layers", LAYERS), made.schema.features, len(made.schema.values))
    return PrivateJob.from_json({"model": model_to_json(model), "test_rows": len(made.data.test_x), **values})


@pytest.mark.parametrize("kind", ["real", pytest.param("count", marks=pytest.mark.ci(__file__)), "binary"])
def test_a_target_of_another_kind_goes_from_a_file_to_predictions(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    rows: list[list[Any]] = [["dose", "weight", "answer"]]
    truth = []
    for _ in range(120):
        dose, weight = rng.uniform(0, 10), rng.uniform(50, 90)
        score = 0.2 * dose - 0.02 * (weight - 70)
        truth.append({"real": 300 + 40 * score, "count": float(rng.poisson(np.exp(score))), "binary": score > 1}[kind])
        said = ["no", "yes"][int(truth[-1])] if kind == "binary" else truth[-1]
        rows.append([f"{dose:.4f}", f"{weight:.4f}", said])
    table = write(tmp_path / "t.csv", rows)
    schema = tmp_path / "t.schema.yaml"
    assert own_data.main(["infer", str(table)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == ("real" if kind == "real" else "classes")
    if kind != "real":  # what the owner changes in the file
        head = "target: {column: answer, kind: count}" if kind == "count" else "target: {column: answer, kind: binary,"
        old = r"target: .*" if kind == "count" else r"target: \{column: answer,"
        schema.write_text(re.sub(old, head, schema.read_text(), count=1))
    plan = ["plan", "--model", '["linear"]', "--data", str(table), "--schema", str(schema)]
    assert own_data.main(plan) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objective"] == {"real": "mse", "count": "poisson", "binary": "binary"}[kind]
    assert found["model"]["classes"] == 1
    made = prepare(read_table(table), load_schema(schema))
    base = {"model": found["model"], "test_rows": found["rows"]["test"], "objective": found["objective"]}
    reveal = ["accuracy", "auc"] if kind == "binary" else ["rmse", "r2"]
    job = PrivateJob.from_json(
        base | {"steps": 50, "batch": 32, "lr": 0.05 if kind == "count" else 0.2, "reveal": reveal}
    )
    trained = simulate.train(job, made.data)
    clear = trained.twin().metrics
    assert {k: round(v, 2) for k, v in trained.metrics.items()} == pytest.approx(clear, abs=0.02)
    folder = tmp_path / "results"
    folder.mkdir()
    np.savez(folder / own_data.WEIGHTS, **{f"weight.{i}": w for i, w in enumerate(trained.weights)})
    (folder / own_data.MODEL).write_text(json.dumps(found["model"]))
    (folder / own_data.FITTED).write_text(schema_text(made.schema))
    assert own_data.main(["predict", "--model", str(folder), "--data", str(table)]) == 0
    said = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    if kind == "binary":
        assert np.mean([(row["answer"] == "yes") == one for row, one in zip(said, truth, strict=True)]) > 0.9
        assert set(said[0]) == {"row", "answer", "p(no)", "p(yes)"}
    else:
        answers = np.array([float(row["answer"]) for row in said])
        out = ["--out", str(tmp_path / "p.csv")]
        assert own_data.main(["predict", "--model", str(folder), "--data", str(table), *out]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["from"], summary["to"]) == (pytest.approx(answers.min()), pytest.approx(answers.max()))
        off = answers - truth
        assert 1 - np.square(off).sum() / np.square(truth - np.mean(truth)).sum() > (0.9 if kind == "real" else 0.25)


@pytest.mark.parametrize(
    ("kind", "cell", "what"),
    [
        ("count", "2.5", "row 2 .*holds 2.5, which is no count"),
        ("count", "-1", "no count"),
        ("real", "", "row 2 .*is empty"),
        ("real", "much", "holds 'much', which is no number"),
    ],
)
def test_targets_that_are_no_such_number_are_refused_by_row(kind: str, cell: str, what: str, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", [["a", "y"], *([i, i % 5] for i in range(1, 30))])
    table.write_text(table.read_text().replace("2,2\n", f"2,{cell}\n", 1))
    schema = parse_schema({"target": {"column": "y", "kind": kind}, "columns": {"a": "standardise"}})
    with pytest.raises(ConfigError, match=what):
        prepare(read_table(table), schema)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``uvcc owner open`` leaves, of a training in clear."""
    folder = tmp_path_factory.mktemp("results")
    table = read_table(write(folder / "patients.csv", rows_of(150)))
    made = prepare(table, infer(table, "ill").schema)
    job = job_for(made, steps=60, batch=32, lr=0.2)
    weights = {f"weight.{i}": w for i, w in enumerate(train_plaintext(job, made.data).weights)}
    np.savez(folder / own_data.WEIGHTS, **weights)
    (folder / own_data.MODEL).write_text(json.dumps(job.to_json()["model"]))
    (folder / own_data.FITTED).write_text(schema_text(made.schema))
    return folder


def predict(capsys: pytest.CaptureFixture[str], results: Path, data: Path, *more: str) -> tuple[int, str, str]:
    code = own_data.main(["predict", "--model", str(results), "--data", str(data), *more])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_new_rows_are_predicted_by_the_training_s_statistics(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *rows = rows_of(60)
    code, out, _ = predict(capsys, results, write(tmp_path / "new.csv", [row[:-1] for row in [header, *rows]]))
    assert code == 0
    found = list(csv.DictReader(io.StringIO(out)))
    assert [row["patient"] for row in found] == [row[0] for row in rows]
    assert sum(one["ill"] == row[-1] for one, row in zip(found, rows, strict=True)) >= 52
    assert all(abs(float(row["p(no)"]) + float(row["p(yes)"]) - 1.0) < 1e-5 for row in found)
    # one row alone has the same prediction: nothing is taken from the file that is predicted
    code, out, _ = predict(capsys, results, write(tmp_path / "one.csv", [header[:-1], rows[7][:-1]]))
    assert list(csv.DictReader(io.StringIO(out))) == [found[7]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("ward", "west"), r"row 1 \(line 2\), column 'ward' holds 'west'.*no other: mend the cell, or leave it empty"),
        (("dose", ""), r"column 'dose' has no value \(fill it in, or give the column missing: mean\)"),
        (("dose", "1e999"), "not finite"),
        (("dose", "many"), "no number"),
    ],
)
def test_rows_that_the_schema_does_not_know_are_refused(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], what: str
) -> None:
    header, row = rows_of(1)
    row[header.index(change[0])] = change[1]
    code, _, err = predict(capsys, results, write(tmp_path / "new.csv", [header, row]))
    assert code == 2
    assert re.search(what, err)


@pytest.mark.parametrize(("column", "cell"), [("ward", ""), ("dose", "")])
def test_what_a_refused_row_is_told_to_do_helps(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, cell: str
) -> None:
    """``missing: mean`` in the fitted schema changes none of the model's features."""
    header, row = rows_of(1)
    row[header.index(column)] = cell
    fitted = results / "preprocessing.yaml"
    rows = write(tmp_path / "new.csv", [header, row])
    assert predict(capsys, results, rows)[0] == 2
    schema = tmp_path / "mean.yaml"
    schema.write_text(re.sub(rf"({column}: {{kind: [a-z-]+),", r"\1, missing: mean,", fitted.read_text()))
    code, _, err = predict(capsys, results, rows, "--schema", str(schema))
    assert code == 0, err


def test_weights_schema_and_model_must_belong_together(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "new.csv", rows_of(3))
    unfitted = tmp_path / "s.yaml"
    table = read_table(results / "patients.csv")
    unfitted.write_text(schema_text(infer(table, "ill").schema))
    assert "has no statistics" in predict(capsys, results, data, "--schema", str(unfitted))[2]
    for name in (own_data.WEIGHTS, own_data.FITTED):
        (tmp_path / name).write_bytes((results / name).read_bytes())
    assert "model.json" in predict(capsys, tmp_path, data)[2]
    other = model_to_json(model_of_list([{"linear": 5}, "relu", "linear"], 6, 2))
    (tmp_path / own_data.MODEL).write_text(json.dumps(other))
    assert "the weights are not those of" in predict(capsys, tmp_path, data)[2]


def inputs_of(made: Prepared, job: PrivateJob) -> list[Any]:
    shared = share_dataset(made.data, job.frac_bits, tuple(p.public for p in PARTIES), OWNER, seed=1)
    return [open_inputs(shared.boxes[i], party=i, identity=PARTIES[i], **shared.public()) for i in range(3)]


def test_a_training_that_goes_on_from_its_state_ends_in_the_same_bits(results: Path) -> None:
    table = read_table(results / "patients.csv")
    made = prepare(table, infer(table, "ill").schema)
    job = job_for(made, steps=2, batch=16, lr=0.2)
    inputs = inputs_of(made, job)

    def body(rt: Runtime, stop: bool) -> list[str]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        for step in range(job.steps):
            rt.begin_epoch(step)
            if stop and step == 1:
                state, trainer = trainer.state(), PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
                trainer.load_state(state)
            trainer.step(step)
        return [trainer.component_digest(c, b"blind") for c in ("first", "second")]

    whole, resumed = (LocalPlanes(3).run_three(lambda rt, s=s: body(rt, s)) for s in (False, True))
    assert whole == resumed


def auc(p: Floats, y: Any) -> float:
    """The share of pairs of an ill and a well row that are in the right order."""
    pairs = p[y == 1][:, None] - p[y == 0][None, :]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [["linear"], [{"linear": 16}, "relu", "linear"]], ids=["logistic", "mlp"])
def test_breast_cancer_is_told_as_well_on_shares_as_in_clear(tmp_path: Path, layers: list[Any]) -> None:
    found = pytest.importorskip("sklearn.datasets").load_breast_cancer()
    rows = [[*map(float, x), found.target_names[y]] for x, y in zip(found.data, found.target, strict=True)]
    table = read_table(write(tmp_path / "patients.csv", [[*found.feature_names, "diagnosis"], *rows]))
    made = prepare(table, infer(table).schema)
    job = job_for(made, layers=layers, steps=60, batch=64, lr=0.1)
    model, inputs = find_model(job.model), inputs_of(made, job)

    def body(rt: Runtime) -> Any:
        trainer = PrivateTrainer(rt, job, model, inputs[rt.party])
        for step in range(job.steps):
            rt.begin_epoch(step)
            trainer.step(step)
        rt.begin_epoch(job.steps)
        return trainer.weights, trainer.count_correct()

    parties = LocalPlanes(3).run_three(body)
    ours = [reconstruct([shares[i] for shares, _ in parties]) for i in range(len(model.weights))]
    clear = train_plaintext(job, made.data)

    def measured(weights: list[torch.Tensor]) -> float:
        logits = forward(model, weights, torch.from_numpy(made.data.test_x))
        return auc(torch.softmax(logits, 1)[:, 1].numpy(), made.data.test_y)

    private, float_auc = measured(ours), measured([torch.from_numpy(w) for w in clear.weights])
    print(f"AUC {private:.4f} on shares, {float_auc:.4f} in floats")
    assert float_auc > 0.98
    assert abs(private - float_auc) < 0.01
    assert abs(parties[0][1] / len(made.data.test_x) - clear.accuracy) < 0.01


def test_an_owner_of_some_columns_is_told_which_schema_predictions_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    np.savez(results / owner_files.WEIGHTS, **{"weight.0": np.zeros((3 + 1, 2))})
    (results / owner_files.MODEL).write_text(json.dumps(model_to_json(model_of_list(["linear"], 3, 2))))
    (results / owner_files.PREPROCESSING).write_text("columns: {a: {kind: standardise, statistics: {}}}\n")
    data = write(tmp_path / "new.csv", [["a", "b", "c"], ["1", "2", "3"]])
    code, _, err = predict(capsys, results, data)
    assert code == 2
    assert "the schema gives 1 features and no outputs, the model takes 3 and 2" in err
    assert "the columns of all in the proposal's order and with the target: --schema" in err
    columns = ", ".join(f"{name}: {{kind: standardise, statistics: {{}}}}" for name in "abc")
    (tmp_path / "all.yaml").write_text(f"target: {{column: y, values: [0, 1]}}\ncolumns: {{{columns}}}\n")
    code, out, _ = predict(capsys, results, data, "--schema", str(tmp_path / "all.yaml"))
    assert (code, out.splitlines()[1]) == (0, "1,0,0.500000,0.500000")
