"""Who goes first when the pods share the operator's own machine.

Two hundred workers that share two cores fairly with the conductor leave it a hundredth of a core: it then journals
minutes late, and what it must decide on is stale. So the workers of local pods together weigh about as much as one
ordinary process on each core, and the pods' servers and agents stand between them and the console.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from uvcc_engine.contract import host

NICE: Final = "UVCC_WORKER_NICE"
LOCAL: Final = "local"
_PER_LEVEL: Final = 1.25  # what one level of niceness is worth under Linux's fair scheduler (sched(7))
_LOWEST: Final = 19


def niceness(workers: int, cores: int) -> int:
    """The level at which ``workers`` processes together weigh about as much as one process on each core."""
    crowd = workers / max(1, cores)
    return min(_LOWEST, round(math.log(crowd, _PER_LEVEL))) if crowd > 1 else 0


def environment(provider: str, workers: int, cores: int | None = None) -> Mapping[str, str]:
    """What the workers of a phase are told; nothing where the pods are machines of their own."""
    if provider != LOCAL:
        return {}
    level = niceness(workers, cores or host.usable_cpus())
    return {NICE: str(level)} if level else {}
