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
from uvcc_engine.contract.parsing.untrusted import as_float
from uvcc_engine.contract.run_files import files

RTT_MS: Final = 20.0
MBIT: Final = 1000.0
"""Links between three providers of one continent; pods of this machine have none between them."""
_FIGURES: Final = ("rounds", "bytes", "seconds")
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
        found = json.loads(_file(plan).read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and all((as_float(found.get(name)) or 0) > 0 for name in _FIGURES)
    return found if whole and {"layers", "warnings", "most_frac_bits", "processes"} <= found.keys() else None


def _of(plan: Plan) -> tuple[Mapping[str, Any], list[str]]:
    """The full run's job, and its workers as the engine's command takes them."""
    full = plan.phases[FULL]
    t = full.topology
    sizes = {"replicas": t.replicas, "stages": t.stages, "tensor": t.tensor, "microbatches": t.microbatches}
    workers = {"workers": t.workers_per_party * t.microbatches} | sizes
    flags = [part for name, size in workers.items() for part in (f"--{name}", str(size))]
    return full.job, [*flags, "--link", _LIKE.get(plan.profile.link, plan.profile.link)]


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


def promise(plan: Plan, step: Mapping[str, Any]) -> ev.PlanForetold:
    """What the plan says of the full run, for the journal: afterwards it is held against what was measured.

    Stages, tensor ranks and micro-batches share out the messages, so their rounds are not foretold (0).
    """
    full = plan.phases[FULL]
    t, over = full.topology, links(plan)
    whole = t.stages == t.tensor == t.microbatches == 1
    found = step_of(plan, step, over)
    finite = math.isfinite(found.high)
    return ev.PlanForetold(
        steps=full.steps,
        rounds=float(step["rounds"]) if whole else 0.0,
        bytes=float(step["bytes"]) * PARTIES * t.replicas,
        seconds=found.seconds if finite else 0.0,
        rtt_s=over[0] if over is not None else 0.0,
        low=found.low if finite and whole else 0.0,
        high=found.high if finite and whole else 0.0,
        early=float(step["processes"]["early"]),
        more=found.seconds - step_of(plan, step, over, SMOKE).seconds if finite and SMOKE in plan.phases else 0.0,
        here=over is None,
    )
