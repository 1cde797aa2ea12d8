"""Each document is read once: by one rank, over halts and other worlds, from shards as the datasets library streams."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_kit import SMALL, with_hub

from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import worker
from uvcc_engine.train.config import DataConfig
from uvcc_engine.train.text.data import Cursor, Packer, Prefetcher, for_another_world, held_out
from uvcc_engine.train.text.source_probe import main as probe_cli
from uvcc_engine.train.text.sources import (
    ROWS,
    DocumentSource,
    DocumentStream,
    FineWeb,
    LocalText,
    Synthetic,
    make_source,
)
from uvcc_engine.train.text.tokenizer import ByteTokenizer, gpt2_ranks, make_tokenizer

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the extra 'train' (datasets) is not installed"
)
PERCENT = 10


class Reader(Packer):
    """A rank that notes the number of each document that it takes."""

    def __init__(self, source: DocumentSource, rank: int, world: int, cursor: Cursor | None, val: bool = False) -> None:
        more: dict[str, Any] = {"seq_len": 15, "val": val, "val_percent": PERCENT, "cursor": cursor}
        super().__init__(source, ByteTokenizer(), rank=rank, world=world, **more)
        self.taken: list[int] = []

    def _mine(self, number: int) -> bool:
        found = super()._mine(number)
        if found:
            self.taken.append(number)
        return found

    @property
    def cursor(self) -> Cursor:
        """As a checkpoint would hold it."""
        return Cursor.from_json(json.loads(json.dumps(self._cursor.to_json())))


def shown(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def read_through(source: DocumentSource, worlds: Sequence[int], end: int, batches: int) -> tuple[Counter[int], str]:
    """One pass up to document ``end`` by worlds of those sizes, one after the other; each before the last takes some
    batches. Returns how often each document was taken, and the text of all rows and of what was left over."""
    taken: Counter[int] = Counter()
    text, before = "", {0: Cursor()}
    for i, world in enumerate(worlds):
        starts = {r: for_another_world(before, len(before), r == 0) for r in range(world)} if i else {}
        ranks = [Reader(source, r, world, starts.get(r)) for r in range(world)]
        for rank, reader in enumerate(ranks):
            left = starts[rank].tokens if i else []
            rows: list[int] = []
            if i < len(worlds) - 1:
                for _ in range(batches):
                    rows += reader.batch(1 + rank).tokens.flatten().tolist()
            else:
                while reader.cursor.document < end:
                    rows += reader.batch(1).tokens.flatten().tolist()
            rows += reader.cursor.tokens
            assert rows[: len(left)] == left
            text += shown(rows[len(left) :])
            taken.update(n for n in reader.taken if n < end)
        before = {r: reader.cursor for r, reader in enumerate(ranks)}
    return taken, text


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 3), (3, 1, 2), (2, 2)])
def test_every_document_is_read_once_whatever_worlds_read_it(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    documents = [f"document number {n} of this text" for n in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    taken, text = read_through(LocalText(tmp_path), worlds, 60, batches=7)
    assert taken == Counter(range(60))
    train = Counter(d for d in documents if not held_out(d, PERCENT))
    found = Counter(text.split("\0"))
    assert train <= found  # nothing is cut; what the last world read of the next pass comes again
    assert not any(found[d] for d in documents if held_out(d, PERCENT))


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 4)])
def test_shards_of_a_hub_are_read_once_whatever_worlds_read_them(
    monkeypatch: pytest.MonkeyPatch, worlds: tuple[int, ...]
) -> None:
    with_hub(monkeypatch)
    taken, _ = read_through(make_source(DataConfig(source="fineweb_edu"), 0), worlds, 3 * ROWS, batches=9)
    assert taken == Counter(shard * ROWS + row for shard in range(3) for row in range(40))


def shards(folder: Path, kind: str, sizes: Sequence[int]) -> Path:
    """A folder of shards as a copy of the hub's would be."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    for shard, rows in enumerate(sizes):
        table = {"id": [str(n) for n in range(rows)], "text": [f"shard {shard} row {n} and more" for n in range(rows)]}
        path = folder / f"train-{shard:05}-of-{len(sizes):05}.{kind}"
        if kind == "parquet":
            parquet.write_table(pyarrow.table(table), path, row_group_size=8)
        else:
            path.write_text("".join(json.dumps({k: v[n] for k, v in table.items()}) + "\n" for n in range(rows)))
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library neither reads nor fills the caches of whoever runs this."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "modules")
    datasets.disable_progress_bars()


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 4)])
def test_shards_of_the_datasets_library_are_read_once(tmp_path: Path, kind: str, worlds: tuple[int, ...]) -> None:
    sizes = (20, 11, 17)
    source = make_source(DataConfig(source="fineweb_edu", path=str(shards(tmp_path / "s", kind, sizes))), 0)
    taken, text = read_through(source, worlds, len(sizes) * ROWS, batches=6)
    assert taken == Counter(shard * ROWS + row for shard, rows in enumerate(sizes) for row in range(rows))
    found = Counter(text.split("\0"))
    for shard, rows in enumerate(sizes):
        for document in (f"shard {shard} row {n} and more" for n in range(rows)):
            assert bool(found[document]) != held_out(document, PERCENT)


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_a_rank_opens_its_own_shards_and_validation_only_what_is_held_out(tmp_path: Path) -> None:
    source = FineWeb(str(shards(tmp_path / "s", "parquet", (30, 30, 30, 30))))
    for val in (False, True):
        reader = Reader(source, 1, 2, None, val)
        text = shown(reader.batch(3).tokens.flatten().tolist())
        assert {n // ROWS % 2 for n in reader.taken} == {1}
        whole = text.split("\0")[:-1]
        assert whole
        assert all(held_out(d, PERCENT) == val for d in whole)


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_a_rank_goes_on_behind_the_row_that_its_checkpoint_names(tmp_path: Path) -> None:
    source = FineWeb(str(shards(tmp_path / "s", "parquet", (30, 30))))
    whole = Reader(source, 0, 1, None)
    first, second = whole.batch(4), whole.batch(4)
    again = Reader(source, 0, 1, Cursor.from_json(first.cursor))
    assert torch.equal(again.batch(4).tokens, second.tokens)
    assert again.taken[0] == first.cursor["document"]


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_shards_that_are_not_the_checkpoints_are_refused(tmp_path: Path) -> None:
    reader = Reader(FineWeb(str(shards(tmp_path / "two", "parquet", (9, 9)))), 0, 1, None)
    reader.batch(1)
    other = Reader(FineWeb(str(shards(tmp_path / "three", "parquet", (9, 9, 9)))), 0, 1, reader.cursor)
    with pytest.raises(UnreadableError, match="has 3 shards now, the checkpoint's had 2"):
        other.batch(1)


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_a_dataset_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "train.jsonl").write_text('{"body": "hello"}\n')
    with pytest.raises(UnreadableError, match="no column text, but body"):
        Reader(FineWeb(str(tmp_path / "s")), 0, 1, None).batch(1)


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_a_damaged_shard_of_this_disk_is_named_and_no_network_blamed(tmp_path: Path) -> None:
    folder = shards(tmp_path / "s", "parquet", (30,))
    reader = Reader(FineWeb(str(folder)), 0, 1, None)
    reader.batch(1)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UnreadableError, match=r"a shard of .*/s cannot be read: .*is to be whole"):
        Reader(FineWeb(str(folder)), 0, 1, None).batch(1)


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_rows_without_a_text_are_left_out_and_keep_their_numbers(tmp_path: Path) -> None:
    """They were read as the word None, and numbers as their digits."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "s.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None, "b", None]}), path)
    stream = FineWeb(str(path)).open(0, 0, 1, {})
    assert [next(stream) for _ in range(3)] == [(0, "a"), (2, "b"), (ROWS, "a")]
    assert next(FineWeb(str(path)).open(3, 0, 1, {})) == (ROWS, "a")
    parquet.write_table(pyarrow.table({"text": [[1, 2], [3]]}), path)
    with pytest.raises(UnreadableError, match="the column text of the dataset holds list, not text"):
        next(FineWeb(str(path)).open(0, 0, 1, {}))
    parquet.write_table(pyarrow.table({"text": pyarrow.array([None] * 4, pyarrow.string())}), path)
    with pytest.raises(UnreadableError, match="no document in any shard"):
        next(FineWeb(str(path)).open(0, 0, 1, {}))


@pytest.mark.parametrize("value", ["null", "5", '["a"]'])
def test_a_line_whose_text_is_none_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "hello"}}\n{{"text": {value}}}\n')
    with pytest.raises(UnreadableError, match="line 2 holds no document"):
        list(make_source(DataConfig(source="local", path=str(tmp_path / "a.jsonl")), 0).one_pass())


def test_a_training_without_held_out_text_is_refused_before_its_first_step(tmp_path: Path) -> None:
    """It was found out at the first evaluation, which may be after hours."""
    with pytest.raises(ConfigError, match=r"data\.val_percent=0 holds nothing out to evaluate every 5 steps"):
        lm_config.from_mapping({"data": {"source": "synthetic", "val_percent": 0}, "train": {"eval_every": 5}})
    (tmp_path / "a.txt").write_text("one document of one paragraph")
    data = {"source": "local", "path": str(tmp_path / "a.txt"), "val_percent": 1}
    cfg = lm_config.from_mapping({**SMALL, "data": data, "train": {**SMALL["train"], "eval_every": 5}})
    assert worker.train(cfg, tmp_path / "run", "lm") == 2
    end = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (end["step"], end["error"][:20]) == (0, "no held-out document")
    assert not (tmp_path / "run" / "training.csv").exists()


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "saved parts"])
def test_one_shard_and_what_the_datasets_library_saved_are_read_once(tmp_path: Path, kind: str) -> None:
    import datasets

    if kind.startswith("saved"):
        path = tmp_path / "saved"
        rows = datasets.Dataset.from_dict({"text": [f"shard 0 row {n} and more" for n in range(20)]})
        (datasets.DatasetDict(train=rows, test=rows) if kind == "saved parts" else rows).save_to_disk(path)
    else:
        (path,) = shards(tmp_path / "s", kind, (20,)).iterdir()
    source = make_source(DataConfig(source="fineweb_edu", path=str(path)), 0)
    assert list(source.one_pass()) == [f"shard 0 row {n} and more" for n in range(20)]
    taken, _ = read_through(source, (1, 2), ROWS, batches=6)
    assert taken == Counter(range(20))


@needs_datasets
@pytest.mark.usefixtures("hub_cache")
def test_what_is_no_shard_is_told_how_to_be_read(tmp_path: Path) -> None:
    import datasets

    text = tmp_path / "a.txt"
    text.write_text("words")
    with pytest.raises(UnreadableError, match=r"a\.txt is no shard .*\.parquet or \.jsonl"):
        make_source(DataConfig(source="fineweb_edu", path=str(text)), 0).open(0, 0, 1, {})
    rows = datasets.Dataset.from_dict({"text": ["words"]})
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "parts")
    with pytest.raises(UnreadableError, match="has no part train, but test"):
        make_source(DataConfig(source="fineweb_edu", path=str(tmp_path / "parts")), 0).open(0, 0, 1, {})
    (tmp_path / "a.parquet").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(UnreadableError, match=r"not UTF-8 text.*for \.parquet data\.source: fineweb_edu"):
        list(make_source(DataConfig(source="local", path=str(tmp_path / "a.parquet")), 0).one_pass())


@pytest.mark.slow  # the hub's client tries again for half a minute
@needs_datasets
def test_a_hub_that_is_not_there_is_named_with_the_hint(tmp_path: Path) -> None:
    """The probe of an operator whose pod has no way to the hub; port 9 of this host discards, nobody listens."""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "1"}
    code = "import sys; from uvcc_engine.cli import main; sys.exit(main())"
    config = ["train_showcase", "--set", "data.source=fineweb_edu", "--set", "data.retries=0"]
    command = [sys.executable, "-c", code, "data", "probe", *config]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert found.returncode != 0
    assert "the data source fails" in found.stderr
    assert "data.source: local" in found.stderr


def test_a_source_that_hangs_does_not_hold_a_halt() -> None:
    hangs, go = threading.Event(), threading.Event()

    class Stuck:
        def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
            hangs.set()
            go.wait()
            return Synthetic(1).open(first, rank, world, facts)

    data = Prefetcher(Reader(Stuck(), 0, 1, None), 1, depth=1)
    assert hangs.wait(120)
    data.stop(patience_s=0.05)
    assert data.thread.is_alive()
    with pytest.raises(UnreachableError, match="no batch for 0 s"):
        data.get(timeout=0.01)
    go.set()
    data.thread.join(120)
    assert not data.thread.is_alive()


def test_validation_is_held_out_in_every_world() -> None:
    """No document of any rank's validation is ever in any rank's training."""
    sides: dict[bool, set[str]] = {False: set(), True: set()}
    for world in (1, 2, 3):
        for rank in range(world):
            for val in (False, True):
                text = shown(Reader(Synthetic(5), rank, world, None, val).batch(100).tokens.flatten().tolist())
                sides[val] |= set(text.split("\0")[1:-1])
    assert len(sides[True]) > 5
    assert not sides[True] & sides[False]


def _merges(count: int) -> str:
    """A file of merges in GPT-2's spelling: two letters each, of which the first is "h e", then "he l"."""
    letters = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
    pairs = [f"{a} {b}" for a in letters for b in letters if a + b != "he"]
    return "#version: 0.2\n" + "\n".join(["h e", "he l", *pairs][:count]) + "\n"


