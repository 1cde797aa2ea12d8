"""``uvcc bench journal``: what a very long journal costs those who are in a hurry. The run has 192 workers.

Rows: ``halt_order`` (``uvcc halt --now`` started to its order being taken at the sidecar's door), ``status``, ``runs``
and ``pods`` (the whole command). The journal is made in one transaction; its last ``BEHIND`` events came after the
snapshot that a conductor leaves beside it.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from uvcc_console.bench.door import HaltDoor
from uvcc_console.bench.scratch import scratch
from uvcc_console.bench.terminal import python
from uvcc_console.core import events as ev
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal import KEEP_AFTER, Follower, Journal
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, row

EVENTS: Final = 10_000_000
BEHIND: Final = KEEP_AFTER + 1_000  # what a conductor may not have kept yet, at a hundred events a second
NAME: Final = "long"
REPLICAS, STAGES, TENSOR = 8, 4, 2
RATE: Final = 115.0  # events a second, as a run of 192 workers has them
FIGURES: Final = ("loss", "lr", "samples_per_s", "step_s")
_CODE: Final = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"


def coords() -> list[str]:
    return [
        f"p{p}r{r}s{s}t{t}"
        for r in range(REPLICAS)
        for p in range(PARTIES)
        for s in range(STAGES)
        for t in range(TENSOR)
    ]


def opening(born: float) -> list[ev.Event]:
    """Everything up to the first step of the full run."""
    topology = {"replicas": REPLICAS, "stages": STAGES, "tensor": TENSOR}
    profile = {
        "job": {"kind": "private", "model": "mlp4-digits", "steps": 100_000},
        "topology": topology,
        "fleet": {"provider": "local"},
        "limits": {"ttl": 1e6},
    }
    made: list[ev.Event] = [
        ev.RunCreated(
            ts=born,
            run=NAME,
            profile_name=NAME,
            job_kind="private",
            replicas=REPLICAS,
            pipeline_stages=STAGES,
            tensor=TENSOR,
            stages=["plan", "provision", "full", "teardown"],
            profile=profile,
        )
    ]
    for r in range(REPLICAS):
        for p in range(PARTIES):
            pod = ev.PodChanged(ts=born, pod=f"p{p}r{r}", party=p, replica=r, provider="local", state="agent")
            made += [pod, ev.LinkChanged(ts=born, pod=pod.pod, path="ssh", up=True)]
    made.append(ev.StageChanged(ts=born, name="full", status="running"))
    return [*made, ev.PhaseStarted(ts=born, phase="full", engine_run=f"{NAME}.full", steps=100_000, sid_job="0" * 64)]


def rows(count: int, born: float) -> Iterator[tuple[float, str, str, str]]:
    """``count`` rows as the workers' reports and the meter's ticks leave them."""
    who, root, made, step = coords(), "ab" * 32, 0, 0
    while made < count:
        for coord in who:
            ts = born + made / RATE
            pod = coord[: coord.index("s")]
            beat = f'{{"pod":"{pod}","coord":"{coord}","record":{{"step":{step},"phase":"train","mem_mib":170}}}}'
            loss = f'{{"coord":"{coord}","step":{step},"values":{{"loss":{2.0 / (1 + step):.5f},"lr":0.1}}}}'
            yield ts, "conductor", "heartbeat", beat
            yield ts, "conductor", "metric", loss
            yield ts, "conductor", "root", f'{{"coord":"{coord}","epoch":{step},"root":"{root}","pairs":{{}}}}'
            made += 3
            if made % 576 == 0:
                yield ts, "conductor", "cost", f'{{"hourly":24.0,"spent":{ts - born:.2f},"at":{ts}}}'
                made += 1
        step += 1


def build(folder: Path, events: int, *, behind: int = BEHIND) -> None:
    """A run folder with a journal of about ``events`` events; the snapshot beside it lacks the last ``behind``."""
    folder.mkdir(parents=True, mode=0o700)
    born = time.time() - events / RATE
    journal = Journal(folder / processes.JOURNAL, source="bench", clock=lambda: born)
    journal.append(*opening(born))
    journal.close()
    db = sqlite3.connect(folder / processes.JOURNAL, isolation_level=None)
    db.execute("PRAGMA journal_mode=OFF")
    db.execute("PRAGMA synchronous=OFF")
    db.execute("DROP INDEX by_kind")
    db.execute("BEGIN")
    db.executemany("INSERT INTO events(ts, source, kind, data) VALUES (?,?,?,?)", rows(events, born))
    db.execute("COMMIT")
    db.execute("PRAGMA cache_size=-400000")
    db.execute("CREATE INDEX by_kind ON events(kind, seq)")
    db.execute("PRAGMA journal_mode=WAL")
    db.close()
    keep(folder, behind)


def keep(folder: Path, behind: int) -> None:
    """Leave what a conductor would have left: every worker, and curves as long as they are ever kept."""
    journal = Journal(folder / processes.JOURNAL, readonly=True)
    try:
        last = journal.last_seq() - behind
        follower = Follower(journal)
        while follower.snapshot.seq < min(last, 3_000):
            follower.poll(500)
        s = follower.snapshot
        step = last // (3 * len(s.workers))
        snapshot_cache.keep(folder, _aged(s, last, step), journal.mark(last))
    finally:
        journal.close()


def _aged(s: Snapshot, seq: int, step: int) -> Snapshot:
    each = snapshot_cache.POINTS // (len(s.workers) * len(FIGURES))
    xs = array("d", (step * i / each for i in range(each)))
    curves = MappingProxyType({name: Series(xs, array("d", [0.5] * each), each) for name in FIGURES})
    workers = {c: replace(w, step=step) for c, w in s.workers.items()}
    return replace(
        s, seq=seq, workers=MappingProxyType(workers), series=MappingProxyType(dict.fromkeys(workers, curves))
    )


def _command(*words: str) -> float:
    """Run one command; seconds until its end."""
    start = time.perf_counter()
    done = subprocess.run(python("-c", _CODE, *words), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise UvccError(f"uvcc {' '.join(words)} ended with {done.returncode}: {done.stderr[-300:]}")
    return time.perf_counter() - start


def bench(runs: int = 5, events: int = EVENTS) -> list[Row]:
    """Every row, at ``events`` events."""
    before = os.environ.get("UVCC_HOME")
    with scratch() as home:
        os.environ["UVCC_HOME"] = str(home)
        try:
            return _measured(home / "runs" / NAME, runs, events)
        finally:
            if before is None:
                del os.environ["UVCC_HOME"]
            else:
                os.environ["UVCC_HOME"] = before


def _measured(run_dir: Path, runs: int, events: int) -> list[Row]:
    build(run_dir, events)
    processes.write_record(run_dir, processes.CONDUCTOR)  # it passes for conducted
    orders: list[float] = []
    with HaltDoor(run_dir, verdict_s=0.05, noted=False) as door:
        for _ in range(runs):
            start = time.perf_counter()
            _command("halt", NAME, "--now")
            orders.append(door.taken[-1][1] - start)
    found = [row("halt_order", "seconds", "s", orders, 0.3)]
    for words in (["status", NAME], ["runs"], ["pods"]):
        found.append(row(words[0], "seconds", "s", [_command(*words) for _ in range(runs)], 0.5))
    return [*found, row("journal", "bytes", "MB", [(run_dir / processes.JOURNAL).stat().st_size / 1e6])]
