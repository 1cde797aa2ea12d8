"""Standard errors of regressions on shares, against the formulas in float64, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.coefficient_errors import LEAST_EIGENVALUE, standard_errors
from uvcc_engine.data.features import feature_names
from uvcc_engine.data.schema import Schema, SchemaColumn
from uvcc_engine.data.sets import Floats
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import client
from uvcc_engine.sharding.validation import check_counts, fit_model

RNG = np.random.default_rng(16)
ROWS, COLUMNS = 600, 3


def reference(objective: str, x: Floats, y: Floats, weight: Floats) -> Floats:
    """Square roots of the diagonal of the inverse of X' W X, times the residuals' variance where it is estimated."""
    whole = np.concatenate([x, np.ones((len(x), 1))], 1)
    answers = whole @ weight
    chance = 1 / (1 + np.exp(-answers))
    w = {"mse": np.ones_like(answers), "binary": chance * (1 - chance), "poisson": np.exp(answers)}[objective]
    covariance = np.linalg.inv(whole.T @ (whole * w))
    if objective == "mse":
        covariance *= np.square(y.reshape(-1, 1) - answers).sum() / (len(x) - whole.shape[1])
    return np.sqrt(np.diag(covariance))


@pytest.mark.parametrize("objective", ["mse", "binary", "poisson"])
def test_they_are_those_of_float64(objective: str) -> None:
    x = RNG.normal(size=(ROWS, COLUMNS)) @ np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.7]])
    line = x @ np.array([0.6, -0.4, 0.3]) + 0.2
    y: dict[str, Any] = {
        "mse": line + RNG.normal(0, 0.5, ROWS),
        "binary": (RNG.uniform(size=ROWS) < 1 / (1 + np.exp(-line))).astype(int),
        "poisson": RNG.poisson(np.exp(line)).astype(float),
    }
    told = ["loss", "weights", "standard_errors"]
    job: dict[str, Any] = {"objective": objective, "batch": 100, "lr": 0.1, "steps": 4, "test": 0.1, "reveal": told}
    fit = simulate.fit(["linear"], x, y[objective], **job)
    assert fit.standard_errors is not None
    wanted = reference(objective, fit.data.train_x, np.asarray(fit.data.train_y), fit.weights[0])
    assert len(fit.data.train_x) == 540  # not a multiple of the rows that are added up at a time
    assert fit.standard_errors == pytest.approx(wanted, rel=5e-3)


def test_columns_that_follow_from_each_other_have_none() -> None:
    x = RNG.normal(size=(200, 2))
    x = np.concatenate([x, x[:, :1] + 1e-3 * RNG.normal(size=(200, 1))], 1)
    told = ["weights", "standard_errors"]
    fit = simulate.fit(["linear"], x, x[:, 0], objective="mse", batch=50, steps=1, reveal=told)
    assert fit.standard_errors is None
    assert LEAST_EIGENVALUE > 32 * 2.0**-16  # above what truncation leaves of a zero
    assert standard_errors(np.eye(3), np.array([3.0, 1.0, 1.0])) is None  # as many rows as coefficients


def test_the_owner_gets_a_table_with_the_columns_names(tmp_path: Path) -> None:
    weights = {"weight.0": np.array([[0.5], [-1.0], [2.0]])}
    args = client.argparse.Namespace(out=tmp_path, schema=None)
    names: list[str] = []
    information = [np.eye(3), np.array([[103.0, 4.0, 1.0]])]
    assert client.put_coefficients(weights, information, args, names) == []
    assert names == [owner_files.COEFFICIENTS]
    rows = list(csv.DictReader((tmp_path / owner_files.COEFFICIENTS).open()))
    assert [row["name"] for row in rows] == ["feature 0", "feature 1", "(intercept)"]
    assert [float(row["standard_error"]) for row in rows] == [0.2] * 3  # sqrt(4 / (103 - 3))
    assert [float(row["z"]) for row in rows] == [2.5, -5.0, 10.0]
    columns = (SchemaColumn("sex", "one-hot", "indicator", ("f", "m")), SchemaColumn("born", "date"))
    schema = Schema("y", (), (*columns, SchemaColumn("note", "drop")))
    assert feature_names(schema)[:5] == ["sex=f", "sex=m", "sex missing", "born", "born month 1"]
    assert len(feature_names(schema)) == schema.features
    singular = [np.zeros((3, 3)), information[1]]
    assert "leave it out" in client.put_coefficients(weights, singular, args, names)[0]
    assert next(csv.DictReader((tmp_path / owner_files.COEFFICIENTS).open()))["standard_error"] == ""


def job(**changes: Any) -> PrivateJob:
    model = model_to_json(model_of_list(changes.pop("layers", ["linear"]), 4, changes.pop("outputs", 1)))
    told = ["weights", "standard_errors"]
    found = {"model": model, "steps": 2, "batch": 8, "test_rows": 9, "objective": "mse", "reveal": told} | changes
    return PrivateJob.from_json(json.loads(json.dumps(found)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"reveal": ["standard_errors"]}, "without 'weights'"),
        ({"objective": "huber"}, "of objective 'huber'"),
        ({"weight_decay": 0.1}, "weight_decay, which draws coefficients to 0"),
        ({"row_weights": True}, "with weights of rows or classes"),
        ({"layers": [{"linear": 3}, "relu", "linear"]}, "of the model"),
    ],
)
def test_what_has_none_is_refused_by_name(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        fit_model(job(**changes))


def test_they_are_of_one_worker_and_of_enough_rows() -> None:
    with pytest.raises(ConfigError, match="on 2 workers"):
        fit_model(job(), workers=2, tensor=2)
    shapes = {"train_x": (5, 4), "test_x": (9, 4)}
    with pytest.raises(ConfigError, match="the inputs have 5 train rows, a revealed number must be of 6"):
        check_counts(shapes, job())