def test_gpt2s_vocabulary_is_read_from_its_merges(tmp_path: Path) -> None:
    path = tmp_path / "vocab.bpe"
    path.write_text(_merges(50_000), "utf-8")
    ranks = gpt2_ranks(path)
    assert (ranks[b"!"], ranks[b"h"], ranks[b" "], ranks[b"he"], ranks[b"hel"]) == (0, 71, 220, 256, 257)
    pytest.importorskip("tiktoken", reason="the extra 'train' (tiktoken) is not installed")
    tokenizer = make_tokenizer("gpt2", str(path))
    assert tokenizer.encode("hel")[0] == 257
    text = "The hello of ελληνικά, 12 times\n\n  it's"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < tokenizer.eos == 50_256


def test_a_vocabulary_that_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"cannot read .*vocab\.bpe.*data\.merges names vocab\.bpe"):
        gpt2_ranks(tmp_path / "vocab.bpe")
    (tmp_path / "short").write_text(_merges(10), "utf-8")
    with pytest.raises(UnreadableError, match="makes 266 tokens, GPT-2 has 50256"):
        gpt2_ranks(tmp_path / "short")
    (tmp_path / "other").write_text("no merges of any kind", "utf-8")
    with pytest.raises(UnreadableError, match="holds no merges of GPT-2"):
        gpt2_ranks(tmp_path / "other")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"source": "synthetic", "path": "x"}, "data.path has no effect with data.source=synthetic"),
        ({"source": "synthetic", "merges": "x"}, "data.merges has no effect with data.tokenizer=byte"),
    ],
)
def test_data_settings_without_effect_are_refused(data: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        lm_config.from_mapping({"data": data})


def test_the_probe_tells_what_a_rank_would_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"document number {n}" for n in range(200)))
    config = tmp_path / "small.json"
    data = {"source": "local", "path": str(tmp_path / "a.txt"), "val_percent": 0}
    config.write_text(json.dumps({**SMALL, "data": data}))
    command = ["probe", str(config), "--ranks", "2", "--rank", "1", "--batches", "3"]
    assert probe_cli([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batches"], found["rows"], found["tokens_per_row"]) == (3, 2, 49)
    assert found["documents_ended"] <= found["documents"] <= found["documents_ended"] + 1
    assert found["documents"] == pytest.approx(3 * 2 * 49 / len("document number 10."), abs=2)
    assert found["sample"].startswith("document number 1")
    assert found["first_s"] > 0
    assert probe_cli(command) == 0
    assert "local: 3 batches of 2 x 49 tokens (byte)" in capsys.readouterr().out
