"""Parquet and npz tables, rows that are dropped, and three owners' tables that are trained on together."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import PARTIES

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.features import prepare, transform
from uvcc_engine.data.schema import load_schema, parse_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import Dataset
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.owner import client
from uvcc_engine.sealing.joint import open_set
from uvcc_engine.transcript.signing.identity import Identity

torch.set_num_threads(1)
RNG = np.random.default_rng(8)
COLUMNS: dict[str, list[Any]] = {
    "age": [float(a) for a in RNG.uniform(20, 80, 60).round(3)],
    "ward": [["north", "south"][i % 2] for i in range(60)],
    "ill": [int(RNG.integers(0, 2)) for _ in range(60)],
}
SCHEMA = {
    "target": {"column": "ill", "values": ["0", "1"]},
    "columns": {"age": "standardise", "ward": {"kind": "one-hot", "values": ["north", "south"]}},
}


def as_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return path


def as_npz(path: Path, columns: dict[str, list[Any]]) -> Path:
    np.savez(path, **{name: np.array(cells) for name, cells in columns.items()})
    return path


def as_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(("write", "ending"), [(as_npz, "npz"), (as_parquet, "parquet")])
def test_the_same_columns_give_the_same_features_whatever_the_file(write: Any, ending: str, tmp_path: Path) -> None:
    schema = parse_schema(SCHEMA)
    one = prepare(read_table(as_csv(tmp_path / "t.csv", COLUMNS)), schema)
    other = prepare(read_table(write(tmp_path / f"t.{ending}", COLUMNS)), schema)
    assert np.array_equal(one.data.train_x, other.data.train_x)
    assert np.array_equal(one.data.test_y, other.data.test_y)


def test_parquet_without_a_value_is_missing_and_odd_types_are_refused(tmp_path: Path) -> None:
    table = read_table(as_parquet(tmp_path / "t.parquet", {"a": [1.5, None], "b": ["x", None]}))
    assert table.columns == {"a": ["1.5", ""], "b": ["x", ""]}
    with pytest.raises(ConfigError, match="column 'a' is of type list"):
        read_table(as_parquet(tmp_path / "l.parquet", {"a": [[1], [2]]}))


def test_columns_of_a_matrix_are_numbered(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", x=np.arange(6.0).reshape(3, 2), y=np.array([1, 0, 1]))
    assert list(read_table(tmp_path / "m.npz").columns) == ["x.0", "x.1", "y"]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("t.npz", b"nonsense", "cannot read"),
        ("t.parquet", b"PAR1 nonsense PAR1", "cannot read"),
        ("t.npz", {"a": [1, 2], "b": [1]}, "columns of different lengths"),
        ("t.npz", {"a": [[[1]]]}, "has shape"),
    ],
)
def test_files_that_hold_no_table_are_refused(name: str, content: Any, what: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        path.write_bytes(content)
    else:
        np.savez(path, **{key: np.array(value) for key, value in content.items()})
    with pytest.raises(UvccError, match=what):
        read_table(path)


def test_a_compressed_table_with_a_damaged_byte_is_said_to_be_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez_compressed(path, age=np.arange(500.0) * 1.7)
    whole = path.read_bytes()
    seen = set[bool]()
    for at in range(60, 160):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(UvccError) as found:
            read_table(path)
        seen.add("while decompressing" in found.value.what)
    assert True in seen


def test_rows_without_a_value_are_left_out_and_the_others_keep_their_side(tmp_path: Path) -> None:
    holes = COLUMNS | {"age": ["" if i % 7 == 3 else a for i, a in enumerate(COLUMNS["age"])]}
    dropping = parse_schema(SCHEMA | {"columns": SCHEMA["columns"] | {"age": {"kind": "minmax", "missing": "drop"}}})  # type: ignore[operator]
    made = prepare(read_table(as_csv(tmp_path / "t.csv", holes)), dropping)
    assert len(made.data.train_x) + len(made.data.test_x) == 60 - 9
    whole = prepare(read_table(as_csv(tmp_path / "w.csv", COLUMNS)), dropping)
    assert len(whole.data.test_x) - len(made.data.test_x) <= 9
    assert set(made.data.test_x[:, 1]) <= {0.0, 1.0}
    with pytest.raises(ConfigError, match=r"row 4 .*column 'age'.* has no value"):
        transform(read_table(tmp_path / "t.csv"), made.schema)  # a prediction is wanted of every row
    empty = COLUMNS | {"age": [""] * 60}
    with pytest.raises(ConfigError, match="every row lacks"):
        prepare(read_table(as_csv(tmp_path / "e.csv", empty)), dropping)


def test_three_owners_tables_are_trained_on_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first owner's statistics scale all; each shares alone; nobody sees another's rows."""
    parts = [{name: cells[k::3] for name, cells in COLUMNS.items()} for k in range(3)]
    tables = [as_csv(tmp_path / f"t{k}.csv", part) for k, part in enumerate(parts)]
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema_text(prepare(read_table(tables[0]), parse_schema(SCHEMA)).schema))
    made = [prepare(read_table(table), load_schema(schema)).data for table in tables]
    assert abs(made[1].train_x[:, 0].mean()) > 1e-6  # scaled by the first owner's mean, not by their own
    joined = Dataset(*(np.concatenate([getattr(d, n) for d in made]) for n in NAMES), 2)
    model = model_to_json(model_of_list(["linear"], 3, 2))
    job = PrivateJob.from_json({"model": model, "steps": 3, "batch": 16, "test_rows": len(joined.test_x)})
    (tmp_path / "job.json").write_text(json.dumps(job.to_json()))
    (tmp_path / "parties.json").write_text(json.dumps([p.public.to_json() for p in PARTIES]))
    for k, table in enumerate(tables):
        files = ["--job", "job.json", "--parties", "parties.json", "--owner", f"owner{k}", "--out", f"out{k}"]
        command = [str(tmp_path / word) if not word.startswith("--") else word for word in files]
        assert client.main([*command, "--data", str(table), "--schema", str(schema), "--seed", str(k)]) == 0
    folders = [str(tmp_path / f"out{k}") for k in range(3)]
    assert client.main(["--combine", *folders, "--out", str(tmp_path / "all")]) == 0
    public = json.loads((tmp_path / "all" / "commitments.json").read_text())
    assert public["owner"] == Identity.load(tmp_path / "owner0").public.x25519
    capsys.readouterr()

    def body(rt: Runtime) -> list[float | None]:
        box = (tmp_path / "all" / client.sealed_name(rt.party)).read_bytes()
        inputs = open_set(box, party=rt.party, identity=PARTIES[rt.party], **public)
        trainer, losses = PrivateTrainer(rt, job, find_model(job.model), inputs), []
        for step in range(job.steps):
            rt.begin_epoch(step)
            losses.append(trainer.step(step).loss)
        return losses

    assert LocalPlanes(job.seed).run_three(body)[0] == list(simulate.train(job, joined).losses)


NAMES = ("train_x", "train_y", "test_x", "test_y")
