"""Who goes first when the pods share the operator's own machine.

Two hundred workers that share two cores fairly with the conductor leave it a hundredth of a core: it then journals
minutes late, and what it must decide on is stale. So the workers of local pods together weigh about as much as one
ordinary process on each core, and the pods' servers and agents stand between them and the console. Before there are
workers the same holds for what a bootstrap starts on every pod at once: looks at its Python, unpacking, the imports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from uvcc_console.fleet.provider_kinds import runs_here
from uvcc_engine.contract.machine import host

NICE: Final = "UVCC_WORKER_NICE"
SHARED_BY: Final = "UVCC_PROCESSORS_SHARED_BY"
_PER_LEVEL: Final = 1.25  # what one level of niceness is worth under Linux's fair scheduler (sched(7))
_LOWEST: Final = 19
_AT_ONCE: Final = 3  # processes of a core that an ordinary time limit allows for
_LONGEST: Final = 8.0


def niceness(workers: int, cores: int) -> int:
    """The level at which ``workers`` processes together weigh about as much as one process on each core."""
    crowd = workers / max(1, cores)
    return min(_LOWEST, round(math.log(crowd, _PER_LEVEL))) if crowd > 1 else 0


def give_way(provider: str, crowd: int, cores: int | None = None) -> int:
    """The level at which ``crowd`` processes of pods run; 0 where the pods are machines of their own."""
    return niceness(crowd, cores or host.usable_cpus()) if runs_here({"provider": provider}) else 0


def stretch(provider: str, crowd: int, cores: int | None = None) -> float:
    """How many times longer than on machines of their own ``crowd`` processes may take together, before they count
    as stuck: what each does alone in a moment, like its imports, they do one after the other here."""
    if not runs_here({"provider": provider}):
        return 1.0
    return min(_LONGEST, max(1.0, crowd / (_AT_ONCE * (cores or host.usable_cpus()))))


def environment(provider: str, workers: int, on_a_pod: int, cores: int | None = None) -> Mapping[str, str]:
    """What the workers of a phase are told: whom to give way to, and how many of them share their processors."""
    level = give_way(provider, workers, cores)
    shared = workers if runs_here({"provider": provider}) else on_a_pod
    return {SHARED_BY: str(shared)} | ({NICE: str(level)} if level else {})
