"""Reducers for what pods and their workers report. Pure, like all of ``state``, which calls them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.folding import bad_records
from uvcc_console.core.folding.measures import AFTER_HOLD, AT, extended, measured
from uvcc_console.core.folding.pairs import counted
from uvcc_console.core.folding.reducing import LOG_KEEP, changed, logged, put
from uvcc_console.core.folding.vitals import with_vitals
from uvcc_console.core.snapshot import EpochAgreement, LogEntry, OutageView, ReportView, Snapshot, WaitView, WorkerView
from uvcc_console.core.words import engine_words
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.untrusted import as_int, hint_of, scalar_text
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.event_names import area_of
from uvcc_engine.contract.run_files.narrate import OF_EVERY_STEP, only_told
from uvcc_engine.contract.text import clean

AGREEMENT_KEEP = 64
_EPOCH = attrgetter("epoch")


def _worker_of(s: Snapshot, coord: str) -> WorkerView:
    return s.workers.get(coord) or WorkerView(coord)


def beaten(old: WorkerView, e: ev.HeartbeatRead) -> WorkerView:
    """The worker after a heartbeat. Raises BadRecordError where its step is none."""
    r = e.record
    step, phase = bad_records.step_of(r), r.get("phase", "")
    beat, same = MappingProxyType(r.copy()), step == old.step and r.get("phase") == old.phase
    return changed(
        old,
        pod=e.pod,
        phase=str(phase),
        step=step,
        beat_ts=e.ts,
        step_ts=old.step_ts if same else e.ts,
        beat=beat,
        begun=old.begun if same and r.get("msg") != AFTER_HOLD else beat,
    )


def _heartbeat(s: Snapshot, e: ev.HeartbeatRead) -> Snapshot:
    old = _worker_of(s, e.coord)
    w = beaten(old, e)
    workers = put(s.workers, e.coord, w)
    if not w.step > old.step >= 0:
        return changed(s, workers=workers)
    series = extended(s.series, e.coord, w.step, measured(old, e.record, w.step) | {AT: e.ts})
    return changed(s, workers=workers, series=series)


def named_values(e: ev.Metric) -> Mapping[str, float]:
    """The figures by the names of their curves: those of another split than training's carry its name."""
    return e.values if e.split == "train" else {f"{e.split}_{name}": value for name, value in e.values.items()}


def _metric(s: Snapshot, e: ev.Metric) -> Snapshot:
    return changed(s, series=extended(s.series, e.coord, e.step, named_values(e)))


_OUTAGES: Final = frozenset({"relay_down", "relay_up", "relay_moved"})


def _outage(s: Snapshot, e: ev.EngineEvent) -> Snapshot:
    """The first word of an outage says since when; a later one may say another reason."""
    if e.event != "relay_down":
        return changed(s, outages=MappingProxyType({pod: o for pod, o in s.outages.items() if pod != e.pod}))
    known = s.outages.get(e.pod)
    url, why = (scalar_text(e.fields.get(name), 200) for name in ("url", "why"))
    return changed(s, outages=put(s.outages, e.pod, OutageView(url, why, e.ts if known is None else known.ts)))


def _engine(s: Snapshot, e: ev.EngineEvent) -> Snapshot:
    if e.event == "checkpoint_written":
        newest = (bad_records.step_of(e.fields), str(e.fields.get("sha256", "")))
        s = changed(s, checkpoints=put(s.checkpoints, e.pod, max(newest, s.checkpoints.get(e.pod, (-1, "")))))
    elif e.event == "checkpoint_refused":
        s = changed(s, refused_checkpoints=put(s.refused_checkpoints, e.pod, str(e.fields.get("detail", ""))))
    elif e.event == "waiting":
        since_s, why = bad_records.number_of(e.fields, "since_s"), scalar_text(e.fields.get("why"), 200)
        waits = WaitView(f"p{e.fields.get('peer')}", since_s, e.ts, why)
        s = changed(s, waits=put(s.waits, str(e.fields.get("coord") or e.pod), waits))
    elif e.event in _OUTAGES:
        s = _outage(s, e)
    elif e.event == "plane_counters":
        return counted(s, e)  # every few seconds from each worker: for the panel, not for the log
    elif e.event in OF_EVERY_STEP:
        return s  # the log of six pods would tell nothing else
    elif e.event == "sample_written":
        s = changed(s, sample=clean(str(e.fields.get("text", "")), files.SAMPLE_SHOWN))
    elif e.event == files.STEPS_REPEATED and "after" not in e.fields:  # of a resume, not of a rollback
        s = changed(s, repeated=MappingProxyType(dict(e.fields)))
    elif e.event == "proof_failed":
        told, step = e.fields.get("suspects"), bad_records.step_of(e.fields)
        if isinstance(told, list) or e.pod not in s.failed_proofs:  # a sister of who proved says nothing of its own
            names = [str(one)[:4] for one in told[:PARTIES]] if isinstance(told, list) else None
            kept = MappingProxyType({"step": step, "suspects": names})
            s = changed(s, failed_proofs=put(s.failed_proofs, e.pod, kept))
    elif e.event == "watchdog_dump":
        s = changed(s, watchdog_dumps=s.watchdog_dumps + 1)
    elif e.event == "exit" and (coord := str(e.fields.get("coord", ""))) in s.workers:
        error = str(e.fields.get("error", ""))
        s = changed(s, workers=put(s.workers, coord, changed(s.workers[coord], error=error, hint=hint_of(e.fields))))
    elif e.event == "run_facts":
        coord = str(e.fields.get("coord") or e.pod)
        return changed(s, facts=put(s.facts, coord, MappingProxyType(dict(e.fields))))
    text, detail = engine_words(e.event, e.fields)
    return logged(s, e, e.level, e.pod, text, detail)


