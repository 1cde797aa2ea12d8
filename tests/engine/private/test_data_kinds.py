"""Dates, texts, folders of images and safetensors: what they become, and what of them is refused and where."""

from __future__ import annotations

import csv
import hashlib
import json
import pickle
import re
from argparse import Namespace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data import image_folder, text_windows
from uvcc_engine.data import schema as schemas
from uvcc_engine.data.data_files import read_queries, read_rows
from uvcc_engine.data.dates import date_of, days_of, order_of
from uvcc_engine.data.features import prepare, transform
from uvcc_engine.data.fitting_pass import FittingPass
from uvcc_engine.data.infer import infer
from uvcc_engine.data.schema import Schema, SchemaColumn, load_schema, parse_schema
from uvcc_engine.data.schema_text import schema_text, write_fitted
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.data.table_files import read_table
from uvcc_engine.data.text_windows import infer_text, text_dataset
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.owner import client, own_data
from uvcc_engine.owner.rows import rows_of

FIRST = date(2023, 12, 25)  # a Monday


def visits(path: Path, form: str = "%Y-%m-%d", odd: str = "") -> Path:
    rows: list[list[Any]] = [[(FIRST + timedelta(9 * i)).strftime(form), i % 9, i % 2] for i in range(60)]
    if odd:
        rows[7][0] = odd
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["seen", "age", "ill"], *rows])
    return path


# -- dates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "order"),
    [
        ("%Y-%m-%d", "ymd"),
        ("%d.%m.%Y", "dmy"),
        ("%m/%d/%Y", "mdy"),
        ("%Y/%m/%d %H:%M:%S", "ymd"),
        ("%Y-%m-%dT09:30Z", "ymd"),
    ],
)
def test_dates_become_days_in_the_order_that_all_of_them_have(form: str, order: str, tmp_path: Path) -> None:
    table = read_table(visits(tmp_path / "visits.csv", form))
    found = infer(table)
    (seen,) = [c for c in found.schema.columns if c.name == "seen"]
    assert (seen.kind, seen.order) == ("days", order)
    text = schema_text(found.schema, "visits", found.notes)
    (tmp_path / "s.yaml").write_text(text)
    assert load_schema(tmp_path / "s.yaml") == found.schema
    ready = prepare(table, found.schema)
    x = transform(table, ready.schema)[:, 0]
    assert np.allclose(np.diff(x), np.diff(x)[0])  # nine days each
    streamed = FittingPass(found.schema)
    for part in table_batches(tmp_path / "visits.csv"):
        streamed.add(part)
    ours = next(c.statistics for c in ready.schema.used if c.name == "seen")
    theirs = next(c.statistics for c in streamed.fitted("visits").used if c.name == "seen")
    assert ours is not None
    assert theirs is not None
    assert np.allclose([ours.shift, ours.scale], [theirs.shift, theirs.scale])


def test_a_date_has_its_month_and_its_day_of_the_week(tmp_path: Path) -> None:
    table = read_table(visits(tmp_path / "visits.csv", odd="NA"))
    schema = Schema("ill", ("0", "1"), (SchemaColumn("seen", "date", "indicator"), SchemaColumn("age", "standardise")))
    assert schema.features == 1 + 12 + 7 + 1 + 1
    x = transform(table, prepare(table, schema).schema)
    for row in range(60):
        day, parts, lacking = FIRST + timedelta(9 * row), x[row, 1:20], x[row, 20]
        assert lacking == (row == 7)
        wanted = [] if row == 7 else [day.month - 1, 12 + day.weekday()]
        assert np.flatnonzero(parts).tolist() == wanted


