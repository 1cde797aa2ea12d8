"""One rank of a training, forked where torch is imported: what the session's warm process runs for a ``ForkedRank``.

The first line of standard input, of JSON, says which: ``environment`` (all of it), ``folder`` to run in, ``stderr`` (a
file) and ``main`` (a name in ``MAIN``) with its ``arguments``. The answer is the rank's pid; and when it has ended, its
exit code (negative: by that signal). It is killed when standard input ends.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

IMPORTED: Final = ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "uvcc_engine.train.worker")


def prepare() -> None:
    """Import what ranks need beside what workers need; once, where all of them are forked from."""
    for name in IMPORTED:
        importlib.import_module(name)


def _module(path: str, *arguments: str) -> None:
    """``python FILE ARGUMENTS``"""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _train(*arguments: str) -> int:
    """``python -m uvcc_engine.train.worker ARGUMENTS``"""
    from uvcc_engine.train.worker import cli

    return cli(arguments)


MAIN: Final[Mapping[str, Callable[..., int | None]]] = {"module": _module, "train": _train}


def _exit_code(main: Callable[..., int | None], arguments: Sequence[str]) -> int:
    """As Python itself ends a program."""
    try:
        found: object = main(*arguments)
    except SystemExit as end:
        found = end.code
    if found is None or isinstance(found, int):
        return found or 0
    print(found, file=sys.stderr)
    return 1


def _begin(asked: Mapping[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    out = os.open(asked["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (out, 2)):
        os.dup2(source, target)
    return _exit_code(MAIN[asked["main"]], asked["arguments"])


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _begin(asked)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(pid, flush=True)
    ended = threading.Event()

    def wait() -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended.set()
        print(code, flush=True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    sys.stdin.read()  # to its end
    if not ended.is_set():
        os.kill(pid, signal.SIGKILL)
    waiting.join()
