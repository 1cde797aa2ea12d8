"""One training at a time in a run directory: two would write into one table, and remove each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files import files

LOCK: Final = "train.lock"


@contextmanager
def only_training(directory: Path, *, leads: bool) -> Iterator[None]:
    """Hold the directory, which is made; the hold ends with this process at the latest.

    ``leads``: whether this rank holds it for all; the others hold nothing. Raises ConfigError where another training
    has it.
    """
    if not leads:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise files.write_failed(directory, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another training runs in {directory}", "wait for its end, or name another --out"
            ) from None
        yield
    finally:
        os.close(fd)
