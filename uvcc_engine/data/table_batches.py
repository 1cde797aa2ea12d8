"""A table in parts, for files larger than memory: CSV, Parquet and ``.npz`` are read some thousand rows at a time."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine import extras
from uvcc_engine.contract.text import counted
from uvcc_engine.data.array_files import RowReader, rows_in_step, stored_arrays
from uvcc_engine.data.csv_table import CsvTable, delimiter_of, header_names
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.table_files import array_columns, read_table, text_columns

MOST_CELLS: Final = 1 << 15
"""Cells of one part: as text they take some 3 MiB."""


def table_batches(path: Path) -> Iterator[CsvTable]:
    """The rows of a table in their order. Raises UnreadableError, ConfigError.

    Parts have no digest: it would be that of other bytes.
    """
    refuse_streams(path)
    found, read = False, {".npz": _npz, ".parquet": _parquet, ".safetensors": _whole}.get(path.suffix.lower(), _csv)
    for part in read(path):
        found = True
        yield part
    if not found:
        raise ConfigError(f"{path.name} has no rows", "a header line with the columns' names, then one line a row")


def _csv(path: Path) -> Iterator[CsvTable]:
    first = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = next((text for text in file if text.strip("\r\n")), "")
            delimiter, announced = delimiter_of(line)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            rows = ((row, reader.line_num) for row in reader if row)  # an empty line is no row
            next(rows if announced else iter(()), None)
            names = header_names(path.name, next(rows, ([""], 0))[0])
            while part := list(itertools.islice(rows, max(1, MOST_CELLS // len(names)))):
                yield _part(path.name, names, part, first)
                first += len(part)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path.name}, after row {first}, is not UTF-8 text", "save the file as UTF-8") from error
    except csv.Error as error:
        raise UnreadableError(f"{path.name}, line {reader.line_num}: {error}", "mend that line") from error
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}", "check the path") from error


def _part(name: str, names: list[str], rows: list[tuple[list[str], int]], first: int) -> CsvTable:
    for number, (row, line) in enumerate(rows, first + 1):
        if len(row) != len(names):
            raise ConfigError(
                f"{name}, row {number} (line {line}) has {counted(len(row), 'cell')}, the header {len(names)}",
                "mend that line; a cell that holds the delimiter goes into double quotes",
            )
    cells = zip(*(row for row, _ in rows), strict=True)
    columns = {one: list(map(str.strip, column)) for one, column in zip(names, cells, strict=True)}
    return CsvTable(name, columns, tuple(line for _, line in rows), "", first)


def _whole(path: Path) -> Iterator[CsvTable]:
    yield read_table(path)


def _npz(path: Path) -> Iterator[CsvTable]:
    arrays = stored_arrays(path)
    rows, wide = rows_in_step(arrays), sum(array.shape[1] if array.ndim == 2 else 1 for array in arrays.values())
    with ExitStack() as stack:
        readers = {name: stack.enter_context(RowReader(array)) for name, array in arrays.items()}
        for first in range(0, rows, at_once := max(1, MOST_CELLS // max(1, wide))):
            columns: dict[str, list[str]] = {}
            for name, reader in readers.items():
                columns |= array_columns(path.name, name, reader.take(at_once))
            last = min(rows, first + at_once)
            yield CsvTable(path.name, columns, tuple(range(first + 1, last + 1)), "", first)


def _parquet(path: Path) -> Iterator[CsvTable]:
    extras.require("pyarrow", f"{path.name} is read with it")
    import pyarrow as pa
    from pyarrow import parquet

    first = 0
    try:
        with parquet.ParquetFile(path) as file:
            wide = max(1, len(file.schema_arrow.names))
            for batch in file.iter_batches(batch_size=max(1, MOST_CELLS // wide)):
                lines = tuple(range(first + 1, first + 1 + batch.num_rows))
                if batch.num_rows:
                    yield CsvTable(path.name, text_columns(path.name, pa.Table.from_batches([batch])), lines, "", first)
                first += batch.num_rows
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UnreadableError(f"cannot read {path}: {error}", "write it again as Parquet") from error
