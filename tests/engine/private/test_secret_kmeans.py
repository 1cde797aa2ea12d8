"""k-means whose centroids stay secret: the twin's steps, nothing told but what is listed, and no target anywhere."""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.sets import Dataset, Floats
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import own_data
from uvcc_engine.owner.client import dataset_for
from uvcc_engine.owner.rows import rows_of
from uvcc_engine.sharding.validation import check_inputs, check_tensors, fit_model

torch.set_num_threads(1)


def heaps(rows: int = 90, columns: int = 3, heaps: int = 3) -> Floats:
    """Rows around some places that lie apart."""
    rng = np.random.default_rng(8)
    places = 2.0 * rng.normal(size=(heaps, columns))
    return places[np.arange(rows) % heaps] + 0.3 * rng.normal(size=(rows, columns))


@pytest.mark.parametrize(
    ("clusters", "job"),
    [
        (3, {"steps": 5}),
        (12, {"steps": 3, "min_rows": 2}),
        (2, {"steps": 4, "batch": 20, "lr": 0.5, "schedule": "linear"}),
        (3, {"steps": 3, "standardise": True}),
        pytest.param(3, {"steps": 2, "verify": "products"}, marks=pytest.mark.ci(__file__)),
        (2, {"steps": 1, "verify": "proofs"}),
    ],
)
def test_every_step_goes_where_the_twins_does(clusters: int, job: dict[str, Any]) -> None:
    told = ["loss", "inertia", "val_loss"]
    fit = simulate.fit([{"kmeans": clusters}], heaps(), validation=0.1, val_every=1, reveal=told, **job)
    twin = fit.twin()
    assert np.abs(fit.weights[0] - twin.weights[0]).max() < 1e-3
    assert fit.losses == pytest.approx(twin.losses, abs=2e-3)
    assert fit.metrics == pytest.approx(twin.metrics, abs=0.02)
    for step, values in twin.validated.items():
        assert fit.validated[step] == pytest.approx(values, abs=2e-3)
    assert fit.losses[-1] <= fit.losses[0]
    if not job.get("standardise"):
        x = heaps()
        nearest = np.square(x[:, None] - fit.weights[0]).sum(2).argmin(1)
        assert np.array_equal(fit.predict(x), nearest)
    with pytest.raises(ConfigError, match="has no classes"):
        fit.predict_proba(heaps())


@pytest.mark.ci(__file__)
def test_it_finds_what_scikit_learn_finds_of_the_wines() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    from sklearn.cluster import KMeans

    x = sklearn_datasets.load_wine().data
    x = (x - x.mean(0)) / x.std(0)
    fit = simulate.fit([{"kmeans": 3}], x, steps=8)
    rows = fit.data.train_x
    peer = KMeans(3, n_init=4, random_state=0).fit(rows)
    assert fit.losses[-1] * len(rows) < 1.005 * peer.inertia_


def test_a_centroid_of_few_rows_stays_and_one_of_none_too() -> None:
    x = np.array([[0.0], [0.1], [0.2], [0.3], [9.0]] * 4 + [[0.15]])
    fit = simulate.fit([{"kmeans": 2}], x, steps=3, min_rows=5, reveal=["loss"], batch=6, seed=11, test=(x, None))
    twin = fit.twin()
    assert np.abs(fit.weights[0] - twin.weights[0]).max() < 1e-3
    free = simulate.fit([{"kmeans": 2}], x, steps=3, min_rows=1, reveal=["loss"], batch=6, seed=11, test=(x, None))
    assert np.abs(free.weights[0] - fit.weights[0]).max() > 0.1  # the least number of rows has decided something


def test_messages_tell_nothing_of_rows_or_of_how_many_are_where() -> None:
    given: dict[str, Any] = {"steps": 2, "reveal": ["loss"], "batch": 40}
    one = simulate.fit([{"kmeans": 3}], heaps(), **given)
    other = simulate.fit([{"kmeans": 3}], np.zeros_like(heaps()), **given)
    assert one.step_costs == other.step_costs


