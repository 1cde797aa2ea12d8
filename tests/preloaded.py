"""A pytest plugin: one process of the session imports torch for the agents of all rollouts that its tests make.

It is the one that the local provider starts for the pods of a run, and is named to them as an operator may name one.
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


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or PRELOADED_ENV in os.environ or not host.HAS_PROC:
        return
    folder = Path(tempfile.mkdtemp(prefix="up", dir="/tmp"))
    place = folder / socket_name()
    _started.append((imports_shared.start(place, LIFE_S), folder))
    os.environ[PRELOADED_ENV] = str(place)


def pytest_unconfigure() -> None:
    for process, folder in _started:
        os.environ.pop(PRELOADED_ENV, None)
        shutil.rmtree(folder)  # with which it ends
        process.wait(120)
    _started.clear()
