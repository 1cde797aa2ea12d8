"""Text -> fixed rows of packed documents, in an order that a checkpoint can name and a resume can continue.

A document source yields (number, text) from any number on; documents go to rank ``number % world`` and the held-out
share is decided by the text's hash, so no split can leak and every rank reads its documents once. Rows are packed
back to back with an end-of-document token between documents; nothing is truncated or padded.
"""

from __future__ import annotations

import hashlib
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError
from uvcc_engine.train.config import DataConfig


class Tokenizer(Protocol):
    """Text to ids; ``eos`` ends a document."""

    eos: int

    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """UTF-8 bytes; 0, which text does not contain, ends a document."""

    eos = 0

    def encode(self, text: str) -> list[int]:
        return list(text.replace("\0", " ").encode())


def make_tokenizer(name: str) -> Tokenizer:
    """byte or gpt2. Raises ConfigError with the cure if the GPT-2 vocabulary cannot be had."""
    if name == "byte":
        return ByteTokenizer()
    try:
        import tiktoken
    except ImportError as e:
        raise ConfigError(
            "the gpt2 tokenizer needs tiktoken", "pip install 'uvcc[train]', or data.tokenizer: byte"
        ) from e
    try:
        return _GPT2(tiktoken.get_encoding("gpt2"))
    except OSError as e:
        raise UnreachableError(
            f"cannot fetch the GPT-2 vocabulary: {e}", "set TIKTOKEN_CACHE_DIR to a copy, or data.tokenizer: byte"
        ) from e


class _GPT2:
    eos = 50256

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids


Documents = Callable[[int], Iterator[tuple[int, str]]]
"""documents(first) yields (number, text) for number >= first, for ever or until the source ends."""


def local_documents(path: Path) -> Documents:
    """Files below ``path`` in name order; .jsonl holds one {"text"} a line, .txt documents separated by blank lines.

    Starts over at the end (a new pass has new numbers). Raises UnreadableError if there is no text.
    """
    files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
    if not files or not all(p.is_file() for p in files):
        raise UnreadableError(f"no text at {path}", "data.path names a .txt or .jsonl file, or a folder of them")

    def one_pass() -> Iterator[str]:
        for file in files:
            if file.suffix == ".jsonl":
                import json

                with file.open(encoding="utf-8") as lines:
                    yield from (json.loads(line)["text"] for line in lines if line.strip())
            else:
                yield from (d for d in file.read_text("utf-8").split("\n\n") if d.strip())

    def documents(first: int) -> Iterator[tuple[int, str]]:
        number = 0
        while True:
            before = number
            for text in one_pass():
                if number >= first:
                    yield number, text
                number += 1
            if number == before:
                raise UnreadableError(f"no document in {path}", "the files are empty")

    return documents


def synthetic_documents(seed: int) -> Documents:
    """Sentences of a small made-up grammar: learnable, endless, the same for the same seed. Only when asked for."""
    words = [c + v + t for c in "bdfgklmnprst" for v in "aeiou" for t in ("", "n", "s")]

    def documents(first: int) -> Iterator[tuple[int, str]]:
        number = first
        while True:
            rng = random.Random(f"{seed}/{number}")
            topic = rng.sample(words, 12)
            yield (
                number,
                ". ".join(" ".join(rng.choices(topic, k=rng.randint(4, 9))) for _ in range(rng.randint(3, 12))),
            )
            number += 1

    return documents


def fineweb_documents() -> Documents:
    """HuggingFaceFW/fineweb-edu as a stream. Raises ConfigError without the ``train`` extra."""
    try:
        import datasets
    except ImportError as e:
        raise ConfigError(
            "FineWeb-Edu needs the datasets library", "pip install 'uvcc[train]', or data.source: local"
        ) from e

    def documents(first: int) -> Iterator[tuple[int, str]]:
        stream = datasets.load_dataset("HuggingFaceFW/fineweb-edu", split="train", streaming=True)
        for number, row in enumerate(stream.skip(first), start=first):
            yield number, row["text"]

    return documents


def make_documents(cfg: DataConfig, seed: int) -> Documents:
    """The configured source."""
    if cfg.source == "local":
        return local_documents(Path(cfg.path))
    return synthetic_documents(seed) if cfg.source == "synthetic" else fineweb_documents()


