"""Columns whose categories become learned vectors: from a table to a training, its twin, and a prediction in clear."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.owner_files import MODEL, PREPROCESSING, WEIGHTS
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.schema import dimension_of, load_schema, parse_schema
from uvcc_engine.model.definition.column_embeddings import column_embeddings, embedded_width
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.owner import client, own_data
from uvcc_engine.owner.rows import rows_of

torch.set_num_threads(1)
WARDS = [f"w{k:02}" for k in range(12)]


def table(folder: Path) -> Path:
    """The label follows from the ward, and a little from the age; the town says nothing."""
    rng = np.random.default_rng(2)
    lines = ["id,age,ward,town,y"]
    for i in range(160):
        ward, age = int(rng.integers(0, 12)), float(rng.normal(50, 10))
        town = "" if i % 40 == 7 else "ABCDEFGHIJ"[int(rng.integers(0, 10))]
        lines.append(f"{i},{age:.1f},{WARDS[ward]},{town},{'ab'[int(ward % 3 == 0 or age > 65)]}")
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    return folder / "t.csv"


def engine(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any, str]:
    code = own_data.main([str(one) for one in args])
    told = capsys.readouterr()
    return code, json.loads(told.out) if told.out else None, told.err


def test_categories_become_vectors_that_are_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, schema = table(tmp_path), tmp_path / "t.schema.yaml"
    code, found, _ = engine(capsys, "infer", data, "--target", "y", "--embed", 8)
    assert code == 0
    assert found["columns"] == {"drop": 1, "embedding": 2, "standardise": 1}
    assert found["notes"]["ward"] == "12 categories, a vector of 6 for each"
    plan = load_schema(schema)
    assert (plan.features, embedded_width(plan)) == (1 + 12 + 10 + 1, 1 + 6 + 5 + 1)  # one says that the town lacks
    asked = ["plan", "--data", data, "--schema", schema, "--model"]
    code, planned, _ = engine(capsys, *asked, json.dumps([{"linear": 8}, "relu", "linear"]))
    assert code == 0
    values = {"model": planned["model"], "steps": 3, "batch": 16, "lr": 0.3, "test_rows": planned["rows"]["test"]}
    job = PrivateJob.from_json(values)
    model = find_model(job.model)
    assert model.layers[:1] == column_embeddings(plan)
    assert [spec.weight_shape for spec in model.weights] == [(12, 6), (10, 5), (14, 8), (9, 2)]
    rows = client.dataset_for(job, data, schema=schema)
    trained, clear = simulate.train(job, rows), train_plaintext(job, rows)
    for ours, theirs in zip(trained.weights, clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * 2.0**-16
    long = train_plaintext(PrivateJob.from_json(values | {"steps": 150}), rows)
    assert long.accuracy > 0.9
    args = argparse.Namespace(data=data, labels=None, schema=schema, weights=None, pin=None, fitted=tmp_path / "f.yaml")
    blocks: dict[str, list[Any]] = {}
    for name, block in rows_of(job, args).blocks():  # as a large table is shared
        blocks.setdefault(name, []).append(block)
    assert np.abs(np.concatenate(blocks["train_x"]) / 2.0**16 - rows.train_x).max() < 2.0**-15
    results = tmp_path / "results"
    results.mkdir()
    np.savez(results / WEIGHTS, **{f"weight.{i}": w for i, w in enumerate(long.weights)})
    (results / MODEL).write_text(json.dumps(planned["model"]))
    client.dataset_for(job, data, schema=schema, fitted=results / PREPROCESSING)
    code, said, _ = engine(capsys, "predict", "--model", results, "--data", data, "--out", tmp_path / "p.csv")
    assert code == 0
    lines = (tmp_path / "p.csv").read_text().splitlines()[1:]
    truth = [line.rpartition(",")[2] for line in data.read_text().splitlines()[1:]]
    assert np.mean([line.split(",")[1] == y for line, y in zip(lines, truth, strict=True)]) > 0.9
    assert sum(said["classes"].values()) == 160


@pytest.mark.ci(__file__)
def test_a_table_of_one_embedded_column_begins_with_its_table_and_a_module_is_fed_the_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, schema = table(tmp_path), tmp_path / "s.yaml"
    columns: dict[str, Any] = {"id": "drop", "age": "drop", "town": "drop"}
    columns["ward"] = {"kind": "embedding", "values": WARDS, "dimension": 3}
    schema.write_text(yaml.safe_dump({"target": {"column": "y", "values": ["a", "b"]}, "columns": columns}))
    assert column_embeddings(load_schema(schema)) == (Embedding(12, 1, 3, places=False),)
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self, features, classes):\n"
        "        super().__init__()\n"
        "        self.out = torch.nn.Linear(features, classes)\n"
        "    def forward(self, x):\n"
        "        return self.out(torch.relu(x))\n"
    )
    code, planned, _ = engine(capsys, "plan", "--data", data, "--schema", schema, "--model", f"{tmp_path}/m.py:M")
    assert code == 0
    model = find_model(PrivateJob.from_json({"model": planned["model"]}).model)
    assert [spec.weight_shape for spec in model.weights] == [(12, 3), (4, 2)]
    weights = [torch.from_numpy(np.arange(36.0).reshape(12, 3) / 36), torch.randn(4, 2).double()]
    x = torch.eye(12, dtype=torch.float64)
    assert torch.allclose(forward(model, weights, x), torch.relu(weights[0]) @ weights[1][:3] + weights[1][3])


def test_what_does_not_fit_an_embedded_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, schema = table(tmp_path), tmp_path / "t.schema.yaml"
    assert engine(capsys, "infer", data, "--target", "y", "--embed", 8)[0] == 0
    for model, what in (
        (json.dumps([{"trees": 3}]), "trees for 2 outputs|embedded .ward, town., and trees"),
        ("logistic-digits", "does not begin with their tables|the data has 24 features"),
    ):
        code, _, said = engine(capsys, "plan", "--data", data, "--schema", schema, "--model", model)
        assert code == 2
        assert any(part in said.replace("(", ".").replace(")", ".") for part in what.split("|")), said
    code, planned, _ = engine(capsys, "plan", "--data", data, "--schema", schema, "--model", '["linear"]')
    flat = {"classes": 2, "features": 24, "layers": [{"type": "dense", "inputs": 24, "outputs": 2}]}
    job = PrivateJob.from_json({"model": flat, "test_rows": planned["rows"]["test"]})
    with pytest.raises(ConfigError, match="the schema embeds ward, town"):
        client.dataset_for(job, data, schema=schema)
    whole = PrivateJob.from_json({"model": planned["model"], "test_rows": job.test_rows, "standardise": True})
    with pytest.raises(ConfigError, match="a schema that embeds a column"):
        client.dataset_for(whole, data, schema=schema)
    assert engine(capsys, "infer", data, "--embed", 8, "--bins", 4, "--force")[0] == 2


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ({"kind": "embedding"}, "of kind embedding with 0 values"),
        ({"kind": "embedding", "values": ["a", "b"], "dimension": 0}, "dimension is 0"),
        ({"kind": "embedding", "values": ["a", "b"], "dimension": 65}, "dimension is 65"),
        ({"kind": "one-hot", "values": ["a", "b"], "dimension": 2}, "of kind one-hot and says a dimension"),
        ({"kind": "embedding", "values": [f"v{k}" for k in range(1025)]}, "has 1025 categories, at most 1024"),
        ({"kind": "one-hot", "values": [f"v{k}" for k in range(65)]}, "has 65 categories, at most 64"),
    ],
)
def test_an_odd_dimension_or_too_many_categories_are_refused(column: dict[str, Any], what: str) -> None:
    found = {"target": {"column": "y", "values": ["a", "b"]}, "columns": {"c": column}}
    with pytest.raises(ConfigError, match=what):
        parse_schema(found)
    assert [dimension_of(n) for n in (2, 3, 12, 1000)] == [1, 2, 6, 16]
