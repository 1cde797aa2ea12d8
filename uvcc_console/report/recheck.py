"""Whether what was verified still lies there as it was: checksums noted with the verdict, held against the files now.

It costs a reading of the files, and nothing where their inodes say that nobody wrote to them since the last look. It
finds changes since the verdict; whether the evidence holds is decided by ``uvcc verify`` alone.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from uvcc_console.core.snapshot import Snapshot, VerdictView
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf_file import PEERS

ARTIFACTS: Final = "artifacts"
_TOP: Final = (leaf_file.BUNDLE, leaf_file.POLICY, leaf_file.SIGNATURES)
_OF_TRANSCRIPT: Final = (leaf_file.LEAVES, leaf_file.ROOTS, leaf_file.OPENINGS, leaf_file.RESULT, PEERS)
_Mark = tuple[int, int, int, int, int]
_known: dict[Path, tuple[_Mark, str]] = {}


def evidence(folder: Path) -> list[str]:
    """Names, relative to a phase's folder, of the files that its verification rests on."""
    found = [name for name in _TOP if (folder / name).is_file()]
    for home in sorted(p for p in folder.rglob(leaf_file.folder_name("*")) if p.is_dir()):
        found += [(home / n).relative_to(folder).as_posix() for n in _OF_TRANSCRIPT if (home / n).is_file()]
    return found


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 (hex) of each of those files: what a verdict notes."""
    return {name: found for name in evidence(folder) if (found := digest(folder / name))}


def digest(path: Path) -> str:
    """A regular file's SHA-256 (hex), "" if there is none to read. Read anew only where its inode has changed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            return ""
        mark = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        known = _known.get(path)
        if known is None or known[0] != mark:
            try:
                known = mark, hashlib.file_digest(file, "sha256").hexdigest()
            except OSError:
                return ""
            _known[path] = known
        return known[1]


def changed(folder: Path, verdict: VerdictView) -> tuple[str, ...]:
    """Files that are not what they were when the verdict was given, those that are gone or new included."""
    differ = [name for name, was in verdict.files.items() if digest(folder / name) != was]
    return (*differ, *(name for name in evidence(folder) if name not in verdict.files))


def recheck(run_dir: Path, s: Snapshot) -> Mapping[str, tuple[str, ...]]:
    """:func:`changed` of every phase that was verified with checksums; phases without a change are left out."""
    found = {
        phase: changed(run_dir / ARTIFACTS / phase, verdict)
        for phase, verdict in s.verdicts.items()
        if verdict.ok and verdict.files
    }
    return {phase: names for phase, names in found.items() if names}


def size(run_dir: Path, s: Snapshot) -> int:
    """Bytes that :func:`recheck` would read at most."""
    total = 0
    for phase, verdict in s.verdicts.items():
        for name in verdict.files:
            try:
                total += os.stat(run_dir / ARTIFACTS / phase / name).st_size
            except OSError:
                continue
    return total
