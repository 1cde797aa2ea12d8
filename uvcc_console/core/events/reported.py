"""Events that tell what pods and their workers say: none of it is more than their word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from uvcc_console.core.events.event_base import Event, event


@event("heartbeat")
@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRead(Event):
    """One heartbeat record of one worker, as written on the pod (``record``: contract/run_files/records.py)."""

    pod: str
    coord: str
    record: dict[str, Any]


@event("metric")
@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Event):
    """One row of training.csv (or val.csv with split="val") of one worker."""

    coord: str
    step: int
    values: dict[str, float]
    split: str = "train"


@event("engine")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent(Event):
    """One line of a pod's events.jsonl."""

    pod: str
    level: str
    event: str
    fields: dict[str, Any]
    at: float = 0.0


@event("lines")
@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines(Event):
    """Plain text lines of one file on one pod, in order."""

    pod: str
    src: str
    lines: list[str]


@event("worker")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess(Event):
    """A worker process started or exited. ``signal`` names what ended it, if a signal did.

    ``engine_run``: of which run of the engine it is; "" in older journals. Who attaches anew is told of the workers of
    every run that it watches, also of those that were over long before: workers of two phases have the same names.
    """

    pod: str
    coord: str
    state: str
    pid: int = 0
    rc: int | None = None
    signal: str = ""
    engine_run: str = ""


@event("root")
@dataclass(frozen=True, slots=True, kw_only=True)
class RootReported(Event):
    """A worker finalised an epoch: its root and, per peer, the digest of the leaves both should hold."""

    coord: str
    epoch: int
    root: str
    pairs: dict[str, str] = field(default_factory=dict)


@event("telemetry")
@dataclass(frozen=True, slots=True, kw_only=True)
class PodTelemetry(Event):
    """A pod's vital signs, now and then: share of its processors, memory in use and disk free (MiB), its GPUs."""

    pod: str
    cpu: float = 0.0
    mem_mib: float = 0.0
    disk_free_mib: float = 0.0
    gpus: list[dict[str, Any]] = field(default_factory=list)


@event("cursor")
@dataclass(frozen=True, slots=True, kw_only=True)
class CursorMoved(Event):
    """How far a pod's files have become events: ``run/file`` -> [inode, offset]. Written with those events."""

    pod: str
    cursors: dict[str, list[int]]


@event("result")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReported(Event):
    """One worker's final result as its pod streamed it: hash and what the policy reveals. Nothing of it is verified."""

    coord: str
    phase: str
    result_hash: str
    values: dict[str, float]
    pod: str = ""