MODEL = model_to_json(model_of_list([{"kmeans": 3}], 3, 0))
JOB: dict[str, Any] = {"model": MODEL, "objective": "inertia", "momentum": 0.0, "reveal": ["loss"]}


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ({"momentum": 0.9}, "job.momentum 0.9 with k-means"),
        ({"optimizer": "adam"}, "job.optimizer 'adam' with k-means"),
        ({"lr": 1.5}, "job.lr 1.5 with k-means"),
        ({"clip_norm": 1.0}, "job.clip_norm 1.0 with k-means"),
        ({"objective": "mse"}, "objective 'mse' for job.model"),
        ({"row_weights": True}, "job.row_weights True with k-means"),
        ({"reveal": ["accuracy"]}, "'accuracy' for objective 'inertia'"),
        ({"reveal": ["overflow"]}, "'overflow' for objective 'inertia'"),
        ({"batch": 1 << 27}, r"k-means with 134217728 rows of 3 features"),
        ({"min_rows": 200}, "a number of 128 rows would be revealed"),
    ],
)
def test_what_k_means_has_not_is_refused_by_name(job: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        fit_model(PrivateJob.from_json(JOB | job))


def test_no_other_model_has_its_objective_and_replicas_alone_divide_it() -> None:
    with pytest.raises(ConfigError, match="objective 'inertia' for"):
        fit_model(PrivateJob.from_json({"objective": "inertia", "reveal": ["loss"]}))
    with pytest.raises(ConfigError, match="'inertia' for objective 'cross-entropy'"):
        fit_model(PrivateJob.from_json({"reveal": ["inertia"]}))
    assert fit_model(PrivateJob.from_json(JOB), workers=2, replicas=2).unsupervised
    with pytest.raises(ConfigError, match=r"stages of 2, and .* is k-means"):
        fit_model(PrivateJob.from_json(JOB), workers=2, stages=2)


@pytest.mark.parametrize(
    ("layers", "labels", "what"),
    [
        ([{"kmeans": 3}], 2, "k-means for 2 outputs, or beside other layers"),
        (["linear"], 0, "the schema names no target, and job.model learns one"),
        ([{"linear": 3}, {"kmeans": 3}], 0, "the schema names no target, and job.model learns one"),
        ([{"residual": [{"kmeans": 3}]}], 0, "the schema names no target, and job.model learns one"),
        ([{"kmeans": 1}], 0, "k-means with 1 clusters"),
        (["kmeans"], 0, "the number of clusters is None"),
        ([{"kmeans": {"cluster": 3}}], 0, "unknown key 'cluster'"),
    ],
)
def test_where_it_may_stand(layers: list[Any], labels: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        model_of_list(layers, 3, labels)


def test_rows_that_are_too_few_or_too_large_or_labelled_are_refused_before_they_are_shared() -> None:
    job = PrivateJob.from_json(JOB)
    shapes = {"train_x": (2, 3), "test_x": (2, 3)}
    with pytest.raises(ConfigError, match="3 clusters of 2 training rows"):
        check_tensors(shapes, job, fit_model(job))
    check_tensors({"train_x": (3, 3), "test_x": (2, 3)}, job, fit_model(job))
    with pytest.raises(ConfigError, match="the inputs have train_y"):
        check_tensors({"train_x": (3, 3), "test_x": (2, 3), "train_y": (3, 1)}, job, fit_model(job))
    check_inputs(job, "features", np.full((100, 3), 100.0))
    with pytest.raises(ConfigError, match="the squares of features come to 3e"):
        check_inputs(job, "features", np.full((100_000, 3), 1000.0))
    with pytest.raises(ConfigError, match="labels of no class"):
        Dataset(np.zeros((2, 1)), np.zeros((2, 1)), np.zeros((1, 1)), np.zeros((1, 0)), 0)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "wines.csv"
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["id", "a", "b", "c"])
        lines.writerows([k, *(f"{v:.5f}" for v in row)] for k, row in enumerate(heaps()))
    return path


def test_a_table_without_a_target_goes_from_a_schema_to_clusters(
    table: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert own_data.main(["infer", str(table), "--no-target"]) == 0
    told, schema = json.loads(capsys.readouterr().out), table.with_name("wines.schema.yaml")
    assert (told["target"], told["kind"], told["features"]) == ("", "none", 3)
    assert "target:" not in "".join(line for line in schema.read_text().splitlines() if not line.startswith("#"))
    plan = ["plan", "--data", str(table), "--schema", str(schema), "--model"]
    assert own_data.main([*plan, '[{"kmeans": 3}]']) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objective"], found["model"]["classes"]) == ("inertia", 3)
    values = {"test_rows": found["rows"]["test"], "steps": 6, "batch": found["rows"]["train"], "lr": 1.0}
    job = PrivateJob.from_json(JOB | {"model": found["model"], "schedule": "constant"} | values)
    fitted = tmp_path / "results" / own_data.FITTED
    fitted.parent.mkdir()
    data = dataset_for(job, table, schema=schema, fitted=fitted)
    shared = rows_of(job, _arguments(table, schema))
    assert shared.shapes == {"train_x": data.train_x.shape, "test_x": data.test_x.shape}
    assert {name for name, _ in shared.blocks()} == {"train_x", "test_x"}
    trained = simulate.train(job, data)
    np.savez(fitted.parent / own_data.WEIGHTS, **{"weight.0": trained.weights[0]})
    (fitted.parent / own_data.MODEL).write_text(json.dumps(found["model"]))
    assert own_data.main(["predict", "--model", str(fitted.parent), "--data", str(table)]) == 0
    said = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    clusters = np.array([int(row["cluster"]) for row in said])
    assert {len(set(clusters[k::3])) for k in range(3)} == {1}  # a heap has one cluster
    assert len(set(clusters[:3])) == 3  # of its own
    assert set(said[0]) == {"id", "cluster", "distance"}
    assert 0.0 < float(said[0]["distance"]) < 1.5


def _arguments(table: Path, schema: Path | None) -> argparse.Namespace:
    return argparse.Namespace(data=table, schema=schema, labels=None, pin=None, fitted=None, weights=None)


@pytest.mark.parametrize("model", ['["linear"]', "mlp-digits", "x.py:Net"])
def test_a_model_that_learns_a_target_is_refused_without_one(
    model: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_data.main(["infer", str(table), "--no-target"])
    schema = table.with_name("wines.schema.yaml")
    asked = ["plan", "--data", str(table), "--schema", str(schema), "--model", model]
    assert own_data.main(asked) == ConfigError.exit_code
    assert "the schema names no target, and " in capsys.readouterr().err
    job = PrivateJob.from_json({"model": model_to_json(model_of_list(["linear"], 3, 2)), "test_rows": 13})
    with pytest.raises(ConfigError, match=r"the schema names no target, and job\.model"):
        dataset_for(job, table, schema=schema)
    with pytest.raises(ConfigError, match=r"the schema names no target, and job\.model"):
        rows_of(job, _arguments(table, schema))


def test_a_schema_with_a_target_or_a_file_of_labels_is_no_table_for_it(table: Path) -> None:
    own_data.main(["infer", str(table)])
    schema, job = table.with_name("wines.schema.yaml"), PrivateJob.from_json(JOB | {"test_rows": 13})
    assert load_schema(schema).target == "c"
    with pytest.raises(ConfigError, match=r"the rows have a target, and job\.model"):
        dataset_for(job, table, schema=schema)
    with pytest.raises(ConfigError, match=r"the rows have a target, and job\.model"):
        rows_of(job, _arguments(table, schema))
    np.savez(rows := table.with_name("rows.npz"), x=heaps(), y=np.zeros(90, np.int64))
    with pytest.raises(ConfigError, match=r"the rows have a target, and job\.model"):
        rows_of(job, _arguments(rows, None))
