"""Evidence that a halted pod's GPUs are empty: what nvidia-smi says runs on them, held against our own processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from uvcc_console.fleet.ssh import PodLink
from uvcc_engine.contract.errors import UvccError

NONE, EMPTY, USED, UNKNOWN = "none", "empty", "used", "unknown"
ASK_GPUS: Final = (
    "command -v nvidia-smi >/dev/null 2>&1 || { echo none; exit 0; }; "
    "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
)


def occupancy(listed: str, ours: Collection[int]) -> tuple[str, str]:
    """Whether anything of ours is left on the pod's GPUs (none, empty or used), and in words what is there. Pure.

    In a container nvidia-smi may name processes by the host's numbers, so a process that it lists and that is not
    known as ours is told too, but only one of ours is a failure.
    """
    if listed.strip() == "none":
        return NONE, "no GPU"
    found: dict[int, str] = {}
    for line in listed.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdigit():
            found[int(pid)] = used.strip()
    left = sorted(set(found) & set(ours))
    if left:
        return USED, "GPU still used by " + ", ".join(f"{pid} ({found[pid]} MiB)" for pid in left)
    if found:
        return EMPTY, "GPU free of ours; others there: " + ", ".join(map(str, sorted(found)))
    return EMPTY, "GPU empty"


async def look(link: PodLink, ours: Collection[int], timeout: float = 15.0) -> tuple[str, str]:
    """Ask the pod, for at most ``timeout`` seconds. What cannot be asked is unknown, never empty."""
    try:
        return occupancy(await link.sh(ASK_GPUS, timeout=timeout), ours)
    except UvccError as e:
        return UNKNOWN, f"GPU unknown: {e.what}"
