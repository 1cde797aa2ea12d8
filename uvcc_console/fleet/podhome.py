"""What a local pod leaves on this machine, and its removal. Without SSH: who only looks at pods loads none."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from uvcc_console.fleet import procs
from uvcc_engine.contract.machine.preloaded import socket_name

USER: Final = "uvcc"
FILES: Final = (".ready", ".tmp", ".keys", ".log", ".pod")  # beside the home


def clean_up(home: Path, *, own_pid: int = 0) -> set[int]:
    """End everything that was started in the pod with this home and remove its folder; returns what would not end."""

    def rest() -> set[int]:
        found = procs.marked(str(home))
        if own_pid:
            found |= procs.descendants(own_pid)
        return found - {own_pid, os.getpid()}

    left = procs.stop_all(rest)
    shutil.rmtree(home, ignore_errors=True)
    return left


def remove_files(home: Path) -> None:
    """Remove what lies beside the home; the last pod of a run takes the run's folder along.

    As long as the home is there, on a disk that takes no writes, its record stays: by it a sweep finds what is left.
    """
    if home.exists():
        return
    for suffix in FILES:
        home.with_suffix(suffix).unlink(missing_ok=True)
    if not any(home.parent.glob("p*r*.pod")):
        (home.parent / socket_name()).unlink(missing_ok=True)  # with which the process behind it ends
    with contextlib.suppress(OSError):  # other pods of the run are still there
        home.parent.rmdir()
