"""Text -> fixed rows of packed documents, in an order that a checkpoint can name and a resume can continue.

Every document has one rank that reads it, in a world of any size, and the held-out share is decided by the text's hash,
so no split can leak and each document is read once in a pass, also over a change of the world. Rows are packed back to
back with an end-of-document token between documents; nothing is truncated or padded.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from uvcc_engine.contract.errors import UnreachableError, UnreadableError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.nsa.model import NO_LABEL
from uvcc_engine.train.text.documents import DocumentSource, DocumentStream, TokenDocument
from uvcc_engine.train.text.tokenizer import Tokenizer


def bucket_of(text: str) -> int:
    """A document's number from 0 to 99, which decides on the held-out share: a property of its text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % 100


def held_out(document: str | TokenDocument, percent: int) -> bool:
    """Whether a document belongs to validation."""
    return (bucket_of(document) if isinstance(document, str) else document.bucket) < percent


@dataclass(slots=True)
class Cursor:
    """Where a rank stands: the next document's number, the tokens read but not yet in a row, the source's facts.

    ``earlier``: for each earlier world of ranks that this one goes on from, how far each of its ranks had read.
    """

    document: int = 0
    tokens: list[int] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    earlier: list[list[int]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"document": self.document, "tokens": self.tokens, "source": self.source, "earlier": self.earlier}

    @classmethod
    def from_json(cls, raw: object) -> Cursor:
        """Raises ConfigError for what a checkpoint of this trainer does not hold."""
        return strict.read(cls, raw, "a cursor")


def for_another_world(before: dict[int, Cursor], world: int, lead: bool) -> Cursor:
    """The cursor of each rank of a new world, from those of the one before it (``world`` ranks, some maybe lost).

    The new ranks begin at the first document that some rank had not read and leave out what others had; the lead gets
    the tokens that were in no row yet. A rank whose cursor is lost counts as far as the farthest one.
    """
    farthest = max(c.document for c in before.values())
    places = [before[r].document if r in before else farthest for r in range(world)]
    known = [before[r] for r in sorted(before)]
    begin = min(places)
    earlier = [ranks for ranks in (*known[0].earlier, places) if max(ranks) > begin]
    return Cursor(begin, [t for c in known for t in c.tokens] if lead else [], dict(known[0].source), earlier)


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens [B, S + 1] int64 (inputs and, shifted by one, labels); ``cursor`` is the state after this batch.

    Tokens below 0 are no labels, see :func:`inputs_and_labels`.
    """

    tokens: Tensor
    cursor: dict[str, Any]
    fetch_s: float


def inputs_and_labels(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a model reads of a batch's tokens [B, S + 1] and what it is asked to predict, both [B, S]; a label that it
    is not asked for is ``NO_LABEL``."""
    labels = tokens[:, 1:]
    return torch.where(tokens < 0, ~tokens, tokens)[:, :-1], labels.masked_fill(labels < 0, NO_LABEL)


MAX_SKIPPED = 100_000
"""So many documents of the other split in a row mean that none of ours will ever come."""


class Packer:
    """Turns this rank's documents into rows of ``seq_len + 1`` tokens. Neighbouring rows share no token."""

    def __init__(
        self,
        source: DocumentSource,
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
        self._source, self._tokenizer = source, tokenizer
        self._width = seq_len + 1
        self._rank, self._world = rank, world
        self._val, self._percent = val, val_percent
        self._cursor = cursor or Cursor()
        self._retries, self._pause = retries, pause
        self._stream: DocumentStream | None = None
        self.documents = 0  # read so far by this rank, of both splits

    def batch(self, rows: int) -> Batch:
        """The next ``rows`` rows. Raises UnreachableError if the source keeps failing."""
        began = time.perf_counter()
        pending = deque(self._cursor.tokens)
        skipped = 0
        while len(pending) < rows * self._width:
            number, document = self._next_document()
            self._cursor.document = number + 1
            if not self._mine(number):
                continue
            self.documents += 1
            if held_out(document, self._percent) == self._val:
                ids = self._tokenizer.encode(document) if isinstance(document, str) else document.tokens
                pending.extend(ids)
                pending.append(self._tokenizer.eos)
                skipped = 0
            elif (skipped := skipped + 1) > MAX_SKIPPED:
                split = "held-out" if self._val else "training"
                hint = "another data.val_percent, or text of more documents; in a .txt a blank line ends each"
                raise UnreadableError(f"no {split} document in {skipped} documents", hint)
        flat = [pending.popleft() for _ in range(rows * self._width)]
        self._cursor.tokens = list(pending)
        tokens = torch.tensor(flat, dtype=torch.int64).view(rows, self._width)
        return Batch(tokens, self._cursor.to_json(), time.perf_counter() - began)

    def _mine(self, number: int) -> bool:
        """Whether this rank reads the document and no rank of an earlier world had."""
        assert self._stream is not None
        owner = self._stream.owner
        return owner(number, self._world) == self._rank and all(
            number >= ranks[owner(number, len(ranks))] for ranks in self._cursor.earlier
        )

    def _next_document(self) -> tuple[int, str | TokenDocument]:
        """Reads on over failures of the source, from the document behind the last one that arrived."""
        for attempt in range(self._retries + 1):
            try:
                if self._stream is None:
                    c = self._cursor
                    self._stream = self._source.open(c.document, self._rank, self._world, c.source)
                    c.source = self._stream.facts()
                return next(self._stream)
            except StopIteration:
                raise UnreachableError("the data source has ended", "fewer steps, or another source") from None
            except OSError as e:
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
    """Reads batches ahead on a thread; ``get`` hands them over in order. A batch tells how long its reading took.

    An error of the source is raised by ``get``. ``pinned``: in memory from which a GPU copies while the host goes on.
    """

    def __init__(self, packer: Packer, rows: int, depth: int, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=max(1, depth))
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(packer, rows), name="prefetch", daemon=True)
        self.thread.start()

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

    def stop(self, patience_s: float = 5.0) -> None:
        """Join the thread; one that a dead source holds for longer is left to end with the process."""
        self._stopped.set()
        end = time.monotonic() + patience_s
        while self.thread.is_alive() and time.monotonic() < end:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self.thread.join(0.01)

    def _run(self, packer: Packer, rows: int) -> None:
        while not self._stopped.is_set():
            item: Batch | Exception
            try:
                batch = packer.batch(rows)
                item = replace(batch, tokens=batch.tokens.pin_memory()) if self._pinned else batch
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
