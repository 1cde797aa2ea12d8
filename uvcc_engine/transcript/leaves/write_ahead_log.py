"""``open.bin``: the records of the epoch that is open, where they survive the end of the process that wrote them.

The file is mapped into memory, so a record is with the operating system as soon as it is written, without a call. Its
first page says which epoch it is of and how many records follow; that number is raised after the record is there. Only
a window of the file is mapped at a time, and its space is claimed before it is used: a full disk is an error here, not
a signal.

Every record carries its epoch and a CRC32C over session, epoch and record, and so does the head: what a failing disk or
memory changed is found to be this worker's own damage before it is held against anybody. Nothing is synced: after a
power cut the file may lack some of its pages. Those read as empty or as of another epoch, and count as not there.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import google_crc32c

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.run_files.files import write_failed
from uvcc_engine.transcript.leaves.leaf import RECORD
from uvcc_engine.transcript.leaves.leaf_file import OPEN_EPOCH, damaged

MAGIC: Final = b"UVCCWAL3"
_HEAD: Final = struct.Struct("<8s32sQI4s")  # magic, session, count, epoch, CRC of all but the count
_COUNT: Final = struct.Struct("<Q")
_COUNT_AT: Final = 40
_EPOCH: Final = struct.Struct("<I4s")  # with its CRC: eight aligned bytes, so both are new or old
_EPOCH_AT: Final = 48
_U32: Final = struct.Struct("<I")
_BODY: Final = RECORD.size + _U32.size  # a record and its epoch
SLOT: Final = _BODY + _U32.size
_EMPTY: Final = bytes(SLOT)
PAGE: Final = mmap.ALLOCATIONGRANULARITY
IN_WINDOW: Final = PAGE // 4  # records; so that a window is whole pages: 68 bytes are 17 times 4
_WINDOW: Final = IN_WINDOW * SLOT
_NONE: Final = 0xFFFF_FFFF
_READ: Final = 4096


def _epoch_crc(sid_sub: bytes, epoch: int) -> bytes:
    return _U32.pack(google_crc32c.value(MAGIC + sid_sub + _U32.pack(epoch)))


class WriteAheadLog:
    """Used by one thread of one process: the folder's lock is held by the store."""

    def __init__(self, folder: Path, sid_sub: bytes, epoch: int) -> None:
        """Open or create; what it holds counts if it is of ``epoch`` of this session. Raises UvccError, OSError."""
        self._path = folder / OPEN_EPOCH
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._window: mmap.mmap | None = None
        self._claimed = os.fstat(self._fd).st_size
        self._claim(PAGE)
        self._head = mmap.mmap(self._fd, PAGE)
        self._sid = sid_sub
        self._seed = google_crc32c.value(sid_sub)
        self._tail = b""
        try:
            found = _head(self._head, self._path)
        except UnreadableError:
            self.close()
            raise
        self.epoch, self.count = _NONE, 0
        if found is not None and found[0] == sid_sub and found[2] == epoch:
            self.epoch, self.count = epoch, found[1]
        else:
            os.ftruncate(self._fd, PAGE)  # else records of an epoch that is repeated would be found again
            self._claimed = PAGE
            _HEAD.pack_into(self._head, 0, MAGIC, sid_sub, 0, _NONE, _epoch_crc(sid_sub, _NONE))
        self._number = self._at = 0

    def begin(self, epoch: int) -> Iterator[bytes]:
        """Make ready for records of this epoch; returns those that an interrupted attempt at it left.

        Raises UnreadableError if one of them is not as it was written.
        """
        left: Iterator[bytes] = iter(())
        if epoch != self.epoch:
            self.count = 0
            _COUNT.pack_into(self._head, _COUNT_AT, 0)
            _EPOCH.pack_into(self._head, _EPOCH_AT, epoch, _epoch_crc(self._sid, epoch))
            self.epoch = epoch
        else:
            self.count = _taken(self._fd, self._path, self._sid, epoch, self.count)
            _COUNT.pack_into(self._head, _COUNT_AT, self.count)
            left = _records(self._fd, epoch, self.count)
        self._tail = _U32.pack(epoch)
        self._open_window()
        return left

    def add(self, record: bytes) -> None:
        """Note a record. Raises UvccError if the disk is full."""
        if self._at == _WINDOW:
            self._open_window()
        slot = record + self._tail
        at = self._at
        self._at = at + SLOT
        assert self._window is not None
        self._window[at : self._at] = slot + _U32.pack(google_crc32c.extend(self._seed, slot))
        self.count += 1
        _COUNT.pack_into(self._head, _COUNT_AT, self.count)

    def _open_window(self) -> None:
        """Map the part of the file in which the next record lies."""
        number, within = divmod(self.count, IN_WINDOW)
        if number != self._number or self._window is None:
            start = PAGE + number * _WINDOW
            self._claim(start + _WINDOW)
            self._close_window()
            self._window, self._number = mmap.mmap(self._fd, _WINDOW, offset=start), number
        self._at = within * SLOT

    def _claim(self, size: int) -> None:
        if size <= self._claimed:
            return
        try:
            allocate(self._fd, size)
        except OSError as e:
            raise write_failed(self._path, e) from e
        self._claimed = size

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def close(self) -> None:
        """Unmap; what was noted stays. Harmless twice."""
        if self._fd < 0:
            return
        self._close_window()
        self._head.close()
        os.close(self._fd)
        self._fd = -1


