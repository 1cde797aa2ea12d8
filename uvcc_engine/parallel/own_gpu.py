"""Which of a pod's GPUs a rank computes on, and whether its groups can be carried between GPUs.

NCCL refuses a communicator that holds one device twice. Where a pod has a GPU for each of them, the ranks of one
communicator get different ones and NCCL carries their sums; where several have to share one, shares stay on the GPU and
the sums pass through the host.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Final

import torch

from uvcc_engine.parallel.meeting import wants_seal
from uvcc_engine.parallel.place import RankAddress, device_slot, has_own_devices

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def claim(place: RankAddress, env: MutableMapping[str, str] | None = None, count: int = -1) -> str:
    """Have this process see only its own of the pod's GPUs, and say what its groups carry: ``cuda`` or ``cpu`` memory.

    It has to be called before anything touches a GPU: the driver reads ``CUDA_VISIBLE_DEVICES`` once. ``count``: how
    many GPUs the process may see, if that is not to be looked up. Without one, or alone, nothing changes.
    """
    env = os.environ if env is None else env
    if place.world == 1:
        return "cpu"
    found = torch.cuda.device_count() if count < 0 else count  # asks the management library, not the driver
    if found == 0:
        return "cpu"
    # replicas on other pods have devices of their own, and what is summed with them is sealed by the host
    beyond = wants_seal(place.address)
    coord = replace(place.coord, replica=0) if beyond else place.coord
    here = replace(place.topology, replicas=1) if beyond else place.topology
    slot = device_slot(coord, found, here)
    listed = [one for one in env.get(VISIBLE, "").split(",") if one] or [str(k) for k in range(found)]
    env[VISIBLE] = listed[slot]
    return "cuda" if has_own_devices(found, here) else "cpu"
