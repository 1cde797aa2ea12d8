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
from uvcc_console.plan.plan import FULL, Plan
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_engine import __version__
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.link_time import link_time
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.untrusted import as_float
from uvcc_engine.contract.run_files import files

RTT_MS: Final = 20.0
MBIT: Final = 1000.0
"""Links between three providers of one continent; pods of this machine have none between them."""
_FIGURES: Final = ("rounds", "bytes", "seconds")


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
    return found if whole and {"layers", "warnings", "most_frac_bits"} <= found.keys() else None


def _of(plan: Plan) -> tuple[Mapping[str, Any], list[str]]:
    """The full run's job, and its workers as the engine's command takes them."""
    full = plan.phases[FULL]
    t = full.topology
    sizes = {"replicas": t.replicas, "stages": t.stages, "tensor": t.tensor, "microbatches": t.microbatches}
    workers = {"workers": t.workers_per_party * t.microbatches} | sizes
    return full.job, [part for name, size in workers.items() for part in (f"--{name}", str(size))]


def _file(plan: Plan) -> Path:
    job, workers = _of(plan)
    said = f"{__version__}\n{' '.join(workers)}\n{sorted_json(dict(job))}"
    return paths.data_dir() / "rehearsals" / f"{hashlib.sha256(said.encode()).hexdigest()}.json"


def round_trip_s(plan: Plan) -> float:
    """Seconds between two parties where nothing else is known."""
    return 0.0 if kind_of(plan.profile.fleet.kind).here else RTT_MS / 1e3


def foretold(step: Mapping[str, Any], steps: int, rtt_s: float, bytes_s: float) -> dict[str, float]:
    """Seconds of a step and of the full run over such links: rounds, bytes and computing, one after another.

    ``rtt_s``: there and back between two parties, of which a round takes one way. ``bytes_s``: of a party's link.
    On processors as fast as these; what the relay and the transcript add is measured by the smoke.
    """
    network = link_time(float(step["rounds"]), float(step["bytes"]), rtt_s / 2, bytes_s).total_s
    one = network + float(step["seconds"])
    return {"rtt_s": rtt_s, "bytes_s": bytes_s, "network_s": network, "step_s": one, "full_s": one * steps}


def promise(plan: Plan, step: Mapping[str, Any]) -> ev.PlanForetold:
    """What the plan says of the full run, for the journal: afterwards it is held against what was measured.

    Stages, tensor ranks and micro-batches share out the messages, so their rounds are not foretold (0).
    """
    full = plan.phases[FULL]
    t, rtt = full.topology, round_trip_s(plan)
    whole = t.stages == t.tensor == t.microbatches == 1
    over = foretold(step, full.steps, rtt, MBIT * 1e6 / 8)
    seconds = over["step_s"] if math.isfinite(over["step_s"]) else 0.0
    return ev.PlanForetold(
        steps=full.steps,
        rounds=float(step["rounds"]) if whole else 0.0,
        bytes=float(step["bytes"]) * PARTIES * t.replicas,
        seconds=seconds,
        rtt_s=rtt,
    )
