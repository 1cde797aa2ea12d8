"""A run that is live as far as its journal tells, a feeder that writes to it, and the console on it in a terminal."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uvcc_console.bench import feeder
from uvcc_console.bench.scratch import scratch
from uvcc_console.bench.terminal import Terminal, python
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL

PODS = feeder.PODS
READY = b"Ledger"
PROBE = "probe.json"
"""What the console under test reports to, beside the journal."""


@contextmanager
def live_run(pods: int) -> Iterator[Path]:
    """A run folder with a journal in which the full run has begun; it passes for conducted."""
    with scratch() as home:
        folder = home / "runs" / "bench"
        folder.mkdir(parents=True)
        journal = Journal(folder / JOURNAL, source="bench")
        journal.append(*feeder.opening(pods), *feeder.beat(pods, 0))
        journal.close()
        yield folder


def feed(run_dir: Path, rate: float, beats: float, seconds: float) -> subprocess.Popen[bytes]:
    """Start the feeder."""
    args = [str(run_dir / JOURNAL), str(PODS), str(rate), str(beats), str(seconds)]
    return subprocess.Popen(python("-m", "uvcc_console.bench.feeder", *args), stdout=subprocess.PIPE)


@contextmanager
def console(run_dir: Path) -> Iterator[tuple[Terminal, Path]]:
    """The console on that run, once its first picture is there; and the file it reports to."""
    report = run_dir / PROBE
    args = python("-m", "uvcc_console.bench.console_probe", str(run_dir), str(report))
    with Terminal(args, {"UVCC_HOME": str(run_dir.parents[1])}) as terminal:
        terminal.wait_for(READY)
        time.sleep(1.5)
        yield terminal, report
