"""``events.jsonl``: one line per event, ``{ts, seq, coord, level, event, fields}``. Standard library only.

Ranks that share a directory share the file; ``seq`` counts each rank's events and goes on after a restart, so that
(coord, seq) names an event for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import LineFile

LEVELS = ("debug", "info", "warn", "error")


class Notice(NamedTuple):
    """Something the operator may want to see: an event name of the run contract and its fields."""

    event: str
    fields: dict[str, object]


class EventLog:
    """Appends events of one ``coord`` (a worker's coordinate, or "agent")."""

    def __init__(self, path: Path, coord: str, clock: Callable[[], float]) -> None:
        self._coord = coord
        self._clock = clock
        self._file = LineFile(path)
        self._seq = _last_seq(path, coord) + 1

    def append(self, name: str, level: str, fields: Mapping[str, Any]) -> None:
        """Write one event. Raises UvccError if the disk refuses."""
        record = {
            "ts": round(self._clock(), 6),
            "seq": self._seq,
            "coord": self._coord,
            "level": level,
            "event": name,
            "fields": dict(fields),
        }
        self._file.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False, default=str))
        self._seq += 1

    def sync(self) -> None:
        """Make everything written so far durable."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _last_seq(path: Path, coord: str) -> int:
    """The highest ``seq`` of ``coord`` in the file, searched from its end; -1 if it has none."""
    mark = f'"coord":{json.dumps(coord)}'.encode()
    with path.open("rb") as f:
        end = f.seek(0, os.SEEK_END)
        rest = b""
        while end > 0:
            start = max(0, end - 262144)
            f.seek(start)
            chunk = f.read(end - start) + rest
            rest, newline, whole = chunk.partition(b"\n") if start else (b"", b"\n", chunk)
            for line in reversed(whole.split(b"\n")):
                if mark in line and (seq := _seq_of(line, coord)) is not None:
                    return seq
            rest += newline
            end = start
    return -1


def _seq_of(line: bytes, coord: str) -> int | None:
    try:
        found = json_of(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("coord") != coord:
        return None
    seq = found.get("seq")
    return seq if isinstance(seq, int) else None
