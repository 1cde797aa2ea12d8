"""Where documents come from: local text, Python's manual, the hub, prepared tokens, or a made-up grammar."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.train.config import DataConfig
from uvcc_engine.train.text.documents import DocumentSource, DocumentStream, Numbered
from uvcc_engine.train.text.hidden_letters import HiddenLetters, Hideout
from uvcc_engine.train.text.prepared import PreparedText
from uvcc_engine.train.text.tokenizer import tokenizer_id

_TEXTS: Final = (
    "data.path names a .txt or .jsonl file of UTF-8, or a folder of them; for .parquet data.source: fineweb_edu"
)


@dataclass(frozen=True, slots=True)
class LocalText:
    """Files below ``path`` in name order; .jsonl holds one {"text"} a line, .txt documents separated by blank lines.

    Starts over at the end (a new pass has new numbers). Raises UnreadableError if there is no text.
    """

    path: Path

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
        return Numbered(_endless(self, first))

    def one_pass(self) -> Iterator[str]:
        """Every document once."""
        path = self.path
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
        if not files or not all(p.is_file() for p in files):
            raise UnreadableError(f"no text at {path}", _TEXTS)
        for file in files:
            if file.suffix == ".jsonl":
                yield from _json_lines(file)
            else:
                yield from (d for d in _read(file).split("\n\n") if d.strip())


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise UnreadableError(f"{file} is not UTF-8 text: {e.reason} at byte {e.start}", _TEXTS) from e


def _text_of(value: object) -> str:
    """Raises TypeError for what is no text: a word like ``None`` would be learned in its place."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    return value


def _json_lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield _text_of(json_of(line)["text"])
            except (ValueError, KeyError, TypeError) as e:
                raise UnreadableError(
                    f"{file} line {number} holds no document", 'each line is like {"text": "..."}'
                ) from e


@dataclass(frozen=True, slots=True)
class PythonManual:
    """The reference manual that every Python carries for ``help()``: 0.4 MB of English prose about a language.

    Part of Python (PSF licence), read where it is installed, so nothing has to be shipped or fetched. Documents are
    its paragraphs' topics in name order; starts over at the end. Raises UnreadableError where it was stripped off.
    """

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
        return Numbered(_endless(self, first))

    def one_pass(self) -> Iterator[str]:
        """Every topic once."""
        try:
            from pydoc_data.topics import topics
        except ImportError as e:
            raise UnreadableError("this Python carries no manual (pydoc_data)", "data.source: local") from e
        yield from (topics[name] for name in sorted(topics))


