"""Data files a data owner may bring: .npz, .npy, IDX (MNIST), .csv, .safetensors, .pt, and folders of PNG files.

Read strictly, never unpickled.
"""

from __future__ import annotations

import gzip
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine import extras
from uvcc_engine.data.image_folder import read_images
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.sets import Floats, Ints

_FEATURE_NAMES: Final = ("x", "X", "features", "images", "data")
_LABEL_NAMES: Final = ("y", "Y", "labels", "targets", "target")
_IDX_TYPES: Final = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


_NPY: Final = b"\x93NUMPY"
MOST_BYTES: Final = 16 << 30
"""What a data file may unpack to: more than anything that fits a pod's memory as shares."""
DAMAGED: Final = (
    *(OSError, ValueError, EOFError, KeyError, TypeError, SyntaxError, NotImplementedError),
    *(MemoryError, OverflowError, RecursionError, struct.error, zlib.error, tokenize.TokenError),
)


def read_rows(path: Path, labels: Path | None = None) -> tuple[Floats, Ints]:
    """Features (n, d) as float64 and labels (n,) from one file, or from two where the format holds one array.

    ``.npz``, ``.safetensors`` and ``.pt`` hold both by name, ``.csv`` has the label in its last column, a folder has
    one of PNG files for each class, ``.npy`` and IDX need ``labels``.
    Raises UnreadableError if a file is not of its format, ConfigError if the arrays do not fit together.
    """
    for named in filter(None, (path, labels)):
        refuse_streams(named)
    if path.is_dir():
        if labels is not None:
            raise ConfigError(f"{path.name} says by its folders which class an image is of", "leave the labels out")
        return read_images(path)
    kind = _kind(path)
    if kind in ("npz", "pt", "csv", "safetensors"):
        if labels is not None:
            raise ConfigError(f"{path.name} holds its labels itself", "leave the labels file out")
        x, y = _WITH_LABELS[kind](path)
    else:
        if labels is None:
            raise ConfigError(f"{path.name} holds one array only", "name the labels file as well")
        x, y = _read_array(path), _read_array(labels)
    return _fit(path, x, y)


def read_queries(path: Path) -> Floats:
    """Rows without labels (n, d): an array from ``.npy`` or IDX, or the features of what ``read_rows`` takes.

    Raises UnreadableError, ConfigError, as ``read_rows`` does.
    """
    refuse_streams(path)
    if _kind(path) in ("npy", "idx"):
        x = _read_array(path)
        if x.ndim < 2 or not len(x):
            raise ConfigError(f"{path.name} is of the shape {x.shape}", "give at least one row, and each its features")
        return _fit(path, x, np.zeros(len(x)))[0]
    return read_rows(path)[0]


def read_arrays(path: Path) -> dict[str, Floats]:
    """All arrays of an ``.npz`` or ``.safetensors`` file by name, each in its own shape, as float64. Raises
    UnreadableError."""
    refuse_streams(path)
    if path.suffix.lower() == ".safetensors":
        return {name: array.astype(np.float64) for name, array in read_tensors(path).items()}

    def read() -> dict[str, Floats]:
        return {name: array.astype(np.float64) for name, array in archived(_bounded(path)).items()}

    arrays: dict[str, Floats] = _readable(path, read)
    return arrays


def _fit(path: Path, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Floats, Ints]:
    if x.ndim > 1 and y.ndim == 1 and len(x) == len(y) == 0:
        raise ConfigError(f"{path.name} holds no row", "bring at least as many as a batch has")
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise ConfigError(f"{path.name}: features {x.shape} and labels {y.shape} do not fit", "one label per row")
    for name, array in (("features", x), ("labels", y)):
        if array.dtype.kind not in "iufb":
            raise ConfigError(f"{path.name}: {name} are of type {array.dtype}", "use numbers")
    whole = y.astype(np.int64)
    if not np.array_equal(whole, y):
        raise ConfigError(f"{path.name}: labels are not whole numbers", "labels are classes 0, 1, 2, ...")
    return x.reshape(len(x), -1).astype(np.float64), whole


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy", ".csv", ".pt", ".safetensors"):
        return suffix[1:]
    if "idx" in path.name.lower():
        return "idx"
    if not path.exists():
        raise UnreadableError(f"cannot read {path}: No such file or directory", "check the path")
    raise ConfigError(
        f"cannot tell the format of {path}",
        "use .npz, .npy, .csv, .safetensors, .pt, an IDX file, or a folder of PNG files",
    )


