"""Whether the disk that a run's folder is on takes anything more: of one that does not no journal can tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from uvcc_console.core.paths import JOURNAL
from uvcc_console.fleet import pulse
from uvcc_console.runs import processes

FULL_MIB: Final = 1.0
_BEATS_S: Final = 5.0  # who has just given a beat has written
_NO_WRITES: Final = "takes no writes"
_MEANWHILE: Final = "nothing new can be written down; workers go on, and a halt and a teardown work all the same"


def full_disk(folder: Path) -> str:
    """What to say where nothing more can be written; "" where there is room, or nobody can tell."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return ""
    free = disk.f_bavail * disk.f_frsize / (1 << 20)
    if free < FULL_MIB:
        return f"the disk of {folder} is full ({free:.1f} MiB free)"
    if disk.f_files and not disk.f_favail:
        return f"the disk of {folder} takes no more files"
    if min(pulse.beat_age_s(folder, name) for name in (processes.CONDUCTOR, processes.HALTD)) < _BEATS_S:
        return ""
    why = pulse.no_writes(folder / JOURNAL)
    return f"the disk of {folder} {_NO_WRITES} ({why})" if why else ""


def cure(found: str) -> str:
    """What to do about what :func:`full_disk` said."""
    if _NO_WRITES not in found:
        return f"make room there: {_MEANWHILE}"
    return f"the kernel's log says why, and what makes it writable again: {_MEANWHILE}"
