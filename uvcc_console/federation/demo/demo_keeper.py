"""Ends what a federated demo leaves: started beside it, it waits for the demo's end, however that comes.

It holds the read end of a pipe whose other end only the demo has; a demo that was killed has closed it, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil

from uvcc_console.fleet import procs
from uvcc_engine.contract.errors import UvccError

GRACE_S: Final = 8.0
LIMIT_S: Final = 20.0
_NAMES: Final = ("UVCC_HOME", procs.MARK)


def processes(*folders: Path) -> set[int]:
    """Every process whose data folder, or whose pod, lies in one of these folders."""
    beginnings = tuple(f"{folder}{os.sep}" for folder in folders)
    found = set[int]()
    for process in psutil.process_iter():
        try:
            said = process.environ()
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's
        if process.pid != os.getpid() and any(
            f"{said.get(name, '')}{os.sep}".startswith(beginnings) for name in _NAMES
        ):
            found.add(process.pid)
    return found


def sweep(folder: Path, temp: Path) -> set[int]:
    """End all processes of a demo and remove its temporary files; the pids of those that would not end.

    The people's homes stay where they lie apart from the temporary files: the evidence is in them.
    """
    left = procs.stop_all(lambda: processes(folder, temp), grace_s=GRACE_S, limit_s=LIMIT_S)
    if temp not in folder.parents:
        shutil.rmtree(temp, ignore_errors=True)
        return left
    for below in temp.iterdir():
        if below != folder:
            shutil.rmtree(below, ignore_errors=True)
    for path in folder.rglob("*"):  # the numbers are free from now on, and whoever has them next shall read nothing
        os.chown(path, os.getuid(), os.getgid(), follow_symlinks=False)
    return left


def start(folder: Path, temp: Path, claim: Path | None = None) -> subprocess.Popen[bytes]:
    """Start the keeper of a demo; it acts when its standard input is closed. Raises UvccError."""
    try:
        return subprocess.Popen(
            (sys.executable, "-m", "uvcc_console.federation.demo.demo_keeper", *map(str, (folder, temp, claim or ""))),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as e:
        raise UvccError(f"cannot start the demo's keeper: {e}", "is this machine overloaded?") from e


def main() -> int:
    """Entry point: FOLDER TEMP CLAIM. Returns 1 where processes would not end."""
    folder, temp, claim = sys.argv[1:]
    sys.stdin.buffer.read()
    if sweep(Path(folder), Path(temp)):
        return 1  # their user numbers stay taken
    if claim:
        Path(claim).rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