def _endless(source: LocalText | PythonManual, first: int) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        before = number
        for text in source.one_pass():
            if number >= first:
                yield number, text
            number += 1
        if number == before:
            raise UnreadableError(f"no document in {source}", "the files are empty")
        number += (first - number) // (number - before) * (number - before) if first > number else 0


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Sentences of a small made-up grammar: learnable, endless, the same for the same seed. Only when asked for."""

    seed: int

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
        return Numbered(self.numbered_documents(first))

    def numbered_documents(self, first: int) -> Iterator[tuple[int, str]]:
        words = [c + v + t for c in "bdfgklmnprst" for v in "aeiou" for t in ("", "n", "s")]
        number = first
        while True:
            rng = random.Random(f"{self.seed}/{number}")
            topic = rng.sample(words, 12)
            sentences = (" ".join(rng.choices(topic, k=rng.randint(4, 9))) for _ in range(rng.randint(3, 12)))
            yield number, ". ".join(sentences)
            number += 1


FINEWEB_EDU: Final = "HuggingFaceFW/fineweb-edu"
ROWS: Final = 1 << 32
"""Row k of the v-th shard to be read has the number ``v * ROWS + k``; shards count on from pass to pass."""


@dataclass(frozen=True, slots=True)
class FineWeb:
    """A dataset of the hub, or a folder of its shards, as a stream; each rank reads its own shards and no others. One
    shard is a .parquet or .jsonl file; what the datasets library saved (``save_to_disk``) is one shard as well.

    Where there are fewer shards than ranks, all read all shards and keep their own rows. Raises ConfigError without
    the ``train`` extra, UnreadableError if the shards are not those that a cursor speaks of.
    """

    name: str = FINEWEB_EDU

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
        try:
            import datasets
        except ImportError as e:
            raise ConfigError(
                "FineWeb-Edu needs the datasets library", "pip install 'uvcc[train]', or data.source: local"
            ) from e
        with _failed_reads(self.name):
            whole = _on_disk(datasets, Path(self.name).expanduser())
            if whole is None:
                whole = datasets.load_dataset(self.name, split="train", streaming=True)
        stream = _Shards(self.name, whole, first, rank, world)
        if facts and facts != stream.facts():
            raise UnreadableError(
                f"{self.name} has {whole.num_shards} shards now, the checkpoint's had {facts.get('shards')}",
                "give data.path the copy that the run began with, or begin a new run",
            )
        return stream

    def one_pass(self) -> Iterator[str]:
        """Every row of every shard once, in order. Raises as :meth:`open`."""
        stream = self.open(0, 0, 1, {})
        last = ROWS * int(stream.facts()["shards"])
        for number, text in iter(lambda: next(stream), None):
            if number >= last:
                return
            if isinstance(text, str):
                yield text


def _on_disk(datasets: Any, path: Path) -> Any:
    """The stream of one file, or of what ``save_to_disk`` wrote; None of anything else. Raises UnreadableError."""
    if path.is_file():
        kind = {".parquet": "parquet", ".jsonl": "json"}.get(path.suffix)
        if kind is None:
            raise UnreadableError(f"{path} is no shard of a dataset", "name a .parquet or .jsonl file, or their folder")
        return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    if not path.is_dir():
        return None
    saved = (datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME)
    if not any((path / name).is_file() for name in saved):
        return None
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found:
            raise UnreadableError(f"{path} has no part train, but {', '.join(found)}", f"name one: {path}/PART")
        found = found["train"]
    return found.to_iterable_dataset()


_BELOW: Final = ("httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "pyarrow")


@contextmanager
def _failed_reads(name: str) -> Iterator[None]:
    """The datasets library lets errors of what it reads with through; to a reader they are failed reads like any other.

    Which HTTP library that is changes with the hub's client, and none need be installed for any other source. What is
    no shard on this machine's disk will be none at the next try, and no network is to blame: UnreadableError.
    """
    try:
        yield
    except Exception as e:
        arrow = any(base.__module__.partition(".")[0] == "pyarrow" for base in type(e).__mro__)
        if arrow and not isinstance(e, OSError) and Path(name).expanduser().exists():
            hint = "each .parquet is to be whole and to have rows: put it back as it was, or take it out"
            raise UnreadableError(f"a shard of {name} cannot be read: {e}", hint) from e
        if any(base.__module__.partition(".")[0] in _BELOW for base in type(e).__mro__):
            raise OSError(f"{type(e).__name__}: {e}") from e
        raise


class _Shards:
    """A rank's shards one after the other, pass after pass."""

    def __init__(self, name: str, whole: Any, first: int, rank: int, world: int) -> None:
        self._name, self._whole, self._shards = name, whole, int(whole.num_shards)
        self._documents = self._read(first, rank, world)

    def __next__(self) -> tuple[int, str]:
        with _failed_reads(self._name):
            return next(self._documents)

    def owner(self, number: int, world: int) -> int:
        return number % world if world > self._shards else number // ROWS % self._shards % world

    def facts(self) -> dict[str, Any]:
        return {"shards": self._shards}

    def _read(self, first: int, rank: int, world: int) -> Iterator[tuple[int, str]]:
        empty = 0
        for shard in count(first // ROWS):
            if world <= self._shards and self.owner(shard * ROWS, world) != rank:
                continue
            number = begin = max(first, shard * ROWS)
            found = False
            for text in self._texts(shard % self._shards, begin % ROWS):
                if text is not None:
                    found = True
                    yield number, text
                number += 1
            empty = 0 if found or begin % ROWS else empty + 1
            if empty > self._shards:
                raise UnreadableError("no document in any shard of this rank", "look at the dataset")

    def _texts(self, shard: int, skip: int) -> Iterator[str | None]:
        """The shard's rows behind the first ``skip``; None for one without a text."""
        from datasets.distributed import split_dataset_by_node

        rows = split_dataset_by_node(self._whole, rank=shard, world_size=self._shards)
        for row in rows.skip(skip) if skip else rows:
            if "text" not in row:
                raise UnreadableError(f"the dataset has no column text, but {', '.join(row)}", "name another one")
            if not isinstance(row["text"], str | None):
                kind = type(row["text"]).__name__
                raise UnreadableError(f"the column text of the dataset holds {kind}, not text", "name another dataset")
            yield row["text"]


def make_source(cfg: DataConfig, seed: int) -> DocumentSource:
    """The configured source. Nothing is read yet."""
    if cfg.source == "local":
        return LocalText(Path(cfg.path).expanduser())
    if cfg.source == "python_docs":
        return PythonManual()
    if cfg.source == "hidden_letters":
        return HiddenLetters(Hideout(LocalText(Path(cfg.path).expanduser()) if cfg.path else PythonManual()), seed)
    if cfg.source == "prepared":
        return PreparedText(Path(cfg.path).expanduser(), tokenizer_id(cfg), seed if cfg.shuffle else None)
    return Synthetic(seed) if cfg.source == "synthetic" else FineWeb(cfg.path or FINEWEB_EDU)
