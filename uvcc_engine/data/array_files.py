"""Arrays of ``.npy`` and ``.npz`` files, read some rows at a time: an owner's file may be larger than its memory.

numpy reads a member of an archive whole, and a memory map is for bare ``.npy`` files and counts as resident memory.
numpy's own parser reads the headers; nothing is unpickled.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
from numpy.lib import format as npy

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.data.data_files import DAMAGED, MOST_BYTES
from uvcc_engine.data.named_file import refuse_streams

Array = np.ndarray[Any, Any]
MOST_WHOLE: Final = 64 << 20
"""Bytes of an array that is held whole where its file cannot be read by rows: compressed, and column after column."""
_LOCAL_HEAD: Final = 30  # bytes of a member's own head in a zip archive; two lengths stand at its end
_DAMAGED: Final = (*DAMAGED, zipfile.BadZipFile, RuntimeError)  # the latter: a member that is encrypted


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as it lies in a file. ``member``: of an archive, "" where the file is the array; ``start``: bytes before
    its values; ``columns``: they follow each other column by column.
    """

    path: Path
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    columns: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


def stored_arrays(path: Path) -> dict[str, StoredArray]:
    """The arrays of an ``.npz`` archive by name, or the one of an ``.npy`` file under "". Raises UnreadableError."""
    refuse_streams(path)
    try:
        if path.suffix.lower() != ".npz":
            with path.open("rb") as file:
                return {"": _described(file, path, "")}
        with zipfile.ZipFile(path) as archive:
            found = {}
            for entry in _entries(archive):
                with archive.open(entry) as file:
                    found[entry.filename.removesuffix(".npy")] = _described(file, path, entry.filename)
            return found
    except _DAMAGED as error:
        raise UnreadableError(f"cannot read {path}: {error}", "save it with numpy.save or numpy.savez") from error


def _entries(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Raises ValueError for an archive that unpacks to more than any pod has memory for."""
    if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
    return [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]


def _described(file: IO[bytes], path: Path, member: str) -> StoredArray:
    """Raises ValueError for anything that is not a plain array."""
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{member or path.name} has the array format {version}")
    shape, columns, dtype = readers[version](file)
    if dtype.hasobject or dtype.fields is not None or not dtype.itemsize or any(n < 0 for n in shape):
        raise ValueError(f"{member or path.name} is of type {dtype}; use numbers or text")
    return StoredArray(path, member, tuple(shape), dtype, file.tell(), bool(columns) and len(shape) > 1)


class RowReader:
    """Reads the rows of an array in their order, once. A context manager."""

    def __init__(self, array: StoredArray) -> None:
        self._array = array
        self._row_bytes = int(array.dtype.itemsize * np.prod(array.shape[1:], dtype=np.int64))
        self._done, self._start = 0, array.start
        self._open = ExitStack()
        self._file: IO[bytes] | None = None
        self._whole: Array | None = None

    def __enter__(self) -> Self:
        try:
            self._begin()
        except _DAMAGED as error:
            self._open.close()
            raise self._unreadable(error) from error
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def take(self, most: int) -> Array:
        """Up to ``most`` further rows, ``(rows, ...)``; none at the end. Raises UnreadableError."""
        count = min(most, len(self._array) - self._done)
        try:
            found = self._rows(count)
        except _DAMAGED as error:
            raise self._unreadable(error) from error
        self._done += count
        return found

    def _begin(self) -> None:
        array = self._array
        if not array.member:
            self._file = self._open.enter_context(array.path.open("rb"))
            self._file.seek(array.start)
            return
        archive = self._open.enter_context(zipfile.ZipFile(array.path))
        entry = archive.getinfo(array.member)
        if not array.columns:
            self._file = self._open.enter_context(archive.open(entry))
            self._exactly(array.start)
        elif entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 and array.ndim == 2:
            self._file = self._open.enter_context(array.path.open("rb"))
            self._file.seek(entry.header_offset)
            lengths = struct.unpack("<HH", self._exactly(_LOCAL_HEAD)[-4:])
            self._start = entry.header_offset + _LOCAL_HEAD + sum(lengths) + array.start
        elif entry.file_size <= MOST_WHOLE:
            with archive.open(entry) as file:
                self._whole = npy.read_array(file, allow_pickle=False)
        else:
            raise ConfigError(
                f"{array.path.name}: {array.member} is compressed, and stored column by column",
                "save numpy.ascontiguousarray(...) of it, or use numpy.savez in place of savez_compressed",
            )

    def _rows(self, count: int) -> Array:
        array = self._array
        if self._whole is not None:
            return self._whole[self._done : self._done + count]
        if not array.columns:
            data = self._exactly(count * self._row_bytes)
            return np.frombuffer(data, array.dtype).reshape(count, *array.shape[1:])
        if array.ndim != 2:
            raise ValueError("it has several dimensions and is stored column by column; save a copy by rows")
        assert self._file is not None
        found, size = np.empty((count, array.shape[1]), array.dtype), array.dtype.itemsize
        for column in range(array.shape[1]):
            self._file.seek(self._start + (column * len(array) + self._done) * size)
            found[:, column] = np.frombuffer(self._exactly(count * size), array.dtype)
        return found

    def _exactly(self, count: int) -> bytes:
        assert self._file is not None
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("it is cut short")
        return data

    def _unreadable(self, error: BaseException) -> UnreadableError:
        name = self._array.member or self._array.path.name
        return UnreadableError(
            f"cannot read {name} of {self._array.path}: {error}", "save it with numpy.save or numpy.savez"
        )


def rows_in_step(arrays: Mapping[str, StoredArray]) -> int:
    """How many rows every one of these has. Raises ConfigError if they differ, or there are none."""
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1 or not (rows := counts.pop()):
        name = next(iter(arrays.values())).path.name if arrays else "the file"
        raise ConfigError(f"{name} has no rows, or columns of different lengths", "give every row every column")
    return rows
