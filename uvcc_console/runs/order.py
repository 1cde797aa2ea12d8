"""Which run of this machine is the newest: each folder has a number of its own, for a clock may be set back.

The number lies in the run's folder, so that a run that was packed away and unpacked keeps it; the highest that was ever
given lies beside the runs, so that none is given again after a run was deleted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from uvcc_console.core import paths

NUMBER = "number"  # in the folder of a run; beside the runs, the highest that was given
_DIGITS = 18


def number_of(run_dir: Path) -> int:
    """The number of a run; 0 of one that was made before runs had numbers, or whose number cannot be read."""
    return _read(run_dir / NUMBER)


def _read(path: Path) -> int:
    try:
        with path.open("rb") as f:
            text = f.read(_DIGITS + 1).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and len(text) <= _DIGITS else 0


def enrol(run_dir: Path) -> None:
    """Give a new run's folder the next number. Two that start at the same moment may get the same one: then the time
    decides. A disk that refuses leaves the run without a number, and what cannot be written next ends its start."""
    highest = run_dir.parent.parent / NUMBER
    found = max((number_of(folder) for folder in paths.run_folders()), default=0)
    text = f"{max(found, _read(highest)) + 1}\n"
    with contextlib.suppress(OSError):
        (run_dir / NUMBER).write_text(text)
        partial = highest.with_name(f".{NUMBER}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(highest)
