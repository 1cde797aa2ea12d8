"""``uvcc bench demo``: the figures of the main job, measured from outside on the real command.

Rows: ``first_step`` (command to first training step), ``demo_total``, ``demo_memory`` (sum over all processes of their
proportional set sizes, the peak of samples taken every quarter second), ``help``, each against its bar.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from uvcc_console.bench.scratch import scratch
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.benchrows import Row, row

SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One measured demo."""

    first_step_s: float
    total_s: float
    memory_mib: float


def _uvcc(*args: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from uvcc_console.cli.main import main; sys.exit(main())", *args]


def memory_mib(mark: str) -> float:
    """Proportional set size in MiB of every process whose environment names ``mark``: shared pages count once.

    Where the system does not tell it (macOS), only what is each process' own counts.
    """
    total = 0
    for process in psutil.process_iter():
        try:
            if any(mark in value for value in process.environ().values()):
                found = process.memory_full_info()
                total += getattr(found, "pss", found.uss)
        except (psutil.Error, OSError):
            continue  # it ended, or is not ours to read
    return total / (1 << 20)


def run_demo(extra: Sequence[str] = ()) -> DemoRun:
    """Run ``uvcc demo --headless`` in a data folder of its own. Raises UvccError if it does not end verified."""
    with scratch() as home:
        env = {**os.environ, "UVCC_HOME": str(home / "data"), "TMPDIR": str(home)}
        log = home / "out.log"
        with log.open("wb") as out:
            began, began_wall = time.perf_counter(), time.time()
            process = subprocess.Popen(_uvcc("demo", "--headless", *extra), env=env, stdout=out, stderr=out)
            peak = 0.0
            while process.poll() is None:
                peak = max(peak, memory_mib(str(home)))
                try:
                    process.wait(SAMPLE_S)
                except subprocess.TimeoutExpired:
                    continue
            total = time.perf_counter() - began
        if process.returncode:
            raise UvccError(f"the demo ended with {process.returncode}: {log.read_text()[-2000:]}", "run: uvcc demo")
        return DemoRun(_first_step(home) - began_wall, total, peak)


def _first_step(home: Path) -> float:
    for journal in (home / "data" / "runs").glob("*/journal.sqlite"):
        for _, event in iter_events(journal):
            if isinstance(event, ev.Metric):
                return event.ts
    raise UvccError("the demo reported no training step", "run: uvcc demo --headless")


def help_seconds() -> float:
    """Wall time of ``uvcc --help`` as a process."""
    began = time.perf_counter()
    subprocess.run(_uvcc("--help"), check=True, capture_output=True)
    return time.perf_counter() - began


def bench(runs: int = 3) -> list[Row]:
    """All rows."""
    demos = [run_demo() for _ in range(runs)]
    helps = [help_seconds() for _ in range(max(5, runs))]
    return [
        row("first_step", "seconds", "s", [d.first_step_s for d in demos], 20.0),
        row("demo_total", "seconds", "s", [d.total_s for d in demos], 90.0),
        row("demo_memory", "bytes", "MiB", [d.memory_mib for d in demos], 2560.0),
        row("help", "seconds", "s", helps, 0.3),
    ]
