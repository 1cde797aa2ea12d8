"""Snapshots as JSON: the documents that ``--json`` prints. Keys are only ever added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from uvcc_console.core.snapshot import Snapshot, WorkerView
from uvcc_console.rollout.spawn import CONDUCTOR, HALTD, running


def summary(s: Snapshot, run_dir: Path) -> dict[str, Any]:
    """One row of ``uvcc runs --json``."""
    stage = s.stage
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
        "verified": verified(s),
        "created": s.created,
        "updated": s.updated,
        "ended": s.ended,
        "live": bool(running(run_dir, CONDUCTOR)),
        "path": str(run_dir),
    }


def last_value(s: Snapshot, name: str) -> float | None:
    """The newest value of a figure over all workers; None before the first."""
    points = [line.last for by_name in s.series.values() if (line := by_name.get(name)) and line.last]
    return max(points)[1] if points else None


def verified(s: Snapshot) -> bool | None:
    """Whether every phase that was checked holds, the full run among them; None while that is open."""
    if not s.verdicts:
        return None
    if not all(v.ok for v in s.verdicts.values()):
        return False
    return True if "full" in s.verdicts else None


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
    return summary(s, run_dir) | {
        "seq": s.seq,
        "engine_run": s.engine_run,
        "attempt": s.attempt,
        "sid_job": s.sid_job,
        "seed": s.seed,
        "topology": {"replicas": s.replicas, "stages": s.pipeline_stages, "tensor": s.tensor},
        "stages": [
            {
                "name": v.name,
                "status": v.status,
                "detail": v.detail,
                "started": v.started,
                "ended": v.ended,
                "until": v.until,
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
                "paths": {name: {"up": up, "since": since} for name, (up, since) in p.paths.items()},
            }
            for p in s.pods.values()
        ],
        "workers": [_worker(s.workers[c]) for c in sorted(s.workers)],
        "figures": {
            coord: {name: line.last[1] for name, line in by_name.items() if line.last}
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
        "cost": {"hourly": s.hourly, "spent": s.spent, "forecast": s.forecast, "runway_h": s.runway_h},
        "results": {phase: dict(values) for phase, values in s.results.items()},
        "result_hashes": dict(s.result_hashes),
        "verdicts": {
            phase: {
                "ok": v.ok,
                "global_root": v.global_root,
                "sid_job": v.sid_job,
                "detail": v.detail,
                "bundle": v.bundle,
            }
            for phase, v in s.verdicts.items()
        },
        "alerts": [{"ts": a.ts, "level": a.level, "source": a.source, "text": a.text} for a in s.alerts],
        "leaks": list(s.leaks),
        "conductor": running(run_dir, CONDUCTOR),
        "haltd": running(run_dir, HALTD),
    }
