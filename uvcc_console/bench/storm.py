"""F9 in the worst minute: thirty lines pasted without brackets, a storm of resizes, and two loops that fill two cores.

Row ``halt_dispatch_storm``: milliseconds from the key's bytes being written to the terminal to the order being taken at
the run's halt door, median and 99th percentile. The door is in this process and, where that is granted, runs ahead of
the busy loops, as the halt sidecar does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from uvcc_console.bench.door import HaltDoor
from uvcc_console.bench.live_console import console, feed, live_run
from uvcc_console.bench.terminal import ESCAPE, F9, Terminal, python
from uvcc_engine.contract.machine.benchrows import Row, row

PRESSES: Final = 50
PODS: Final = 24
BAR_MS: Final = 150.0
_PASTE: Final = 30 * b"the quick brown fox jumps over the lazy dog, and over all of this text\r"
_ANSWER_S: Final = 20.0


@contextlib.contextmanager
def busy(loops: int = 2) -> Iterator[None]:
    """So many processes that do nothing but count."""
    made = [subprocess.Popen(python("-c", "while True: pass")) for _ in range(loops)]
    try:
        yield
    finally:
        for process in made:
            process.kill()
            process.wait()


@contextlib.contextmanager
def resizing(terminal: Terminal, pause_s: float = 0.01) -> Iterator[None]:
    """Another size of the terminal a hundred times a second."""
    stop = threading.Event()

    def storm() -> None:
        i = 0
        while not stop.wait(pause_s):
            fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30 + i % 21, 90 + i % 71, 0, 0))
            i += 1

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """This process before others in the queue for a processor, where the machine grants it."""
    _schedule(True)
    try:
        yield
    finally:
        _schedule(False)


def _schedule(first: bool) -> None:
    if sys.platform == "linux" and hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK if first else os.SCHED_OTHER
            os.sched_setscheduler(0, policy, os.sched_param(int(first)))


def dispatches(run_dir: Path, terminal: Terminal, presses: int) -> list[float]:
    """Milliseconds from each press to its order. Raises UvccError when one is not obeyed at all."""
    delays: list[float] = []
    with HaltDoor(run_dir) as door, ahead(), resizing(terminal):
        for i in range(presses):
            terminal.press(_PASTE)
            time.sleep(0.3 + 0.007 * (i % 13))
            pressed = time.perf_counter()
            terminal.press(F9)
            delays.append((door.wait_for("hold", pressed, _ANSWER_S) - pressed) * 1000)
            time.sleep(0.1 + 0.013 * (i % 7))
            pressed = time.perf_counter()
            terminal.press(ESCAPE)
            door.wait_for("release", pressed, _ANSWER_S)
            time.sleep(0.2)
    return delays


def bench(presses: int = PRESSES) -> list[Row]:
    """Both rows of the worst minute."""
    with live_run(PODS) as run_dir, busy(), console(run_dir) as (terminal, _):
        writer = feed(run_dir, 100, 1, 3600)
        try:
            delays = dispatches(run_dir, terminal, presses)
        finally:
            writer.kill()
            writer.wait()
    ranked = sorted(delays)
    p99 = ranked[min(len(ranked) - 1, round(0.99 * (len(ranked) - 1)))]
    return [row("halt_dispatch_storm", "p99", "ms", [p99], BAR_MS), row("halt_dispatch_storm", "p50", "ms", delays)]
