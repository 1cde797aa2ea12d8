"""Archives that somebody handed over, read with suspicion. Light: every ``uvcc verify`` imports it."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.transcript.formats import reading

MOST: Final = 4 * 1024 * reading.MIB  # what is unpacked of an archive that somebody handed over
_CHUNK: Final = reading.MIB


def zstandard_module() -> Any:
    try:
        import zstandard
    except ImportError as e:
        raise UvccError("tar.zst needs zstandard", "install the extra uvcc[report], or use --format zip") from e
    return zstandard


def is_archive(path: Path) -> bool:
    return path.name.endswith((".zip", ".tar.zst")) and path.is_file()


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The content of an archive in a folder that is removed afterwards. Raises UnreadableError.

    An archive is a stranger's: only plain files inside it, by plain names, each once, no more bytes than ``MOST``.
    """
    with tempfile.TemporaryDirectory(prefix="uvcc-package-") as folder:
        home = Path(folder)
        try:
            (_unzip if path.name.endswith(".zip") else _untar)(path, home)
        except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError) as e:
            raise UnreadableError(f"cannot unpack {reading.shown(path)}: {reading.reason(e)}", "fetch it again") from e
        tops = list(home.iterdir())
        yield tops[0] if len(tops) == 1 and tops[0].is_dir() else home


def _unzip(path: Path, home: Path) -> None:
    left = MOST
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.external_attr >> 16 & 0o170000 not in (0, 0o100000):
                raise UnreadableError(f"{reading.shown(path)} holds {reading.shown(entry.filename, 80)}: no plain file")
            with archive.open(entry) as source:
                left = _extract(path, home, entry.filename, source, left)


def _untar(path: Path, home: Path) -> None:
    left, zstandard = MOST, zstandard_module()
    try:
        with (
            path.open("rb") as raw,
            zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw) as plain,
            tarfile.open(fileobj=plain, mode="r|") as archive,
        ):
            for entry in archive:
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None:
                    raise UnreadableError(f"{reading.shown(path)} holds {reading.shown(entry.name, 80)}: no plain file")
                left = _extract(path, home, entry.name, source, left)
    except zstandard.ZstdError as e:
        raise OSError(str(e)) from e


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
