"""Append-only files of JSON lines beside a transcript: a line cut short by a crash is removed on opening."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves.leaf_file import make_durable, write_all


def read_lines(path: Path, most: int = 256 * reading.MIB) -> list[Any]:
    """The objects of a JSON-lines file of at most ``most`` bytes. Raises UnreadableError naming the line."""
    return [reading.parse_json(line, f"{path}:{number}") for number, line in enumerate(reading.lines(path, most), 1)]


class LineLog:
    """Lines appended to a file; what survives a killed process is whole lines."""

    def __init__(self, path: Path) -> None:
        """Open or create; :meth:`take` gives what was there before."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(self._fd, whole)
        self._lines = data[:whole].splitlines(keepends=True)
        self.path = path

    def take(self) -> list[tuple[Any, bytes]]:
        """What was there when it was opened, as (object, line); handed out once. Raises UnreadableError."""
        lines, self._lines = self._lines, []
        try:
            return [(json_of(line), line) for line in lines]
        except ValueError as e:
            raise UnreadableError(f"{self.path} is damaged: {e}", "take the next attempt") from e

    def append(self, line: bytes) -> None:
        """Write one whole line (with its newline) at once."""
        write_all(self._fd, line, self.path)

    def sync(self) -> None:
        make_durable(self._fd, self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
