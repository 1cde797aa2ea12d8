"""A folder for one benchmark, and the end of everything that was started in it, however the benchmark ends.

A benchmark starts detached processes (sidecars, conductors, pods). One that is killed cannot end them itself, so a
small process waits beside it: when its standard input closes, it ends every process that carries the folder's mark in
its environment and removes the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from uvcc_console.fleet import procs

MARK: Final = "UVCC_BENCH"
_END_S: Final = 30.0


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder. What is started while it is open inherits its mark; all of it is gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="ub-"))
    before = os.environ.get(MARK)
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(home)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is for the benchmark
    )
    os.environ[MARK] = str(home)
    try:
        yield home
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        guard.communicate(timeout=_END_S)


def main() -> int:
    """Wait for the benchmark's end, then clean up; the exit code says whether anything would not end."""
    home = Path(sys.argv[1])
    sys.stdin.buffer.read()
    left = procs.stop_all(lambda: procs.marked(str(home), MARK) - {os.getpid()}, grace_s=3.0, limit_s=10.0)
    shutil.rmtree(home, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
