"""A tokenizer of one's own: learned from a text, trained with, prepared with, exported; files that are none."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_kit import SMALL

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.config import DataConfig
from uvcc_engine.train.text.prepare import prepare
from uvcc_engine.train.text.source_probe import main as data_cli
from uvcc_engine.train.text.sources import make_source
from uvcc_engine.train.text.tokenizer import END, OwnTokenizer, make_tokenizer, tokenizer_id, train_tokenizer
from uvcc_engine.train.trained import exported
from uvcc_engine.train.trained import generate as gen
from uvcc_engine.train.worker import cli

TEXTS = [f"the {a} {b} sat on the {a} mat. " * 4 for a in ("old", "new", "red") for b in ("cat", "dog", "hen")]
VOCAB = 280


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A training in this process takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "tokenizer.json"
    assert train_tokenizer(TEXTS, VOCAB, out) == VOCAB
    return out


def test_the_same_text_makes_the_same_tokenizer(own: Path, tmp_path: Path) -> None:
    train_tokenizer(TEXTS, VOCAB, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == own.read_bytes()


def test_rows_become_shorter_and_read_back(own: Path) -> None:
    tokenizer = OwnTokenizer(own, VOCAB)
    ids = tokenizer.encode(TEXTS[0])
    assert tokenizer.decode(ids) == TEXTS[0]
    assert len(ids) < len(TEXTS[0]) / 3
    assert tokenizer.eos not in ids


@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_reads_back_and_none_holds_an_end(own: Path, text: str) -> None:
    tokenizer = OwnTokenizer(own)
    spelled = text.encode(errors="surrogatepass").decode(errors="replace") + END
    ids = tokenizer.encode(spelled)
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == spelled


def test_a_training_prepared_and_exported_with_it_generates(own: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS * 4))
    data = {"source": "local", "path": str(text), "tokenizer": "file", "tokenizer_file": str(own), "val_percent": 10}
    prepare(DataConfig(**data), 0, tmp_path / "prepared")  # type: ignore[arg-type]
    data |= {"source": "prepared", "path": str(tmp_path / "prepared")}
    config = tmp_path / "config.json"
    train = {**SMALL["train"], "steps": 3}
    config.write_text(json.dumps({**SMALL, "model": {**SMALL["model"], "vocab": VOCAB}, "data": data, "train": train}))
    assert cli([str(config), "--out", str(tmp_path / "run")]) == 0
    assert gen.export_main([str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == own.read_bytes()
    model = exported.load(tmp_path / "model")
    made = gen.continue_text(model.model, model.tokenizer, "the old", 5, gen.Sampling(seed=1))
    assert made.tokens <= 5


def test_text_prepared_with_another_file_is_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    data = DataConfig(path=str(tmp_path / "text.txt"), tokenizer="file", tokenizer_file=str(own))
    made = prepare(data, 0, tmp_path / "prepared")
    assert made.tokenizer == tokenizer_id(data)
    train_tokenizer(TEXTS[:2], VOCAB - 15, tmp_path / "other.json")
    other = DataConfig(
        source="prepared",
        path=str(tmp_path / "prepared"),
        tokenizer="file",
        tokenizer_file=str(tmp_path / "other.json"),
    )
    with pytest.raises(UnreadableError, match="was prepared with the tokenizer") as caught:
        next(make_source(other, 0).open(0, 0, 1, {}))
    assert "the file it was prepared with" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no tokenizer"),
        (b"[1, 2", "is no tokenizer"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "has no token"),
        (b"\xff\xfe", "cannot read"),
        (b"[" * 100_000, "is no tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=said):
        make_tokenizer("file", str(path))


def test_its_size_must_be_the_models(own: Path) -> None:
    with pytest.raises(ConfigError, match=f"has {VOCAB} symbols, model.vocab is 400") as caught:
        make_tokenizer("file", str(own), 400)
    assert caught.value.hint == f"model.vocab: {VOCAB}"


@pytest.mark.parametrize(
    ("data", "vocab", "said"),
    [
        ({"tokenizer": "file"}, 300, r"data\.tokenizer_file is missing"),
        ({"tokenizer": "byte", "tokenizer_file": "x"}, 256, r"data\.tokenizer_file has no effect"),
        ({"tokenizer": "file", "tokenizer_file": "x"}, 256, r"model\.vocab=256"),
        ({"tokenizer": "file", "tokenizer_file": "x"}, 70000, r"model\.vocab=70000"),
    ],
)
def test_settings_that_do_not_fit_are_refused(data: dict[str, object], vocab: int, said: str) -> None:
    raw = {**SMALL, "data": {**SMALL["data"], **data}, "model": {**SMALL["model"], "vocab": vocab}}
    with pytest.raises(ConfigError, match=said):
        lm_config.from_mapping(raw)


def test_the_command_writes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**SMALL, "data": {"source": "local", "path": str(tmp_path / "text.txt")}}))
    args = ["tokenizer", str(config), "--vocab", "275", "--out", str(tmp_path / "t.json")]
    assert data_cli(args) == 0
    assert "275 symbols" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists"):
        data_cli(args)
    with pytest.raises(ConfigError, match="--vocab 100"):
        data_cli([*args[:2], "--vocab", "100", "--out", str(tmp_path / "u.json")])
