"""What a detector says, and the small statistics that detectors share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import Snapshot, WorkerView


@dataclass(frozen=True, slots=True)
class Finding:
    """What (``name``) is wrong with whom (``subject``), what was measured and what to do. level: warn | error."""

    name: str
    text: str
    hint: str
    subject: str = ""
    level: str = "warn"


Detector = Callable[[Snapshot, float], Iterable[Finding]]
RECENT = 5
ENOUGH = 12


def training(s: Snapshot) -> list[WorkerView]:
    """Workers that are to make steps now: none while a halt is asked for or the run is not running."""
    held = bool(s.halt.nonce) and not (s.halt.done and s.halt.mode in ("release", "hold"))
    if s.status != "running" or held or not s.engine_run:
        return []
    return [w for w in s.workers.values() if w.beat_ts and w.state != "exited" and w.phase in ("train", "step", "")]


def line(s: Snapshot, coord: str, name: str) -> Series:
    return s.series.get(coord, {}).get(name) or Series()


def middle(values: Iterable[float]) -> float:
    """Median; 0 of nothing."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def usual_and_recent(s: Snapshot, coord: str, name: str) -> tuple[float, float] | None:
    """Medians of everything before, and of the last few points; None before there is enough to tell."""
    ys = line(s, coord, name).ys()
    if len(ys) < ENOUGH:
        return None
    return middle(ys[:-RECENT]), middle(ys[-RECENT:])


def step_time(s: Snapshot) -> float:
    """The run's own median step, seconds; 0 before any was measured."""
    return middle(middle(line(s, coord, "step_s").ys()[-200:]) for coord in s.series if len(line(s, coord, "step_s")))
