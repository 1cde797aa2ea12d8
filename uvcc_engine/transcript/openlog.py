"""``open.bin``: the records of the epoch that is open, where they survive the end of the process that wrote them.

The file is mapped into memory, so a record is with the operating system as soon as it is written, without a call. Its
first page says which epoch it is of and how many records follow; that number is raised after the record is there. Only
a window of the file is mapped at a time, and its space is claimed before it is used: a full disk is an error here, not
a signal. Nothing is synced: after a power cut the file may lack its end.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.transcript.files import OPEN_EPOCH
from uvcc_engine.transcript.leaf import RECORD
from uvcc_engine.transcript.runs import EMPTY, Pile

MAGIC: Final = b"UVCCWAL2"
_HEAD: Final = struct.Struct("<8s32sQI")  # magic, session, count, epoch; the last two aligned, so each is whole or old
_COUNT: Final = struct.Struct("<Q")
_COUNT_AT: Final = 40
_EPOCH: Final = struct.Struct("<I")
_EPOCH_AT: Final = 48
_PAGE: Final = mmap.ALLOCATIONGRANULARITY
_IN_WINDOW: Final = _PAGE // 4  # records; so that a window is whole pages: 60 bytes are 15 times 4
_WINDOW: Final = _IN_WINDOW * RECORD.size
_NONE: Final = 0xFFFF_FFFF


class OpenLog:
    """Used by one thread of one process: the folder's lock is held by the store."""

    def __init__(self, folder: Path, sid_sub: bytes, epoch: int) -> None:
        """Open or create; what it holds counts if it is of ``epoch`` of this session. Raises UvccError, OSError."""
        self._path = folder / OPEN_EPOCH
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._window: mmap.mmap | None = None
        self._claimed = os.fstat(self._fd).st_size
        self._claim(_PAGE)
        self._head = mmap.mmap(self._fd, _PAGE)
        found = _head(self._head)
        self.epoch, self.count = _NONE, 0
        if found is not None and found[0] == sid_sub and found[2] == epoch:
            self.epoch, self.count = epoch, min(found[1], (self._claimed - _PAGE) // RECORD.size)
        else:
            _HEAD.pack_into(self._head, 0, MAGIC, sid_sub, 0, _NONE)
        self._number = self._at = 0

    def begin(self, epoch: int) -> Pile:
        """Make ready for records of this epoch; returns those that an interrupted attempt at it left."""
        if epoch != self.epoch:
            self.count = 0
            _COUNT.pack_into(self._head, _COUNT_AT, 0)
            _EPOCH.pack_into(self._head, _EPOCH_AT, epoch)
            self.epoch = epoch
        left = Pile(self.count, fd=self._fd, at=_PAGE) if self.count else EMPTY
        self._open_window()
        return left

    def add(self, record: bytes) -> None:
        """Note a record. Raises UvccError if the disk is full."""
        if self._at == _WINDOW:
            self._open_window()
        at = self._at
        self._at = at + len(record)
        assert self._window is not None
        self._window[at : self._at] = record
        self.count += 1
        _COUNT.pack_into(self._head, _COUNT_AT, self.count)

    def _open_window(self) -> None:
        """Map the part of the file in which the next record lies."""
        number, within = divmod(self.count, _IN_WINDOW)
        if number != self._number or self._window is None:
            start = _PAGE + number * _WINDOW
            self._claim(start + _WINDOW)
            self._close_window()
            self._window, self._number = mmap.mmap(self._fd, _WINDOW, offset=start), number
        self._at = within * RECORD.size

    def _claim(self, size: int) -> None:
        if size <= self._claimed:
            return
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as e:
            raise UvccError(f"cannot write {self._path}: {e.strerror}", "free disk space, then resume") from e
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


def _head(data: bytes | mmap.mmap) -> tuple[bytes, int, int] | None:
    """(session, count, epoch); None for anything else."""
    if len(data) < _HEAD.size:
        return None
    magic, sid_sub, count, epoch = _HEAD.unpack_from(data)
    return (sid_sub, count, epoch) if magic == MAGIC else None


def open_records(folder: Path, epoch: int) -> Iterator[bytes]:
    """What another process noted of ``epoch`` when it was open; nothing if the file is of another one."""
    try:
        with (folder / OPEN_EPOCH).open("rb") as file:
            found = _head(file.read(_HEAD.size))
            if found is None or found[2] != epoch:
                return
            file.seek(_PAGE)
            for _ in range(found[1]):
                record = file.read(RECORD.size)
                if len(record) < RECORD.size:
                    return
                yield record
    except OSError:
        return
