"""The log of a run: one file of JSON lines for each of its processes, rotated, and what reads them together.

``<process>.jsonl`` lies in the run's folder beside ``<process>.log``, which takes what a process says past its logger
(an interpreter that dies, a library in C). Both may quote pods and providers: :func:`entry` and :func:`plain` clean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, BinaryIO, Final

from uvcc_console.core import log
from uvcc_console.runs.processes import CONDUCTOR, HALTD
from uvcc_engine.contract.parsing.untrusted import as_object, as_timestamp, scalar_text
from uvcc_engine.contract.text import clean, clean_block, complain

PROCESSES: Final = (CONDUCTOR, HALTD)
BYTES, KEPT = 4 << 20, 3
"""How large a file grows, and how many older ones are kept beside it."""
LINE: Final = 1 << 16
"""Longer lines are no entries: nothing that writes here makes them."""
QUIET: Final = ("asyncssh", "httpx", "httpcore")
_DATED: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (INFO|WARNING|ERROR|CRITICAL) (.*)", re.DOTALL)


class _Handler(RotatingFileHandler):
    """A disk that does not take a line loses it, no more: what is logged must not hurt what it tells of."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.stream is None and record.levelno >= logging.WARNING:  # there is no such run, or nowhere to write
            complain(record.getMessage())

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def begin(run_dir: Path, process: str) -> None:
    """Have everything that this process logs from now on written to the run's folder. Call once, at its start."""
    handler = _Handler(
        run_dir / f"{process}.jsonl", maxBytes=BYTES, backupCount=KEPT, encoding="ascii", errors="replace", delay=True
    )
    handler.setFormatter(log.JsonLines(process))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log, cleaned. ``trace`` has several lines; ``ts`` of an undated one is its predecessor's."""

    ts: float
    level: str
    process: str
    message: str
    logger: str = ""
    context: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    hint: str = ""
    trace: str = ""

    @property
    def document(self) -> dict[str, Any]:
        """As ``uvcc logs --json`` prints it: empty fields are left out."""
        row: dict[str, Any] = {"ts": self.ts, "level": self.level, "process": self.process, "message": self.message}
        more = {"logger": self.logger, **self.context, "error": self.error, "hint": self.hint, "trace": self.trace}
        return row | {key: value for key, value in more.items() if value}

    def text(self) -> str:
        """For a reader: when, how bad, who, about what; the traceback below, indented."""
        day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.ts))
        about = " ".join(f"{k}={v}" for k, v in self.context.items() if v and k != "run")
        head = f"{day}.{int(self.ts * 1000) % 1000:03d} {self.level:<7} {self.process:<9} "
        lines = [head + self.message + (f"  [{about}]" if about else "")]
        return "\n".join([*lines, *(f"    {line}" for line in self.trace.splitlines())])


def entry(line: bytes, process: str) -> LogLine | None:
    """A line of a ``.jsonl`` file; None for whatever is none, such as one that a full disk cut short."""
    row = as_object(line, LINE)
    ts = as_timestamp(row.get("ts")) if row is not None else None
    if row is None or ts is None:
        return None
    level = scalar_text(row.get("level"), 16)
    about = {name: text for name in log.CONTEXT if (text := scalar_text(row.get(name)))}
    trace = row.get("trace")
    return LogLine(
        ts,
        level if level in log.LEVELS else "info",
        process,
        scalar_text(row.get("message"), log.TEXT),
        scalar_text(row.get("logger")),
        about,
        scalar_text(row.get("error")),
        scalar_text(row.get("hint"), log.TEXT),
        clean_block(trace[: log.TRACE]) if isinstance(trace, str) else "",
    )


def plain(line: bytes, process: str, before: float) -> LogLine:
    """A line of a ``.log`` file, which may have a date of its own; otherwise it is as late as what came ``before``."""
    text = line[:LINE].decode(errors="replace")
    dated = _DATED.match(text)
    if dated is None:
        return LogLine(before, "info", process, clean(text.rstrip(), log.TEXT))
    try:
        ts = time.mktime(time.strptime(dated[1], "%Y-%m-%d %H:%M:%S")) + int(dated[2]) / 1000
    except (ValueError, OverflowError):
        ts = before
    return LogLine(ts, log.level_of(getattr(logging, dated[3])), process, clean(dated[4].rstrip(), log.TEXT))


class _Tail:
    """The whole lines of one file, read on from where it was left; a file that takes its place is read from its start.

    A file larger than what rotation keeps is begun at its last part.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    @property
    def inode(self) -> int:
        return os.fstat(self._file.fileno()).st_ino if self._file is not None else 0

    def lines(self) -> list[bytes]:
        """What has come since the last call."""
        found = self._read()
        if self._moved():
            found += self._read()  # what came between the two
            if self._rest:
                found.append(self._rest)
            self._close()
            found += self._read()
        return found

    def last(self) -> list[bytes]:
        """What was begun, and has no end of line yet."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def _read(self) -> list[bytes]:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
                self._file.seek(max(0, os.fstat(self._file.fileno()).st_size - BYTES * (KEPT + 1)))
            except OSError:
                return []
        try:
            *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        except OSError:
            return []
        return [line for line in whole if line.strip()]

    def _moved(self) -> bool:
        if self._file is None:
            return False
        try:
            now = self._path.stat()
        except OSError:
            return False
        return now.st_ino != self.inode or now.st_size < self._file.tell()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    close = _close


class LogReader:
    """All logs of a run together. ``new`` gives what has come since the last call, by time; totally, and bounded."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._json = {name: _Tail(run_dir / f"{name}.jsonl") for name in PROCESSES}
        self._plain = {name: _Tail(run_dir / f"{name}.log") for name in PROCESSES}
        self._before: dict[str, float] = {}
        self._first = True

    def new(self, *, unfinished: bool = False) -> list[LogLine]:
        """``unfinished``: also lines without an end, where nobody writes any more."""
        found: list[LogLine] = []
        for name, tail in self._json.items():
            lines = tail.lines() + (tail.last() if unfinished else [])
            if self._first:
                lines = [*self._older(name, tail.inode), *lines]
            found += [e for line in lines if (e := entry(line, name)) is not None]
        for name, tail in self._plain.items():
            found += self._said(name, tail.lines() + (tail.last() if unfinished else []))
        self._first = False
        return sorted(found, key=lambda e: e.ts)

    def _older(self, name: str, newest: int) -> Iterator[bytes]:
        for n in range(KEPT, 0, -1):
            older = _Tail(self._run_dir / f"{name}.jsonl.{n}")
            lines = older.lines()
            if older.inode != newest:
                yield from lines
            older.close()

    def _said(self, name: str, lines: Iterable[bytes]) -> Iterator[LogLine]:
        before = self._before.get(name, 0.0)
        for line in lines:
            before = before or self._written(name)
            found = plain(line, name, before)
            self._before[name] = before = found.ts
            yield found

    def _written(self, name: str) -> float:
        """When a file was written last: no line of it is later."""
        try:
            return (self._run_dir / f"{name}.log").stat().st_mtime
        except OSError:
            return 0.0

    def close(self) -> None:
        for tail in (*self._json.values(), *self._plain.values()):
            tail.close()
