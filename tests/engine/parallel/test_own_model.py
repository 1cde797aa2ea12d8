"""A list of layers on a table of one's own: replicas, stages and tensor ranks train it as its plaintext twin does."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
from training_kit import check_replicas, train, weights

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data.features import prepare
from uvcc_engine.data.infer import infer
from uvcc_engine.data.sets import Dataset
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.learning.plaintext import train_plaintext

TOPOLOGIES = [Topology(2, 1, 1, 1), Topology(1, 2, 1, 2), Topology(1, 1, 2, 1)]
LAYERS = [{"linear": 12}, "relu", {"linear": 8}, "relu", "linear"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(120, 6)) * [1, 10, 100, 1000, 0.1, 0.01]
    path = tmp_path_factory.mktemp("data") / "t.csv"
    with path.open("w", newline="") as file:
        rows = ([*map(repr, map(float, row)), "yes" if row[0] + row[1] / 10 > 0 else "no"] for row in x)
        csv.writer(file).writerows([[*"abcdef", "label"], *rows])
    table = read_table(path)
    return prepare(table, infer(table).schema).data


@pytest.mark.parametrize(
    "size", [*TOPOLOGIES, pytest.param(Topology(2, 2, 2, 2), marks=pytest.mark.ci(__file__))], ids=str
)
def test_two_steps_of_ones_own_model_on_ones_own_table(data: Dataset, size: Topology) -> None:
    model = model_of_list(LAYERS, 6, 2)
    job = PrivateJob.from_json(
        {"model": model_to_json(model), "steps": 2, "batch": 16, "lr": 0.25, "test_rows": len(data.test_x)}
    )
    found = train(job, size, data=data)
    clear = train_plaintext(replace(job, batch=job.batch * size.replicas), data)
    check_replicas(found)
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 64 * 2.0**-16
    assert np.allclose(found[Coord(0, 0, 0, 0)]["losses"], clear.losses, atol=1e-3)