def test_dates_in_no_clear_order_are_left_out_and_told_so(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("seen,age,ill\n" + "".join(f"{1 + i % 12}/{1 + i % 11}/2024,{i % 9},{i % 2}\n" for i in range(40)))
    found = infer(read_table(path))
    assert next(c.kind for c in found.schema.columns if c.name == "seen") == "drop"
    assert "no clear order" in found.notes["seen"]


def test_a_cell_that_is_no_date_is_named_by_row_and_column(tmp_path: Path) -> None:
    table = read_table(visits(tmp_path / "visits.csv", odd="2024-02-30"))
    schema = Schema("ill", ("0", "1"), (SchemaColumn("seen", "days"), SchemaColumn("age", "standardise")))
    with pytest.raises(ConfigError, match=r"row 8 .line 9., column 'seen' holds '2024-02-30', which is no date"):
        prepare(table, schema)
    for wrong in ("1/2/24", "2024-13-01", "yesterday", "2024-01/02", "99999-01-01", "2024-1-1 25:00"):
        assert date_of(wrong, "ymd") is None
    moment = date_of("1970-01-02T12:00", "ymd")
    assert moment is not None
    assert days_of(moment) == 1.5
    assert order_of(["1.2.2024"]) == ""
    with pytest.raises(ConfigError, match="seen is of kind log and has an order"):
        parse_schema(
            {"target": {"column": "y", "values": ["a", "b"]}, "columns": {"seen": {"kind": "log", "order": "ymd"}}}
        )


# -- texts -------------------------------------------------------------------------------------------------------------

TEXT = "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs!\n" * 12


def test_a_text_becomes_windows_and_no_letter_is_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    schema, _ = infer_text(path)
    assert parse_schema(json.loads(json.dumps(_plain(schema_text(schema))))) == schema
    data, _ = text_dataset(path, schema)
    places, width = schema.positions, len(schema.values)
    assert data.train_x.shape[1] == schema.features == places * width
    letters = "".join(schema.values)

    def read(x: np.ndarray, y: np.ndarray) -> list[str]:
        seen = x.reshape(len(x), places, width).argmax(2)
        assert np.array_equal(seen[:, 1:], y[:, :-1])
        return ["".join(letters[i] for i in (*row, last)) for row, last in zip(seen, y[:, -1], strict=True)]

    for window in read(data.train_x, data.train_y) + read(data.test_x, data.test_y):
        assert window in TEXT
    assert len(data.test_x)
    assert len(data.train_x) > len(data.test_x)


def _plain(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def test_pieces_of_the_text_are_whole_on_their_side(tmp_path: Path) -> None:
    path = tmp_path / "n.txt"
    path.write_text("".join(chr(33 + i % 90) for i in range(4000)))
    plan = text_windows.TextPlan(5, 2)
    schema = Schema("next letter", tuple(chr(33 + i) for i in range(90)), (), test=0.3, kind="next-token", text=plan)
    data, _ = text_dataset(path, schema)
    piece = text_windows.PIECE * 5 + 1
    assert len(data.train_x) + len(data.test_x) == 4000 // piece * len(range(0, piece - 5, 2)) + len(
        range(0, max(0, 4000 % piece - 5), 2)
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"positions": 0}, "text.positions is 0"),
        ({"letters": ["a", "bc"]}, "no list of single letters"),
        ({"letters": ["a", "a"]}, "2 to 4096, each once"),
        ({"letters": "words"}, "no list of single letters"),
        ({"stride": 2.5}, "text.stride is 2.5"),
        ({"strde": 2}, "unknown key 'strde'.*stride"),
    ],
)
def test_a_text_schema_that_is_wrong_is_refused_at_its_place(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_schema({"text": {"positions": 4, "letters": ["a", "b"]} | change})


def test_texts_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.txt"
    path.write_text("ab\nabç")
    schema = parse_schema({"text": {"positions": 2, "letters": ["a", "b", "\n"]}})
    with pytest.raises(ConfigError, match="line 2, column 3 holds 'ç'"):
        text_dataset(path, schema)
    path.write_text("abab")
    with pytest.raises(ConfigError, match="windows are for the test"):
        text_dataset(path, schema)
    path.write_bytes(b"ab\xff")
    with pytest.raises(UnreadableError, match="byte 2, is not UTF-8"):
        text_dataset(path, schema)
    monkeypatch.setattr(text_windows, "MOST_BYTES", 10)
    path.write_text("ab" * 9)
    with pytest.raises(ConfigError, match="longer than"):
        text_dataset(path, schema)
    with pytest.raises(UnreadableError):
        infer_text(tmp_path / "nothing.txt")


@pytest.fixture
def own_tokens(tmp_path: Path) -> Path:
    """A text with a schema whose tokenizer lies beside it: whole words, and one for all others."""
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted({word.strip(".,") for word in TEXT.split()})[:20]
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate([*words, "?"])}, unk_token="?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "words.json"))
    (tmp_path / "mine.txt").write_text(TEXT)
    schema = tmp_path / "mine.schema.yaml"
    schema.write_text("text: {positions: 4, stride: 2, tokenizer: words.json}\nsplit: {test: 0.3, seed: 1}\n")
    return schema


