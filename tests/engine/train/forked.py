"""Ranks of a training as children of one process that has imported torch once: an import costs as much as their work.

What a rank's environment sets before torch is imported has no effect here; such tests start processes of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "uvcc_engine.train.worker")


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _begin(environment: Mapping[str, str], stderr: str, main: Callable[[], int | None]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(stderr, "wb", buffering=0) as out:
        os.dup2(out.fileno(), 2)
    sys.exit(main())


class ForkedRank:
    """As much of ``subprocess.Popen`` as the tests use, for a function of a module."""

    def __init__(self, environment: Mapping[str, str], stderr: Path, main: Callable[[], int | None]) -> None:
        self._stderr = stderr
        arguments = (dict(environment), str(stderr), main)
        self._process = _server().Process(target=_begin, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; subprocess.TimeoutExpired after ``timeout`` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return "", self._stderr.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Module:
    """``python FILE ARGUMENTS`` in a forked rank: run as a main program."""

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self.path, self.arguments = str(path), list(arguments)

    def __call__(self) -> None:
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).parent))
        runpy.run_path(self.path, run_name="__main__")


class TrainCommand:
    """``python -m uvcc_engine.train.worker ARGUMENTS`` in a forked rank."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    def __call__(self) -> int:
        from uvcc_engine.train.worker import cli

        return cli(self.arguments)
