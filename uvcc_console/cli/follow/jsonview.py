"""Snapshots as JSON: the documents that ``--json`` prints. Keys are only ever added."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from uvcc_console.core.alerts.expense import expected
from uvcc_console.core.answers.shown import CHANGED, UNCHECKED, VERIFIED, Changes, Shown, final, shown, verified
from uvcc_console.core.folding.measures import AT
from uvcc_console.core.snapshot import PodView, Snapshot, WorkerView
from uvcc_console.plan import plan_score
from uvcc_console.report.recheck import recheck
from uvcc_console.runs.processes import CONDUCTOR, HALTD, running


def summary(s: Snapshot, run_dir: Path, changed: Changes | None = None) -> dict[str, Any]:
    """One row of ``uvcc runs --json``. ``changed``: what a recheck of the files found; made here if it is not given."""
    stage = s.stage
    changed = recheck(run_dir, s) if changed is None else changed
    return {
        "run": s.run,
        "profile": s.profile_name,
        "job": s.job_kind,
        "status": s.status,
        "detail": s.detail,
        "stage": stage.name if stage else "",
        "stage_status": stage.status if stage else "",
        "phase": s.phase,
        "step": s.step,
        "steps": s.steps_planned,
        "loss": last_value(s, "loss"),
        "verified": verified(s, changed),
        "result": result(final(s, changed)),
        "created": s.created,
        "updated": s.updated,
        "ended": s.ended,
        "live": bool(running(run_dir, CONDUCTOR)),
        "path": str(run_dir),
    }


def last_value(s: Snapshot, name: str) -> float | None:
    """The newest value of a figure over all workers; None before the first."""
    points = [line.last for by_name in s.series.values() if (line := by_name.get(name)) and line.last]
    return max(points, key=lambda point: point[0])[1] if points else None


def result(found: Shown) -> dict[str, Any]:
    """A phase's result with its mark: whose word it is, and whether it holds now."""
    return {
        "phase": found.phase,
        "mark": found.mark,
        "verified": found.verified,
        "words": found.words(),
        "values": dict(found.values),
        "result_hashes": list(found.hashes),
        "global_root": found.global_root,
        "run_root": found.run_root,
        "sid_job": found.sid_job,
        "verified_at": found.at if found.at and found.mark in (VERIFIED, CHANGED, UNCHECKED) else None,
        "changed": list(found.changed),
    }


def vitals(p: PodView) -> dict[str, Any]:
    """What the pod's agent measured last: share of processors, MiB, and every card as it is; null where unknown."""
    curves = {"cpu": p.cpu, "memory_mib": p.memory, "disk_free_mib": p.disk, "gpu_percent": p.gpu}
    found: dict[str, Any] = {name: line.last[1] if line.last else None for name, line in curves.items()}
    return found | {"gpus": [dataclasses.asdict(card) for card in p.gpus]}


def _worker(w: WorkerView) -> dict[str, Any]:
    return {
        "coord": w.coord,
        "pod": w.pod,
        "state": w.state,
        "rc": w.rc,
        "signal": w.signal,
        "phase": w.phase,
        "step": w.step,
        "pid": w.beat.get("pid"),
        "heartbeat_ts": w.beat_ts,
        "heartbeat": dict(w.beat),
        "root_epoch": w.root_epoch,
        "root": w.root,
    }


def document(s: Snapshot, run_dir: Path) -> dict[str, Any]:
    """``uvcc status --json``: all that is known, series shortened to their last point."""
    changed = recheck(run_dir, s)
    phases = dict.fromkeys((*s.results, *s.verdicts))
    return summary(s, run_dir, changed) | {
        "seq": s.seq,
        "engine_run": s.engine_run,
        "attempt": s.attempt,
        "sid_job": s.sid_job,
        "seed": s.seed,
        "operation": list(s.operation),
        "topology": {"replicas": s.replicas, "stages": s.pipeline_stages, "tensor": s.tensor},
        "stages": [
            {
                "name": v.name,
                "status": v.status,
                "detail": v.detail,
                "started": v.started,
                "ended": v.ended,
                "until": v.until,
                "again": v.again,
            }
            for v in s.stages
        ],
        "gates": [{"name": g.name, "ok": g.ok, "wanted": g.wanted, "measured": g.measured} for g in s.gates],
        "pods": [
            {
                "pod": p.pod,
                "party": p.party,
                "replica": p.replica,
                "provider": p.provider,
                "state": p.state,
                "address": p.address,
                "price_hr": p.price_hr,
                "detail": p.detail,
                "checkpoint": s.checkpoints.get(p.pod, (-1, ""))[0],
                "home": s.home.get(p.pod, (-1, ""))[0],
                "vitals": vitals(p),
                "paths": {name: {"up": up, "since": since} for name, (up, since) in p.paths.items()},
            }
            for p in s.pods.values()
        ],
        "domains": [dataclasses.asdict(d) for d in s.domains.values()],
        "workers": [_worker(s.workers[c]) for c in sorted(s.workers)],
        "figures": {
            coord: {name: line.last[1] for name, line in by_name.items() if line.last and name != AT}
            for coord, by_name in s.series.items()
        },
        "agreed_epoch": s.agreed_epoch,
        "fork": s.fork,
        "halt": {
            "nonce": s.halt.nonce,
            "mode": s.halt.mode,
            "by": s.halt.by,
            "drill": s.halt.drill,
            "done": s.halt.done,
            "verified": s.halt.verified,
            "total": s.halt.total,
            "step": s.halt.step,
            "seconds": s.halt.seconds,
            "last_drill_s": s.halt.last_drill_s,
            "acks": {
                pod: {"stage": stage, "step": step, "checkpoint": checkpoint, "ts": ts}
                for pod, (stage, step, checkpoint, ts) in s.halt.acks.items()
            },
            "gpus": dict(s.halt.gpus),
            "pods_gone": sorted(name for name, pod in s.pods.items() if pod.state == "gone"),
        },
        "plan_score": [figure.to_json() for figure in plan_score.score(s)],
        "cost": {
            "hourly": s.hourly,
            "spent": s.spent,
            "expected": expected(s),
            "forecast": s.forecast,
            "runway_h": s.runway_h,
        },
        "results": {phase: dict(shown(s, phase, changed).values) for phase in phases},
        "result_hashes": {
            key: h for key, h in s.result_hashes.items() if h in shown(s, key.partition("/")[0], changed).hashes
        },
        "shown": {phase: result(shown(s, phase, changed)) for phase in phases},
        "reported": [
            {"pod": r.pod, "coord": r.coord, "phase": r.phase, "result_hash": r.result_hash, "values": dict(r.values)}
            for r in s.reports.values()
        ],
        "verdicts": {
            phase: {
                "ok": v.ok,
                "global_root": v.global_root,
                "sid_job": v.sid_job,
                "detail": v.detail,
                "bundle": v.bundle,
                "ts": v.ts,
                "level": v.level,
                "pinned": v.pinned,
                "values": dict(v.values),
                "result_hashes": list(v.result_hashes),
                "run_root": v.run_root,
                "changed": list(changed.get(phase, ())),
            }
            for phase, v in s.verdicts.items()
        },
        "malformed": dict(s.malformed),
        "alerts": [{"ts": a.ts, "level": a.level, "source": a.source, "text": a.text} for a in s.alerts],
        "leaks": list(s.leaks),
        "conductor": running(run_dir, CONDUCTOR),
        "haltd": running(run_dir, HALTD),
    }
