"""``python -m uvcc_console.haltd RUN``: the halt sidecar of one run, a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from uvcc_console.core import paths
from uvcc_console.core.log import logger, within
from uvcc_console.haltd import leftovers
from uvcc_console.haltd.service import Service
from uvcc_console.runs import conducting, logfile, processes
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser

log = logger(__name__)
NICE = -10
REALTIME = 1
THREADS = 8
POLL_S = 0.02


def precede() -> str:
    """Where the system allows it, nothing runs before this thread; returns what it allowed.

    The sidecar sleeps most of the time: real-time scheduling costs nobody anything. It is not passed on to what the
    sidecar starts, and its own threads take it each for itself: one that waited while it holds the interpreter's lock
    would hold up the others.
    """
    if sys.platform == "linux" and hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(REALTIME))
            return "real time"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        return "nice"
    return "none"


def first_in_line() -> str:
    """No halt queues behind what it is to stop, nor behind a sweep of the garbage collector; see ``precede``."""
    gc.collect()
    gc.freeze()  # what lives as long as the process
    return precede()


@contextlib.contextmanager
def sidecar_lock(run_dir: Path) -> Iterator[bool]:
    """Whether this is the run's only sidecar, for as long as the context lasts; a disk that is full stops none.

    One that was killed is waited for: its lock goes with the last of its threads.
    """
    try:
        fd = os.open(run_dir / f"{processes.HALTD}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield not processes.running(run_dir, processes.HALTD)
        return
    end = time.monotonic() + conducting.DYING_S
    try:
        while not (alone := _locked(fd)) and not processes.running(run_dir, processes.HALTD):
            if time.monotonic() > end:
                break
            time.sleep(POLL_S)
        yield alone
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _serve(run_dir: Path) -> bool:
    """Be the run's sidecar until the run is over; False if it was told to go before."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "haltd", initializer=precede))
    task = asyncio.ensure_future(Service(run_dir).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    processes.write_record(run_dir, processes.HALTD)
    with contextlib.suppress(asyncio.CancelledError):
        await task
        return True
    return False


async def _stay(run_dir: Path) -> None:
    """The run is over: for what may still cost money this process stays, and is a sidecar no more."""
    if not (run_dir / processes.JOURNAL).exists() or not leftovers.needed(leftovers.snapshot(run_dir), run_dir):
        return
    processes.write_record(run_dir, leftovers.KEEPER)
    (run_dir / f"{processes.HALTD}.json").unlink(missing_ok=True)
    staying = asyncio.ensure_future(leftovers.keep(run_dir))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, staying.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await staying


def main(argv: Sequence[str]) -> int:
    parser = RaisingParser(prog="uvcc-haltd", description="halt sidecar of one run")
    parser.add_argument("run")
    args = parser.parse_args(argv)
    processes.speak_at_any_cost()
    run_dir = paths.run_dir(args.run)
    logfile.begin(run_dir, processes.HALTD)
    try:
        with within(run=run_dir.name), sidecar_lock(run_dir) as alone:
            if not alone:
                return 0  # one is enough
            log.info("precedence: %s", first_in_line())
            over = asyncio.run(_serve(run_dir))
        if over:
            with within(run=run_dir.name):
                asyncio.run(_stay(run_dir))
    except UvccError as e:
        log.error("%s", e)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
