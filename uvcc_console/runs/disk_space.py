"""Whether the disk that a run's folder is on takes anything more: of a full one no journal can tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FULL_MIB: Final = 1.0
HINT: Final = (
    "make room there: nothing new can be written down; workers go on, and a halt and a teardown work all the same"
)


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
    return ""
