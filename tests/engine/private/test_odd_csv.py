"""Tables as spreadsheets of other countries export them: read alike by all that read tables, or refused by place."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.decimal_commas import as_read, holds_decimal_commas
from uvcc_engine.data.features import transform
from uvcc_engine.data.infer import infer
from uvcc_engine.data.schema import COMMA, DROP, ONE_HOT, POINT, Schema, load_schema, parse_schema
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import own_data
from uvcc_engine.owner.rows import rows_of

GERMAN = "sep=;\r\nGröße in m;Größe 2;Mit Leerzeichen;Leer;Ort;Kennung\r\n"


def german(path: Path, decimal: str = ",", first: str = "") -> Path:
    """60 rows with decimal commas, thousands of one column without any mark, umlauts, a column that is empty."""
    rng, lines = np.random.default_rng(5), []
    for row in range(60):
        tall, wide = rng.normal(1.7, 0.2), rng.integers(900, 3000)
        cells = [first if first and row == 2 else f"{tall:.2f}".replace(".", decimal), f"{wide}"]
        cells += [f"{rng.normal():.3f}".replace(".", decimal) if row % 9 else "", "", ["Köln", "Bonn"][row % 2]]
        lines.append(";".join([*cells, "ja" if tall > 1.7 else "nein"]))
    path.write_bytes(("\ufeff" + GERMAN + "\r\n".join(lines) + "\r\n").encode())
    return path


def inferred(path: Path, **asked: object) -> Schema:
    given = {"file": path, "out": None, "bins": 0, "embed": 0, "target": "", "no_target": False, "force": True}
    return load_schema(Path(own_data.infer_schema(Namespace(**(given | asked)))["schema"]))


def test_decimal_commas_are_inferred_and_read_alike_by_all_that_read_the_table(tmp_path: Path) -> None:
    path, twin = german(tmp_path / "d.csv"), german(tmp_path / "e.csv", ".")
    schema = inferred(path)
    assert schema.decimal == COMMA
    assert 'decimal: ","' in (tmp_path / "d.schema.yaml").read_text().replace("'", '"')
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == inferred_kinds(twin)
    assert kinds["Leer"] == DROP
    assert kinds["Ort"] == ONE_HOT
    assert kinds["Größe in m"] == "standardise"
    assert schema.target == "Kennung"
    fitted = own_data.prepared(path, tmp_path / "d.schema.yaml")
    clear = own_data.prepared(twin, tmp_path / "e.schema.yaml")
    assert np.array_equal(fitted.data.train_x, clear.data.train_x)
    table = as_read(read_table(path), fitted.schema)
    assert np.array_equal(transform(table, fitted.schema), transform(read_table(twin), clear.schema))  # as predict does
    model = model_to_json(model_of_list(["linear"], schema.features, 2))
    held = {"test_rows": len(clear.data.test_x), "batch": 8, "steps": 2}
    job = PrivateJob.from_json({"model": model} | held)
    told = [
        dict(own_blocks(job, one, tmp_path / f"{one.stem}.schema.yaml")) for one in (path, twin)
    ]  # what is shared of a file that is read in parts
    assert told[0].keys() == told[1].keys()
    assert all(np.array_equal(told[0][name], told[1][name]) for name in told[0])


def own_blocks(job: PrivateJob, data: Path, schema: Path) -> list[tuple[str, np.ndarray]]:
    rows = rows_of(job, Namespace(data=data, schema=schema, labels=None, weights=None))
    found: dict[str, list[np.ndarray]] = {}
    for name, values in rows.blocks():
        found.setdefault(name, []).append(values)
    return [(name, np.concatenate(parts)) for name, parts in found.items()]


def inferred_kinds(path: Path) -> dict[str, str]:
    schema = inferred(path)
    assert schema.decimal == POINT
    return {column.name: column.kind for column in schema.columns}


@pytest.mark.parametrize(
    ("cell", "said"),
    [("1.234,5", "holds '1.234,5'"), ("1.5", "holds '1.5'"), ("1 234,5", "holds '1 234,5'"), ("1,234,5", "'1,234,5'")],
)
def test_a_number_that_may_mean_another_is_refused_by_row_and_column(cell: str, said: str, tmp_path: Path) -> None:
    path = german(tmp_path / "d.csv", first=cell)
    with pytest.raises(ConfigError) as told:
        inferred(path)
    assert said in told.value.what
    assert "row 3 (line 5), column 'Größe in m'" in told.value.what
    inferred(german(tmp_path / "good.csv"))
    with pytest.raises(ConfigError, match=r"row 3 .*column 'Größe in m'"):  # the owner's program, with that schema
        own_data.prepared(path, tmp_path / "good.schema.yaml")


def test_commas_that_may_part_thousands_are_refused_unless_another_column_tells(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"{1 + n % 9},{100 + n};{n / 10:.1f};{'ab'[n % 2]}" for n in range(30)]
    path.write_text("\n".join(["price;x;y", *lines]))
    with pytest.raises(ConfigError, match=r"row 1 \(line 2\), column 'price' holds '1,100': 1.100 or 1100"):
        inferred(path)
    path.write_text("\n".join(["price;x;y", *(line.replace(".", ",") for line in lines)]))
    assert inferred(path).decimal == COMMA
    mixed = [f"{n / 7:.2f}".replace(".", ",") + f";{n / 10:.1f};{'ab'[n % 2]}" for n in range(30)]
    path.write_text("\n".join(["price;x;y", *mixed]))
    with pytest.raises(ConfigError, match=r"column 'x' holds '0.0', and column 'price' has decimal commas"):
        inferred(path)


def test_only_a_table_parted_by_semicolons_has_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["x,z,y", *(f'"{n % 7},5",{n / 3:.2f},{"ab"[n % 2]}' for n in range(30))]))
    assert not holds_decimal_commas(read_table(path))
    assert inferred(path).decimal == POINT
    assert "look like numbers" in infer(read_table(path)).notes["x"]
    path.write_text("\n".join(["x;z;y", *(f"{'abc'[n % 3]},{n % 4};{n};{'ab'[n % 2]}" for n in range(30))]))
    assert inferred(path).decimal == POINT  # words with commas


def test_a_schema_keeps_what_it_says_of_decimals_and_takes_no_other(tmp_path: Path) -> None:
    assert parse_schema({"decimal": ",", "columns": {"a": "standardise"}}).decimal == COMMA
    with pytest.raises(ConfigError, match="decimal"):
        parse_schema({"decimal": ";", "target": {"column": "y", "values": ["a", "b"]}, "columns": {"a": "minmax"}})
    real = {"target": {"column": "y", "kind": "real"}, "decimal": ",", "columns": {"a": "minmax"}}
    path = tmp_path / "t.csv"
    path.write_text("a;y\n" + "\n".join(f"{n};{n}.5" for n in range(20)))
    with pytest.raises(ConfigError, match=r"row 1 \(line 2\), column 'y' holds '0.5'"):
        as_read(read_table(path), parse_schema(real))


def test_a_first_line_that_says_the_delimiter_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for first, by in (("sep=;", ";"), ('"sep=|"', "|"), ("SEP=,", ","), ("sep=\t", "\t")):
        path.write_text(
            f"{first}\n" + "\n".join([by.join(("a", "b, c", "y")).replace(", ", " ")] + [by.join("123")] * 3)
        )
        table = read_table(path)
        assert list(table.columns) == ["a", "b c", "y"]
        assert table.place(0, "a").endswith("row 1 (line 3), column 'a'")
        assert [one.columns for one in table_batches(path)] == [table.columns]
    path.write_text("sep=x;b\n1;2\n3;4\n")
    assert list(read_table(path).columns) == ["sep=x", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"name;y\nK\xf6ln;a\n", "line 2 is not UTF-8 text"),
        (b"a;y\n1,5;ja\n2,5;ja\n3,25;ja\n", "the target 'y' holds only 'ja'"),
        (b"a;y\n1,5;ja\n2,5;\n3,25;nein\n", "row 2 \\(line 3\\), column 'y' is empty, and is the target"),
        (b"a;y\n1,5;ja\n2,5;nein\n", "rows"),
        (b"a;b;y\n;;ja\n;;nein\n;;ja\n", "no column to learn from"),
    ],
)
def test_what_cannot_be_learned_from_is_named(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text)
    with pytest.raises(UvccError, match=said):
        inferred(path)
    path.write_bytes(b"a;b\n1,5;ja\n")
    with pytest.raises(UvccError, match="has no column 'Ziel'"):
        inferred(path, target="Ziel")
