"""Tables from files: CSV, Parquet (with the extra ``data``), ``.npz`` and ``.safetensors`` of named columns.

Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine import extras
from uvcc_engine.data.csv_table import CsvTable, read_bytes, read_csv
from uvcc_engine.data.data_files import DAMAGED, MOST_BYTES, archived, read_tensors


def read_table(path: Path) -> CsvTable:
    """A table by its file's ending: ``.parquet``, ``.npz``, ``.safetensors``, all else CSV.

    Raises UnreadableError or ConfigError.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        return read_csv(path)
    raw = read_bytes(path)
    columns = _READERS[suffix](path, raw)
    counts = {len(cells) for cells in columns.values()}
    if len(counts) != 1 or not counts.pop():
        raise ConfigError(f"{path.name} has no rows, or columns of different lengths", "give every row every column")
    rows = len(next(iter(columns.values())))
    return CsvTable(path.name, columns, tuple(range(1, rows + 1)), hashlib.sha256(raw).hexdigest())


def _parquet(path: Path, raw: bytes) -> dict[str, list[str]]:
    extras.require("pyarrow", f"{path.name} is read with it")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        found = parquet.read_table(io.BytesIO(raw))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UnreadableError(f"cannot read {path}: {error}", "write it again as Parquet") from error
    return text_columns(path.name, found)


def text_columns(file: str, found: Any) -> dict[str, list[str]]:
    """The columns of an Arrow table as text cells. Raises ConfigError for a type that is neither number nor text."""
    import pyarrow as pa

    columns: dict[str, list[str]] = {}
    for name, column in zip(found.column_names, found.columns, strict=True):
        kind = column.type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)
        days = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
        if not (plain or texts or days or pa.types.is_null(kind)):
            raise ConfigError(f"{file}: column {name!r} is of type {kind}", "write it as numbers, dates or text")
        if name in columns:
            raise ConfigError(f"{file} has two columns {name!r}", "rename one")
        columns[name] = [_cell(value) for value in column.to_pylist()]
    return columns


def _npz(path: Path, raw: bytes) -> dict[str, list[str]]:
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise ValueError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
        arrays = archived(io.BytesIO(raw))
    except (*DAMAGED, zipfile.BadZipFile, RuntimeError) as error:
        raise UnreadableError(
            f"cannot read {path}: {error}", "save it with numpy.savez, a name for each column"
        ) from error
    columns: dict[str, list[str]] = {}
    for name, array in arrays.items():
        columns |= array_columns(path.name, name, array)
    return columns


def _safetensors(path: Path, raw: bytes) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    for name, array in sorted(read_tensors(path).items()):  # the file keeps no order of its own
        columns |= array_columns(path.name, name, array)
    return columns


_READERS: Final[dict[str, Callable[[Path, bytes], dict[str, list[str]]]]] = {
    ".parquet": _parquet,
    ".npz": _npz,
    ".safetensors": _safetensors,
}


def array_columns(file: str, name: str, array: np.ndarray[Any, Any]) -> dict[str, list[str]]:
    """The columns of an array (rows,) or (rows, columns) as text cells: ``name``, or ``name.0`` and so on.

    Raises ConfigError for another shape, or a type that is neither number nor text.
    """
    if array.ndim not in (1, 2) or array.dtype.kind not in "iufbU":
        what = f"{file}: {name} has shape {array.shape} and type {array.dtype}"
        raise ConfigError(what, "give columns of numbers or text")
    if array.ndim == 1:
        return {name: [_cell(value) for value in array.tolist()]}
    return {f"{name}.{k}": [_cell(v) for v in array[:, k].tolist()] for k in range(array.shape[1])}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value).strip()
