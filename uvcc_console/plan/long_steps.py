"""The times of a profile's halts and of its ranks' waits, fitted to how long a step is foretold to take. Pure.

A worker looks at the control file between two steps. A model whose step takes a minute cannot show within ten seconds
that it holds, so its drill would fail and its halts would be called unverified, though every pod obeys. On a GPU the
first step is such a step: it compiles the kernels that were not compiled there before.
"""

from __future__ import annotations

import math
from typing import Final

from uvcc_console.core.snapshot import ForetoldView
from uvcc_console.plan.schema import PrivateJobSettings, Profile
from uvcc_engine.contract.job.rank_waits import GROUP_TIMEOUT_S, GROUP_TIMEOUT_VARIABLE

STEPS: Final = 2
"""The steps that a pod is given: the one that is under way, and as much again for slower processors."""
LONGEST_S: Final = 600.0
"""What a foretold step lengthens the patience to at most: a pod that is stuck must not be waited for all night."""
APART: Final = 20
"""The steps' time that replicas may be apart before one is given up."""
START_S: Final = 30.0
"""For the start of the workers, which a drill of a short smoke includes."""
FIRST_ON_GPU_S: Final = 20.0
"""What the first step on a GPU takes: 12 to 15 s were seen, most of them for compiling, and 20 on a busy one."""
CPU_OFFER: Final = "CPU"
"""How the market names a machine without GPUs; it counts one all the same."""


def group_timeout(foretold: ForetoldView | None) -> dict[str, str]:
    """How long a rank waits for its sister ranks, for the workers' environment; empty where the usual is enough.

    Replicas meet once a step, and where processors are shared one may be many steps' time behind another.
    """
    needed = APART * foretold.seconds if foretold is not None else 0.0
    return {GROUP_TIMEOUT_VARIABLE: f"{math.ceil(needed)}"} if needed > GROUP_TIMEOUT_S else {}


def foretells_gpus(profile: Profile) -> bool:
    """Whether secret shares will lie on GPUs, as far as the profile tells."""
    job, gpu = profile.job, profile.fleet.gpu
    if not isinstance(job, PrivateJobSettings) or job.device == "cpu":
        return False
    return job.device == "cuda" or bool(gpu and not gpu.startswith(CPU_OFFER))


def fitted(profile: Profile, step_s: float) -> tuple[Profile, list[str]]:
    """The profile with the times that its user left open, and what he should know of them and of those he wrote.

    ``step_s``: seconds that a step of the full run is foretold to take; 0 where nothing is known.
    """
    needed = min(float(math.ceil(STEPS * step_s)), LONGEST_S)
    step = f"a step may take {step_s:.0f} s"
    if foretells_gpus(profile) and needed < FIRST_ON_GPU_S:
        needed, step = FIRST_ON_GPU_S, f"the first step on a GPU may take {FIRST_ON_GPU_S:.0f} s"
    halt, gates = profile.halt, profile.gates
    notes: list[str] = []
    if needed > halt.patience:
        told = f"{step}, and a pod holds between two steps"
        if "patience" in halt.model_fields_set:
            notes.append(f"{told}: halt.patience of {halt.patience:g} s may be too short; {needed:g} s would do")
        else:
            halt = halt.model_copy(update={"patience": needed})
            notes.append(f"{told}: it has {needed:g} s to show it (halt.patience)")
    drill = START_S + needed
    short = 0 < gates.halt_drill_s < drill and needed > gates.halt_drill_s
    if short and "halt_drill_s" in gates.model_fields_set:
        written = f"gates.halt_drill_s of {gates.halt_drill_s:g} s"
        notes.append(f"{written} may be too short for such steps; {drill:g} would do")
    elif short:
        gates = gates.model_copy(update={"halt_drill_s": drill})
    return profile.model_copy(update={"halt": halt, "gates": gates}), notes
