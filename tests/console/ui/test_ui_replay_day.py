"""A day of a recorded run, played back within a minute of the operator's time."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.ui.feed.source import ReplaySource

DAY_S = 86_400.0
EVERY_S = 120.0
PODS = [f"p{p}r{r}" for r in range(2) for p in range(3)]


def _day(path: Path) -> None:
    """Six pods for 24 hours, a heartbeat every two minutes each."""
    journal = Journal(path, source="test")
    created = ev.RunCreated(
        ts=1.0,
        run="day",
        profile_name="t",
        job_kind="private",
        replicas=2,
        pipeline_stages=1,
        tensor=1,
        stages=["full"],
    )
    batch: list[ev.Event] = [created, ev.StageChanged(ts=1.0, name="full", status="running")]
    batch += [
        ev.PodChanged(ts=1.0, pod=pod, party=int(pod[1]), replica=int(pod[3]), provider="local", state="agent")
        for pod in PODS
    ]
    batch.append(ev.PhaseStarted(ts=1.0, phase="full", engine_run="day.full", steps=1000, sid_job=""))
    for step in range(int(DAY_S / EVERY_S)):
        ts = 1.0 + step * EVERY_S
        for pod in PODS:
            record = {"ts": ts, "step": step, "phase": "train", "mem_mib": 200.0}
            batch.append(ev.HeartbeatRead(ts=ts, pod=pod, coord=f"{pod}s0t0", record=record))
    batch.append(ev.RunEnded(ts=1.0 + DAY_S, status="ok"))
    journal.append(*batch)
    journal.close()


def test_twenty_four_hours_take_less_than_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    _day(path)
    now = [0.0]
    source = ReplaySource(path, clock=lambda: now[0])
    while source.speed < 2048:
        source.faster(2.0)  # the key >
    ticks = 0
    while source.playing:
        now[0] += 0.1  # the screen's own pace; each poll folds for a few hundredths of a second at most
        source.poll()
        ticks += 1
        assert ticks < 600, "it would take longer than a minute"
    assert source.end - source.start == DAY_S
    assert source.snapshot.ended
    assert min(w.step for w in source.snapshot.workers.values()) == DAY_S / EVERY_S - 1
    source.close()
