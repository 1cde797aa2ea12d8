"""What a worker that has ended left behind of why: its exit record, else a disk that took none, else the last line of
its log."""

from __future__ import annotations

import re
from typing import Final

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.rollout.bus import Bus
from uvcc_console.runs.disk_space import FULL_MIB
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files.files import log_name
from uvcc_engine.contract.text import clean

MOST = 200
TELEMETRY_S: Final = 2.5  # a pod tells of its disk every two seconds
ASKED_S: Final = 10.0
_NO_WRITES: Final = ("Read-only file system", "Input/output error")
_ROUTINE: Final = re.compile(r"[\d:,.T -]+ (?:INFO|DEBUG) ")  # how such a line of a worker's own log begins


def last_words(s: Snapshot, coord: str) -> tuple[str, str] | None:
    """What a worker's exit record said of its end, and what to do about it, if it could still write one."""
    worker = s.workers.get(coord)
    return (worker.error, worker.hint) if worker is not None and worker.error else None


def no_room(s: Snapshot, coord: str) -> tuple[str, str] | None:
    """That the disk of a worker's pod is full, by its telemetry, and what to do about it."""
    worker = s.workers.get(coord)
    pod = s.pods.get(worker.pod) if worker is not None else None
    if pod is None or pod.disk.last is None or pod.disk.last[1] >= FULL_MIB:
        return None
    hint = f"make room there (df -h, du), then uvcc resume {s.run} goes on from the last common checkpoint"
    return f"the disk of pod {pod.pod} is full", hint


async def full_disk(bus: Bus, coord: str) -> tuple[str, str] | None:
    """Whether that is why a worker left no record of its end. One that was killed could write none anyway."""
    worker = bus.snapshot.workers.get(coord)
    patience = 0.0 if worker is None or worker.signal else TELEMETRY_S
    try:
        return await bus.wait(lambda s: no_room(s, coord), patience)
    except TimeoutError:
        return None


async def read_only(link: PodLink, engine_run: str) -> tuple[str, str] | None:
    """Whether the disk of a worker's pod takes no writes at all, not even the times that a folder has already, and what
    to do about it; None also where the pod does not answer."""
    folder = f".uvcc/runs/{engine_run}"
    try:
        said = await link.sh(f"LC_ALL=C touch -c -r {folder} {folder} 2>&1 || :", timeout=ASKED_S)
    except UvccError:
        return None
    why = next((why for why in _NO_WRITES if why.lower() in said.lower()), "")
    if not why:
        return None
    hint = "its kernel's log says why: make it writable and uvcc resume, or uvcc pod RUN replace POD (P)"
    return f"the disk of pod {link.name} takes no writes ({why})", hint


def last_line(s: Snapshot, coord: str) -> str:
    """The newest line of a worker's own log that may be a reason; "" where none is known. A program that never began
    says why only there; what a worker noted as a matter of routine, minutes before it was killed, explains nothing."""
    name = f"/{log_name(coord)}"
    lines = (e.text for e in reversed(s.log) if e.source.endswith(name) and e.text.strip())
    return clean(next((line for line in lines if not _ROUTINE.match(line)), ""), MOST)
