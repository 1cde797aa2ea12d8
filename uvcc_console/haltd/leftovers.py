"""Who stays when a run is over: for pods that outlive it, and for creates of which nobody knows yet what came of them.

A market has no expiry of its own, and a pod's lease can halt its workers but not its bill. So the run's last process
stays behind, without any connection, ends kept pods (``fleet.keep_pods``) when their time is over, and watches every
create until it is proven: its pod gone, or list and history beyond their known lag without it. It goes when nothing is
left to prove, when another run has taken the pods over and ended them, or when the run's folder is removed; a market
that answers nothing at all it leaves after ``LONGEST_S``. After a reboot of this machine the next ``uvcc`` rollout or
``uvcc pods --sweep`` does it instead. Local pods have a time to live of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.journal.journal import Journal, read_summary
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.cloud.intents import Intents, unended
from uvcc_console.fleet.provider import Provider, Rents
from uvcc_console.fleet.provider_kinds import provider_for, runs_here
from uvcc_console.fleet.runclock import run_now
from uvcc_console.runs import processes, sweep
from uvcc_engine.contract.errors import UvccError

log = logger(__name__)
KEEPER = "keeper"
LOOK_S = 20.0
LONGEST_S = 48 * 3600.0
Sleep = Callable[[float], Awaitable[None]]
Make = Callable[[Snapshot], Provider]


def needed(s: Snapshot, run_dir: Path) -> bool:
    """Whether the run is over and left pods or volumes that do not end by themselves, or creates not proven."""
    if not s.ended or runs_here(dict(s.profile.get("fleet", {}))):
        return False
    return _keeps(s) or any(t.open for t in Intents.of(run_dir).tries().values()) or bool(unended(run_dir))


def _keeps(s: Snapshot) -> bool:
    return bool(dict(s.profile.get("fleet", {})).get("keep_pods")) and s.status == "ok"


async def keep(
    run_dir: Path,
    *,
    make: Make | None = None,
    clock: Callable[[], float] | None = None,
    sleep: Sleep = asyncio.sleep,
) -> list[str]:
    """Stay until nothing is left to end or to prove; returns the names of pods that were ended.

    What could not be done is tried again at the next look.
    """
    now = clock or (lambda: run_now(run_dir))
    ended: list[str] = []
    since, trouble = now(), ""
    while (run_dir / processes.JOURNAL).exists():
        try:
            s = snapshot(run_dir)
            if not needed(s, run_dir):
                return ended
            left, trouble = await _round(run_dir, s, make, now(), ended), ""
        except Exception as error:  # whatever it is, what costs money is looked at again
            e = describe(error)
            log.warning("what the run left: %s", e, exc_info=None if isinstance(error, UvccError) else error)
            left, trouble = True, e.what
        if not left:
            return ended
        if trouble and now() - since > LONGEST_S:
            _tell(run_dir, "error", f"nobody watches what the run left any more: {trouble}")
            return ended
        since = since if trouble else now()
        await sleep(LOOK_S)
    return ended


async def _round(run_dir: Path, s: Snapshot, make: Make | None, now: float, ended: list[str]) -> bool:
    """One look: end what is over, prove what can be; whether there is still something to stay for."""
    fleet = dict(s.profile.get("fleet", {}))
    provider = make(s) if make is not None else provider_for(fleet, run_dir)
    try:
        pods = await provider.list(s.prefix)
        over = [pod for pod in pods if pod.stray or sweep.fate_of(pod.name, now=now) == sweep.ORPHAN]
        left = len(over) < len(pods)
        ends = await asyncio.gather(*(provider.delete(pod) for pod in over), return_exceptions=True)
        for pod, end in zip(over, ends, strict=True):
            if end is None:
                log.info("it was left over, and is deleted", pod=pod.name)
                ended.append(pod.name)
                _tell(run_dir, "warn", f"pod {pod.name} was left when the run was over, and is deleted")
        for end in ends:
            if isinstance(end, BaseException):
                raise end  # only now: one that will not go keeps no other
        if isinstance(provider, Rents):
            kept = [pod.name for pod in pods if pod.name not in ended]
            left |= bool(await provider.prove(ended=True, keep=kept))
        return left
    finally:
        await provider.close()


def _tell(run_dir: Path, level: str, text: str) -> None:
    """Write it into the journal, if that can be written."""
    try:
        journal = Journal(run_dir / processes.JOURNAL, source=KEEPER)
        try:
            journal.append(ev.Alert(level=level, name=KEEPER, text=text, hint="see: uvcc pods --sweep"))
        finally:
            journal.close()
    except UvccError as e:
        log.warning("not journalled: %s: %s", text, e)


def snapshot(run_dir: Path) -> Snapshot:
    """What the run's journal says now."""
    journal = Journal(run_dir / processes.JOURNAL, readonly=True)
    try:
        return read_summary(journal)
    finally:
        journal.close()
