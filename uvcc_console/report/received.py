"""Archives that somebody handed over, read with suspicion. Light: every ``uvcc verify`` imports it."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.transcript.formats import reading

MOST: Final = 4 * 1024 * reading.MIB  # what is unpacked of an archive that somebody handed over
MOST_FILES: Final = 1 << 18
LONGEST_LIST: Final = 128 * MOST_FILES  # bytes, with the names
_HEADS: Final = 64 * reading.KIB  # of what stands before a file in a tar archive, and what is read ahead
_CHUNK: Final = reading.MIB
_DAMAGED: Final = (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)
_ENCRYPTED: Final = 1  # the flag of a zip archive's file
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def zstandard_module() -> Any:
    try:
        import zstandard
    except ImportError as e:
        raise UvccError("tar.zst needs zstandard", "install the extra uvcc[report], or use --format zip") from e
    return zstandard


def is_archive(path: Path) -> bool:
    return path.name.endswith((".zip", ".tar.zst")) and os.path.isfile(path)


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The content of an archive in a folder that is removed afterwards. Raises UnreadableError.

    An archive is a stranger's: only plain files inside it, by plain names, each once, no more bytes than ``MOST`` and
    no more files than ``MOST_FILES``: empty ones cost it nothing, and this machine one of its inodes each.
    """
    with tempfile.TemporaryDirectory(prefix="uvcc-package-") as folder:
        home = Path(folder)
        try:
            (_unzip if path.name.endswith(".zip") else _untar)(path, home)
        except _DAMAGED as e:
            raise UnreadableError(f"cannot unpack {reading.shown(path)}: {reading.reason(e)}", "fetch it again") from e
        tops = list(home.iterdir())
        yield tops[0] if len(tops) == 1 and tops[0].is_dir() else home


def _unzip(path: Path, home: Path) -> None:
    left = MOST
    with _BoundedReader(open(path, "rb", buffering=0)) as file, zipfile.ZipFile(file) as archive:
        for number, entry in enumerate(archive.infolist()):
            _check_count(path, number)
            if entry.is_dir() and not entry.file_size:
                continue  # as other programs note them: a file's own name makes its folders
            if entry.flag_bits & _ENCRYPTED:
                hint = "ask for one without a password, or unpack it and verify the folder"
                raise UnreadableError(f"{reading.shown(path)} is encrypted", hint)
            if entry.external_attr >> 16 & 0o170000 not in (0, 0o100000):
                raise UnreadableError(f"{reading.shown(path)} holds {reading.shown(entry.filename, 80)}: no plain file")
            if entry.compress_type not in _METHODS:
                raise UnreadableError(f"{reading.shown(path)} is packed in a way that no package is", "fetch it again")
            with archive.open(entry) as source:
                left = _extract(path, home, entry.filename, source, left)


class _BoundedReader(io.BufferedReader):
    """What a zip is read from: ``zipfile`` takes the list of its files in one read, and half a kilobyte for each."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises BadZipFile where a list is longer than ``MOST_FILES`` files make it."""
        if size is not None and size > LONGEST_LIST:
            raise zipfile.BadZipFile(f"a list of files of more than {LONGEST_LIST} bytes, as no package has it")
        return super().read(size)


def _untar(path: Path, home: Path) -> None:
    zstandard = zstandard_module()
    try:
        with path.open("rb") as raw, zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw) as plain:
            metered = _Metered(plain)
            with tarfile.open(fileobj=cast(IO[bytes], metered), mode="r|") as archive:
                _take_all(path, home, archive, metered)
    except zstandard.ZstdError as e:
        raise OSError(str(e)) from e


def _take_all(path: Path, home: Path, archive: tarfile.TarFile, metered: _Metered) -> None:
    left = MOST
    for number, entry in enumerate(archive):
        _check_count(path, number)
        if archive.pax_headers:
            raise tarfile.ReadError("a head about all files, as no package has it")
        archive.members = []  # type: ignore[attr-defined]  # it would keep what it read of every file
        if entry.isdir():
            metered.allow(0)
            continue
        source = archive.extractfile(entry) if entry.isreg() and not entry.issparse() else None
        if source is None:
            raise UnreadableError(f"{reading.shown(path)} holds {reading.shown(entry.name, 80)}: no plain file")
        metered.allow(entry.size)
        left = _extract(path, home, entry.name, source, left)
        metered.allow(0)


class _Metered:
    """What an archive is read from. What stands before a file, such as a long name, ``tarfile`` reads as a whole,
    however much that is said to be; so no more than ``_HEADS`` bytes are given to it until it names the next file."""

    def __init__(self, plain: IO[bytes]) -> None:
        self._plain, self._left = plain, _HEADS

    def allow(self, size: int) -> None:
        """So many bytes are a file's, and what stands before the next one follows."""
        self._left = size + _HEADS

    def read(self, size: int) -> bytes:
        """Raises ReadError where nothing that a package has is so long."""
        if self._left <= 0:
            raise tarfile.ReadError(f"more than {_HEADS} bytes beside a file, as no package has them")
        data = self._plain.read(size)
        self._left -= len(data)
        return data


def _check_count(path: Path, number: int) -> None:
    if number >= MOST_FILES:
        raise UnreadableError(f"{reading.shown(path)} holds more than {MOST_FILES} files", "do not unpack it")


def _extract(path: Path, home: Path, name: str, source: IO[bytes], left: int) -> int:
    """Copy one file; returns how many bytes may still come."""
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts) or len(name) > 1000:
        raise UnreadableError(
            f"{reading.shown(path)} holds a file called {reading.shown(name, 80)!r}", "do not unpack it"
        )
    target = home.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        while data := source.read(_CHUNK):
            left -= len(data)
            if left < 0:
                raise UnreadableError(f"{reading.shown(path)} unpacks to more than {MOST} bytes", "do not unpack it")
            out.write(data)
    return left
