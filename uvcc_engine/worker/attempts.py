"""Attempts of one policy on one pod: what an earlier attempt left is moved aside, never mixed with.

Another attempt number means other masks, so its messages can repeat none of the earlier attempt's, and neither its
transcript nor its checkpoints may go on where that one stopped.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.leaves.leaf_file import folder_name

_NUMBER: Final = "attempt_{coord}.json"


def begin_attempt(directory: Path, coord: Coord, attempt: int) -> None:
    """Note the attempt number of a run directory; at a higher one than before, move transcript and checkpoints aside.

    Raises ConfigError for a number lower than one that was used: its masks would meet other messages.
    """
    path = directory / _NUMBER.format(coord=coord)
    before = _read(path)
    if before is not None and attempt < before:
        raise ConfigError(f"attempt {attempt} after attempt {before}", f"start attempt {before} or a later one")
    if before is not None and attempt > before:
        for name in (folder_name(coord), files.CHECKPOINTS):
            with contextlib.suppress(FileNotFoundError):  # the pod's other ranks move its checkpoints, too
                os.rename(directory / name, directory / f"earlier{before}_{name}")
    if before != attempt:
        files.write_json(path, {"attempt": attempt})


def _read(path: Path) -> int | None:
    if not path.exists():
        return None
    found = files.read_json(path).get("attempt")
    if not isinstance(found, int):
        raise UnreadableError(f"{path} holds no attempt number", "take a fresh run directory")
    return found
