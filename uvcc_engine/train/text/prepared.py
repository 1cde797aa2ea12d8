"""Documents that were tokenised once: files that are mapped and not parsed, so that the first batch comes at once.

A folder of ``MANIFEST.json`` and, per shard, ``NNNNN.tokens`` (little-endian uint16, the end tokens left out) and
``NNNNN.index``: 16 bytes a document, which hold where its tokens end, its number from 0 to 99 for the held-out share,
and the CRC-32 of its tokens. The manifest holds the SHA-256 of every index. So all of a shard's index is checked when
it is opened, and each document when it is read: a damaged file ends the training by name and never changes it.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files
from uvcc_engine.train.config import MOST_VOCAB, VOCAB
from uvcc_engine.train.text.documents import DocumentStream, TokenDocument

FORMAT: Final = "uvcc-prepared-text-1"
MANIFEST: Final = "MANIFEST.json"
RECORD: Final = struct.Struct("<QBxxxI")  # end (tokens from the beginning of the shard), bucket, crc32
TOKEN_BYTES: Final = 2
AGAIN: Final = "prepare it again: uvcc-engine data prepare CONFIG --out FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedShard:
    """One shard: its ``name``, how many documents and tokens it holds, and the SHA-256 of its index (hex)."""

    name: str
    documents: int
    tokens: int
    index_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedManifest:
    """What ``MANIFEST.json`` says. ``source``: of what the documents were read, for people."""

    format: str
    tokenizer: str
    source: str
    shards: list[PreparedShard]

    @property
    def documents(self) -> int:
        """How many documents one pass has."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """How many tokens one pass has, without the end tokens."""
        return sum(shard.tokens for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def digest(self) -> str:
        """What names this very text: SHA-256 over every index, in order (hex)."""
        return hashlib.sha256("".join(shard.index_sha256 for shard in self.shards).encode()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> PreparedManifest:
        """Raises UnreadableError for a folder that is none, or was not finished; ConfigError for other keys."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UnreadableError(f"{folder} holds no prepared text: there is no {MANIFEST}", AGAIN)
        found = strict.read(cls, files.read_json(path), str(path))
        if found.format != FORMAT:
            raise UnreadableError(f"{path} is of the format {found.format[:40]!r}, not {FORMAT}", AGAIN)
        named = [shard.name for shard in found.shards]
        if not found.documents or named != [shard_name(at) for at in range(len(named))]:
            raise UnreadableError(f"{path} names no shards, or not in order", AGAIN)
        return found


def shard_name(at: int) -> str:
    """The name of the shard number ``at``, without its ending."""
    return f"{at:05}"


def tokens_of(data: bytes | memoryview) -> array[int]:
    """Little-endian uint16 as numbers."""
    found = array("H", bytes(data))
    if sys.byteorder == "big":
        found.byteswap()
    return found


class _Shard:
    """One mapped shard. Raises UnreadableError if its files are not those of the manifest."""

    def __init__(self, folder: Path, said: PreparedShard, vocab: int) -> None:
        self._vocab = vocab
        self._path = folder / f"{said.name}.tokens"
        index, self._tokens = _mapped(folder / f"{said.name}.index"), _mapped(self._path)
        if len(index) != said.documents * RECORD.size or len(self._tokens) != said.tokens * TOKEN_BYTES:
            raise UnreadableError(f"{self._path} or its index has another length than {MANIFEST} says", AGAIN)
        if hashlib.sha256(index).hexdigest() != said.index_sha256:
            raise UnreadableError(f"{folder / said.name}.index is not what {MANIFEST} says", AGAIN)
        self._index = index

    def document(self, at: int) -> TokenDocument:
        begin = RECORD.unpack_from(self._index, (at - 1) * RECORD.size)[0] if at else 0
        end, bucket, crc = RECORD.unpack_from(self._index, at * RECORD.size)
        data = self._tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]
        if zlib.crc32(data) != crc:
            raise UnreadableError(f"document {at} of {self._path} is damaged", AGAIN)
        ids = tokens_of(data).tolist()
        if ids and max(ids) >= self._vocab:
            raise UnreadableError(f"document {at} of {self._path} has tokens that the tokenizer does not know", AGAIN)
        return TokenDocument(ids, bucket)


def _mapped(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise UnreadableError(f"cannot read {path}: {e.strerror}", AGAIN) from e


@dataclass(frozen=True, slots=True)
class PreparedText:
    """Implements ``sources.DocumentSource`` over a folder that ``uvcc-engine data prepare`` wrote.

    ``shuffle``: the seed of an order that differs from pass to pass; None: as they were written. Documents are dealt to
    the ranks in turn. Raises UnreadableError for a folder that is damaged, of another ``tokenizer``, or not the one
    that a checkpoint's cursor speaks of.
    """

    folder: Path
    tokenizer: str
    shuffle: int | None = None

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
        manifest = PreparedManifest.read(self.folder)
        if manifest.tokenizer != self.tokenizer:
            own = manifest.tokenizer.startswith("file:")
            hint = "the file it was prepared with" if own else f"data.tokenizer: {manifest.tokenizer}"
            hint += ", or prepare it anew"
            raise UnreadableError(f"{self.folder} was prepared with the tokenizer {manifest.tokenizer[:40]!r}", hint)
        stream = _PreparedStream(self, manifest, first, rank, world)
        if facts and facts != stream.facts():
            raise UnreadableError(
                f"{self.folder} is not the text, or not in the order, that the checkpoint was trained on",
                "give data.path and data.shuffle as the run began with, or begin a new run",
            )
        return stream


class _PreparedStream:
    """This rank's documents, pass after pass."""

    def __init__(self, source: PreparedText, manifest: PreparedManifest, first: int, rank: int, world: int) -> None:
        self._source, self._manifest = source, manifest
        self._ends = list(accumulate(shard.documents for shard in manifest.shards))
        self._shards: dict[int, _Shard] = {}
        self._facts = {"prepared": manifest.digest(), "shuffle": -1 if source.shuffle is None else source.shuffle}
        self._documents = self._read(first, rank, world)

    def __next__(self) -> tuple[int, TokenDocument]:
        return next(self._documents)

    def owner(self, number: int, world: int) -> int:
        return number % world

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)

    def _read(self, first: int, rank: int, world: int) -> Iterator[tuple[int, TokenDocument]]:
        size, seed = self._manifest.documents, self._source.shuffle
        number = first + (rank - first) % world
        while True:
            turn, place = divmod(number, size)
            yield number, self._document(place if seed is None else shuffled(place, size, seed, turn))
            number += world

    def _document(self, place: int) -> TokenDocument:
        at = bisect_right(self._ends, place)
        if at not in self._shards:
            self._shards[at] = _Shard(
                self._source.folder, self._manifest.shards[at], VOCAB.get(self._source.tokenizer, MOST_VOCAB)
            )
        return self._shards[at].document(place - (self._ends[at - 1] if at else 0))


ROUNDS: Final = 6


def shuffled(place: int, size: int, seed: int, turn: int) -> int:
    """Where ``place`` of ``size`` goes in pass ``turn``: a permutation that needs no table and is the same everywhere.

    A Feistel network over the smallest even number of bits that holds ``size``, walked until it falls inside again
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 4).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for step in range(ROUNDS):
            told = struct.pack("<qqIQ", seed, turn, step, right)
            mixed = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        place = left << half | right
        if place < size:
            return place