def test_a_text_is_read_by_the_owners_tokenizer_whose_hash_the_policy_names(
    own_tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, text = load_schema(own_tokens), own_tokens.with_name("mine.txt")
    words = own_tokens.with_name("words.json")
    digest = hashlib.sha256(words.read_bytes()).hexdigest()
    assert schema.text is not None
    assert (schema.text.sha256, schema.values[-1], schema.features) == (digest, "?", 4 * len(schema.values))
    assert parse_schema(_plain(schema_text(schema))) == schema  # the fitted one is held to the hash
    data, _ = text_dataset(text, schema)
    assert set(np.unique(data.train_y)) <= set(range(len(schema.values)))
    line = np.array([schema.values[i] for i in data.train_y[0]])
    assert all(word in TEXT or word == "?" for word in line)
    model = '[{"embedding": 8}, {"attention": {"causal": true}}, "linear"]'
    assert own_data.main(["plan", "--data", str(text), "--schema", str(own_tokens), "--model", model]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokenizer"] == found["pin"]["tokenizer"] == digest
    asked = {"model": found["model"], "test_rows": found["rows"]["test"], "batch": 4}
    args = Namespace(data=text, schema=own_tokens, labels=None, pin=None, fitted=None, weights=None)
    named = PrivateJob.from_json(asked | {"tokenizer": digest})
    assert rows_of(named, args).shapes["train_y"] == (found["rows"]["train"], 4 * len(schema.values))
    assert named.to_json()["tokenizer"] == digest
    for other in ({}, {"tokenizer": "0" * 64}):
        with pytest.raises(ConfigError, match="the schema's tokenizer has the hash"):
            rows_of(PrivateJob.from_json(asked | other), args)
    with pytest.raises(ConfigError, match="SHA-256 in hex"):
        PrivateJob.from_json(asked | {"tokenizer": "words.json"})
    pin = own_tokens.with_name("pin.json")
    pin.write_text(json.dumps(found["pin"]))
    words.write_text(words.read_text() + " ")
    with pytest.raises(ConfigError, match=r"words\.json has changed since the run was planned"):
        own_data.prepared(text, own_tokens, pin)
    with pytest.raises(ConfigError, match="has changed since the schema was read"):
        text_dataset(text, schema)
    with pytest.raises(ConfigError, match=r"words\.json has the hash .*, schema: text\.sha256 is"):
        parse_schema(_plain(schema_text(schema)))


def test_what_an_owner_receives_of_a_text_can_be_moved(
    own_tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another machine there is neither the owner's folder nor the file that the schema was written with."""
    schema, text, results = load_schema(own_tokens), own_tokens.with_name("mine.txt"), tmp_path / "results"
    results.mkdir()
    layers = '[{"embedding": 8}, {"attention": {"causal": true}}, "linear"]'
    assert own_data.main(["plan", "--data", str(text), "--schema", str(own_tokens), "--model", layers]) == 0
    planned = json.loads(capsys.readouterr().out)
    asked = {"model": planned["model"], "test_rows": planned["rows"]["test"], "tokenizer": planned["tokenizer"]}
    job = PrivateJob.from_json({**asked, "batch": 4})
    client.dataset_for(job, text, schema=own_tokens, fitted=results / owner_files.PREPROCESSING)
    assert str(tmp_path) not in (results / owner_files.PREPROCESSING).read_text()
    moved = results.rename(tmp_path / "elsewhere")
    own_tokens.with_name("words.json").unlink()
    there = load_schema(moved / owner_files.PREPROCESSING)
    assert there.text is not None
    assert schema.text is not None
    assert (there.values, there.text.sha256) == (schema.values, schema.text.sha256)
    assert Path(there.text.tokenizer) == moved / owner_files.TOKENIZER
    assert {p.stat().st_mode & 0o777 for p in moved.iterdir()} == {0o600}
    (moved / owner_files.MODEL).write_text(json.dumps(planned["model"]))
    shapes = [spec.weight_shape for spec in find_model(job.model).weights]
    np.savez(moved / owner_files.WEIGHTS, **{f"weight.{i}": np.zeros(shape) for i, shape in enumerate(shapes)})
    assert own_data.main(["predict", "--model", str(moved), "--data", str(text)]) == 2
    assert "a model of a text predicts letters, not columns" in capsys.readouterr().err  # as it is read, not the path
    with pytest.raises(UnreadableError, match=r"cannot read .*words\.json"):
        write_fitted(tmp_path / "again.yaml", schema)
    own_tokens.with_name("words.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"words\.json has changed since the schema was read"):
        write_fitted(tmp_path / "again.yaml", schema)
    assert not (tmp_path / "again.yaml").exists()


def test_a_tokenizer_that_is_none_is_refused_by_its_file(own_tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = own_tokens.with_name("words.json")
    own_tokens.write_text(own_tokens.read_text().replace("words.json", "no.json"))
    with pytest.raises(UnreadableError, match=r"cannot read .*no\.json"):
        load_schema(own_tokens)
    own_tokens.write_text(own_tokens.read_text().replace("no.json", "words.json, letters: bytes"))
    with pytest.raises(ConfigError, match="text takes letters, or a tokenizer"):
        load_schema(own_tokens)
    own_tokens.write_text(own_tokens.read_text().replace(", letters: bytes", ""))
    monkeypatch.setattr(schemas, "MOST_CLASSES", 7)
    with pytest.raises(ConfigError, match=r"words\.json has \d+ tokens") as caught:
        load_schema(own_tokens)
    assert "2 to 7" in caught.value.hint
    words.write_text("{}")
    with pytest.raises(UnreadableError, match=r"words\.json is no tokenizer"):
        load_schema(own_tokens)


def test_a_model_of_a_list_is_planned_and_shared_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    assert own_data.main(["infer", str(path)]) == 0
    capsys.readouterr()
    schema = tmp_path / "mine.schema.yaml"
    model = '[{"embedding": 8}, {"residual": ["layer-norm", {"attention": {"causal": true}}]}, "linear"]'
    plan = ["plan", "--data", str(path), "--schema", str(schema), "--model", model]
    assert own_data.main(plan) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objective"], found["model"]["positions"]) == ("cross-entropy", load_schema(schema).positions)
    job = PrivateJob.from_json({"model": found["model"], "test_rows": found["rows"]["test"], "batch": 8})
    args = Namespace(data=path, schema=schema, labels=None, pin=None, fitted=None, weights=None)
    shapes = rows_of(job, args).shapes
    assert shapes["train_x"] == (found["rows"]["train"], found["model"]["features"])
    assert shapes["train_y"] == shapes["train_x"]
    wrong = ["plan", "--data", str(path), "--schema", str(schema), "--model", '[{"embedding": 8}, "mean", "linear"]']
    assert own_data.main(wrong) == 2
    assert "gives 1 lines" in capsys.readouterr().err


# -- images and safetensors --------------------------------------------------------------------------------------------


def pictures(folder: Path, mode: str = "L") -> Path:
    rng = np.random.default_rng(1)
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (4, 5) if mode == "L" else (4, 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_a_folder_of_images_becomes_rows(mode: str, channels: int, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "all", mode)
    x, y = read_rows(folder)
    assert (x.shape, y.tolist()) == ((6, channels * 20), [0, 0, 0, 1, 1, 1])
    first = np.asarray(Image.open(folder / "cats" / "0.png")).reshape(4, 5, -1).transpose(2, 0, 1)
    assert np.allclose(x[0], first.reshape(-1) / 127.5 - 1.0)


def test_images_that_do_not_fit_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "all")

    def refused(what: str) -> None:
        with pytest.raises(UvccError, match=what):
            read_rows(folder)

    odd = folder / "dogs" / "9.png"
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(odd)
    refused(r"9.png is L of \(5, 5\), 0.png is L of \(4, 5\)")
    Image.fromarray(np.zeros((4, 5, 4), np.uint8)).save(odd)
    refused("9.png is RGBA")
    odd.write_bytes((folder / "dogs" / "1.png").read_bytes()[:60])
    refused("cannot read .*9.png")
    odd.write_bytes(b"GIF89a")
    refused("cannot read .*9.png")
    odd.unlink()
    odd.symlink_to("/etc/passwd")
    assert len(read_rows(folder)[0]) == 6  # links are not followed
    monkeypatch.setattr(image_folder, "MOST_SIDE", 4)
    refused(r"is L of \(5, 4\)")
    with pytest.raises(ConfigError, match="leave the labels out"):
        read_rows(folder, odd)
    with pytest.raises(ConfigError, match="has 0 folders"):
        read_rows(folder / "cats")


def test_safetensors_hold_tables_and_rows(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1] * 3)
    save_file({"x": x, "y": y}, tmp_path / "rows.safetensors")
    found = read_rows(tmp_path / "rows.safetensors")
    assert np.array_equal(found[0], x)
    assert np.array_equal(found[1], y)
    table = read_table(tmp_path / "rows.safetensors")
    assert table.columns == {
        "x.0": [repr(v) for v in x[:, 0].tolist()],
        "x.1": [repr(v) for v in x[:, 1].tolist()],
        "y": [str(v) for v in y.tolist()],
    }
    (part,) = table_batches(tmp_path / "rows.safetensors")
    assert part.columns == table.columns
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    for read in (read_rows, read_table):
        with pytest.raises(UnreadableError, match="cannot read"):
            read(tmp_path / "bad.safetensors")


def test_a_query_that_is_none_is_told_in_words_of_ours(tmp_path: Path) -> None:
    """Not with labels that nobody gave, nor with NumPy's advice to unpickle what somebody else may have written."""
    files = {"none.npy": np.zeros((0, 4)), "flat.npy": np.zeros(4)}
    for name, array in files.items():
        np.save(tmp_path / name, array)
        with pytest.raises(ConfigError, match=re.escape(f"{name} is of the shape {array.shape}")):
            read_queries(tmp_path / name)
    (tmp_path / "pickled.npy").write_bytes(pickle.dumps(np.zeros((2, 4))))
    with pytest.raises(UnreadableError) as refused:
        read_queries(tmp_path / "pickled.npy")
    assert "was not written by numpy.save" in str(refused.value)
    assert "allow_pickle" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"cannot tell the format of \."):
        read_queries(Path())
    assert owner_files.named_schema(Path(), None) is None  # a folder somebody named has no schema beside it
