"""Class weights, row weights and label smoothing: prepared by the owner in clear, held against torch's own losses."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.features import prepare
from uvcc_engine.data.schema import parse_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.table_files import read_table
from uvcc_engine.data.weighted_targets import training_targets
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.learning.plaintext import training_loss
from uvcc_engine.owner import client
from uvcc_engine.owner.rows import rows_of
from uvcc_engine.sharding.validation import check_tensors, fit_model
from uvcc_engine.simulate.step_rehearsal import rehearse

torch.set_num_threads(1)
RNG = np.random.default_rng(6)
ROWS = RNG.normal(size=(90, 5))
TRUTH = ROWS @ [1.0, -0.5, 0.0, 0.25, 0.7]
RARE, THREE = (TRUTH > 0.8).astype(int), np.digitize(TRUTH, [-0.5, 0.5])
OWN = RNG.uniform(0.0, 2.0, 90)


@pytest.mark.parametrize(
    ("objective", "y", "own", "asked"),
    [
        ("cross-entropy", RARE, None, {"class_weights": [1, 3.5], "label_smoothing": 0.1}),
        ("cross-entropy", THREE, OWN, {"label_smoothing": 0.2, "class_weights": [0.5, 1, 2]}),
        ("binary", RARE, OWN, {"class_weights": [0.5, 4], "label_smoothing": 0.1}),
        ("mse", TRUTH, OWN, {}),
        ("mse", THREE, OWN, {}),
        ("huber", 2.0 * TRUTH, OWN, {}),
        ("poisson", RNG.poisson(np.exp(0.4 * TRUTH)).astype(float), OWN, {}),
    ],
)
def test_a_weighted_training_is_that_in_clear(objective: str, y: Any, own: Any, asked: dict[str, Any]) -> None:
    given: dict[str, Any] = {"steps": 5, "batch": 30, "lr": 0.1, "objective": objective, "reveal": ["loss"]}
    made = simulate.fit(["linear"], ROWS, y, row_weights=own, **given, **asked)
    clear, plain = made.twin(), simulate.fit(["linear"], ROWS, y, **given)
    assert np.allclose(made.losses, clear.losses, atol=2e-3)
    assert np.abs(made.weights[0] - clear.weights[0]).max() < 1e-3
    assert np.abs(made.weights[0] - plain.weights[0]).max() > 1e-2  # weights do something
    assert plain.rounds < made.rounds <= plain.rounds + 2 * made.steps  # and cost at most a product


def test_smoothing_alone_costs_no_round_and_no_byte() -> None:
    given: dict[str, Any] = {"steps": 2, "batch": 30, "reveal": ["loss"]}
    plain, smooth = (simulate.fit(["linear"], ROWS, THREE, label_smoothing=e, **given) for e in (0.0, 0.3))
    assert (plain.rounds, plain.bytes_sent) == (smooth.rounds, smooth.bytes_sent)
    assert np.allclose(smooth.losses, smooth.twin().losses, atol=2e-3)
    assert not np.allclose(smooth.losses, plain.losses, atol=1e-2)


def test_many_classes_and_letters_are_weighted_at_every_position() -> None:
    """More classes than a look-up has places for, so that the softmax divides; and labels at three positions a row."""
    letters = RNG.integers(0, 20, (24, 3))
    model = ["linear"]
    spec = model_of_list([{"embedding": 4}, *model], 60, 20, 3)
    x = np.eye(20)[letters].reshape(24, 60)
    given: dict[str, Any] = {"steps": 2, "batch": 8, "lr": 0.1, "test": 0.25, "reveal": ["loss"]}
    data_y = (letters + 1) % 20
    classes = [1.0 + 0.1 * k for k in range(20)]
    made = _letters(spec, x, data_y, class_weights=classes, label_smoothing=0.1, **given)
    assert np.allclose(made.losses, made.twin().losses, atol=5e-3)
    assert all(np.abs(a - b).max() < 2e-3 for a, b in zip(made.weights, made.twin().weights, strict=True))


def _letters(spec: Any, x: Any, y: Any, *, test: float, steps: int, **given: Any) -> simulate.SimulatedFit:
    from uvcc_engine.data.sets import split
    from uvcc_engine.simulate.fitting import train

    data = split(x, y, 7, round(test * len(x)), 20, weights=RNG.uniform(0.5, 1.5, len(x)))
    told = {"model": model_to_json(spec), "steps": steps, "test_rows": len(data.test_x), "row_weights": True} | given
    return train(PrivateJob.from_json(told), data)


@pytest.mark.ci("tests/engine/proofs/test_proved_learning.py")
def test_every_product_of_a_weighted_step_can_be_proved() -> None:
    given: dict[str, Any] = {"steps": 1, "batch": 12, "test": 0.2, "reveal": ["loss"], "verify": "products"}
    made = simulate.fit(["linear"], ROWS[:30], RARE[:30], class_weights=[1, 2], row_weights=OWN[:30], **given)
    assert np.allclose(made.losses, made.twin().losses, atol=2e-3)


def test_targets_are_what_torch_takes_for_them() -> None:
    job = PrivateJob(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.3)
    labels, own = np.array([0, 2, 1, 1]), np.array([1.0, 2.0, 0.0, 0.5])
    logits = torch.from_numpy(RNG.normal(size=(4, 3)))
    t = torch.from_numpy(training_targets(replace(job, row_weights=True), labels, 3, own)["train_y"])
    mine = -(t * torch.log_softmax(logits, 1)).sum() / 4
    assert mine.item() == pytest.approx(training_loss(job, logits, torch.from_numpy(labels), own).item())
    fn = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.3, reduction="none")
    assert mine.item() == pytest.approx((fn(logits, torch.from_numpy(labels)) * torch.from_numpy(own)).mean().item())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"objective": "mse", "class_weights": [1, 2, 3]}, "job.class_weights with objective 'mse'"),
        ({"objective": "huber", "label_smoothing": 0.1}, "job.label_smoothing with objective 'huber'"),
        ({"task": "infer", "label_smoothing": 0.1, "reveal": ["predictions"]}, "job.label_smoothing in task 'infer'"),
        ({"class_weights": [1, 0, 1]}, "job.class_weights names 0"),
        ({"class_weights": [1, 17, 1]}, "job.class_weights names 17"),
        ({"class_weights": [1, float("nan"), 1]}, "job.class_weights"),
        ({"label_smoothing": 1.0}, "job.label_smoothing is 1.0"),
        ({"class_weights": "heavy"}, "job.class_weights"),
    ],
)
def test_weights_that_fit_no_job_are_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        PrivateJob.from_json(PrivateJob().to_json() | change)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"class_weights": [1, 2]}, "job.class_weights has 2 numbers for 3 classes"),
        ({"row_weights": OWN[:8]}, r"row_weights of shape \(8,\) for 90 rows"),
        ({"row_weights": -OWN}, "a training row counts -"),
        ({"row_weights": 8.0 * OWN, "class_weights": [1, 1, 4]}, "a training row counts .* with its class's weight"),
        ({"label_smoothing": 1e-4}, "over 3 classes is 3.3e-05 for each"),
    ],
)
def test_weights_that_do_not_fit_the_data_are_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        simulate.fit(["linear"], ROWS, THREE, steps=1, batch=10, **change)


def test_a_policy_names_weights_only_where_there_are_some() -> None:
    job = PrivateJob(class_weights=(1.0, 2.5), label_smoothing=0.1, row_weights=True)
    assert not {"class_weights", "label_smoothing", "row_weights"} & PrivateJob().to_json().keys()
    assert PrivateJob.from_json(job.to_json()) == job
    assert PrivateJob.from_json(job.to_json() | {"class_weights": [1, 2.5]}) == job  # as canonical JSON writes 1.0


def test_a_plan_rehearses_weights_of_rows_too() -> None:
    job = PrivateJob(model=model_to_text(["linear"], 4, 1), objective="mse", steps=9, batch=8, reveal=("loss",))
    assert rehearse(replace(job, row_weights=True)).rounds > rehearse(job).rounds


def test_an_estimator_takes_sample_weights_as_scikit_learn_gives_them() -> None:
    ones, none = (simulate.PrivateRegressor(["linear"], epochs=1, batch=45) for _ in range(2))
    heavy = np.where(TRUTH > 0, 4.0, 0.0)
    assert np.allclose(ones.fit(ROWS, TRUTH, np.ones(90)).predict(ROWS), none.fit(ROWS, TRUTH).predict(ROWS), atol=1e-2)
    assert not np.allclose(ones.fit(ROWS, TRUTH, sample_weight=heavy).predict(ROWS), none.predict(ROWS), atol=1e-1)


def model_to_text(layers: list[Any], features: int, outputs: int) -> str:
    return PrivateJob.from_json({"model": model_to_json(model_of_list(layers, features, outputs))}).model


# -- a table's own column of weights --------------------------------------------------------------------------------

SCHEMA = {
    "target": {"column": "y", "values": ["a", "b"]},
    "split": {"test": 0.25, "by": "id"},
    "weight": "seen",
    "columns": {"u": "standardise", "id": "drop"},
}


def table(folder: Path, **cells: str) -> Path:
    lines = [f"{100 + i},{i % 17},{0.5 * (i % 5)},{'ab'[(i % 17) > 8]}" for i in range(60)]
    for row, cell in cells.items():
        parts = lines[int(row[1:])].split(",")
        lines[int(row[1:])] = ",".join([*parts[:2], cell, parts[3]])
    (folder / "t.csv").write_text("\n".join(["id,u,seen,y", *lines]) + "\n")
    (folder / "s.yaml").write_text(schema_text(parse_schema(SCHEMA)))
    return folder / "t.csv"


def test_the_schema_names_the_column_of_weights_and_both_ways_of_sharing_take_it(tmp_path: Path) -> None:
    path = table(tmp_path)
    schema = parse_schema(SCHEMA)
    assert parse_schema({**SCHEMA, "weight": "seen"}) == schema
    made = prepare(read_table(path), schema)
    assert made.data.weights is not None
    assert made.data.weights.shape == (len(made.data.train_x),)
    assert set(made.data.weights) == {0.0, 0.5, 1.0, 1.5, 2.0}
    for objective, outputs in (("cross-entropy", 2), ("mse", 2)):
        told: dict[str, Any] = {"model": model_to_json(model_of_list(["linear"], 1, outputs)), "objective": objective}
        told |= {"steps": 2, "batch": 8, "reveal": ["loss"], "test_rows": len(made.data.test_x), "row_weights": True}
        job = PrivateJob.from_json(told)
        args = argparse.Namespace(
            data=path, labels=None, schema=tmp_path / "s.yaml", weights=None, pin=None, fitted=None
        )
        streamed, whole = rows_of(job, args), client.input_tensors(job, args)
        assert streamed.shapes == {name: values.shape for name, values in whole.items()}
        assert ("train_w" in whole) == (objective == "mse")
        found: dict[str, list[Any]] = {}
        for name, block in streamed.blocks():
            found.setdefault(name, []).append(block)
        assert found.keys() == whole.keys()
        assert all(np.abs(np.concatenate(found[name]) - values).max() <= 1 for name, values in whole.items())
        for act in (rows_of, client.input_tensors):
            with pytest.raises(ConfigError, match=r"job\.row_weights is false, though the rows have weights"):
                act(replace(job, row_weights=False), args)


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        ("", "column 'seen' has no value, and the schema takes it for the row's weight"),
        ("17", "column 'seen' holds 17, and"),
        ("-1", "column 'seen' holds -1, and"),
        ("x", "column 'seen'"),
        ("nan", "column 'seen'"),
    ],
)
def test_a_weight_that_is_none_is_named_by_row_and_column(tmp_path: Path, cell: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        prepare(read_table(table(tmp_path, r7=cell)), parse_schema(SCHEMA))
    assert "row 8" in refused.value.what


@pytest.mark.parametrize("name", ["y", "u", "id"])
def test_a_column_of_weights_has_no_other_use(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the weight '{name}' is the target, split.by, or one of columns, too"):
        parse_schema({**SCHEMA, "weight": name})


def test_a_pod_refuses_rows_whose_weights_its_job_does_not_know() -> None:
    job = PrivateJob(model=model_to_text(["linear"], 2, 1), objective="mse", row_weights=True, reveal=("loss",))
    shapes = {"train_x": (9, 2), "train_y": (9, 1), "test_x": (360, 2), "test_y": (360, 1), "train_w": (9, 1)}
    check_tensors(shapes, job, fit_model(job))
    with pytest.raises(ConfigError, match="the inputs lack train_w"):
        check_tensors({n: s for n, s in shapes.items() if n != "train_w"}, job, fit_model(job))
    with pytest.raises(ConfigError, match=r"train_w has shape \(8, 1\)"):
        check_tensors(shapes | {"train_w": (8, 1)}, job, fit_model(job))
    with pytest.raises(ConfigError, match="the rows have weights, and the job says nothing of them"):
        check_tensors(shapes, replace(job, row_weights=False), fit_model(job))
