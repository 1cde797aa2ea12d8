"""Follows the files of one run directory for one console: whole lines, with cursors that survive everything.

A cursor is (inode, offset after the last line given). An unfinished last line is held back. A file that was replaced
is drained before its successor is begun, and both replacement and truncation are reported, also a rewrite that leaves
the size as it was. The file itself is the queue: what the console cannot take yet stays unread. Only telemetry
(heartbeats, logs) is skipped when the backlog grows beyond reason, and then counted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)
READ: Final = 256 << 10
BACKLOG: Final = 1 << 20
KEEP: Final = 64 << 10
_MARK: Final = 64

EVIDENCE: Final = re.compile(r"events\.jsonl|training\.csv|val\.csv|(exit|result)(_rank\d+)?\.json|run\.json")
TELEMETRY: Final = re.compile(r"heartbeat_rank\d+\.jsonl|worker_.+\.log|stackdump_.+\.txt")
_DOCUMENT: Final = re.compile(r"(exit|result)(_rank\d+)?\.json|run\.json")


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Whole lines of one file; ``off`` is the offset after the last one."""

    src: str
    ino: int
    off: int
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Rewound:
    """The file begins again: truncated | rotated."""

    src: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """So many telemetry lines were passed over."""

    src: str
    n: int


Found = LineBatch | Rewound | Skipped


class FileTail:
    """One file. ``poll`` gives what is new since the last call."""

    def __init__(self, path: Path, cursor: tuple[int, int] | None = None) -> None:
        self._path = path
        self._src = path.name
        self._document = bool(_DOCUMENT.fullmatch(path.name))
        self._may_skip = bool(TELEMETRY.fullmatch(path.name))
        self._fd = -1
        self._ino, self._off = cursor or (0, 0)
        self._seen: tuple[int, int] = (-1, -1)
        self._mark = b""
        self._resuming = cursor is not None and cursor[0] != 0

    def poll(self, limit: int, *, finished: bool = False) -> Iterator[Found]:
        """At most about ``limit`` bytes; ``finished`` = nobody writes any more, so an unfinished line is given too."""
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return
        if self._resuming:
            yield from self._resume(now)
        if self._fd < 0:
            self._open()
        elif now.st_ino != self._ino:
            yield from self._drain()
            os.close(self._fd)
            if not self._document:
                yield Rewound(self._src, "rotated")
            self._off = 0
            self._open()
        yield from self._follow(limit, finished)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = _regular(self._path)
        self._ino = os.fstat(self._fd).st_ino
        self._seen = (-1, -1)
        self._remember()

    def _resume(self, now: os.stat_result) -> Iterator[Found]:
        """Find where a console left off: in this file, or in the one that it was rotated to."""
        self._resuming = False
        if now.st_ino == self._ino:
            self._open()
            if self._document:
                self._off = self._off if self._off == now.st_size else 0
            elif self._off > now.st_size or (self._off and os.pread(self._fd, 1, self._off - 1) != b"\n"):
                self._off = 0
                self._remember()
                yield Rewound(self._src, "truncated")
            return
        rotated = self._path.with_name(self._path.name + ".1")
        if rotated.exists() and rotated.stat().st_ino == self._ino:
            self._fd = _regular(rotated)
            yield from self._drain()
            self.close()
        if not self._document:
            yield Rewound(self._src, "rotated")
        self._off = 0

    def _drain(self) -> Iterator[Found]:
        """The rest of a file that nobody writes any more."""
        while (batch := self._read(READ, finished=True)) is not None:
            yield batch

    def _follow(self, limit: int, finished: bool) -> Iterator[Found]:
        st = os.fstat(self._fd)
        seen = (st.st_size, st.st_mtime_ns)
        if seen != self._seen and (st.st_size < self._off or self._rewritten()):
            yield Rewound(self._src, "truncated")
            self._off = 0
            self._remember()
        self._seen = seen
        if self._may_skip and st.st_size - self._off > BACKLOG:
            yield Skipped(self._src, self._skip(st.st_size - KEEP))
        taken = 0
        while taken < limit and self._off < st.st_size:
            batch = self._read(READ, finished=finished)
            if batch is None:
                break
            taken += sum(map(len, batch.lines))
            yield batch

    def _read(self, size: int, *, finished: bool) -> LineBatch | None:
        data = os.pread(self._fd, size, self._off)
        end = data.rfind(b"\n") + 1
        if not end:
            if not data or (len(data) < size and not finished):
                return None
            end = len(data)  # a line beyond all measure, or the last words of the dead
        lines = data[:end].removesuffix(b"\n").split(b"\n")
        self._off += end
        self._remember()
        return LineBatch(self._src, self._ino, self._off, [line.decode(errors="replace") for line in lines])

    def _skip(self, target: int) -> int:
        """Go on behind the first line end after ``target``; returns the number of lines passed over."""
        passed = 0
        while self._off < target:
            data = os.pread(self._fd, min(READ, target - self._off), self._off)
            if not data:
                break
            passed += data.count(b"\n")
            self._off += len(data)
        rest = os.pread(self._fd, KEEP, self._off)
        self._off += rest.find(b"\n") + 1
        self._remember()
        return passed + 1

    def _remember(self) -> None:
        """The bytes before the cursor, by which a rewrite of the same size is recognised."""
        start = max(0, self._off - _MARK)
        self._mark = os.pread(self._fd, self._off - start, start) if self._off else b""

    def _rewritten(self) -> bool:
        start = max(0, self._off - _MARK)
        return bool(self._mark) and os.pread(self._fd, len(self._mark), start) != self._mark


def _regular(path: Path) -> int:
    """Open a file without ever waiting for it: a pipe of that name would hold up the agent, and every halt with it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", os.fspath(path))
    return fd


class RunTail:
    """All streamed files of one run directory."""

    def __init__(self, directory: Path, cursors: Mapping[str, tuple[int, int]]) -> None:
        self._directory = directory
        self._cursors = dict(cursors)
        self._tails: dict[str, FileTail] = {}

    def poll(self, limit: int, *, finished: bool = False) -> Iterator[Found]:
        """What is new in every file, evidence first; stops after about ``limit`` bytes."""
        for name in self._names():
            tail = self._tails.get(name)
            if tail is None:
                tail = self._tails[name] = FileTail(self._directory / name, self._cursors.get(name))
            try:
                for found in tail.poll(limit, finished=finished and name.endswith(".log")):
                    if isinstance(found, LineBatch):
                        limit -= sum(map(len, found.lines))
                    yield found
            except OSError as error:  # most often replaced between stat and open: the next poll sees its successor
                if error.errno != errno.ENOENT:
                    log.warning("cannot read %s of %s: %s", name, self._directory, error.strerror)
                continue
            if limit <= 0:
                return

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _names(self) -> list[str]:
        try:
            present = os.listdir(self._directory)
        except OSError:
            return []  # not there yet, or no directory any more
        evidence = sorted(n for n in present if EVIDENCE.fullmatch(n))
        return evidence + sorted(n for n in present if TELEMETRY.fullmatch(n))