def _readable(path: Path, read: Callable[[], Any], hint: str = "check the file and its format") -> Any:
    try:
        return read()
    except (*DAMAGED, zipfile.BadZipFile, RuntimeError) as error:  # the last: an entry that is encrypted
        raise UnreadableError(f"cannot read {path}: {error}", hint) from error


def _bounded(path: Path) -> Path:
    """The archive, if what it unpacks to is not beyond all measure. Raises ValueError."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
    return path


def archived(file: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an ``.npz`` archive by name. Raises ValueError for an entry that is none: NumPy gives its bytes."""
    with np.load(file, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"its entry {name[:80]!r} is no array")
    return arrays


def features_and_labels(path: Path, found: Mapping[str, Any]) -> tuple[Any, Any]:
    """The two arrays of a file that holds both by name. Raises ConfigError."""
    pair = [next((n for n in names if n in found), None) for names in (_FEATURE_NAMES, _LABEL_NAMES)]
    if pair[0] is None or pair[1] is None:
        raise ConfigError(f"{path.name} holds {sorted(found)}", "name the arrays x and y")
    return found[pair[0]], found[pair[1]]


def _read_npz(path: Path) -> tuple[Any, Any]:
    def read() -> tuple[Any, Any]:
        return features_and_labels(path, archived(_bounded(path)))

    x, y = _readable(path, read)
    return x, y


def _read_safetensors(path: Path) -> tuple[Any, Any]:
    x, y = features_and_labels(path, read_tensors(path))
    return x, y


def read_tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of a ``.safetensors`` file by name, each in its own shape. Raises UnreadableError, also for types that
    NumPy has not."""
    refuse_streams(path)
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        if path.stat().st_size > MOST_BYTES:
            raise UnreadableError(f"{path} holds more than {MOST_BYTES >> 30} GiB", "train on a part of it")
        return load_file(path)
    except (SafetensorError, *DAMAGED) as error:
        raise UnreadableError(f"cannot read {path}: {error}", "write it again as safetensors, of numbers") from error


def _read_pt(path: Path) -> tuple[Any, Any]:
    import pickle

    try:
        import torch  # only the owner of .pt files pays for this import
    except ImportError as error:
        hint = f"{extras.hint_for(error)}, or save the arrays as .npz"
        raise ConfigError(f"reading {path.name} needs torch, which is not installed", hint) from error

    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, struct.error, pickle.UnpicklingError) as error:
        raise UnreadableError(f"cannot read {path}: {error}", "save a dict of two tensors, x and y") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} holds a {type(found).__name__}", "save a dict of two tensors, x and y")
    x, y = features_and_labels(path, found)
    return x.numpy(), y.numpy()


def _read_csv(path: Path) -> tuple[Any, Any]:
    def read() -> Any:
        with path.open(encoding="utf-8") as lines:
            first = lines.readline()
            numeric = all(_is_number(cell) for cell in first.strip().split(","))
            return np.loadtxt(path, delimiter=",", ndmin=2, skiprows=0 if numeric else 1)

    table = _readable(path, read, "without a schema each cell is a number; uvcc data infer writes a schema")
    if table.shape[1] < 2:
        raise ConfigError(f"{path.name} has {table.shape[1]} column", "features first, the label last")
    return table[:, :-1], table[:, -1]


_WITH_LABELS: Final[dict[str, Callable[[Path], tuple[Any, Any]]]] = {
    "npz": _read_npz,
    "safetensors": _read_safetensors,
    "pt": _read_pt,
    "csv": _read_csv,
}


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_array(path: Path) -> Any:
    if _kind(path) == "npy":
        return _readable(path, lambda: _load_npy(path))
    return _readable(path, lambda: _parse_idx(path))


def _load_npy(path: Path) -> Any:
    """Raises ValueError. Of a file of any other format NumPy would say how to unpickle it, which nobody should do."""
    with path.open("rb") as file:
        if file.read(len(_NPY)) != _NPY:
            raise ValueError("it was not written by numpy.save")
        file.seek(0)
        return np.load(file, allow_pickle=False)


def _parse_idx(path: Path) -> Any:
    """The IDX format of MNIST: two zero bytes, a type, the number of dimensions, their sizes, the values."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        with gzip.open(path) as packed:
            raw = packed.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
    zero, kind, dims = struct.unpack_from(">HBB", raw)
    if zero != 0 or kind not in _IDX_TYPES or not dims:
        raise ValueError("not an IDX file")
    shape = struct.unpack_from(f">{dims}I", raw, 4)
    values = np.frombuffer(raw, _IDX_TYPES[kind], offset=4 + 4 * dims)
    if values.size != math.prod(shape):
        raise ValueError(f"{values.size} values in place of {shape}")
    return values.reshape(shape)
