"""Pods that outlive their run (``fleet.keep_pods``) still end at its time to live: somebody has to stay for that.

A market has no expiry of its own, and a pod's lease can halt its workers but not its bill. So the run's last process
stays behind, without any connection, and ends the pods when their time is over. It goes when they are gone, when
another run has taken them over and ended them, or when the run's folder is removed. After a reboot of this machine the
next ``uvcc`` rollout or ``uvcc pods --sweep`` does it instead. Local pods have a time to live of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from uvcc_console.core.journal import Journal, read_newest
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.provider import Provider, provider_for
from uvcc_console.rollout import spawn, sweep
from uvcc_engine.contract.errors import UvccError

log = logging.getLogger(__name__)
KEEPER = "keeper"
LOOK_S = 60.0
Sleep = Callable[[float], Awaitable[None]]
Make = Callable[[Snapshot], Provider]


def needed(s: Snapshot) -> bool:
    """Whether the run ended well and left pods that do not end by themselves."""
    fleet = dict(s.profile.get("fleet", {}))
    kept = bool(fleet.get("keep_pods")) and bool(s.ended) and s.status == "ok"
    return kept and fleet.get("provider", "local") != "local"


async def keep(
    run_dir: Path,
    *,
    make: Make | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Sleep = asyncio.sleep,
) -> list[str]:
    """Stay until the run's kept pods are gone, ending those whose time is over; returns the names of these.

    What could not be ended is tried again every minute.
    """
    ended: list[str] = []
    while (run_dir / spawn.JOURNAL).exists():
        try:
            s = snapshot(run_dir)
            if not needed(s):
                return ended
            left = await _round(run_dir, s, make, clock(), ended)
        except UvccError as e:
            log.warning("the kept pods of %s: %s", run_dir.name, e)
            left = True
        if not left:
            return ended
        await sleep(LOOK_S)
    return ended


async def _round(run_dir: Path, s: Snapshot, make: Make | None, now: float, ended: list[str]) -> bool:
    """One look: end what is over; whether there is still something to stay for."""
    fleet = dict(s.profile.get("fleet", {}))
    provider = make(s) if make is not None else provider_for(fleet, run_dir)
    try:
        pods = await provider.list(f"uvcc-{s.run}-")
        for pod in pods:
            if sweep.fate_of(pod.name, now=now) == sweep.ORPHAN:
                log.info("the time of %s is over: it is deleted", pod.name)
                await provider.delete(pod)
                ended.append(pod.name)
        return any(pod.name not in ended for pod in pods)
    finally:
        await provider.close()


def snapshot(run_dir: Path) -> Snapshot:
    """What the run's journal says now."""
    journal = Journal(run_dir / spawn.JOURNAL, readonly=True)
    try:
        return read_newest(journal)
    finally:
        journal.close()
