"""Key figures of a run, counted from its events: the table of a report, and what the figures draw."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import shown
from uvcc_console.report.record import RunRecord, parse
from uvcc_engine.contract.job.link_spec import FAULT_KINDS
from uvcc_engine.contract.job.topology import AXES, PARTIES
from uvcc_engine.contract.parsing.untrusted import as_float, as_int, scalar_text

GROUPS: Final = AXES[::-1]  # as they are formed
TIMEOUT, ABORT, RETRANSMIT, REJECTED = "timeout", "abort", "retransmit", "rejected frame"
# events that the table counts: the row's name, and what counts for it
_COUNTED: Final = {
    "dp ready": ("dp_ready",),
    "dp ok": ("dp_ok", "dp_allreduce_done"),
    "fwd open ok": ("fwd_open_ok",),
    "bwd open ok": ("bwd_open_ok",),
    "uid wait": ("uid_wait",),
    "checkpoints written": ("checkpoint_written",),
    "links up": ("link_up",),
    "resumes": ("resumed",),
}
_TIMEOUTS: Final = ("timeout", "watchdog_dump", "group_timeout")
# a worker that ends because of a peer or of the way to it says so once, in one of these
_ABORTS: Final = ("protocol_error", "peer_lost", "transport_abort")
# what the plane counts by itself, and the rows of the table: none of it harms a run
_PLANE: Final = {
    "retransmits": "retransmits",
    "duplicates discarded": "duplicates",
    "frames rejected": "rejected",
    "stale frames": "stale",
}


@dataclass(frozen=True, slots=True)
class GroupInit:
    """One worker's initialisation of one group, in seconds."""

    coord: str
    group: str
    seconds: float
    backend: str = ""


def _amount(event: ev.EngineEvent) -> int:
    """Events may stand for several of their kind (``count``)."""
    return as_int(event.fields.get("count"), 1) or 1


def aborted(event: ev.EngineEvent) -> bool:
    """Whether a worker's session ended by this. A frame that was dropped, and sent again, ends nothing."""
    return event.event in _ABORTS and not event.fields.get("dropped")


def counts(record: RunRecord) -> dict[str, int]:
    """How often each thing of the table happened."""
    by_name: Counter[str] = Counter()
    for event in record.of(ev.EngineEvent):
        by_name[event.event] += _amount(event)
    found = {"epoch root": len({(e.coord, e.epoch, e.root) for e in record.of(ev.RootReported)})}
    found |= {row: sum(by_name[n] for n in names) for row, names in _COUNTED.items()}
    found["worker timeouts"] = sum(by_name[n] for n in _TIMEOUTS)
    found["transport aborts"] = sum(_amount(e) for e in record.of(ev.EngineEvent) if aborted(e))
    plane = plane_totals(record)
    found |= {row: plane[name] for row, name in _PLANE.items()}
    injected = faults_injected(record)
    found["faults injected"] = sum(injected.values())
    found["forks"] = sum(1 for _ in record.of(ev.ForkDetected))
    found["pods lost"] = sum(1 for e in record.of(ev.PodChanged) if e.state == "lost")
    ended = (e for e in record.of(ev.WorkerProcess) if e.state == "exited" and e.rc != 0)
    found["workers that failed"] = len({(e.pod, e.coord, e.pid) for e in ended})  # a reconnect reports an end again
    return found


_NO_TOTALS: Final = ("coord", "began", "peer", "round_trip_us")


def plane_totals(record: RunRecord) -> Counter[str]:
    """What the workers' planes counted in all: messages, frames, bytes, retransmits, duplicates, rejected, stale.

    A worker tells its totals now and then and at its end; the last word of each process about each peer counts.
    """
    last = _last_words(record, "plane_counters", ("coord", "began", "peer"))
    total: Counter[str] = Counter()
    for fields in last:
        total.update({k: v for k, v in fields.items() if k not in _NO_TOTALS and _is_count(v)})
    return total


def faults_injected(record: RunRecord) -> dict[str, int]:
    """How often each fault was put into what arrived; empty for a run without rehearsed faults."""
    total: Counter[str] = Counter()
    for fields in _last_words(record, "faults_injected", ("coord", "began")):
        total.update({k: fields[k] for k in FAULT_KINDS if _is_count(fields.get(k))})
    return dict(total)


