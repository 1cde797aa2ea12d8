"""What an owner may name by mistake or for harm: nothing is waited for, and one sentence says what is wrong."""

from __future__ import annotations

import os
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data import csv_table
from uvcc_engine.data.array_files import stored_arrays
from uvcc_engine.data.data_files import read_arrays, read_queries, read_rows
from uvcc_engine.data.own_tokenizer import TextTokenizer
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.data.table_files import read_table
from uvcc_engine.data.text_windows import infer_text
from uvcc_engine.model.definition.base_model import read_base
from uvcc_engine.owner import own_data
from uvcc_engine.owner.joined_rows import file_digests
from uvcc_engine.owner.rows import rows_of


def batches(path: Path) -> list[Any]:
    return list(table_batches(path))


def shared(path: Path) -> Any:
    """As an owner's rows are read when they are sealed."""
    job = PrivateJob.from_json({"kind": "private", "model": "logistic-digits", "steps": 1, "batch": 4})
    labels = path if path.suffix == ".npy" else None
    return rows_of(job, Namespace(data=path, schema=None, labels=labels, weights=None, pin=None, fitted=None))


READERS: list[Callable[[Path], Any]] = [
    *(read_table, batches, read_rows, read_queries, read_arrays, stored_arrays, infer_text, shared),
    *(load_schema, read_base, lambda path: TextTokenizer(path, 100)),
    lambda path: file_digests(path, path),
]


@pytest.fixture(params=["x.csv", "x.npz", "x.parquet", "x.npy"])
def pipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A pipe that nobody writes to: whoever opens it waits."""
    path = tmp_path / request.param
    os.mkfifo(path)
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_and_not_waited_for(read: Callable[[Path], Any], pipe: Path) -> None:
    with pytest.raises(UnreadableError, match=r"is a pipe, not a file") as refused:
        read(pipe)
    assert "save them in a file" in refused.value.hint


@pytest.mark.timeout(60)
def test_labels_that_are_a_pipe_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    os.mkfifo(tmp_path / "y.npy")
    with pytest.raises(UnreadableError, match=r"y\.npy is a pipe"):
        read_rows(tmp_path / "x.npy", tmp_path / "y.npy")


def test_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").symlink_to("/dev/zero")
    with pytest.raises(UnreadableError, match=r"x\.csv is a device"):
        read_table(tmp_path / "x.csv")


def wide(path: Path, columns: int) -> Path:
    names = [f"c{n}" for n in range(columns)]
    path.write_text("\n".join(",".join(cells) for cells in (names, ["1"] * columns, ["0"] * columns)) + "\n")
    return path


@pytest.mark.timeout(120)
def test_a_table_of_a_million_columns_is_refused_at_once(tmp_path: Path) -> None:
    path = wide(tmp_path / "wide.csv", 1_000_000)
    for read in (read_table, batches):
        with pytest.raises(ConfigError, match="1000000 columns, at most 100000 are read"):
            read(path)


@pytest.mark.timeout(120)
def test_so_many_columns_as_are_read_take_time_by_their_number(tmp_path: Path) -> None:
    """By its square it would be minutes."""
    found = read_table(wide(tmp_path / "wide.csv", csv_table.MOST_COLUMNS))
    assert len(found.columns) == csv_table.MOST_COLUMNS
    with pytest.raises(ConfigError, match="has two columns 'c'"):
        csv_table.header_names("t.csv", [*map(str, "abc"), "c"])


def test_an_archive_with_an_entry_that_is_no_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros((4, 2)))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y.npy", b"0 1 0 1")
    for read in (read_rows, read_arrays, read_table):
        with pytest.raises(UnreadableError, match=r"cannot read .*rows\.npz: .*y"):
            read(path)


def test_an_archive_with_an_encrypted_entry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.zeros(4))
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flag of each entry, in both of its headers
        found = -1
        while (found := data.find(mark, found + 1)) >= 0:
            data[found + at] |= 1
    path.write_bytes(data)
    for read in (read_rows, read_arrays):
        with pytest.raises(UnreadableError, match="encrypted"):
            read(path)


def test_labels_below_zero_are_refused_by_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, they were found when pods were rented already."""
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.array([-3, 6, 0, 1]))
    assert own_data.main(["plan", "--data", str(path), "--model", '["linear"]']) == 2
    assert "error: rows.npz: a label is -3 (labels are classes 0, 1, 2, ...)" in capsys.readouterr().err


def test_a_file_without_a_row_is_told_so(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((0, 4)), y=np.zeros(0))
    with pytest.raises(ConfigError, match=r"rows\.npz holds no row"):
        read_rows(tmp_path / "rows.npz")
    np.savez(tmp_path / "rows.npz", x=np.zeros((0, 4)), y=np.zeros(3))
    with pytest.raises(ConfigError, match="do not fit"):
        read_rows(tmp_path / "rows.npz")
