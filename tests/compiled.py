"""A pytest plugin: the compiled loops of a fresh checkout are compiled once, while pytest's workers collect.

Each of them, and each process that a test forks before they are loaded, would compile them anew and all at the same
time: half a minute of a processor each.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from uvcc_engine import nsa
from uvcc_engine.contract.machine.compiled import loops_folder
from uvcc_engine.mpc.kernels.compiling.loops import mark

LOCK_ENV = "UVCC_TESTS_COMPILING"
PROGRAM = Path(__file__).with_name("compile_loops.py")
_started: list[tuple[subprocess.Popen[bytes], Path]] = []


def wanted() -> bool:
    """Whether something is not compiled yet that can be."""
    if importlib.util.find_spec("numba") is None:
        return False
    sources = Path(nsa.__file__).with_name("loops").glob("*.py")
    kept = [folder.stat().st_mtime for folder in loops_folder().glob("attention-*")]
    return not mark().exists() or not kept or max(kept) < max(path.stat().st_mtime for path in sources)


def start(command: list[str], lock: Path) -> subprocess.Popen[bytes]:
    """A process that holds a lock for as long as it lives, however it ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, *command], env=env, pass_fds=(file.fileno(),), **pipes)


def wait(lock: Path) -> None:
    """Until nobody holds it any more."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None) or not wanted():
        return
    fd, name = tempfile.mkstemp(prefix="uvcc-compiling-")
    os.close(fd)
    _started.append((start([str(PROGRAM)], Path(name)), Path(name)))
    os.environ[LOCK_ENV] = name


def pytest_collection_finish() -> None:
    if name := os.environ.pop(LOCK_ENV, None):
        wait(Path(name))


def pytest_unconfigure() -> None:
    for process, lock in _started:
        os.environ.pop(LOCK_ENV, None)
        process.wait(120)
        lock.unlink()
    _started.clear()
