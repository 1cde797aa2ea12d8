"""The process that imports torch for all local pods of a run, on Linux. See ``preloaded_server`` in the engine.

It belongs to the run's folder of pods: the last pod takes its socket along, and it ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from uvcc_console.fleet.wheel import engine_package
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV, ROOM, socket_name

LISTENS_S: Final = 10.0  # without it each pod imports by itself
_BLANKS: Final = " " * 1024  # where the command lines of its forks are shown
_SINGLE: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class SharedImports:
    """Of the pods in one folder. It is told which by whoever starts them, one after the other."""

    def __init__(self, folder: Path, life_s: float) -> None:
        self.place = folder / socket_name()
        self._life_s = life_s
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ensure(self) -> dict[str, str]:
        """What pods are told in their environment: the process that the operator's names, else that of this folder.

        It is started if none answers. Nothing is told where the system does not show what a fork writes of itself.
        Raises OSError.
        """
        if os.environ.get(PRELOADED_ENV) or not host.HAS_PROC:
            return {}  # pods get the whole environment
        with self._lock:  # pods are started side by side
            if not _answers(self.place):
                self.place.unlink(missing_ok=True)
                self.process = start(self.place, self._life_s)
                end = time.monotonic() + LISTENS_S
                while self.runs() and not self.place.exists() and time.monotonic() < end:
                    time.sleep(0.01)
        return {PRELOADED_ENV: str(self.place)}

    def runs(self) -> bool:
        """Whether the process that was started here lives; one that has ended is collected."""
        return self.process is not None and self.process.poll() is None


def start(place: Path, life_s: float) -> subprocess.Popen[bytes]:
    """Start such a process. It listens at ``place`` when it has begun, and imports with the first request."""
    server = engine_package() / "agent" / "processes" / "preloaded_server.py"
    image = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    image["TMPDIR"] = str(place.parent)  # it shows whose it is, to whoever counts what a run takes
    return subprocess.Popen(
        [sys.executable, str(server), str(place), str(life_s), _BLANKS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**image, **dict.fromkeys(_SINGLE, "1"), "ROOM": " " * ROOM},
        start_new_session=True,
    )


def _answers(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as found:
        found.settimeout(1.0)
        try:
            found.connect(str(place))
        except OSError:
            return False
    return True
