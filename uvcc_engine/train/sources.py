"""Where documents come from. A source is opened at a document number and yields (number, text) from there on.

Numbers are the source's own order and the same on every rank; document n belongs to rank ``n % world``. A source that
can read one rank's part alone yields only that rank's numbers; the others yield all and the reader keeps its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.train.config import DataConfig


class Stream(Protocol):
    """An opened source."""

    def __next__(self) -> tuple[int, str]: ...

    def state(self) -> dict[str, Any]:
        """What ``open`` needs to go on behind the last document without reading what lies before; may be empty."""
        ...


class Source(Protocol):
    """Opens streams. ``state`` is that of an earlier stream of the same rank and world, or empty."""

    def open(self, first: int, rank: int, world: int, state: dict[str, Any]) -> Stream: ...


class _Numbered:
    """A stream that is found again by its number alone."""

    def __init__(self, documents: Iterator[tuple[int, str]]) -> None:
        self._documents = documents

    def __next__(self) -> tuple[int, str]:
        return next(self._documents)

    def state(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class LocalText:
    """Files below ``path`` in name order; .jsonl holds one {"text"} a line, .txt documents separated by blank lines.

    Starts over at the end (a new pass has new numbers). Raises UnreadableError if there is no text.
    """

    path: Path

    def open(self, first: int, rank: int, world: int, state: dict[str, Any]) -> Stream:
        return _Numbered(_endless(self, first))

    def one_pass(self) -> Iterator[str]:
        """Every document once."""
        path = self.path
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
        if not files or not all(p.is_file() for p in files):
            raise UnreadableError(f"no text at {path}", "data.path names a .txt or .jsonl file, or a folder of them")
        for file in files:
            if file.suffix == ".jsonl":
                yield from _json_lines(file)
            else:
                yield from (d for d in _read(file).split("\n\n") if d.strip())


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise UnreadableError(f"{file} is not UTF-8 text: {e.reason} at byte {e.start}") from e


def _json_lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield str(json.loads(line)["text"])
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

    def open(self, first: int, rank: int, world: int, state: dict[str, Any]) -> Stream:
        return _Numbered(_endless(self, first))

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

    def open(self, first: int, rank: int, world: int, state: dict[str, Any]) -> Stream:
        return _Numbered(self._documents(first))

    def _documents(self, first: int) -> Iterator[tuple[int, str]]:
        words = [c + v + t for c in "bdfgklmnprst" for v in "aeiou" for t in ("", "n", "s")]
        number = first
        while True:
            rng = random.Random(f"{self.seed}/{number}")
            topic = rng.sample(words, 12)
            sentences = (" ".join(rng.choices(topic, k=rng.randint(4, 9))) for _ in range(rng.randint(3, 12)))
            yield number, ". ".join(sentences)
            number += 1


@dataclass(frozen=True, slots=True)
class FineWeb:
    """HuggingFaceFW/fineweb-edu as a stream; each rank reads its own shards and no others.

    The k-th document of rank r has number ``k * world + r``. Raises ConfigError without the ``train`` extra.
    """

    name: str = "HuggingFaceFW/fineweb-edu"

    def open(self, first: int, rank: int, world: int, state: dict[str, Any]) -> Stream:
        try:
            import datasets
            from datasets.distributed import split_dataset_by_node
        except ImportError as e:
            raise ConfigError(
                "FineWeb-Edu needs the datasets library", "pip install 'uvcc[train]', or data.source: local"
            ) from e
        with _network_errors():
            whole = datasets.load_dataset(self.name, split="train", streaming=True)
        mine = split_dataset_by_node(whole, rank=rank, world_size=world)
        done = -(-(first - rank) // world) if first > rank else 0
        if state:
            mine.load_state_dict(state)
        elif done:
            mine = mine.skip(done)
        return _HubStream(mine, done, rank, world)


@contextmanager
def _network_errors() -> Iterator[None]:
    """The hub's client lets its HTTP library's own errors through; to a reader they are failed reads like any other."""
    import httpx

    try:
        yield
    except httpx.HTTPError as e:
        raise OSError(f"{type(e).__name__}: {e}") from e


class _HubStream:
    """Numbers a rank's documents; its state names shard and row, so that going on downloads nothing twice."""

    def __init__(self, dataset: Any, done: int, rank: int, world: int) -> None:
        self._dataset, self._rows = dataset, iter(dataset)
        self._done, self._rank, self._world = done, rank, world

    def __next__(self) -> tuple[int, str]:
        with _network_errors():
            row = next(self._rows)
        number = self._done * self._world + self._rank
        self._done += 1
        return number, str(row["text"])

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._dataset.state_dict()
        return found


def make_source(cfg: DataConfig, seed: int) -> Source:
    """The configured source. Nothing is read yet."""
    if cfg.source == "local":
        return LocalText(Path(cfg.path).expanduser())
    if cfg.source == "python_docs":
        return PythonManual()
    return Synthetic(seed) if cfg.source == "synthetic" else FineWeb()
