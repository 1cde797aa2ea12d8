"""A table of text cells from a CSV file, read strictly: every complaint names the row, the column and what to do."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.contract.text import counted
from uvcc_engine.data.named_file import refuse_streams

MOST_BYTES: Final = 4 << 30
"""What a table may weigh: its cells are held as text while it is read."""
MOST_COLUMNS: Final = 100_000
"""Each is looked at by itself, and has its lines in a schema: ten seconds for so many."""
MISSING_WORDS: Final = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
DELIMITERS: Final = (",", ";", "\t", "|")
_ANNOUNCES: Final = "sep="


@dataclass(frozen=True, slots=True)
class CsvTable:
    """Columns of stripped text cells by name, in the file's order, and the line on which each row ends.

    ``digest``: SHA-256 of the very bytes that the cells came from. ``first``: where this table is a part of a larger
    one, the number of rows before it. ``delimiter``: what parts the cells of its file, "" where nothing does.
    """

    name: str
    columns: dict[str, list[str]]
    lines: tuple[int, ...]
    digest: str
    first: int = 0
    delimiter: str = ""

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """The cells of a column. Raises ConfigError naming the nearest one that there is."""
        if name in self.columns:
            return self.columns[name]
        raise ConfigError(f"{self.name} has no column {name!r}", did_you_mean(name, self.columns))

    def rows(self, wanted: list[int]) -> CsvTable:
        """Some of its rows, in that order."""
        columns = {name: [cells[row] for row in wanted] for name, cells in self.columns.items()}
        return CsvTable(self.name, columns, tuple(self.lines[row] for row in wanted), self.digest, 0, self.delimiter)

    def place(self, row: int, column: str) -> str:
        """Where a cell stands, for people: rows count from 1 below the header, lines as an editor shows them."""
        return f"{self.name}, row {self.first + row + 1} (line {self.lines[row]}), column {column!r}"

    def number(self, row: int, column: str) -> float | None:
        """A cell as a finite number; None if it says that the value is missing. Raises ConfigError naming it."""
        cell = self.columns[column][row]
        if is_missing(cell):
            return None
        found = as_number(cell)
        if found is None:
            raise ConfigError(
                f"{self.place(row, column)} holds {cell[:40]!r}, which is no number",
                "mend the cell, or give the column kind: one-hot or kind: drop",
            )
        if not math.isfinite(found):
            raise ConfigError(
                f"{self.place(row, column)} holds {cell[:40]!r}, which is not finite",
                "mend the cell, or leave it empty",
            )
        return found


def is_missing(cell: str) -> bool:
    """Whether a cell says that there is no value: empty, ``NA``, ``nan``, ``null``, ``?`` and their like."""
    return cell.lower() in MISSING_WORDS


def as_number(cell: str) -> float | None:
    """The number that a cell holds, perhaps an infinite one; None if it holds none."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None


def read_csv(path: Path) -> CsvTable:
    """A CSV file with a header line; cells parted by comma, semicolon, tab or bar, whichever the header has most of, or
    as a first line like ``sep=;`` says, which spreadsheets write.

    Raises UnreadableError if it cannot be read as text, ConfigError for a header or a row that does not fit.
    """
    raw = read_bytes(path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"{path.name}, line {line} is not UTF-8 text", "save the file as UTF-8") from None
    delimiter, announced = delimiter_of(text.lstrip("\r\n").partition("\n")[0])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:  # an empty line is no row
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise UnreadableError(f"{path.name}, line {reader.line_num}: {error}", "mend that line") from error
    rows, lines = rows[announced:], lines[announced:]
    if len(rows) < 2:
        raise ConfigError(f"{path.name} has no rows", "a header line with the columns' names, then one line a row")
    header = header_names(path.name, rows[0])
    for number, (row, line) in enumerate(zip(rows[1:], lines[1:], strict=True), 1):
        if len(row) != len(header):
            raise ConfigError(
                f"{path.name}, row {number} (line {line}) has {counted(len(row), 'cell')}, the header {len(header)}",
                "mend that line; a cell that holds the delimiter goes into double quotes",
            )
    columns = {name: [row[at].strip() for row in rows[1:]] for at, name in enumerate(header)}
    return CsvTable(path.name, columns, tuple(lines[1:]), hashlib.sha256(raw).hexdigest(), delimiter=delimiter)


def delimiter_of(first: str) -> tuple[str, bool]:
    """What parts the cells of a file by its first line, and whether that line is there to say so and is no header."""
    said = first.strip().strip('"').lower().removeprefix(_ANNOUNCES)
    if first.strip().strip('"').lower().startswith(_ANNOUNCES) and (said or "\t") in DELIMITERS:
        return said or "\t", True
    return max(DELIMITERS, key=first.count), False


def read_bytes(path: Path) -> bytes:
    """A table's file. Raises ConfigError if it is too large, UnreadableError if it cannot be read."""
    refuse_streams(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES >> 30} GiB", "share it in parts, or as .npz")
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}", "check the path") from error


ROW: Final = "row"
"""What the first column is called where the header line does not name it."""


def header_names(file: str, cells: list[str]) -> list[str]:
    """The columns' names from a header line. The first one may lack its own, as where a program writes the rows'
    numbers there, and is called ``row``. Raises ConfigError if it is no header."""
    names = [cell.strip() for cell in cells]
    if len(names) > 1 and not names[0] and ROW not in names:
        names[0] = ROW
    if all(as_number(name) is not None for name in names):
        raise ConfigError(f"{file} starts with numbers, not with its columns' names", "put a header line on top")
    if len(names) > MOST_COLUMNS:
        raise ConfigError(
            f"{file} has {len(names)} columns, at most {MOST_COLUMNS} are read", "is it rows that should be columns?"
        )
    before = set[str]()
    for at, name in enumerate(names, 1):
        if not name:
            raise ConfigError(f"{file}: column {at} has no name", "name it in the header line")
        if name in before:
            raise ConfigError(f"{file} has two columns {name!r}", "rename one in the header line")
        before.add(name)
    return names
