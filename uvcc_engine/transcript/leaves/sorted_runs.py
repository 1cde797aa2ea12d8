"""The records of one epoch in bounded memory: the newest in a dictionary, older ones in sorted pieces on disk.

An external merge sort (Knuth, TAOCP vol. 3, section 5.4): pieces lie in one unnamed file that ends with the process.
"""

from __future__ import annotations

import heapq
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.run_files.files import write_failed
from uvcc_engine.transcript.leaves.leaf import RECORD, Key
from uvcc_engine.transcript.leaves.leaf_file import write_all

LIMIT: Final = 65_536  # records in memory: about 25 MB
_KEY: Final = struct.Struct("<BBBBIIQ")
_READ: Final = 4096  # records read at a time
Clash = Callable[[bytes, bytes], Exception]


def key_of(record: bytes) -> Key:
    """The canonical order of a record, see ``leaf.Leaf.key``."""
    direction, kind, src, dst, op, chunk, stream = _KEY.unpack_from(record)
    return stream, op, chunk, direction, src, dst, kind


@dataclass(frozen=True, slots=True)
class SortedRun:
    """Records in canonical order: in memory, or ``count`` of them from byte ``at`` of an open file."""

    count: int
    data: bytes = b""
    fd: int = -1
    at: int = 0

    def chunks(self) -> Iterator[bytes]:
        """Whole records, some thousands at a time; may be asked again and again. Raises UnreadableError."""
        if self.fd < 0:
            if self.data:
                yield self.data
            return
        for first in range(0, self.count, _READ):
            yield self._read(first, min(_READ, self.count - first))

    def __iter__(self) -> Iterator[bytes]:
        for data in self.chunks():
            for i in range(0, len(data), RECORD.size):
                yield data[i : i + RECORD.size]

    def _read(self, first: int, count: int) -> bytes:
        if self.fd < 0:
            return self.data[first * RECORD.size : (first + count) * RECORD.size]
        data = os.pread(self.fd, count * RECORD.size, self.at + first * RECORD.size)
        if len(data) != count * RECORD.size:
            raise UnreadableError("a file of records was cut short while it was read", "take the next attempt")
        return data

    def find(self, key: Key) -> bytes | None:
        """The record of this key: a binary search, one read a step."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            record = self._read(middle, 1)
            found = key_of(record)
            if found == key:
                return record
            low, high = (middle + 1, high) if found < key else (low, middle)
        return None


EMPTY: Final = SortedRun(0)


class KnownKeys:
    """What was recorded of an epoch before, by key; ``run`` is all of it in order."""

    def __init__(self, run: SortedRun, limit: int = LIMIT) -> None:
        """At most ``limit`` records are held in memory; more are looked up in their file."""
        self.run = run
        self._held = {key_of(r): r for r in run} if run.count <= limit else None

    def get(self, key: Key) -> bytes | None:
        """The record of this key."""
        return self.run.find(key) if self._held is None else self._held.get(key)


class RunSet:
    """Collects the records of an epoch in any order. Used by one thread."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        """``limit``: how many records it holds in memory; more of them are sorted into ``folder``'s file system."""
        self._folder, self._limit = folder, limit
        self.recent: dict[Key, bytes] = {}  # the newest by key; repeats of older ones are found by :meth:`merged`
        self._fd = -1
        self._size = 0
        self._pieces: list[SortedRun] = []

    def put(self, key: Key, record: bytes) -> None:
        """Add a record. Raises UvccError if the disk refuses."""
        recent = self.recent
        recent[key] = record
        if len(recent) >= self._limit:
            self._pieces.append(self._keep(self.recent[k] for k in sorted(self.recent)))
            self.recent = {}

    def merged(self, clash: Clash) -> SortedRun:
        """All records, each once, in canonical order. Raises what ``clash`` makes of two that differ under one key."""
        order = sorted(self.recent)
        if not self._pieces:
            return SortedRun(len(order), b"".join([self.recent[k] for k in order]))
        recent = SortedRun(len(order), b"".join([self.recent[k] for k in order]))
        return self._keep(_unique(heapq.merge(*self._pieces, recent, key=key_of), clash))

    def _keep(self, records: Iterable[bytes]) -> SortedRun:
        """Write sorted records behind what lies in the file."""
        if self._fd < 0:
            self._fd = _unnamed(self._folder)
        at, count, held = self._size, 0, bytearray()
        for record in records:
            held += record
            count += 1
            if not count % _READ:
                write_all(self._fd, bytes(held), self._folder)
                held = bytearray()
        write_all(self._fd, bytes(held), self._folder)
        self._size = at + count * RECORD.size
        return SortedRun(count, fd=self._fd, at=at)

    def clear(self) -> None:
        """Forget everything; piles that it gave are void."""
        self.recent, self._pieces, self._size = {}, [], 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unnamed(folder: Path) -> int:
    """A file without a name, so that a killed process leaves none behind."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as e:
        raise write_failed(folder, e) from e


def _unique(records: Iterable[bytes], clash: Clash) -> Iterator[bytes]:
    last = b""
    for record in records:
        if record == last:
            continue
        if last and key_of(record) == key_of(last):
            raise clash(last, record)
        last = record
        yield record


def first_missing(wanted: Iterable[bytes], there: Iterable[bytes]) -> bytes | None:
    """The first of ``wanted`` whose key ``there`` lacks; both in canonical order."""
    rest = map(key_of, there)
    at = next(rest, None)
    for record in wanted:
        key = key_of(record)
        while at is not None and at < key:
            at = next(rest, None)
        if at != key:
            return record
    return None
