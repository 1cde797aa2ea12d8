"""A table of one's own: read strictly, described by a schema, fitted on its training rows alone, refused by row."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.features import prepare, sides, transform
from uvcc_engine.data.fitting_pass import FittingPass
from uvcc_engine.data.infer import infer
from uvcc_engine.data.schema import Schema, SchemaColumn, Statistics, load_schema, parse_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import TEST, TRAIN
from uvcc_engine.data.table_files import read_table
from uvcc_engine.owner import client, own_data, seal

ROWS = 40


def write(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def people(folder: Path, **changes: Any) -> Path:
    """Forty rows; ``changes`` maps ``column_row`` to what that cell holds instead."""
    header = ["id", "age", "income", "smoker", "ward", "flag", "ill"]
    rows: list[list[Any]] = []
    for i in range(ROWS):
        rows.append([1000 + i, 20 + (7 * i) % 50, 1000.5 + i * i, ["yes", "no"][i % 2], "north", i % 2, (i // 2) % 2])
    for place, cell in changes.items():
        name, _, row = place.rpartition("_")
        rows[int(row) - 1][header.index(name)] = cell
    return write(folder / "people.csv", header, rows)


def test_a_first_schema_says_of_every_column_what_it_is(tmp_path: Path) -> None:
    table = read_table(people(tmp_path, age_3="", smoker_5="NA", income_1=9e9))
    found = infer(table, "ill")
    kinds = {c.name: (c.kind, c.missing) for c in found.schema.columns}
    assert kinds == {
        "id": ("drop", "error"),
        "age": ("standardise", "mean"),
        "income": ("standardise", "error"),
        "smoker": ("one-hot", "indicator"),
        "ward": ("drop", "error"),
        "flag": ("minmax", "error"),
    }
    assert found.schema.values == ("0", "1")
    assert found.schema.by == "id"
    assert found.notes["ward"] == "constant"
    assert found.schema.features == 1 + 1 + (2 + 1) + 1


def test_what_other_programs_write_is_understood_or_doubted_aloud(tmp_path: Path) -> None:
    header = ["", "key", "price", "share", "sort", "stage", "ville", "y"]
    rows = [
        [
            i,
            f"k{i}",
            f"$1,{i % 7}00.50",
            f"{i % 5},5 %",
            ["Yes", "no", "yes"][i % 3],
            f"T{i % 3}",
            ["Köln", "Łódź"][i % 2],
            i % 2,
        ]
        for i in range(40)
    ]
    found = infer(read_table(write(tmp_path / "t.csv", header, rows)), "y")
    kinds = {c.name: c.kind for c in found.schema.columns}
    assert kinds["row"] == "drop"
    assert found.schema.by == "row"
    assert found.notes == {
        "key": "another text in every row",  # rows are split by one column alone
        "row": "another number in every row: an identifier, by which rows are split",
        "price": "texts like '$1,000.50' look like numbers: write 1234.5 for them to be learned as such",
        "share": "texts like '0,5 %' look like numbers: write 1234.5 for them to be learned as such",
        "sort": "'Yes' and 'yes' are two categories",
    }
    text = schema_text(found.schema)
    assert "values: [Köln, Łódź]" in text
    (tmp_path / "s.yaml").write_bytes(text.encode())
    assert load_schema(tmp_path / "s.yaml") == found.schema


def test_a_schema_survives_its_file_with_statistics_and_odd_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", ["a: b", "yes", "{x}", "1"], [[i, i % 3, f"{i % 2}#", i % 2] for i in range(30)])
    table = read_table(path)
    made = prepare(table, infer(table, "1").schema)
    for schema in (infer(table, "1").schema, made.schema):
        (tmp_path / "s.yaml").write_text(schema_text(schema, "about\nit", {"yes": "a\nnote: x"}))
        assert load_schema(tmp_path / "s.yaml") == schema


def test_statistics_are_those_of_the_training_rows_alone(tmp_path: Path) -> None:
    table = read_table(people(tmp_path))
    schema = infer(table, "ill").schema
    test = sides(table, schema) == TEST
    changed = {f"age_{row + 1}": 1e6 for row in np.flatnonzero(test)}
    other = read_table(people(tmp_path, **changed))
    one, two = prepare(table, schema), prepare(other, schema)
    assert one.schema == two.schema  # what the test rows hold moved nothing
    assert np.array_equal(one.data.train_x, two.data.train_x)
    assert not np.array_equal(one.data.test_x, two.data.test_x)
    age = one.data.train_x[:, 0]
    assert abs(age.mean()) < 1e-12
    assert abs(age.std() - 1.0) < 1e-12


def test_statistics_that_one_column_has_stay_and_the_others_are_found(tmp_path: Path) -> None:
    table = read_table(people(tmp_path))
    schema = infer(table, "ill").schema
    given = Statistics(fill=30.0, shift=30.0, scale=0.1)
    some = schema.fitted({"age": given})
    made = prepare(table, some)
    passes = FittingPass(some)
    passes.add(table)
    for found in (made.schema, passes.fitted(table.name)):
        of = {c.name: c.statistics for c in found.used}
        assert of.pop("age") == given
        assert all(of.values()), of
    assert made.data.train_x[:, 0].tolist() == ((training_cells(table, schema, "age") - 30.0) * 0.1).tolist()


def training_cells(table: CsvTable, schema: Schema, name: str) -> Any:
    train = sides(table, schema) == TRAIN
    return np.array(table.column(name), dtype=float)[train]


def test_rows_keep_their_side_when_others_come_and_go(tmp_path: Path) -> None:
    table = read_table(people(tmp_path))
    schema = infer(table, "ill").schema
    before = dict(zip(table.columns["id"], sides(table, schema).tolist(), strict=True))
    text = people(tmp_path).read_text().splitlines()
    (tmp_path / "fewer.csv").write_text("\n".join([text[0], *reversed(text[5:])]) + "\n")
    fewer = read_table(tmp_path / "fewer.csv")
    assert dict(zip(fewer.columns["id"], sides(fewer, schema).tolist(), strict=True)).items() <= before.items()
    assert sides(table, replace(schema, seed=8)).tolist() != list(before.values())


def test_every_kind_of_column_gives_what_it_says(tmp_path: Path) -> None:
    rows = [[i, 2.0**i, i, "" if i == 4 else i, "" if i == 5 else "abc"[i % 3], i % 2] for i in range(12)]
    table = read_table(write(tmp_path / "t.csv", ["m", "l", "c", "g", "h", "y"], rows))
    columns = (
        SchemaColumn("m", "minmax"),
        SchemaColumn("l", "log"),
        SchemaColumn("c", "clip"),
        SchemaColumn("g", "standardise", "indicator"),
        SchemaColumn("h", "one-hot", "mean", ("a", "b", "c")),
    )
    made = prepare(table, Schema("y", ("0", "1"), columns, test=0.3))
    train = sides(table, made.schema) == TRAIN
    x = transform(table, made.schema)
    assert x.shape == (12, 1 + 1 + 1 + 2 + 3)
    m = np.arange(12.0)
    assert np.allclose(x[:, 0], (m - m[train].min()) / np.ptp(m[train]))
    logs = np.log1p(2.0**m)
    assert np.allclose(x[:, 1], (logs - logs[train].mean()) / logs[train].std())
    low, high = np.quantile(m[train], [0.01, 0.99])
    clipped = np.clip(m, low, high)
    assert np.allclose(x[:, 2], (clipped - clipped[train].mean()) / clipped[train].std())
    known = train & (m != 4)
    fill = m[known].mean()
    g = np.where(m == 4, fill, m)
    assert np.allclose(x[:, 3], (g - m[known].mean()) / m[known].std())
    assert x[:, 4].tolist() == (m == 4).astype(float).tolist()
    shares = [(train & (m != 5) & (m % 3 == k)).sum() for k in range(3)]
    assert np.allclose(x[5, 5:], np.array(shares) / sum(shares))
    assert x[4, 5:].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"age_7": "abc"}, r"row 7 \(line 8\), column 'age' holds 'abc'"),
        ({"age_7": "1_0"}, r"row 7 \(line 8\), column 'age' holds '1_0'"),
        ({"age_7": "inf"}, r"row 7 .*'inf', which is not finite"),
        ({"age_7": "-1e999"}, r"row 7 .*not finite"),
        ({"ill_9": ""}, r"row 9 \(line 10\), column 'ill' is empty.*fill it in"),
        ({f"ill_{i + 1}": 1 for i in range(ROWS)}, "target 'ill' holds only '1'"),
    ],
)
def test_a_table_that_cannot_be_learnt_from_is_refused_by_row(tmp_path: Path, changes: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        infer(read_table(people(tmp_path, **changes)), "ill")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"age_7": ""}, r"row 7 .*'age' has no value .*missing: mean or missing: indicator"),
        ({"age_7": "nan"}, r"row 7 .*'age' has no value"),
        ({"age_7": "12,5"}, r"row 7 .*'12,5', which is no number"),
        ({"smoker_3": "maybe"}, r"row 3 \(line 4\), column 'smoker' .*add it to the column's .* with missing: mean"),
        ({"ill_3": "2"}, r"row 3 .*'2', which is none of the target's values .*0, 1"),
        ({f"age_{i + 1}": 5 for i in range(ROWS)}, "column 'age' is constant in the training rows .*kind: drop"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused_by_row(tmp_path: Path, changes: Any, what: str) -> None:
    schema = infer(read_table(people(tmp_path)), "ill").schema
    with pytest.raises(ConfigError, match=what):
        prepare(read_table(people(tmp_path, **changes)), schema)


@pytest.mark.parametrize(
    ("changes", "columns", "what"),
    [
        ({f"smoker_{i + 1}": "no" for i in range(ROWS)}, {}, "'smoker' is constant in the training rows .*kind: drop"),
        ({f"smoker_{i + 1}": "" for i in range(ROWS)}, {"smoker": {"missing": "mean"}}, "'smoker' is constant"),
        ({f"age_{i + 1}": 5 for i in range(ROWS)}, {"age": {"kind": "bins", "bins": 4}}, "column 'age' is constant"),
        ({"age_7": "1e300"}, {}, "'age' holds numbers too far apart .*kind: clip"),
        ({f"flag_{i + 1}": 3 for i in range(ROWS)}, {"flag": {"kind": "drop"}}, "target 'flag' is constant"),
    ],
)
def test_both_ways_of_reading_a_table_refuse_what_tells_nothing(
    tmp_path: Path, changes: Any, columns: dict[str, dict[str, Any]], what: str
) -> None:
    """The plan reads it whole, sharing in parts: what the one lets pass, the other must not refuse once pods run."""
    schema = infer(read_table(people(tmp_path)), "ill").schema
    changed = [replace(one, **columns.get(one.name, {})) for one in schema.columns]
    if "flag" in columns:
        left = [one for one in changed if one.name != "flag"]
        schema = replace(schema, target="flag", kind="count", values=(), columns=(*left, SchemaColumn("ill", "drop")))
    else:
        schema = replace(schema, columns=tuple(changed))
    table = read_table(people(tmp_path, **changes))
    with pytest.raises(ConfigError, match=what):
        prepare(table, schema)
    parts = FittingPass(schema)
    parts.add(table)
    with pytest.raises(ConfigError, match=what):
        parts.fitted(table.name)


FAR: dict[str, Any] = {"age_7": "1e30", "age_8": "1e30"}


@pytest.mark.parametrize(
    ("changes", "age", "what"),
    [
        (FAR, {}, r"row 7 .*'age' holds 1e\+30, beside which most others are one number .*kind: clip"),
        (FAR, {"kind": "minmax"}, r"'age' holds 1e\+30, .*kind: clip"),
        ({f"age_{i}": "1e30" for i in range(7, 14)}, {"kind": "clip"}, r"'age' holds 1e\+30, .*kind: log"),
        ({"age_7": "-1e12"}, {}, "'age' holds -1e.12, .*mend the cell"),
        ({}, {"statistics": Statistics(shift=1e30, scale=1e-30)}, "the statistics of column 'age' make one number"),
        ({}, {"statistics": Statistics(scale=1e-30)}, "of column 'age' make one number .*mend low, high, shift and"),
        ({}, {"statistics": Statistics(scale=0.0)}, "statistics of column 'age' make one number"),
        (
            {},
            {"kind": "clip", "statistics": Statistics(low=5.0, high=1.0)},
            "statistics of column 'age' make one number",
        ),
        ({}, {"kind": "minmax", "statistics": Statistics(low=1e30)}, "statistics of column 'age' make one number"),
        (
            {"age_7": ""},
            {"kind": "log", "missing": "mean", "statistics": Statistics(fill=-5.0)},
            "of column 'age' put -5 where a value is missing, and the logarithm .*give fill the column's mean",
        ),
    ],
)
def test_a_plan_refuses_numbers_of_which_fixed_point_leaves_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, age: Any, what: str
) -> None:
    schema = infer(read_table(people(tmp_path)), "ill").schema
    columns = tuple(replace(one, **age) if one.name == "age" else one for one in schema.columns)
    path, data = tmp_path / "s.yaml", people(tmp_path, **changes)
    path.write_text(schema_text(replace(schema, columns=columns)))
    code, _, said = engine(capsys, "plan", "--data", data, "--schema", path, "--model", '["linear"]')
    assert code == 2
    assert re.search(what, said), said


def test_a_target_beside_which_others_are_one_number_is_refused_and_rare_values_are_not(tmp_path: Path) -> None:
    columns = [one for one in infer(read_table(people(tmp_path)), "ill").schema.columns if one.name != "flag"]
    schema = Schema("flag", (), (*columns, SchemaColumn("ill", "drop")), kind="real")
    with pytest.raises(ConfigError, match=r"row 5 .*'flag' holds 1e\+30, beside which most others are one number"):
        prepare(read_table(people(tmp_path, flag_5="1e30")), schema)
    rare = {f"age_{i + 1}": 0 for i in range(ROWS)} | {"age_4": 3, "age_9": 100, "age_13": 1}
    assert len(prepare(read_table(people(tmp_path, **rare)), schema).data.train_x)


def test_a_plan_refuses_numbers_that_could_not_be_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, path = people(tmp_path), tmp_path / "s.yaml"
    ready = prepare(read_table(data), infer(read_table(data), "ill").schema)
    far = [
        replace(one, statistics=replace(one.statistics, scale=1e6)) if one.name == "age" and one.statistics else one
        for one in ready.schema.columns
    ]
    path.write_text(schema_text(replace(ready.schema, columns=tuple(far))))
    code, _, said = engine(capsys, "plan", "--data", data, "--schema", path, "--model", '["linear"]')
    assert code == 2
    assert "people.csv: column 'age', as the network would see its test rows, reaches" in said
    np.savez(tmp_path / "d.npz", x=np.full((9, 5), 5000.0), y=np.arange(9) % 3)
    code, _, said = engine(capsys, "plan", "--data", tmp_path / "d.npz", "--model", '["linear"]')
    assert code == 2
    assert "d.npz: a feature reaches 5000, beyond 1024" in said


def test_columns_that_the_schema_does_not_know_or_the_table_lacks_are_refused(tmp_path: Path) -> None:
    table = read_table(people(tmp_path))
    schema = infer(table, "ill").schema
    with pytest.raises(ConfigError, match=r"no column 'aeg' .did you mean 'age'"):
        prepare(table, replace(schema, columns=(*schema.columns, SchemaColumn("aeg", "log"))))
    with pytest.raises(ConfigError, match="has a column 'flag' of which the schema says nothing"):
        prepare(table, replace(schema, columns=tuple(c for c in schema.columns if c.name != "flag")))
    with pytest.raises(ConfigError, match="no training row of class '7'"):
        prepare(table, replace(schema, values=("0", "1", "7")))
    with pytest.raises(ConfigError, match="0 of 40 rows are for the test"):
        prepare(table, replace(schema, test=1e-9))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "has no rows"),
        (b"a,b\n", "has no rows"),
        (b"1,2\n3,4\n", "starts with numbers, not with its columns' names"),
        (b"a,b\n1,2\n1,2,3\n", r"row 2 \(line 3\) has 3 cells, the header 2"),
        (b"a,a\n1,2\n", "two columns 'a'"),
        (b"a,\n1,2\n", "column 2 has no name"),
        (b",,a\n1,2,3\n", "column 2 has no name"),
        (b",row\n1,2\n", "column 1 has no name"),
        (b"a,b\n1,\xff\n", "line 2 is not UTF-8"),
        (b'a,b\n1,"2\n', "line 2"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_line(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UvccError, match=what):
        read_table(tmp_path / "t.csv")


def test_delimiters_quotes_and_marks_of_other_programs_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'\xef\xbb\xbfa;b\r\n1;"x;\r\ny"\r\n\r\n2; z \r\n')
    table = read_table(tmp_path / "t.csv")
    assert table.columns == {"a": ["1", "2"], "b": ["x;\r\ny", "z"]}
    assert table.place(1, "b") == "t.csv, row 2 (line 5), column 'b'"


GOOD: dict[str, Any] = {"target": {"column": "y", "values": [0, 1]}, "columns": {"a": {"kind": "log"}}}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"colums": {}}, "unknown key 'colums' .did you mean 'columns'"),
        ({"columns": {"a": {"kind": "standardize"}}}, "columns.a.kind is 'standardize' .did you mean 'standardise'"),
        ({"columns": {"a": {"kind": "log", "mising": "mean"}}}, "did you mean 'missing'"),
        ({"columns": {"a": {"kind": "one-hot"}}}, "of kind one-hot with 0 values"),
        ({"columns": {"a": {"kind": "one-hot", "values": [True, False]}}}, "put words in quotes"),
        ({"columns": {"a": {"kind": "one-hot", "values": list(range(10**4))}}}, "10000 categories, at most 64"),
        ({"columns": {"y": {"kind": "log"}}}, "the target 'y' is one of the features"),
        ({"columns": {"a": {"kind": "log", "statistics": {"scale": float("inf")}}}}, "scale is inf .it must be finite"),
        ({"columns": {"a": "drop"}}, "every column is dropped"),
        ({"columns": []}, "columns is no mapping"),
        ({"target": {"column": "y", "values": [1, 1.0]}}, "names a value twice"),
        ({"target": {"column": "y", "values": [1]}}, "has 1 classes"),
        ({"target": "y"}, "target is 'y'"),
        ({"split": {"test": 1.5}}, "split.test is 1.5"),
        ({"split": {"seed": -1}}, "split.seed is -1"),
    ],
)
def test_a_wrong_schema_is_refused_and_says_what_to_write(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_schema(GOOD | changes)


def test_more_classes_than_can_be_told_apart_are_refused_before_any_is_read() -> None:
    target = {"column": "y", "values": [*range(10**6)]}
    with pytest.raises(ConfigError, match=r"target\.values names 1000000 classes, at most 2048 are told apart"):
        parse_schema(GOOD | {"target": target})


@pytest.mark.parametrize("text", ["", "7", "[1]", "a: [", "\x00", "!!python/object:os.system {}", "&a [*a]"])
def test_a_file_that_is_no_schema_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises((ConfigError, UnreadableError)):
        load_schema(tmp_path / "s.yaml")


def test_a_schema_of_a_million_categories_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    with path.open("wb") as file:
        file.truncate(10 << 20)
    with pytest.raises(ConfigError, match=r"s\.yaml is 10 MiB long, a schema at most 4") as caught:
        load_schema(path)
    assert "64 categories" in caught.value.hint


def test_a_column_that_is_described_twice_is_refused_by_line(tmp_path: Path) -> None:
    text = "target: {column: y, values: [0, 1]}\ncolumns:\n  a: {kind: log}\n  a: {kind: drop}\n"
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"'a' stands twice.*line 4"):
        load_schema(tmp_path / "s.yaml")


def engine(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = own_data.main([str(a) for a in args])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_schema_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = people(tmp_path)
    code, out, _ = engine(capsys, "infer", table, "--target", "ill")
    assert code == 0
    assert json.loads(out)["columns"] == {"drop": 2, "minmax": 1, "one-hot": 1, "standardise": 2}
    (tmp_path / "people.schema.yaml").write_text("mine")
    code, _, err = engine(capsys, "infer", table)
    assert code == 2
    assert "exists already" in err
    assert (tmp_path / "people.schema.yaml").read_text() == "mine"
    assert engine(capsys, "infer", table, "--target", "ill", "--force")[0] == 0


def test_a_plan_fills_in_what_follows_from_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, schema = people(tmp_path), tmp_path / "people.schema.yaml"
    engine(capsys, "infer", table, "--target", "ill")
    where = ("plan", "--data", table, "--schema", schema, "--model")
    code, out, _ = engine(capsys, *where, '[{"linear": 3}, "relu", "linear"]')
    found = json.loads(out)
    assert code == 0
    assert (found["model"]["features"], found["model"]["classes"]) == (5, 2)
    assert sum(found["rows"].values()) == ROWS
    code, _, err = engine(capsys, *where, "mlp-digits")
    assert code == 2
    assert "the data has 5 features and 2 classes, mlp-digits takes 64 and 10" in err
    code, _, err = engine(capsys, *where, '["rellu"]')
    assert (code, "unknown layer 'rellu' (did you mean 'relu'?)" in err) == (2, True)
    (tmp_path / "pin").write_text(json.dumps(found["pin"]))
    own_data.prepared(table, schema, tmp_path / "pin")
    for file in (table, schema):
        kept = file.read_bytes()
        file.write_bytes(kept + b"\n")
        with pytest.raises(ConfigError, match=f"{file.name} has changed since the run was planned"):
            own_data.prepared(table, schema, tmp_path / "pin")
        file.write_bytes(kept)


def test_a_schema_that_lies_beside_the_table_is_named_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = write(tmp_path / "numbers.csv", ["id", "age", "ill"], [[i, i % 9, i % 2] for i in range(ROWS)])
    plan = ("plan", "--data", numbers, "--model", '["linear"]')
    code, out, _ = engine(capsys, *plan)
    assert (code, json.loads(out)["model"]["features"]) == (0, 2)  # nothing beside it: every column is a feature
    engine(capsys, "infer", numbers, "--target", "ill")
    code, _, err = engine(capsys, *plan)
    assert code == 2
    assert "numbers.schema.yaml lies beside" in err
    assert f"say `schema: {tmp_path / 'numbers.schema.yaml'}` under job" in err
    code, out, _ = engine(capsys, *plan, "--schema", tmp_path / "numbers.schema.yaml")
    assert (code, json.loads(out)["model"]["features"]) == (0, 1)  # the id is none
    code, out, _ = engine(capsys, *plan, "--schema", "none")
    assert (code, json.loads(out)["model"]["features"]) == (0, 2)


@pytest.mark.parametrize("program", ["share", "seal"])
def test_no_program_of_the_owner_trains_past_a_schema_beside_the_table(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = people(tmp_path)
    engine(capsys, "infer", table, "--target", "ill")
    (tmp_path / "job.json").write_text("{}")
    more = ["--check", tmp_path / "job.json"] if program == "share" else ["--request", tmp_path / "r", "--owner", "o"]
    more += [] if program == "share" else ["--out", tmp_path / "out"]
    module = {"share": client, "seal": seal}[program]
    code = module.main([str(part) for part in [*more, "--data", table]])
    assert (code, "people.schema.yaml lies beside" in capsys.readouterr().err) == (2, True)


def test_texts_with_line_breaks_stand_in_a_schema_and_are_read_again(tmp_path: Path) -> None:
    """Spreadsheets write them for cells of two lines, in quotes."""
    rows = [[i, i / 7.0, ["one\nline", "a: 'b'", " #c", "yes"][i % 4], i % 2] for i in range(40)]
    table = read_table(write(tmp_path / "t.csv", ["id", "the\nage: 'x'", "kind\r\nof it", "y"], rows))
    found = infer(table, "y").schema
    assert [c.name for c in found.columns] == ["id", "the\nage: 'x'", "kind\r\nof it"]
    text = schema_text(found)
    assert parse_schema(yaml.safe_load(text)) == found
    weighted = replace(found, weight=found.columns[1].name, columns=(found.columns[0], found.columns[2]))
    assert parse_schema(yaml.safe_load(schema_text(weighted))) == weighted


def test_dates_in_several_forms_and_points_between_thousands_are_told(tmp_path: Path) -> None:
    forms = ["2024-03-{:02d}", "{:02d}.03.2024", "03/{:02d}/2024", "{:02d}-Mar-2024"]
    rows = [
        [
            forms[i % 4].format(1 + i % 28),
            f"Mar {1 + i % 28}, 2024",
            f"{1 + i}.{100 + i}" if i % 3 else str(900 + i),
            f"{1 + i}.{100 + i}" if i % 3 else "0.5",
            f"{1 + i}.{100 + i}",
            i % 2,
        ]
        for i in range(60)
    ]
    table = read_table(write(tmp_path / "t.csv", ["seen", "named", "income", "mixed", "exact", "y"], rows))
    notes = infer(table, "y").notes
    assert notes.keys() == {"seen", "named", "income"}
    told = "look like dates: write all of them as 2024-12-31 for them to be learned as such"
    assert notes["seen"] == f"texts like '02.03.2024' and '04-Mar-2024' {told}"
    assert notes["named"] == f"texts like 'Mar 1, 2024' {told}"
    assert notes["income"] == (
        "'9.108' is read as a number below 1000, beside '957': if points part thousands, write 9108"
    )


def test_why_no_column_is_left_is_told_of_each(tmp_path: Path) -> None:
    alone = read_table(write(tmp_path / "one.csv", ["y"], [[i % 2] for i in range(30)]))
    with pytest.raises(ConfigError, match=r"one.csv has no column to learn from beside 'y'") as told:
        infer(alone)
    assert "one column" in told.value.hint
    assert "semicolons" in told.value.hint
    rows = [[i, f"k{i}", 7, "", "a", "b", i % 2] for i in range(30)]
    many = read_table(write(tmp_path / "many.csv", ["id", "code", "same", "none", "p", "q", "y"], rows))
    with pytest.raises(ConfigError) as told:
        infer(many)
    assert told.value.hint == (
        "id: another number in every row: an identifier; code: another text in every row; same: constant; none: empty;"
        " and 2 more"
    )
