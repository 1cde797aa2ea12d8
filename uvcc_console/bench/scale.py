"""``uvcc bench scale``: what more workers and more pods cost the console, and whether a cost grows faster than they do.

A step of ``workers`` workers is journalled as a run leaves it (a heartbeat, figures and a root of each). ``fold``: the
processor time that folding it takes; ``journal``: the bytes it adds; ``snapshot``: the memory that the run's state
takes; ``judge``: one look at every worker's health and at what the alerts find; ``screen``: the processor time of a
console in a terminal until it shows the newest step; ``status``: that of ``uvcc status --json``. ``pods_conduct``:
share of a core that following so many pods takes, which log ten lines a second each. What a step costs the engine is
``uvcc-engine bench scale``.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from uvcc_console.bench import feeder, pods
from uvcc_console.bench.live_console import PROBE, live_run
from uvcc_console.bench.terminal import Terminal, python
from uvcc_console.core.alerts import detect
from uvcc_console.core.journal.journal import Follower, Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.ui.judging.condition import tally
from uvcc_console.ui.judging.view import View
from uvcc_engine.contract.machine.benchrows import Row
from uvcc_engine.contract.machine.growth import Costs, growth_rows

WORKERS: Final = (24, 192, 1_000, 10_000)
PODS: Final = (50, 100, 200)
ALLOWED: Final = {"fold": 1.0, "journal": 1.0, "snapshot": 1.0, "judge": 1.0, "screen": 1.0, "status": 1.0}
UNITS: Final = {
    "fold": "s",
    "journal": "B",
    "snapshot": "B",
    "judge": "s",
    "screen": "s",
    "status": "s",
    "conduct": "core",
}
_STEPS: Final = 3
_SHOWN: Final = 76_543  # a step whose number nothing else on the screen has
_LIMIT_S: Final = 300.0
_STATUS: Final = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"


def _one(workers: int) -> Costs:
    """Every cost of a run of so many workers."""
    with live_run(workers) as run_dir:
        module = "uvcc_console.bench.scale"
        told = subprocess.run(python("-m", module, str(run_dir), str(workers)), check=True, capture_output=True)
        found: Costs = json.loads(told.stdout)
        return found | {"screen": _screen(run_dir, workers), "status": _status(run_dir)}


def folded(run_dir: Path, workers: int) -> Costs:
    """What reading costs, in this process: the least of a few steps, whose memory is counted in one of its own."""
    journal = Journal(run_dir / JOURNAL, source="bench")
    follower = Follower(journal)
    tracemalloc.start()
    while follower.poll():
        pass
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    size, times, looks = _size(run_dir), [], []
    for step in range(1, _STEPS + 1):
        journal.append(*feeder.beat(workers, step))
        begun = time.thread_time()
        while follower.poll():
            pass
        times.append(time.thread_time() - begun)
        begun = time.thread_time()
        tally(View(snap=follower.snapshot, now=follower.snapshot.updated))
        detect(follower.snapshot, follower.snapshot.updated)
        looks.append(time.thread_time() - begun)
    journal.close()
    added = (_size(run_dir) - size) / _STEPS
    return {"fold": min(times), "journal": added, "snapshot": float(held), "judge": min(looks)}


def _size(run_dir: Path) -> int:
    """Bytes of the journal; what still stands in the write-ahead log is written into it first."""
    Journal(run_dir / JOURNAL, source="bench").close()
    return sum(f.stat().st_size for f in run_dir.glob(f"{JOURNAL}*") if not f.name.endswith("-shm"))


def _screen(run_dir: Path, workers: int) -> float:
    """Processor seconds of a console from its start to the picture of the newest step."""
    journal = Journal(run_dir / JOURNAL, source="bench")
    journal.append(*feeder.beat(workers, _SHOWN))
    journal.close()
    args = python("-m", "uvcc_console.bench.console_probe", str(run_dir), str(run_dir / PROBE))
    with Terminal(args, {"UVCC_HOME": str(run_dir.parents[1])}) as terminal:
        terminal.wait_for(str(_SHOWN).encode(), _LIMIT_S)
        return terminal.cpu_s()


def _status(run_dir: Path) -> float:
    """Processor seconds of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "UVCC_HOME": str(run_dir.parents[1])}
    subprocess.run(python("-c", _STATUS, "status", run_dir.name, "--json"), check=True, capture_output=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench(runs: int = 3, workers: Sequence[int] = WORKERS, followed: Sequence[int] = PODS) -> list[Row]:
    """The powers and the costs of every axis."""
    rows = growth_rows("workers", [(float(n), _one(n)) for n in workers], ALLOWED, UNITS)
    conduct = [(float(n), {"conduct": pods.bench(runs, pods=n)[0].value}) for n in followed]
    return [*rows, *growth_rows("pods", conduct, {"conduct": 1.0}, {"conduct": "core"})]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(folded(Path(sys.argv[1]), int(sys.argv[2]))))
