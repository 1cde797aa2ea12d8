"""A pytest plugin: one process of the session imports torch for the agents of all rollouts that its tests make.

It is the one that the local provider starts for the pods of a run, and is named to them as an operator may name one.
It ends when its folder is gone: a small process removes that of a session that was killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from uvcc_console.fleet.local import imports_shared
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV, socket_name

LIFE_S = 7200.0
_started: list[tuple[subprocess.Popen[bytes], Path]] = []
_watched: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or PRELOADED_ENV in os.environ or not host.HAS_PROC:
        return
    folder = Path(tempfile.mkdtemp(prefix="up", dir="/tmp"))
    place = folder / socket_name()
    _watched.append(_removed_with_this(folder))
    _started.append((imports_shared.start(place, LIFE_S), folder))
    os.environ[PRELOADED_ENV] = str(place)


def _removed_with_this(folder: Path) -> subprocess.Popen[bytes]:
    """A shell whose input ends with this process, however that ends; what is started by it does not inherit it."""
    code = 'read -r _; rm -rf "$1"'
    return subprocess.Popen(["sh", "-c", code, "sh", str(folder)], stdin=subprocess.PIPE, start_new_session=True)


def pytest_unconfigure() -> None:
    for process, folder in _started:
        os.environ.pop(PRELOADED_ENV, None)
        shutil.rmtree(folder)  # with which it ends
        process.wait(120)
    for watching in _watched:
        watching.communicate()
    _started.clear()
    _watched.clear()
