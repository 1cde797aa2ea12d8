"""Key figures of a run, counted from its events: the table of seed 002, and what the figures draw."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.report.record import RunRecord, parse
from uvcc_engine.contract.outside import real, said, whole
from uvcc_engine.parallel.topology import PARTIES

GROUPS: Final = ("tp", "pp", "dp")
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
_TIMEOUTS: Final = ("peer_lost", "timeout", "watchdog_dump", "group_timeout")
_ABORTS: Final = ("protocol_error", "transport_abort")


@dataclass(frozen=True, slots=True)
class GroupInit:
    """One worker's initialisation of one group, in seconds."""

    coord: str
    group: str
    seconds: float


def _amount(event: ev.EngineEvent) -> int:
    """Events may stand for several of their kind (``count``)."""
    return whole(event.fields.get("count"), 1) or 1


def counts(record: RunRecord) -> dict[str, int]:
    """How often each thing of the table happened."""
    by_name: Counter[str] = Counter()
    for event in record.of(ev.EngineEvent):
        by_name[event.event] += _amount(event)
    found = {"epoch root": len({(e.coord, e.epoch, e.root) for e in record.of(ev.RootReported)})}
    found |= {row: sum(by_name[n] for n in names) for row, names in _COUNTED.items()}
    found["worker timeouts"] = sum(by_name[n] for n in _TIMEOUTS)
    found["transport aborts"] = sum(by_name[n] for n in _ABORTS)
    found["retransmits"] = _retransmits(record)
    found["forks"] = sum(1 for _ in record.of(ev.ForkDetected))
    found["pods lost"] = sum(1 for e in record.of(ev.PodChanged) if e.state == "lost")
    ended = (e for e in record.of(ev.WorkerProcess) if e.state == "exited" and e.rc != 0)
    found["workers that failed"] = len({(e.pod, e.coord, e.pid) for e in ended})  # a reconnect reports an end again
    return found


def _retransmits(record: RunRecord) -> int:
    """The last count that each pod reported."""
    last = {}
    for event in record.of(ev.EngineEvent):
        value = whole(event.fields.get("retransmits"))
        if value is not None:
            last[(event.pod, said(event.fields.get("coord")), said(event.fields.get("peer")))] = value
    return sum(last.values())


def group_inits(record: RunRecord) -> list[GroupInit]:
    """Initialisation times that workers reported (``group_ready``, ``nccl_init_done``, ``dp_init_done``)."""
    found = []
    for event in record.engine_events("group_ready", "group_init_done", "nccl_init_done", "dp_init_done"):
        group = said(event.fields.get("group") or event.fields.get("kind") or "dp").lower()
        seconds = real(next((event.fields[k] for k in ("seconds", "t_s", "init_s") if k in event.fields), None))
        if group in GROUPS and seconds is not None:
            found.append(GroupInit(said(event.fields.get("coord", event.pod)), group, seconds))
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
    return rows + list(_outcome(record))


def _outcome(record: RunRecord) -> Iterator[tuple[str, str]]:
    s = record.snapshot
    for phase, values in ((p, s.results[p]) for p in record.phases if p in s.results):
        hashes = {h for k, h in s.result_hashes.items() if k.startswith(f"{phase}/")}
        yield f"{phase}: unique result hashes", str(len(hashes))
        for name, value in sorted(values.items()):
            yield f"{phase}: {name}", f"{value:.6g}"


def of_the_run(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Rows that belong to no phase."""
    s = record.snapshot
    if s.halt.last_drill_s is not None:
        yield "halt drill", f"{s.halt.last_drill_s:.2f} s"
    yield "spent", f"{s.spent:.2f} USD"


def errors_by_group(record: RunRecord) -> dict[tuple[str, str], int]:
    """(group, type) -> count, over timeouts, aborts and retransmits; what names no group counts as "plane"."""
    found: Counter[tuple[str, str]] = Counter()
    for event in record.of(ev.EngineEvent):
        kind = "timeout" if event.event in _TIMEOUTS else "abort" if event.event in _ABORTS else ""
        if kind:
            group = said(event.fields.get("group", "plane")).lower()
            found[(group if group in GROUPS else "plane", kind)] += _amount(event)
    found[("plane", "retransmit")] = _retransmits(record)
    return dict(found)


def dp_map(record: RunRecord) -> dict[tuple[int, int], tuple[int, int, float | None]]:
    """(stage, tensor) -> workers with a ready data-parallel group, workers expected, median initialisation seconds."""
    size = record.size
    ready: dict[tuple[int, int], set[str]] = {}
    seconds: dict[tuple[int, int], list[float]] = {}
    for event in record.engine_events("dp_ready", "dp_ok"):
        if (c := parse(said(event.fields.get("coord")))) is not None:
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
class Tick:
    """One microbatch of one worker as it ran: seconds from the first tick."""

    coord: str
    step: int
    phase: str
    microbatch: int
    start: float
    end: float


def schedule(record: RunRecord) -> list[Tick]:
    """The pipeline schedule as it ran, of the first step for which workers reported ``pipeline_tick`` events."""
    raw: list[tuple[float, ev.EngineEvent]] = []
    for event in record.engine_events("pipeline_tick"):
        f: dict[str, Any] = event.fields
        wholes = all(whole(f.get(k)) is not None for k in ("step", "microbatch"))
        if wholes and all(real(f.get(k)) is not None for k in ("start", "end")):
            raw.append((float(f["start"]), event))
    if not raw:
        return []
    first = min(int(e.fields["step"]) for _, e in raw)
    kept = [(start, e.fields) for start, e in raw if int(e.fields["step"]) == first]
    zero = min(start for start, _ in kept)
    return sorted(
        (
            Tick(
                said(f.get("coord")),
                first,
                said(f.get("phase", "F")),
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
