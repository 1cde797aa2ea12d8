"""``verify`` in processes of their own, forked from one that has imported it and nothing else.

As a program it lends forks: each line of JSON on standard input, ``[arguments, folder]``, gets a process that verifies
and leaves ``out`` and ``err`` in the folder; the answer is its exit code. A fork's peak of memory begins with what the
verifier itself takes, for nothing else was imported here.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 500.0


@dataclass(frozen=True)
class Ended:
    """How a verification ended: processor seconds, and the most memory that its process held."""

    rc: int
    out: str
    err: str
    seconds: float
    mib: float


class Verifiers:
    """The process that lends forks; they leave what they say in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}  # a test runner's: nobody reads it at that width
        self._process = subprocess.Popen(command, **pipes, env=env, text=True, start_new_session=True)

    def run(self, arguments: Sequence[object]) -> Ended:
        """Verify; time is the processor's, so that a busy machine fails no test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([[str(a) for a in arguments], str(self._folder)]) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], PATIENCE_S)[0], f"{arguments} takes too long"
        rc = int(self._process.stdout.readline())
        out, err = ((self._folder / name).read_text(errors="surrogateescape") for name in ("out", "err"))
        assert "MEASURED" in out, err[-3000:]
        used, peak = out.split("MEASURED ")[1].split()
        return Ended(rc, out, err, float(used), float(peak))

    def close(self) -> None:
        """It ends at once, and with it whatever it still waits for."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _verified(arguments: list[str], folder: str) -> int:
    from uvcc_engine.transcript.proof.cli import main

    for target, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, target)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    begun = time.process_time()
    rc = main(arguments)
    used = time.process_time() - begun
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    print(f"\nMEASURED {used} {int(peak) / 1024}")
    return rc


def _child(line: str) -> int:
    """The exit code of one verification; a traceback in its errors and 70 where it raises."""
    try:
        rc = _verified(*json.loads(line))
        sys.stdout.flush()
    except BaseException:
        logging.exception("verify raised")
        rc = 70
    sys.stderr.flush()
    return rc


def main() -> None:
    import uvcc_engine.transcript.proof.cli  # noqa: F401  # for all forks

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(_child(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