def _telemetry(s: Snapshot, e: ev.PodTelemetry) -> Snapshot:
    pod = s.pods.get(e.pod)
    if pod is None:
        return s
    return changed(s, pods=put(s.pods, e.pod, with_vitals(pod, e)))


def _line(e: ev.LogLines, source: str, line: str) -> LogEntry:
    """A line of a worker's log as it is, or in words where it is the only word of an event."""
    told = only_told(line)
    if told is None:
        return LogEntry(e.ts, "debug", source, line)
    name, level, fields = told
    text, detail = engine_words(name, fields)
    return LogEntry(e.ts, level, e.pod, text, str(area_of(name) or ""), detail)


def entries_of(e: ev.LogLines, lines: Sequence[str]) -> tuple[LogEntry, ...]:
    """Lines of a file on a pod as entries of the log."""
    source = f"{e.pod}/{e.src}"
    if files.is_worker_log(e.src):
        return tuple(_line(e, source, line) for line in lines)
    return tuple(LogEntry(e.ts, "debug", source, line) for line in lines)


def _lines(s: Snapshot, e: ev.LogLines) -> Snapshot:
    new = entries_of(e, e.lines[-LOG_KEEP:])
    kept = s.log[max(0, len(s.log) + len(new) - LOG_KEEP) :]
    return changed(s, log=kept + new)


def _worker(s: Snapshot, e: ev.WorkerProcess) -> Snapshot:
    if e.engine_run and s.engine_run and e.engine_run != s.engine_run:
        return s  # of a phase that is over, told again: a worker of this phase with the same name still runs
    old = _worker_of(s, e.coord)
    w = changed(old, pod=e.pod, state=e.state, rc=e.rc, signal=e.signal, pid=e.pid)
    w = changed(w, exited=e.ts if e.state == "exited" else 0.0)
    if e.state == "started":
        w = changed(w, error="", hint="", earlier=0)
        if e.pid != old.pid:  # another process: what the one before said last is no sign of this one's life
            w = changed(w, beat_ts=0.0, phase="")
    s = changed(s, workers=put(s.workers, e.coord, w))
    if e.state != "exited" or (e.pid and e.pid == old.earlier):  # the end of the attempt before is no news
        return s
    how = f"killed by {e.signal}" if e.signal else f"exit {e.rc}"
    return logged(s, e, "info" if e.rc == 0 else "error", e.pod, f"worker {e.coord} {how}")


def _root(s: Snapshot, e: ev.RootReported) -> Snapshot:
    w = changed(_worker_of(s, e.coord), root_epoch=e.epoch, root=e.root)
    known = s.agreement  # in the order of their epochs
    at = bisect_left(known, e.epoch, key=_EPOCH)
    found = at < len(known) and known[at].epoch == e.epoch
    a = known[at] if found else EpochAgreement(e.epoch)
    pairs = put(a.pairs, e.coord, MappingProxyType(dict(e.pairs)))
    a = EpochAgreement(e.epoch, put(a.roots, e.coord, e.root), pairs)
    kept = (known[:at] + (a,) + known[at + found :])[-AGREEMENT_KEEP:]  # noqa: RUF005 - joined at once, not one by one
    agreed = s.agreed_epoch
    if all_agree(s, a):
        agreed = max(agreed, e.epoch)
    return changed(s, workers=put(s.workers, e.coord, w), agreement=kept, agreed_epoch=agreed)


def all_agree(s: Snapshot, a: EpochAgreement) -> bool:
    """Whether every worker of the phase has told its root of an epoch, and no two differ in what both know."""
    return len(a.roots) == workers_of(s) and not disagreement(a)


def workers_of(s: Snapshot) -> int:
    """How many workers the phase has."""
    return 3 * _replicas(s) * s.pipeline_stages * s.tensor


def _replicas(s: Snapshot) -> int:
    """Replicas of the phase that runs: a smoke may have fewer than the run."""
    smoke = s.profile.get("smoke")
    if s.phase != "smoke" or not isinstance(smoke, Mapping):
        return s.replicas
    return min(s.replicas, as_int(smoke.get("replicas"), 1) or s.replicas)


def disagreement(a: EpochAgreement) -> tuple[str, str] | None:
    """The first two workers whose records of their common channel differ. Keys of ``pairs`` are peer coords."""
    for coord in sorted(a.pairs):
        for peer, digest in a.pairs[coord].items():
            other = a.pairs.get(peer, {}).get(coord)
            if other is not None and other != digest:
                return coord, peer
    return None


def _result(s: Snapshot, e: ev.ResultReported) -> Snapshot:
    s = changed(
        s,
        results=put(s.results, e.phase, MappingProxyType(dict(e.values))),
        result_hashes=put(s.result_hashes, f"{e.phase}/{e.coord}", e.result_hash),
        reports=put(
            s.reports,
            f"{e.phase}/{e.pod}/{e.coord}",
            ReportView(e.pod, e.coord, e.phase, e.result_hash, MappingProxyType(dict(e.values))),
        ),
    )
    values = " ".join(f"{k}={v:.4f}" for k, v in e.values.items())
    return logged(s, e, "info", e.coord, f"result reported: {e.result_hash[:12]} {values}".rstrip())


REDUCERS: Final[Mapping[type[ev.Event], Callable[[Snapshot, Any], Snapshot]]] = {
    ev.HeartbeatRead: _heartbeat,
    ev.Metric: _metric,
    ev.EngineEvent: _engine,
    ev.LogLines: _lines,
    ev.PodTelemetry: _telemetry,
    ev.WorkerProcess: _worker,
    ev.RootReported: _root,
    ev.ResultReported: _result,
}
