"""The process that imports torch for a session's pods ends with its session, also with one that is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from uvcc_engine.contract.machine import host

CODE = """
import os, signal, types
os.environ.pop({env!r}, None)
import preloaded
preloaded.pytest_configure(types.SimpleNamespace())
(process, folder), = preloaded._started
print(process.pid, folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _runs(pid: int) -> bool:
    """Whether it lives; who takes orphans over may not have collected it yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not host.HAS_PROC, reason="no /proc: each pod imports by itself")
def test_a_session_that_is_killed_leaves_no_process() -> None:
    from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

    code = CODE.format(env=PRELOADED_ENV)
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert killed.returncode == -9
    pid, folder = killed.stdout.split()
    end = time.monotonic() + 300.0
    while (_runs(int(pid)) or Path(folder).exists()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _runs(int(pid))
    assert not Path(folder).exists()
