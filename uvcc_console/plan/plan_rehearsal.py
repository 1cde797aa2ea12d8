"""What a step of a private training takes, rehearsed on this machine with made-up rows, and what follows for the run.

A rehearsal is kept by the hash of the job and of this version, so that a rollout of what was planned takes no second
one. A job that overflows is refused each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.fleet.provider_kinds import kind_of
from uvcc_console.plan.owndata import REHEARSE, owners_program
from uvcc_console.plan.plan import FULL, SMOKE, Plan
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_console.plan.step_forecast import StepForecast, apart, here
from uvcc_engine import __version__
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.untrusted import as_float, as_int, json_of
from uvcc_engine.contract.run_files import files

RTT_MS: Final = 20.0
MBIT: Final = 1000.0
"""Links between three providers of one continent; pods of this machine have none between them."""
_FIGURES: Final = ("rounds", "bytes", "seconds", "busiest")
_OF_FLEET: Final = {"rounds", "bytes", "pod_bytes", "chain"}
_OF_MEMORY: Final = ("pod_mib", "all_mib")
_OF_AUDIT: Final = ("rounds", "bytes_sent", "audits", "audited")
_LIKE: Final = {"auto": "direct", "nats": "stream"}
"""Over which link the processes are timed where the profile leaves it open, or takes a broker that runs elsewhere."""


def applies(plan: Plan) -> bool:
    """Whether the full run is a training that can be rehearsed."""
    full = plan.phases[FULL]
    return full.kind == "private" and full.job.get("task", "train") == "train"


def own(plan: Plan) -> bool:
    """Whether it is of the user's own data or model: nobody has tried before whether its numbers fit."""
    job = plan.profile.job
    return applies(plan) and isinstance(job, PrivateJobSettings) and bool(job.data or not isinstance(job.model, str))


def rehearsed(plan: Plan) -> dict[str, Any]:
    """The rehearsal as ``uvcc-engine rehearse`` tells it.

    Raises UvccError with its words where numbers overflow, or the job does not fit its workers.
    """
    if (known := kept(plan)) is not None:
        return known
    job, workers = _of(plan)
    with tempfile.TemporaryDirectory(prefix="uvcc-plan-") as folder:
        path = Path(folder) / "rehearsed.json"
        path.write_text(json.dumps(dict(job)))
        said = owners_program(["--job", str(path), *workers], REHEARSE)
    found = dict(json.loads(said))
    with contextlib.suppress(OSError, UvccError):  # it costs a few seconds the next time
        _file(plan).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_atomic(_file(plan), json.dumps(found).encode())
    return found


