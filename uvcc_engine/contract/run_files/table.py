"""``training.csv`` and ``val.csv``: append only, with a header, one row per step. Standard library only."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.files import LineFile

MOST_BYTES: Final = 64 << 20  # of a table that is read


class Table:
    """A CSV of numbers whose first column is the step.

    ``resume_step`` None starts a new table and moves an existing one aside (``.1``, ``.2``, ...); otherwise rows of
    later steps are cut off and the header must be the same. ``active`` False drops every row.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, resume_step: int | None, active: bool = True) -> None:
        self.columns = tuple(columns)
        self._file: LineFile | None = None
        if not active:
            return
        header = ",".join(columns)
        if resume_step is None:
            _move_aside(path)
        self._file = LineFile(path, header)
        if resume_step is not None:
            self._file.truncate(_keep_until(path, header, resume_step))

    def append(self, step: int, values: Sequence[float | None]) -> None:
        """One row; the cell of None is empty. Raises UvccError if its width is not the header's or the disk refuses."""
        if len(values) + 1 != len(self.columns):
            raise UvccError(f"a row of {len(values) + 1} values for columns {', '.join(self.columns)}")
        if self._file is not None:
            self._file.append(f"{step}," + ",".join("" if v is None else f"{v:.9g}" for v in values))

    def rewind(self, step: int) -> None:
        """Cut off the rows of later steps."""
        if self._file is not None:
            self._file.truncate(_keep_until(self._file.path, ",".join(self.columns), step))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _move_aside(path: Path) -> None:
    """Give an earlier run's table the next free number."""
    if not path.exists() or path.stat().st_size == 0:
        return
    n = 1
    while (aside := path.with_name(f"{path.name}.{n}")).exists():
        n += 1
    try:
        os.rename(path, aside)
    except OSError as error:
        raise files.write_failed(path, error) from error


def _keep_until(path: Path, header: str, step: int) -> int:
    """Size in bytes of the part of the table that belongs to steps up to ``step``."""
    size = 0
    with path.open("rb") as f:
        for line in f:
            if size == 0:
                if line.rstrip(b"\r\n").decode(errors="replace") != header:
                    raise ConfigError(f"{path} has other columns", f"expected {header}; move it aside")
            else:
                first = line.split(b",", 1)[0]
                if not first.isdigit() or int(first) > step:
                    break
            size += len(line)
    return size


def rows_until(path: Path, step: int) -> Iterator[tuple[int, Mapping[str, float]]]:
    """(step, values by column) of each row up to ``step``, without cells that hold no number and what is no row."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return
        with path.open(newline="", encoding="utf-8", errors="replace") as f:
            for row in csv.DictReader(f):
                at = row.pop("step", "") or ""
                if at.isdecimal() and len(at) < 16 and int(at) <= step:
                    values = {str(name): _number(cell) for name, cell in row.items()}
                    yield int(at), {name: value for name, value in values.items() if math.isfinite(value)}
    except (OSError, csv.Error):
        return


def _number(cell: object) -> float:
    try:
        return float(cell) if isinstance(cell, str) else math.nan
    except ValueError:
        return math.nan
