"""Where things lie on the operator's machine. ``UVCC_HOME`` overrides the platform's data folder."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError, UvccError

JOURNAL = "journal.sqlite"  # in the folder of a run
ADOPTED = "adopted.json"  # marks the folder of a run that is only followed: whose folder it is, and where
DOMAIN = "domain.json"  # marks the folder of one domain's console: the run is conducted elsewhere


def data_dir() -> Path:
    """The data folder, not necessarily existing. Raises UnreadableError where something else bears its name."""
    home = os.environ.get("UVCC_HOME")
    return _folder(Path(home) if home else usual_dir())


def usual_dir() -> Path:
    """The data folder where ``UVCC_HOME`` names none."""
    from platformdirs import user_data_path

    return user_data_path("uvcc", appauthor=False)


def config_dir() -> Path:
    """What belongs to this installation and to no run: its collector's key. Not necessarily existing. Raises as
    ``data_dir``."""
    if home := os.environ.get("UVCC_HOME"):
        return _folder(_folder(Path(home)) / "config")
    from platformdirs import user_config_path

    return _folder(user_config_path("uvcc", appauthor=False))


def _folder(path: Path) -> Path:
    """This path, where there is a folder or nothing yet: what else lies there would read as a folder without runs."""
    try:
        why = "" if stat.S_ISDIR(path.stat().st_mode) else "it is no folder"
    except FileNotFoundError:
        why = "it is a link to nothing" if path.is_symlink() else ""
    except OSError as e:
        why = f"{e.strerror}"
    if not why:
        return path
    named = "UVCC_HOME names" if str(path) == os.environ.get("UVCC_HOME") else "cannot use"
    raise UnreadableError(f"{named} {path}: {why}", "set UVCC_HOME to a folder, or to what may become one")


def profiles_dir() -> Path:
    """The operator's own profiles. Not necessarily existing."""
    return config_dir() / "profiles"


def runs_dir() -> Path:
    """The folder of all runs. Not necessarily existing. Raises as ``data_dir``."""
    return _folder(data_dir() / "runs")


def run_folders() -> list[Path]:
    """What lies in the folder of all runs, in no order. Raises UnreadableError where it cannot be listed."""
    root = runs_dir()
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UnreadableError(f"cannot list {root}: {e.strerror}", "look who may read it, or set UVCC_HOME") from e


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


def whole_home() -> None:
    """Have ``UVCC_HOME`` say the same to this process and to those that it starts, which work in other folders."""
    if home := os.environ.get("UVCC_HOME"):
        with contextlib.suppress(FileNotFoundError):  # the folder that this process works in is gone
            os.environ["UVCC_HOME"] = os.path.abspath(os.path.expanduser(home))


whole_home()  # before anything asks for it, as above


def ensure(path: Path, mode: int = 0o700) -> Path:
    """Create a private folder; a clear error where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as e:
        raise UvccError(f"cannot create {path}: {e.strerror}", "set UVCC_HOME to a writable folder") from e
    return path
