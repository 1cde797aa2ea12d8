"""A folder of ours into which files of outside origin are written, and the only way in which that is done.

Every folder on the way is opened without following links, the file is written under a fresh name that did not exist,
readable by the owner alone whatever the other side says, and takes its place in one step once it is whole. So a name
that was checked cannot lead anywhere else, also if somebody exchanges folders for links meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.contract.parsing.safepaths import Parts, Refused, safe_relative
from uvcc_engine.contract.run_files.files import write_all, write_failed

RESERVE: Final = 256 << 20
"""So much of the disk stays free: the journal and the halt path need it more than evidence does."""
_LOOK: Final = 32 << 20
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class PartialDownload:
    """One file on its way in. ``keep`` gives it its name; without it nothing of the file is left."""

    def __init__(self, fd: int, root: Path, name: str, limit: int) -> None:
        self._fd, self._root, self._name, self._limit = fd, root, name, limit
        self._hash = hashlib.sha256()
        self._looked = 0
        self.size = 0
        self.kept = False

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append. Raises VerificationError beyond the size that was agreed, UvccError before the disk is full."""
        if self.size + len(data) > self._limit:
            raise VerificationError("fetch", f"{self._name} is longer than the {self._limit} bytes that were announced")
        if self.size == 0 or self.size - self._looked >= _LOOK:
            self._room()
        try:
            write_all(self._fd, data)
        except OSError as e:
            raise write_failed(Path(self._name), e) from e
        self._hash.update(data)
        self.size += len(data)

    def _room(self) -> None:
        disk = os.fstatvfs(self._fd)
        self._looked = self.size
        if disk.f_bavail * disk.f_frsize < RESERVE + min(self._limit - self.size, _LOOK):
            what = f"no room for {self._name}: less than {RESERVE >> 20} MiB are free at {self._root}"
            raise UvccError(what, "free disk space there")

    def keep(self) -> None:
        """The file is whole and shall stay."""
        self.kept = True


class DownloadFolder:
    """``root`` and what is below it; made where it does not exist. Use as a context."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(root, _FOLDER)
        except OSError as e:
            raise write_failed(root, e) from e

    def __enter__(self) -> DownloadFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @contextmanager
    def file(self, parts: Parts, *, limit: int) -> Iterator[PartialDownload]:
        """A file of at most ``limit`` bytes. Raises UvccError if there is a link or a folder in its place."""
        if isinstance(safe_relative("/".join(parts)), Refused):
            raise VerificationError("fetch", f"{'/'.join(parts)!r} is no name for a file here")
        path = self.root.joinpath(*parts)
        folder = self._folder(parts[:-1])
        fresh = f".arriving-{secrets.token_hex(8)}"
        try:
            try:
                fd = os.open(fresh, _FRESH, 0o600, dir_fd=folder)
            except OSError as e:
                raise write_failed(path, e) from e
            try:
                download = PartialDownload(fd, self.root, "/".join(parts), limit)
                yield download
                if download.kept:
                    self._place(fresh, folder, path)
            finally:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(fresh, dir_fd=folder)
        finally:
            os.close(folder)

    @staticmethod
    def _place(fresh: str, folder: int, path: Path) -> None:
        try:
            os.replace(fresh, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as e:
            raise write_failed(path, e) from e

    def write(self, parts: Parts, data: bytes) -> None:
        """A small file at once."""
        with self.file(parts, limit=len(data)) as download:
            download.write(data)
            download.keep()

    def _folder(self, parts: Parts) -> int:
        """The open folder of these parts, made where it is missing."""
        at = os.dup(self._fd)
        for done, part in enumerate(parts, 1):
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=at)
                below = os.open(part, _FOLDER, dir_fd=at)
            except OSError as e:
                path = self.root.joinpath(*parts[:done])
                if e.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise VerificationError("fetch", f"{path} is a link or a file, not a folder", "remove it") from e
                raise write_failed(path, e) from e
            finally:
                os.close(at)
            at = below
        return at
