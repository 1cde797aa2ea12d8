"""Prebuilt wheels of what pods install: sent over SSH, once a pod, so that none of them asks a package index.

The operator's folder is read whole before anything is rented. On a pod the wheels lie in a folder that is named by
their hashes and holds nothing else, so that pip finds what the operator has, and no wheel that lay there before.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import secrets
import stat
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_console.fleet.agent_client import ROOT
from uvcc_console.fleet.ssh import PodLink
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError

SUMS: Final = "SHA256SUMS"
SEND_S: Final = 3600.0
HASH_S: Final = 600.0
_FILL: Final = "pip download -d FOLDER PACKAGE... fills it, with the image's Python and system"
# a wheel's file name, which becomes part of a command line on the pod
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*-[A-Za-z0-9][A-Za-z0-9._!+-]*\.whl")
_SUM: Final = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_READING: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class HeldWheel:
    """One wheel of the operator's folder, read whole. ``size`` in bytes."""

    path: Path
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class WheelSet:
    """The wheels that pods install from. Without any, a pod asks its package index."""

    wheels: tuple[HeldWheel, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.wheels)

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 by file name."""
        return {wheel.path.name: wheel.sha256 for wheel in self.wheels}

    @property
    def folder(self) -> str:
        """Where they lie on a pod: another set of wheels lies elsewhere."""
        text = "".join(f"{digest}  {name}\n" for name, digest in sorted(self.hashes.items()))
        return f"{ROOT}/wheels/{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def pip(self, python: str) -> str:
        """What installs on a pod: from these alone, if there are any, whatever the image's pip.conf says."""
        install = f"{python} -m pip install --no-input --disable-pip-version-check"
        if not self.wheels:
            return install
        return f"PIP_CONFIG_FILE=/dev/null {install} --isolated --no-index --find-links {self.folder}"

    def has(self, package: str) -> bool:
        """Whether one of them is of this package."""
        names = (wheel.path.name.partition("-")[0] for wheel in self.wheels)
        return any(re.sub(r"[-_.]+", "-", name).lower() == package for name in names)


def read_wheels(folder: str) -> WheelSet:
    """The wheels of ``fleet.wheels``; none for an empty name. Blocking: every wheel is read whole, once.

    Raises ConfigError for a folder that is not there, has no wheel, or that anyone may write to, and for a wheel that
    is damaged or not the one that the folder's SHA256SUMS names; UnreadableError for what cannot be read.
    """
    if not folder:
        return WheelSet()
    where = Path(folder).expanduser()
    if not where.is_dir():
        raise ConfigError(f"fleet.wheels: {where} is no folder", _FILL)
    try:
        _hold_closed(where)
        found = sorted(path for path in where.glob("*.whl") if path.is_file())
        if not found:
            raise ConfigError(f"fleet.wheels: {where} has no .whl file", _FILL)
        sums = _sums(where / SUMS)
        with _READING:  # many pods ask for the same at once
            return WheelSet(tuple(_held(path, sums) for path in found))
    except OSError as e:
        raise UnreadableError(f"fleet.wheels: cannot read {e.filename or where}: {e.strerror}", "see its rights") from e


def _hold_closed(path: Path) -> None:
    if path.stat().st_mode & stat.S_IWOTH:
        raise ConfigError(f"fleet.wheels: anyone on this machine may write to {path}", f"chmod o-w {path}")


def _sums(path: Path) -> Mapping[str, str] | None:
    """What the folder says of itself, as ``sha256sum *.whl`` writes it; None if it says nothing."""
    if not path.exists():
        return None
    rows = [_SUM.fullmatch(line) for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not all(rows):
        raise ConfigError(f"fleet.wheels: {path} is not what sha256sum writes", f"sha256sum *.whl > {SUMS}")
    return {row[2]: row[1] for row in rows if row}


def _held(path: Path, sums: Mapping[str, str] | None) -> HeldWheel:
    if not _NAME.fullmatch(path.name):
        raise ConfigError(f"fleet.wheels: {path.name[:120]!r} is no name of a wheel", "take it out of the folder")
    _hold_closed(path)
    about = path.stat()
    digest = _whole(path, about.st_size, about.st_mtime_ns, about.st_ino)
    if sums is not None and sums.get(path.name) != digest:
        what = "is not the wheel that" if path.name in sums else "is not among those that"
        raise ConfigError(
            f"fleet.wheels: {path.name} {what} {SUMS} names", "download it again, or write SHA256SUMS anew"
        )
    return HeldWheel(path, digest, about.st_size)


@functools.lru_cache(maxsize=4096)
def _whole(path: Path, size: int, changed: int, inode: int) -> str:
    """A wheel's SHA-256, all of whose members are whole; remembered until the file changes."""
    del size, changed, inode
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError):
        damaged = path.name
    if damaged is not None:
        raise ConfigError(f"fleet.wheels: {path} is damaged", "download it again")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def send(link: PodLink, wheels: WheelSet, say: Callable[[str, str], None]) -> None:
    """Bring to the pod what it lacks. Others may send the same there meanwhile.

    Raises UvccError where the pod's folder does not hold these wheels and no others then.
    """
    there = await _hashes(link, wheels)
    if set(there) - set(wheels.hashes):  # pip would install from what is no wheel of the operator's
        await link.sh(f"rm -rf {wheels.folder}")
        there = await _hashes(link, wheels)
    lacking = [wheel for wheel in wheels.wheels if there.get(wheel.path.name) != wheel.sha256]
    if not lacking:
        return
    say("wheels", f"{len(lacking)} wheels, {sum(wheel.size for wheel in lacking) >> 20} MiB")
    for wheel in lacking:
        # a name of its own, so that two consoles do not write to one file; it appears whole or not at all
        part = f"{wheels.folder}/.{secrets.token_hex(8)}"
        await link.put(wheel.path, part, timeout=SEND_S)
        await link.sh(f"mv -f {part} {wheels.folder}/{wheel.path.name}")
    there = await _hashes(link, wheels)
    if bad := sorted(name for name in {*there, *wheels.hashes} if there.get(name) != wheels.hashes.get(name)):
        raise UvccError(f"pod {link.name}: {bad[0][:120]} arrived damaged", "try again; is the pod's disk full?")


async def _hashes(link: PodLink, wheels: WheelSet) -> dict[str, str]:
    """SHA-256 of each wheel in the pod's folder by its name. What broke off an hour ago or earlier is taken away."""
    said = await link.sh(
        f"umask 077; mkdir -p {wheels.folder}; cd {wheels.folder} || exit 1\n"
        "find . -name '.*' -type f -mmin +60 -exec rm -f {} +\n"
        "sha256sum -- *.whl 2>/dev/null || :",
        timeout=HASH_S,
    )
    rows = (_SUM.fullmatch(line) for line in said.splitlines())
    return {row[2]: row[1] for row in rows if row}


async def read_in_thread(folder: str) -> WheelSet:
    """As :func:`read_wheels`, beside what else goes on."""
    return await asyncio.to_thread(read_wheels, folder)
