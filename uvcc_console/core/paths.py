"""Where things lie on the operator's machine. ``UVCC_HOME`` overrides the platform's data folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from uvcc_engine.contract.errors import UvccError

JOURNAL = "journal.sqlite"  # in the folder of a run
ADOPTED = "adopted.json"  # marks the folder of a run that is only followed: whose folder it is, and where
DOMAIN = "domain.json"  # marks the folder of one domain's console: the run is conducted elsewhere


def data_dir() -> Path:
    """The data folder, not necessarily existing."""
    if home := os.environ.get("UVCC_HOME"):
        return Path(home)
    from platformdirs import user_data_path

    return user_data_path("uvcc", appauthor=False)


def config_dir() -> Path:
    """What belongs to this installation and to no run: its collector's key. Not necessarily existing."""
    if home := os.environ.get("UVCC_HOME"):
        return Path(home) / "config"
    from platformdirs import user_config_path

    return user_config_path("uvcc", appauthor=False)


def profiles_dir() -> Path:
    """The operator's own profiles. Not necessarily existing."""
    return config_dir() / "profiles"


def runs_dir() -> Path:
    return data_dir() / "runs"


def run_dir(run: str) -> Path:
    """Folder of one run: journal.sqlite, artifacts/, keys of this run's operator."""
    return runs_dir() / run


def temporary() -> None:
    """See that there is a folder for temporary files, also where every disk is full.

    Python finds one by writing to it, and libraries ask for one while they are imported: without this a full disk
    would keep the very commands from starting that stop what costs money.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        shared = Path("/dev/shm")
        tempfile.tempdir = str(shared if shared.is_dir() else Path("/tmp"))


temporary()  # before anything else is imported: this module comes first in every process of the console


def ensure(path: Path, mode: int = 0o700) -> Path:
    """Create a private folder; a clear error where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as e:
        raise UvccError(f"cannot create {path}: {e.strerror}", "set UVCC_HOME to a writable folder") from e
    return path