def held_out(text: str, percent: int) -> bool:
    """Whether a document belongs to validation: a property of its text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % 100 < percent


@dataclass(slots=True)
class Cursor:
    """Where a rank stands: the next document number and the tokens already read but not yet in a row."""

    document: int = 0
    tokens: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"document": self.document, "tokens": self.tokens}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Cursor:
        return cls(int(raw["document"]), [int(t) for t in raw["tokens"]])


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens [B, S + 1] int64 (inputs and, shifted by one, labels); ``cursor`` is the state after this batch."""

    tokens: Tensor
    cursor: dict[str, Any]
    fetch_s: float


MAX_SKIPPED = 100_000
"""So many documents of other ranks or of the other split in a row mean that none of ours will ever come."""


class Packer:
    """Turns this rank's documents into rows of ``seq_len + 1`` tokens. Neighbouring rows share no token."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        rank: int,
        world: int,
        val: bool,
        val_percent: int,
        cursor: Cursor | None = None,
        retries: int = 0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._documents, self._tokenizer = documents, tokenizer
        self._width = seq_len + 1
        self._rank, self._world = rank, world
        self._val, self._percent = val, val_percent
        self._cursor = cursor or Cursor()
        self._retries, self._pause = retries, pause
        self._stream: Iterator[tuple[int, str]] | None = None

    def batch(self, rows: int) -> Batch:
        """The next ``rows`` rows. Raises UnreachableError if the source keeps failing."""
        began = time.perf_counter()
        pending = deque(self._cursor.tokens)
        skipped = 0
        while len(pending) < rows * self._width:
            number, text = self._next_document()
            self._cursor.document = number + 1
            if number % self._world == self._rank and held_out(text, self._percent) == self._val:
                pending.extend(self._tokenizer.encode(text))
                pending.append(self._tokenizer.eos)
                skipped = 0
            elif (skipped := skipped + 1) > MAX_SKIPPED:
                split = "held-out" if self._val else "training"
                raise UnreadableError(f"no {split} document in {skipped} documents", "change data.val_percent")
        flat = [pending.popleft() for _ in range(rows * self._width)]
        self._cursor.tokens = list(pending)
        tokens = torch.tensor(flat, dtype=torch.int64).view(rows, self._width)
        return Batch(tokens, self._cursor.to_json(), time.perf_counter() - began)

    def _next_document(self) -> tuple[int, str]:
        for attempt in range(self._retries + 1):
            try:
                if self._stream is None:
                    self._stream = self._documents(self._cursor.document)
                return next(self._stream)
            except StopIteration:
                raise UnreachableError("the data source has ended", "fewer steps, or another source") from None
            except (OSError, ConnectionError) as e:
                self._stream = None
                if attempt == self._retries:
                    raise UnreachableError(
                        f"the data source fails: {e}", "check the network, or use local shards: data.source: local"
                    ) from e
                self._pause(min(30.0, 0.5 * 2**attempt))
        raise AssertionError("unreachable")


def doc_ids(tokens: Tensor, eos: int) -> Tensor:
    """Which document each position belongs to; the end token belongs to the document it ends. [B, S] -> [B, S]."""
    ends = (tokens == eos).to(torch.int64)
    return ends.cumsum(1) - ends


class Prefetcher:
    """Reads batches ahead on a thread; ``get`` hands them over in order with the time spent waiting.

    ``stop`` joins the thread. An error of the source is raised by ``get``.
    """

    def __init__(self, packer: Packer, rows: int, depth: int) -> None:
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=max(1, depth))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(packer, rows), name="prefetch", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        return self._queue.qsize()

    def get(self, timeout: float = 300.0) -> Batch:
        """The next batch; Raises UnreachableError after ``timeout`` seconds without one."""
        try:
            found = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise UnreachableError(
                f"no batch for {timeout:.0f} s", "check the data source; uvcc-engine data probe"
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, packer: Packer, rows: int) -> None:
        while not self._stopped.is_set():
            item: Batch | Exception
            try:
                item = packer.batch(rows)
            except Exception as e:  # noqa: BLE001 - handed to the consumer, which raises it
                item = e
            while not self._stopped.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return
