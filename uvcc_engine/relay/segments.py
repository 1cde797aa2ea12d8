"""Large payloads of the relay, beside the database: files that only grow, each deleted when nothing in it is needed.

A database would write a large payload twice (log and table); here it is written once. Used by the writer thread; any
thread may read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from uvcc_engine.contract.run_files import files
from uvcc_engine.relay.binary import Buffer

LARGE: Final = 64 << 10  # payloads from this size on are kept here
SEGMENT_BYTES: Final = 256 << 20
_IOV: Final = 256


class Segments:
    """Numbered files in ``folder``. A number is never used again while its file may be referred to."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = segment_bytes
        folder.mkdir(mode=0o700, exist_ok=True)
        self._live: dict[int, int] = {}
        self._number = max((int(p.stem) for p in self._files()), default=0)
        self._fd = -1
        self._size = 0

    def path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.seg"

    def _files(self) -> list[Path]:
        return [p for p in self._folder.glob("*.seg") if p.stem.isascii() and p.stem.isdigit() and len(p.stem) < 16]

    @property
    def in_use(self) -> bool:
        """True if any payload is kept here."""
        return bool(self._live)

    def keep_only(self, live: Iterable[int]) -> None:
        """After a start: count what is still referred to (one entry per payload), delete the other files."""
        for number in live:
            self._live[number] = self._live.get(number, 0) + 1
        for path in self._files():
            if int(path.stem) not in self._live:
                path.unlink()

    def append(self, payloads: Sequence[Buffer]) -> list[tuple[int, int]]:
        """Write payloads and make them durable; returns (segment, offset) of each. Raises OSError."""
        if self._fd < 0 or self._size >= self._limit:
            self._roll()
        places = []
        at = self._size
        for payload in payloads:
            places.append((self._number, at))
            at += len(payload)
        try:
            for start in range(0, len(payloads), _IOV):
                self._write(payloads[start : start + _IOV])
            files.sync_data(self._fd)
        except OSError:
            self.close()  # what was written in part is never referred to: the next one begins a file of its own
            raise
        self._live[self._number] = self._live.get(self._number, 0) + len(payloads)
        return places

    def _write(self, some: Sequence[Buffer]) -> None:
        total = sum(len(p) for p in some)
        done = os.pwritev(self._fd, some, self._size)
        self._size += done
        if done < total:
            rest = memoryview(b"".join(some))[done:]
            while rest:
                n = os.pwrite(self._fd, rest, self._size)
                self._size += n
                rest = rest[n:]

    def _roll(self) -> None:
        before = self._number
        self.close()  # its number may be another file's at once: nothing is written to it, whatever fails below
        fd = os.open(self.path(before + 1), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._fd, self._number, self._size = fd, before + 1, 0
        self._drop_if_unused(before)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def release(self, number: int) -> None:
        """One payload of a segment is not needed any more."""
        self._live[number] = self._live.get(number, 0) - 1
        self._drop_if_unused(number)

    def give_back(self) -> None:
        """Let go of the file that is written to, if nothing in it is needed: the disk is short of room."""
        if self._live.get(self._number, 0) <= 0:
            self.close()
            self._drop_if_unused(self._number)

    def _drop_if_unused(self, number: int) -> None:
        if (number != self._number or self._fd < 0) and self._live.get(number, 0) <= 0:
            self._live.pop(number, None)
            self.path(number).unlink(missing_ok=True)

    def read(self, number: int, offset: int, size: int) -> bytes | None:
        """A payload; None if its segment is gone, or ends before it does."""
        try:
            fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            found = os.pread(fd, size, offset)
        finally:
            os.close(fd)
        return found if len(found) == size else None

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
