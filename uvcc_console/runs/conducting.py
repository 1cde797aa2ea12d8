"""What every process that conducts a run begins with: its arguments, its log, the run's lock, and its record."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from uvcc_console.core import paths
from uvcc_console.core.log import logger, within
from uvcc_console.runs import logfile, processes
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.raising_parser import RaisingParser

log = logger(__name__)
LOCK_S: Final = 1.0
DYING_S: Final = 10.0  # so long a process that was killed may keep its locks: they go with the last of its threads


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock. Raises UvccError if another conductor has it; the lock dies with its holder.

    Gives up only after a moment: by then the other one has said who it is. One that has ended is given longer.
    """
    fd = os.open(run_dir / "conductor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    began = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lives = processes.running(run_dir, processes.CONDUCTOR)
                if time.monotonic() - began > (LOCK_S if lives else DYING_S):
                    what = f"{run_dir.name} has a conductor already"
                    raise UvccError(what, "it acts on intents in the journal") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def main(
    prog: str,
    work: Callable[[Path, str, int], int],
    argv: Sequence[str] | None = None,
    *,
    names: Sequence[str] = (processes.CONDUCTOR,),
) -> int:
    """Hold the run's lock and record while ``work`` runs, and return its exit code; 1 where it raised a UvccError.

    ``work`` is given the run's folder, what it was started for ("", "resume" or "teardown"), and the sequence number
    of the journal after which intents are its own; ``names`` are the processes that this one is.
    """
    parser = RaisingParser(prog=prog)
    parser.add_argument("run")
    parser.add_argument("--adopt", choices=["resume", "teardown"], default="")
    parser.add_argument("--since", type=int, default=0)
    args = parser.parse_args(argv)
    processes.speak_at_any_cost()
    run_dir = paths.run_dir(args.run)
    logfile.begin(run_dir, processes.CONDUCTOR)
    try:
        with within(run=run_dir.name), run_lock(run_dir):
            for name in names:
                processes.write_record(run_dir, name)
            return work(run_dir, args.adopt, args.since)
    except UvccError as e:
        log.error("%s", e)
        return 1