def _head(data: bytes | mmap.mmap, path: Path) -> tuple[bytes, int, int] | None:
    """(session, count, epoch); None where nothing was written. Raises UnreadableError for what is damaged."""
    if len(data) < _HEAD.size or not any(data[: _HEAD.size]):
        return None
    magic, sid_sub, count, epoch, _ = _HEAD.unpack_from(data)
    if magic != MAGIC or data[_EPOCH_AT + 4 : _HEAD.size] != _epoch_crc(sid_sub, epoch):
        raise damaged(path, "the open epoch", "its head is not as it was written")
    return sid_sub, count, epoch


def _taken(fd: int, path: Path, sid_sub: bytes, epoch: int, count: int) -> int:
    """How many slots hold records of this epoch, or ones that were lost. Raises UnreadableError for what is damaged.

    A process can die between a record and its count: one more than counted may be there, two are damage. Whatever the
    count says, every slot of the file is looked at.
    """
    seed, taken, number = google_crc32c.value(sid_sub), count, -1
    for number, slot in enumerate(_slots(fd)):
        good = _U32.unpack_from(slot, _BODY)[0] == google_crc32c.extend(seed, slot[:_BODY])
        if not good and number < count and slot != _EMPTY:
            raise damaged(path, f"epoch {epoch}", f"its record {number} is not as it was written")
        if good and number >= count and _U32.unpack_from(slot, RECORD.size)[0] == epoch:
            if number > count:
                raise damaged(path, f"epoch {epoch}", f"it counts {count} records and holds {number + 1}")
            taken = number + 1
    return min(taken, number + 1)


def _records(fd: int, epoch: int, count: int) -> Iterator[bytes]:
    """The records of this epoch in the first ``count`` slots, which were checked."""
    tail = _U32.pack(epoch)
    for slot in islice(_slots(fd), count):
        if slot[RECORD.size : _BODY] == tail and slot != _EMPTY:
            yield slot[: RECORD.size]


def _slots(fd: int) -> Iterator[bytes]:
    at = PAGE
    while data := os.pread(fd, _READ * SLOT, at):
        for i in range(0, len(data) - SLOT + 1, SLOT):
            yield data[i : i + SLOT]
        at += len(data)


def open_epoch(folder: Path, sid_sub: bytes) -> int:
    """The epoch of this session that the file is of, or -1. Raises UnreadableError for what is damaged."""
    path = folder / OPEN_EPOCH
    try:
        with path.open("rb") as file:
            found = _head(file.read(_HEAD.size), path)
    except OSError:
        return -1
    return found[2] if found is not None and found[0] == sid_sub and found[2] != _NONE else -1


def open_records(folder: Path, epoch: int) -> Iterator[bytes]:
    """What another process noted of ``epoch`` when it was open; nothing if the file is of another one.

    Raises UnreadableError if it is not as it was written.
    """
    path = folder / OPEN_EPOCH
    try:
        with path.open("rb") as file:
            found = _head(file.read(_HEAD.size), path)
            if found is not None and found[2] == epoch:
                count = _taken(file.fileno(), path, found[0], epoch, found[1])
                yield from _records(file.fileno(), epoch, count)
    except OSError:
        return


def allocate(fd: int, size: int) -> None:
    """Make the file ``size`` bytes long with room for all of them, so that no store to its map meets a full disk.

    Raises OSError.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    at = os.fstat(fd).st_size  # macOS: only what has been written has its room
    while at < size:
        at += os.pwrite(fd, bytes(min(size - at, _WINDOW)), at)
