"""Ranks of a training as children of the session's process that has imported torch: an import costs as much as they do.

What a rank's environment sets before torch is imported has no effect here; such tests start processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from warm_kit import WarmChild


class Main(NamedTuple):
    """What a rank runs: see ``rank_process.MAIN``."""

    name: str
    arguments: Sequence[str]


def module(path: Path, arguments: Sequence[str]) -> Main:
    """``python FILE ARGUMENTS``"""
    return Main("module", [str(path), *arguments])


def train_command(arguments: Sequence[str]) -> Main:
    """``python -m uvcc_engine.train.worker ARGUMENTS``"""
    return Main("train", arguments)


class ForkedRank:
    """As much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, environment: Mapping[str, str], stderr: Path, main: Main) -> None:
        self._stderr = stderr
        asked = {
            "environment": dict(environment),
            "folder": os.getcwd(),
            "stderr": str(stderr.absolute()),
            "main": main.name,
            "arguments": list(main.arguments),
        }
        self._process = WarmChild("rank")
        self._process.tell(json.dumps(asked))
        self.pid = int(self._process.line())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            try:
                self.returncode = int(self._process.line(timeout))
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0) from None
            self._process.end(60)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return "", self._stderr.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