def _last_words(record: RunRecord, name: str, key: Sequence[str]) -> list[dict[str, Any]]:
    last: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in record.engine_events(name):
        last[(event.pod, *(str(event.fields.get(k)) for k in key))] = event.fields
    return list(last.values())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def group_inits(record: RunRecord) -> list[GroupInit]:
    """Initialisation times that workers reported (``group_ready``, ``nccl_init_done``, ``dp_init_done``)."""
    found = []
    for event in record.engine_events("group_ready", "group_init_done", "nccl_init_done", "dp_init_done"):
        group = scalar_text(event.fields.get("group") or event.fields.get("kind") or "dp").lower()
        seconds = as_float(next((event.fields[k] for k in ("seconds", "t_s", "init_s") if k in event.fields), None))
        if group in GROUPS and seconds is not None:
            backend = scalar_text(event.fields.get("backend"))
            found.append(GroupInit(scalar_text(event.fields.get("coord", event.pod)), group, seconds, backend))
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Minimum, median, maximum."""
    return min(values), statistics.median(values), max(values)


def table(record: RunRecord) -> list[tuple[str, str]]:
    """Rows (metric, count or value) of the key-metric table."""
    rows = [(name, str(value)) for name, value in counts(record).items()]
    inits = group_inits(record)
    for group in GROUPS:
        seconds = [i.seconds for i in inits if i.group == group]
        if seconds:
            low, middle, high = spread(seconds)
            shown = f"{low:.3f}/{middle:.3f}/{high:.3f} s (n={len(seconds)})"
            rows.append((f"{group} initialisation min/p50/max", shown))
            backends = sorted({i.backend for i in inits if i.group == group and i.backend})
            rows += [(f"{group} backend", ", ".join(backends))] if backends else []
    injected = {k: v for k, v in faults_injected(record).items() if v}
    rows += [(f"faults injected: {k}", str(v)) for k, v in injected.items()]
    return rows + list(_outcome(record))


def _outcome(record: RunRecord) -> Iterator[tuple[str, str]]:
    for phase in record.phases:
        found = shown(record.snapshot, phase, record.changed)
        if not found.mark:
            continue
        caveat = f" ({found.caveat})" if found.caveat else ""
        yield f"{phase}: result", found.words(utc=True)
        yield f"{phase}: unique result hashes", f"{len(found.hashes)}{caveat}"
        for name, value in sorted(found.values.items()):
            yield f"{phase}: {name}", f"{value:.6g}{caveat}"


def of_the_run(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Rows that belong to no phase."""
    s = record.snapshot
    if s.halt.last_drill_s is not None:
        yield "halt drill", f"{s.halt.last_drill_s:.2f} s"
    yield "spent", f"{s.spent:.2f} USD"


def errors_by_group(record: RunRecord) -> dict[tuple[str, str], int]:
    """(group, type) -> count, over timeouts, aborts and what the plane made good; without a group: "plane"."""
    found: Counter[tuple[str, str]] = Counter()
    for event in record.of(ev.EngineEvent):
        kind = TIMEOUT if event.event in _TIMEOUTS else ABORT if aborted(event) else ""
        if kind:
            group = scalar_text(event.fields.get("group", "plane")).lower()
            found[(group if group in GROUPS else "plane", kind)] += _amount(event)
    plane = plane_totals(record)
    for name in (RETRANSMIT, REJECTED):
        found[("plane", name)] = plane[{RETRANSMIT: "retransmits", REJECTED: "rejected"}[name]]
    return dict(found)


def dp_map(record: RunRecord) -> dict[tuple[int, int], tuple[int, int, float | None]]:
    """(stage, tensor) -> workers with a ready data-parallel group, workers expected, median initialisation seconds."""
    size = record.size
    ready: dict[tuple[int, int], set[str]] = {}
    seconds: dict[tuple[int, int], list[float]] = {}
    for event in record.engine_events("dp_ready", "dp_ok"):
        if (c := parse(scalar_text(event.fields.get("coord")))) is not None:
            ready.setdefault((c.stage, c.tensor), set()).add(str(c))
    for init in group_inits(record):
        if init.group == "dp" and (c := parse(init.coord)) is not None:
            ready.setdefault((c.stage, c.tensor), set()).add(str(c))
            seconds.setdefault((c.stage, c.tensor), []).append(init.seconds)
    cells = [(i, j) for i in range(size.stages) for j in range(size.tensor)]
    expected = PARTIES * size.replicas
    return {
        c: (len(ready.get(c, ())), expected, statistics.median(seconds[c]) if c in seconds else None) for c in cells
    }


@dataclass(frozen=True, slots=True)
class MicrobatchTime:
    """One microbatch of one worker as it ran: seconds from the first tick."""

    coord: str
    step: int
    phase: str
    microbatch: int
    start: float
    end: float


def schedule(record: RunRecord) -> list[MicrobatchTime]:
    """The pipeline schedule as it ran, of the first step for which workers reported ``pipeline_tick`` events."""
    raw: list[tuple[float, ev.EngineEvent]] = []
    for event in record.engine_events("pipeline_tick"):
        f: dict[str, Any] = event.fields
        wholes = all(as_int(f.get(k)) is not None for k in ("step", "microbatch"))
        if wholes and all(as_float(f.get(k)) is not None for k in ("start", "end")):
            raw.append((float(f["start"]), event))
    if not raw:
        return []
    first = min(int(e.fields["step"]) for _, e in raw)
    kept = [(start, e.fields) for start, e in raw if int(e.fields["step"]) == first]
    zero = min(start for start, _ in kept)
    return sorted(
        (
            MicrobatchTime(
                scalar_text(f.get("coord")),
                first,
                scalar_text(f.get("phase", "F")),
                int(f["microbatch"]),
                start - zero,
                float(f["end"]) - zero,
            )
            for start, f in kept
        ),
        key=lambda t: (t.coord, t.start),
    )


def series(record: RunRecord) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """metric -> worker -> (step, value), of the last phase."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for coord, lines in record.snapshot.series.items():
        for name, line in lines.items():
            found.setdefault(name, {})[coord] = list(line)
    return found
