"""Prepared text trains exactly as the text that it was made of, is read once, and is refused when it is damaged."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lm_kit import with_hub
from test_lm_data import Reader, read_through

from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError
from uvcc_engine.train.config import DataConfig
from uvcc_engine.train.text import prepare as preparing
from uvcc_engine.train.text.data import Cursor, Packer
from uvcc_engine.train.text.prepare import PARTIAL, prepare
from uvcc_engine.train.text.prepared import MANIFEST, RECORD, PreparedManifest, PreparedText, shuffled
from uvcc_engine.train.text.source_probe import main as data_cli
from uvcc_engine.train.text.sources import LocalText, make_source
from uvcc_engine.train.text.tokenizer import ByteTokenizer

DOCUMENTS = 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"document {n} " + "word " * (n % 7) + "\u00e9" for n in range(DOCUMENTS)))
    return path


@pytest.fixture
def folder(tmp_path: Path, text: Path) -> Path:
    made = prepare(DataConfig(path=str(text)), 0, tmp_path / "prepared", shard_tokens=400)
    assert made.documents == DOCUMENTS
    assert len(made.shards) > 2
    return tmp_path / "prepared"


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("val", [False, True])
def test_rows_are_those_of_the_text_it_was_made_of(folder: Path, text: Path, rank: int, world: int, val: bool) -> None:
    plain = Reader(LocalText(text), rank, world, None, val)
    ready = Reader(PreparedText(folder, "byte"), rank, world, None, val)
    for _ in range(12):  # several passes
        assert torch.equal(plain.batch(3).tokens, ready.batch(3).tokens)
        ready = Reader(PreparedText(folder, "byte"), rank, world, ready.cursor, val)  # as after a halt


@pytest.mark.parametrize("shuffle", [None, 7])
@pytest.mark.parametrize("worlds", [(1,), (2, 3), (3, 1, 2)])
def test_each_document_is_read_once_whatever_worlds_read_it(
    folder: Path, worlds: tuple[int, ...], shuffle: int | None
) -> None:
    taken, text = read_through(PreparedText(folder, "byte", shuffle), worlds, DOCUMENTS, batches=4)
    assert taken == Counter(range(DOCUMENTS))
    whole = [t for t in text.split("\0") if t.startswith("document ")]
    assert len({t.split()[1] for t in whole}) > DOCUMENTS // 2


def test_the_shuffled_order_is_a_permutation_that_changes_from_pass_to_pass_and_never_with_the_machine() -> None:
    for size in (1, 2, 3, 17, 256, 1000):
        orders = [[shuffled(place, size, 5, turn) for place in range(size)] for turn in range(3)]
        assert all(sorted(order) == list(range(size)) for order in orders)
        if size > 16:
            assert orders[0] != orders[1] != orders[2]
            assert orders[0] != list(range(size))
    assert [shuffled(place, 10, 1, 0) for place in range(10)] == [6, 0, 2, 5, 1, 8, 4, 3, 7, 9]
    moved = [abs(shuffled(place, 4096, 3, 0) - place) for place in range(4096)]
    assert 0.30 < sum(moved) / 4096 / 4096 < 0.37  # a third of the length is what chance gives


def test_a_cursor_of_another_text_or_order_is_refused(folder: Path, tmp_path: Path, text: Path) -> None:
    reader = Reader(PreparedText(folder, "byte"), 0, 1, None)
    reader.batch(1)
    with pytest.raises(UnreadableError, match="not in the order, that the checkpoint was trained on"):
        Reader(PreparedText(folder, "byte", 3), 0, 1, reader.cursor).batch(1)
    text.write_text(text.read_text() + "\n\none more")
    prepare(DataConfig(path=str(text)), 0, tmp_path / "other")
    with pytest.raises(UnreadableError, match="is not the text"):
        Reader(PreparedText(tmp_path / "other", "byte"), 0, 1, reader.cursor).batch(1)
    with pytest.raises(UnreadableError, match="prepared with the tokenizer 'byte'"):
        Reader(PreparedText(folder, "gpt2"), 0, 1, None).batch(1)


def _flip(name: str, at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return change


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2])


def _manifest(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(said | {key: value}))

    return change


def _unknown_token(folder: Path) -> None:
    """A folder that is whole by its own sums, with a token that no byte is."""
    tokens, index = bytearray((folder / "00000.tokens").read_bytes()), bytearray((folder / "00000.index").read_bytes())
    tokens[0:2] = (999).to_bytes(2, "little")
    end, bucket, _ = RECORD.unpack_from(index)
    RECORD.pack_into(index, 0, end, bucket, zlib.crc32(tokens[: 2 * end]))
    (folder / "00000.tokens").write_bytes(tokens)
    (folder / "00000.index").write_bytes(index)
    said = json.loads((folder / MANIFEST).read_text())
    said["shards"][0]["index_sha256"] = preparing.hashlib.sha256(index).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_flip("00000.tokens", 0), "document 0 of .*00000.tokens is damaged"),
        (_flip("00001.tokens", 9), "00001.tokens is damaged"),
        (_flip("00000.index", 3), "00000.index is not what"),
        (_flip("00001.index", 8), "00001.index is not what"),  # a document that would change its split
        (_cut("00000.tokens"), "another length"),
        (_cut("00000.index"), "another length"),
        (lambda folder: (folder / "00001.tokens").unlink(), "cannot read .*00001.tokens"),
        (lambda folder: (folder / MANIFEST).unlink(), "there is no MANIFEST.json"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "MANIFEST.json"),
        (_manifest("format", "another"), "is of the format 'another'"),
        (_manifest("shards", []), "names no shards"),
        (_manifest("shards", [{"name": "../../etc"}]), "documents"),
        (_manifest("more", 1), "more"),
        (_unknown_token, "tokens that the tokenizer does not know"),
    ],
)
def test_what_is_damaged_is_named_and_never_trained_on(folder: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(folder)
    reader = Reader(PreparedText(folder, "byte"), 0, 1, None)
    with pytest.raises(UvccError, match=told):
        while reader.cursor.document < DOCUMENTS:
            reader.batch(1)


def test_a_shard_elsewhere_is_not_named_by_a_manifest(folder: Path) -> None:
    said = json.loads((folder / MANIFEST).read_text())
    said["shards"][0]["name"] = "../00000"
    (folder / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(UnreadableError, match="not in order"):
        PreparedManifest.read(folder)


def test_a_preparation_that_is_cut_off_leaves_nothing_that_could_be_trained_on(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if text.startswith("document 40 "):
                raise KeyboardInterrupt
            return super().encode(text)

    out = tmp_path / "out"
    with monkeypatch.context() as m:
        m.setattr(preparing, "tokenizer_of", lambda *_: Breaks())
        with pytest.raises(KeyboardInterrupt):
            prepare(DataConfig(path=str(text)), 0, out, shard_tokens=400)
    assert not out.exists()
    assert prepare(DataConfig(path=str(text)), 0, out).documents == DOCUMENTS  # a second start takes its place
    assert not out.with_name(out.name + PARTIAL).exists()
    with pytest.raises(ConfigError, match="exists"):
        prepare(DataConfig(path=str(text)), 0, out)


def test_a_full_disk_and_a_lost_source_are_told_apart(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(preparing.files, "sync_data", full)
        with pytest.raises(UvccError, match="No space left on device"):
            prepare(DataConfig(path=str(text)), 0, tmp_path / "out")

    def lost() -> None:
        raise ConnectionError("the line is cut")

    with_hub(monkeypatch, lost)
    with pytest.raises(UnreachableError, match="the data source fails"):
        prepare(DataConfig(source="fineweb_edu"), 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hub_is_prepared_shard_after_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hub(monkeypatch)
    assert prepare(DataConfig(source="fineweb_edu"), 0, tmp_path / "all").documents == 120
    assert prepare(DataConfig(source="fineweb_edu"), 0, tmp_path / "some", documents=50).documents == 50


def test_a_source_without_an_end_asks_how_much(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this source has no end"):
        prepare(DataConfig(source="synthetic"), 3, tmp_path / "out")
    made = prepare(DataConfig(source="synthetic"), 3, tmp_path / "out", documents=20)
    assert made.documents == 20
    with pytest.raises(ConfigError, match="prepared already"):
        prepare(DataConfig(source="prepared", path=str(tmp_path / "out")), 3, tmp_path / "again")


def test_the_command_prepares_what_a_config_names_and_a_training_takes_it(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lm.yaml"
    config.write_text(f"model: {{vocab: 256}}\ndata: {{path: {text}, val_percent: 10}}\n")
    out = tmp_path / "made"
    assert data_cli(["prepare", str(config), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["documents"], said["shards"]) == (DOCUMENTS, 1)
    sets = ["--set", "data.source=prepared", "--set", f"data.path={out}", "--set", "data.shuffle=true"]
    assert data_cli(["probe", str(config), *sets, "--json"]) == 0
    assert math.isfinite(json.loads(capsys.readouterr().out)["first_s"])
    with pytest.raises(ConfigError, match=r"data\.shuffle has no effect"):
        data_cli(["probe", str(config), "--set", "data.shuffle=true"])
    with pytest.raises(ConfigError, match="needs a folder"):
        data_cli(["prepare", str(config)])


def test_a_packer_takes_both_kinds_of_documents_by_the_same_split(folder: Path, text: Path) -> None:
    for percent in (0, 30):
        rows = []
        for source in (make_source(DataConfig(path=str(text)), 0), PreparedText(folder, "byte")):
            packer = Packer(
                source, ByteTokenizer(), seq_len=31, rank=0, world=1, val=False, val_percent=percent, cursor=Cursor()
            )
            rows.append(packer.batch(20).tokens)
        assert torch.equal(*rows)