def kept(plan: Plan) -> dict[str, Any] | None:
    """An earlier rehearsal of the same job on as many workers, if it can be read."""
    try:
        found = json_of(_file(plan).read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and all((as_float(found.get(name)) or 0) > 0 for name in _FIGURES)
    if not whole or not {"layers", "warnings", "most_frac_bits", "processes", "memory"} <= found.keys():
        return None
    took, fleet, memory = found["processes"], found.get("fleet", {}), found["memory"]
    if not isinstance(memory, dict) or not all((as_float(memory.get(name)) or 0) > 0 for name in _OF_MEMORY):
        return None
    told = isinstance(took, dict) and None not in (as_int(took.get(name), 1) for name in ("replicas", "workers"))
    return found if told and isinstance(fleet, dict) and (not fleet or fleet.keys() >= _OF_FLEET) else None


def _of(plan: Plan) -> tuple[Mapping[str, Any], list[str]]:
    """The full run's job, and its workers as the engine's command takes them."""
    full = plan.phases[FULL]
    t = full.topology
    sizes = {"replicas": t.replicas, "stages": t.stages, "tensor": t.tensor, "microbatches": t.microbatches}
    workers = {"workers": t.workers_per_party * t.microbatches} | sizes
    flags = [part for name, size in workers.items() for part in (f"--{name}", str(size))]
    far = [] if kind_of(plan.profile.fleet.kind).here else ["--apart"]
    rows = _answered_rows(plan)
    known = ["--rows", str(rows)] if rows else []
    return full.job, [*flags, "--link", _LIKE.get(plan.profile.link, plan.profile.link), *far, *known]


def _answered_rows(plan: Plan) -> int:
    """How many rows there are to train on, where a step's cost depends on it and they were counted: trees answer those,
    too, that a step does not draw."""
    job = plan.profile.job
    if not isinstance(job, PrivateJobSettings) or not isinstance(job.model, dict):
        return 0
    trees = [layer.get("type") for layer in job.model.get("layers", [])] == ["trees"]
    return job.train_rows if trees else 0


def _file(plan: Plan) -> Path:
    job, workers = _of(plan)
    said = f"{__version__}\n{' '.join(workers)}\n{sorted_json(dict(job))}"
    return paths.data_dir() / "rehearsals" / f"{hashlib.sha256(said.encode()).hexdigest()}.json"


def links(plan: Plan, rtt_ms: float | None = None, mbit: float | None = None) -> tuple[float, float] | None:
    """Round trip in seconds and bytes a second between two parties; None for local pods where neither is given."""
    if rtt_ms is None and mbit is None and kind_of(plan.profile.fleet.kind).here:
        return None
    local = kind_of(plan.profile.fleet.kind).here
    usual = 0.0 if local else RTT_MS
    return (usual if rtt_ms is None else rtt_ms) / 1e3, (MBIT if mbit is None else mbit) * 1e6 / 8


def step_of(plan: Plan, step: Mapping[str, Any], over: tuple[float, float] | None, phase: str = FULL) -> StepForecast:
    """Seconds of a step of a phase over such links."""
    return here(step, plan.phases[phase].topology.replicas) if over is None else apart(step, *over)


def foretold(found: StepForecast, steps: int, over: tuple[float, float] | None) -> dict[str, float]:
    """Seconds of a step and of the full run, as ``uvcc plan --json`` has them. Local links are part of the step."""
    rtt_s, bytes_s = over or (0.0, 0.0)
    return {
        "rtt_s": rtt_s,
        "bytes_s": bytes_s,
        "network_s": found.network_s,
        "step_s": found.seconds,
        "low_s": found.low,
        "high_s": found.high,
        "full_s": found.seconds * steps,
    }


def costs(plan: Plan, step: Mapping[str, Any]) -> tuple[float, float]:
    """Rounds of the worker that has most, and bytes of all workers, of a step of the full run; 0 where neither is
    foretold: a party's workers are more than one machine rehearses."""
    t = plan.phases[FULL].topology
    if t.workers_per_party == t.microbatches == 1:
        return float(step["rounds"]), float(step["bytes"]) * PARTIES
    fleet = step.get("fleet")
    return (float(fleet["rounds"]), float(fleet["bytes"])) if fleet else (0.0, 0.0)


def memory(plan: Plan, step: Mapping[str, Any], here_mib: float) -> tuple[float, str]:
    """GiB that the workers of a pod of the full run hold at most, 0 where too few of them were rehearsed; and what to
    know where there is less: of what the pods ask for, or of ``here_mib`` that is free on this machine for all local
    ones."""
    t, took, fleet = plan.phases[FULL].topology, step["processes"], plan.profile.fleet
    if int(took["workers"]) != PARTIES * t.stages * t.tensor * int(took["replicas"]):
        return 0.0, ""
    each, doubt = float(step["memory"]["pod_mib"]) / 1024, ""
    cure = "a smaller job.batch, or job.verify: products where it is proofs"
    if kind_of(fleet.kind).here:
        need, there = float(step["memory"]["all_mib"]) * t.replicas / int(took["replicas"]) / 1024, here_mib / 1024
        if need > there > 0:
            doubt = f"the workers hold up to {need:.1f} GiB, and this machine has {there:.1f} free: {cure}"
    elif 0 < (asked := float(getattr(fleet, "memory", 0) or 0)) < each:
        doubt = f"a pod's workers hold up to {each:.1f} GiB, and fleet.memory asks for {asked:g}: more of it, or {cure}"
    return each, doubt


def promise(plan: Plan, step: Mapping[str, Any]) -> ev.PlanForetold:
    """What the plan says of the full run, for the journal: afterwards it is held against what was measured.

    Where a party has more workers than are rehearsed, counts and a range are not foretold (0); its seconds are then
    those of one worker with all the work.
    """
    full, over = plan.phases[FULL], links(plan)
    found, (rounds, sent) = step_of(plan, step, over), costs(plan, step)
    finite, sure = math.isfinite(found.high), math.isfinite(found.high) and rounds > 0
    told = step.get("audit") if "fleet" not in step else None  # of several workers, as the rehearsed ones drew
    audit = {name: float(as_float(told.get(name)) or 0.0) for name in _OF_AUDIT} if isinstance(told, dict) else {}
    return ev.PlanForetold(
        steps=full.steps,
        rounds=rounds,
        bytes=sent,
        seconds=found.seconds if finite else 0.0,
        rtt_s=over[0] if over is not None else 0.0,
        low=found.low if sure else 0.0,
        high=found.high if sure else 0.0,
        early=float(step["processes"]["early"]),
        more=found.seconds - step_of(plan, step, over, SMOKE).seconds if finite and SMOKE in plan.phases else 0.0,
        here=over is None,
        audits=audit.get("audits", 0.0),
        audited=audit.get("audited", 0.0),
        audit_rounds=audit.get("rounds", 0.0),
        audit_bytes=audit.get("bytes_sent", 0.0) * PARTIES,
    )
