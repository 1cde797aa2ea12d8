"""Attaching to a run that has been going on for long: rows ``attach_1e6`` and ``folding``.

``attach_1e6``: ``uvcc attach`` of a run of 192 workers and a million events to the first screen that shows its true
step, in seconds and in seconds of its processor time, which a crowded machine changes less. The snapshot beside the
journal lacks what a conductor may not have kept yet. ``folding``: events a second, read from the journal's file and
folded, of a run of 24 workers, in one thread's processor time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from uvcc_console.bench import feeder, longrun
from uvcc_console.bench.scratch import scratch
from uvcc_console.bench.terminal import Terminal, python
from uvcc_console.core.journal.journal import Journal, read_all, read_newest
from uvcc_console.core.paths import JOURNAL
from uvcc_console.runs import processes
from uvcc_engine.contract.machine.benchrows import Row, row

EVENTS: Final = 1_000_000
FOLDED: Final = 24_000
_CODE: Final = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"


def attach(runs: int, events: int = EVENTS) -> list[Row]:
    """Seconds from the command to the first true screen, and what of the processor they took."""
    with scratch() as home:
        run_dir = home / "runs" / longrun.NAME
        longrun.build(run_dir, events)
        processes.write_record(run_dir, processes.CONDUCTOR)  # it passes for conducted
        times, used = [], []
        step = _true_step(run_dir)
        for _ in range(max(3, runs)):
            longrun.keep(run_dir, longrun.BEHIND)
            with Terminal(python("-c", _CODE, "attach", longrun.NAME), {"UVCC_HOME": str(home)}) as terminal:
                times.append(terminal.wait_for(str(step).encode(), 120.0))
                used.append(terminal.cpu_s())
    return [row("attach_1e6", "seconds", "s", times, 1.5), row("attach_1e6", "cpu", "s", used, 1.5)]


def _true_step(run_dir: Path) -> int:
    journal = Journal(run_dir / JOURNAL, readonly=True)
    try:
        return read_newest(journal).step
    finally:
        journal.close()


def folding(runs: int) -> Row:
    """Events a second from the file to the snapshot."""
    rates = []
    with scratch() as home:
        path = home / JOURNAL
        journal = Journal(path, source="bench")
        journal.append(*feeder.opening(feeder.PODS))
        step = 0
        while journal.last_seq() < FOLDED:
            journal.append(*(e for k in range(20) for e in feeder.beat(feeder.PODS, step + k)))
            step += 20
        count = journal.last_seq()
        for _ in range(max(3, runs)):
            begun = time.thread_time()
            read_all(journal)
            rates.append(count / (time.thread_time() - begun))
        journal.close()
    return row("folding", "rate", "events/s", rates, 60_000)
