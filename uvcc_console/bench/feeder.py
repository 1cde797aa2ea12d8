"""A made-up live run for the benchmarks: pods, heartbeats, roots and log lines, journalled at a given rate."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal

BATCH_S = 0.1
PODS = 24


def coords(pods: int) -> list[str]:
    """Workers of ``pods`` pods, three parties interleaved."""
    return [f"p{i % 3}r{i // 3}s0t0" for i in range(pods)]


def opening(pods: int) -> list[ev.Event]:
    """Everything up to the start of the full run."""
    profile = {"job": {"kind": "private", "model": "mlp-digits", "batch": 64}}
    stages = ["plan", "provision", "full", "teardown"]
    out: list[ev.Event] = [
        ev.RunCreated(
            run="bench",
            profile_name="bench",
            job_kind="private",
            replicas=max(1, pods // 3),
            pipeline_stages=1,
            tensor=1,
            stages=stages,
            profile=profile,
        )
    ]
    for coord in coords(pods):
        pod = coord.split("s")[0]
        party, replica = (int(x) for x in pod[1:].split("r"))
        out.append(ev.PodChanged(pod=pod, party=party, replica=replica, provider="local", state="agent"))
        out.append(ev.LinkChanged(pod=pod, path="ssh", up=True))
    out.append(ev.StageChanged(name="full", status="running"))
    out.append(ev.PhaseStarted(phase="full", engine_run="bench.full", steps=100_000, sid_job="0" * 64))
    return out


def beat(pods: int, step: int) -> list[ev.Event]:
    """One step of every worker: heartbeat, figures, root."""
    out: list[ev.Event] = []
    loss = 0.1 + 2.2 * math.exp(-step / 400)
    for coord in coords(pods):
        pod = coord.split("s")[0]
        record = {"rank": 0, "step": step, "phase": "train", "loss": loss, "samples_per_s": 500.0, "mem_mib": 170}
        out.append(ev.HeartbeatRead(pod=pod, coord=coord, record=record))
        out.append(ev.Metric(coord=coord, step=step, values={"loss": loss, "lr": 0.1, "samples_per_s": 500.0}))
        out.append(ev.RootReported(coord=coord, epoch=step, root=hashlib.sha256(f"{coord}{step}".encode()).hexdigest()))
    return out


def lines(pods: int, count: int, first: int) -> list[ev.Event]:
    """``count`` log lines of about a hundred characters, spread over the pods."""
    out: list[ev.Event] = []
    each = max(1, count // pods)
    for i, coord in enumerate(coords(pods)):
        tail = f"rank {i} all_reduce bucket 25.0 MiB in 3.14 ms, waiting for nobody, seq"
        text = [f"step {first + k} {tail} {first + k}" for k in range(each)]
        out.append(ev.LogLines(pod=coord.split("s")[0], src="worker.log", lines=text))
    return out


def main() -> int:
    """``feeder JOURNAL PODS LINES_PER_S BEATS_PER_S SECONDS``: prints how many lines it wrote in how many seconds."""
    path, pods = Path(sys.argv[1]), int(sys.argv[2])
    rate, beats, limit = float(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
    journal = Journal(path, source="feeder")
    written, step, start = 0, 0, time.perf_counter()
    while (now := time.perf_counter() - start) < limit:
        batch: list[ev.Event] = []
        due = int(rate * now) - written
        if due >= pods:
            fed = lines(pods, due, written)
            written += sum(len(e.lines) for e in fed if isinstance(e, ev.LogLines))
            batch += fed
        if beats and step < beats * now:
            step += 1
            batch += beat(pods, step)
        if batch:
            journal.append(*batch)
        time.sleep(max(0.0, BATCH_S - (time.perf_counter() - start - now)))
    print(json.dumps({"lines": written, "seconds": time.perf_counter() - start}))
    journal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
