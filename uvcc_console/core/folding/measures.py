"""What heartbeats measure, and the series that measurements become. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.core.folding.reducing import put, put_all
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import EMPTY, WorkerView
from uvcc_engine.contract.parsing.untrusted import as_float, as_int, as_timestamp

AT = "at"
"""The series of the console's time at each step: what turns an axis of steps into one of time."""
AFTER_HOLD: Final = "released"
"""What a worker's first heartbeat behind a hold says; that of the hold itself may have been passed over."""
_NONE: Final = Series()
BEAT_SERIES = ("mem_mib", "gpu_mem_alloc_mib", "gate_entropy_mean", "gate_collapse_frac", "dt_fetch_s", "bytes")


def measured(old: WorkerView, r: Mapping[str, Any], step: int) -> dict[str, float]:
    """The numbers of a heartbeat ``r`` that are worth a series; ``old``: the worker as the last one left it."""
    found: dict[str, float] = {}
    for name in BEAT_SERIES:
        if name in r and (value := as_float(r[name])) is not None:
            found[name] = value
    if "ts" in r and (value := _step_time(old, r, step)) is not None:
        found["step_s"] = value
    if "sent_bytes" in r and (value := _moved(old, r, step)) is not None:
        found["bytes"] = value
    return found


def _step_time(old: WorkerView, r: Mapping[str, Any], step: int) -> float | None:
    """Seconds a step by the pod's own clock, between the first heartbeats of two steps of training, no hold among them.
    A step that is longer than a worker waits between heartbeats has several."""
    now, before = as_timestamp(r.get("ts")), as_timestamp(old.begun.get("ts"))
    if step <= old.step or r.get("phase") != old.begun.get("phase") or now is None or r.get("msg") == AFTER_HOLD:
        return None
    return (now - before) / (step - old.step) if before is not None and now > before else None


def _moved(old: WorkerView, r: Mapping[str, Any], step: int) -> float | None:
    """Bytes a step between the first heartbeats of two steps, if they count them; a worker that was started again
    counts from nothing."""
    now, before = as_int(r.get("sent_bytes")), as_int(old.begun.get("sent_bytes"))
    if step <= old.step or now is None or before is None or now < before:
        return None
    return (now - before) / (step - old.step)


def extended(
    series: Mapping[str, Mapping[str, Series]], coord: str, step: int, values: Mapping[str, float]
) -> Mapping[str, Mapping[str, Series]]:
    """One more point of each series; a step that was known already takes its successors back (a resume)."""
    known, x = series.get(coord, EMPTY), float(step)
    new = {name: known.get(name, _NONE).reaching(x, value) for name, value in values.items()}
    return put(series, coord, put_all(known, new))
