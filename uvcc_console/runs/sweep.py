"""Pods that nobody looks after any more, found by their names and ended with proof: at the start and every minute.

A name ``uvcc-RUN-p0r0`` tells the run. Only runs that this data folder knows are judged: a pod of any other name may
live under another console and is left alone. Which of a living run's own pods is one too many, the provider says, by
the ids that it has on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.by_party import parts_of
from uvcc_console.fleet.provider import POD_PREFIX, Pod, Provider, Rents
from uvcc_console.fleet.runclock import run_now
from uvcc_console.runs import processes
from uvcc_console.runs.kept_pods import fleet_of, run_of, snapshot_of
from uvcc_engine.contract.errors import UnreachableError, UvccError

if TYPE_CHECKING:
    from uvcc_console.plan.schema import LimitsPart

log = logger(__name__)

EVERY_S = 60.0
LIVE, KEPT, ORPHAN, FOREIGN, UNREADABLE = "live", "kept", "ORPHAN", "foreign", "unreadable"
Sleep = Callable[[float], Awaitable[None]]
Say = Callable[[ev.Event], None]


def fate_of(name: str, *, now: float | None = None) -> str:
    """live: a conductor has it; kept: its run ended and keeps its pods until its time to live; ORPHAN; foreign.

    unreadable: its run's journal cannot be read, so nobody can tell; such a pod is left alone.
    ``now``: the run's time, None for its own clock's.
    """
    run = run_of(name)
    run_dir = paths.run_dir(run) if run else None
    if run_dir is None or not (run_dir / processes.JOURNAL).exists():
        return FOREIGN
    if processes.conducted(run_dir) or _attached(name):
        return LIVE
    try:
        s = snapshot_of(run_dir)
    except UvccError:
        return UNREADABLE
    at = run_now(run_dir) if now is None else now
    fleet = fleet_of(s)
    kept = bool(fleet.get("keep_pods")) and s.ended and s.status == "ok"
    return KEPT if kept and at - s.created <= _limits(s).ttl else ORPHAN


def abandoned(name: str, *, now: float | None = None) -> bool:
    """Whether a pod may be ended without being asked: an orphan that nobody will come back for.

    A run whose conductor died keeps its pods for ``limits.wait``, so that it can be resumed, and its sidecar sees to
    it; only where both are gone, or the run has ended, its pods are anybody's to end.
    """
    if fate_of(name, now=now) != ORPHAN:
        return False
    run_dir = paths.run_dir(run_of(name))
    s = snapshot_of(run_dir)
    if s.ended:
        return True
    limits = _limits(s)
    at = run_now(run_dir) if now is None else now
    over = at - s.created > limits.ttl or at - s.updated > limits.wait
    return over and not processes.running(run_dir, processes.HALTD)


def _attached(name: str) -> bool:
    """Whether a living run of this folder took this pod over (``fleet.attach_prefix``)."""
    for run_dir in paths.run_folders():
        if (run_dir / processes.JOURNAL).exists() and processes.running(run_dir, processes.CONDUCTOR):
            try:
                prefix = str(fleet_of(snapshot_of(run_dir)).get("attach_prefix", ""))
            except UvccError as e:  # a run that cannot be read has nothing to say about another's pods
                log.warning("whether %s took pods over cannot be told: %s", run_dir.name, e)
                continue
            if prefix and name.startswith(prefix):
                return True
    return False


def _limits(s: Snapshot) -> LimitsPart:
    """The profile's limits; the strictest where they cannot be read."""
    from uvcc_console.plan.schema import LimitsPart  # most pods are live: their verbs do without a profile's models

    try:
        return LimitsPart.model_validate(s.profile.get("limits", {}))
    except ValueError:
        return LimitsPart()


async def sweep(provider: Provider, own: str, *, now: float | None = None) -> list[Pod]:
    """End what is abandoned at this provider, and what is beside our own pods (``own`` = their prefix).

    Of our own pods only one goes of which the provider knows, by its id, that the run holds another in its place.
    Returns what was ended, each proven gone. Raises UvccError if the list cannot be had or an end not be proven.
    """

    def lost(pod: Pod) -> bool:
        return pod.stray if pod.name.startswith(own) else abandoned(pod.name, now=now)

    by_id: dict[tuple[str, str], tuple[Provider, Pod]] = {}  # parties may share an account
    trouble: UvccError | None = None
    for part in parts_of(provider):
        try:
            for pod in await part.list(POD_PREFIX):
                if lost(pod):
                    by_id.setdefault((pod.provider, pod.provider_id), (part, pod))
        except UvccError as e:  # one party's provider that does not answer keeps no other
            trouble = e
    found = [pod for _, pod in by_id.values()]
    ends = await asyncio.gather(*(part.delete(pod) for part, pod in by_id.values()), return_exceptions=True)
    if isinstance(provider, Rents):
        await provider.prove(ended=False)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, UvccError):
            raise end
    # only now, and all of them: one that will not go keeps no other
    if stay := [f"{pod.name}: {end.what}" for pod, end in zip(found, ends, strict=True) if isinstance(end, UvccError)]:
        raise UnreachableError("; ".join(stay), "uvcc pods --sweep tells how to end each")
    if trouble is not None:
        raise trouble
    return found


async def keep_sweeping(
    provider: Provider,
    own: str,
    say: Say,
    *,
    clock: Callable[[], float] | None = None,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Sweep now and every minute, until cancelled. What could not be done is told (once) and tried again."""
    told = ""
    while True:
        try:
            for pod in await sweep(provider, own, now=clock() if clock is not None else None):
                text = f"pod {pod.name} was left behind and is deleted"
                say(ev.Alert(level="warn", name="sweep", text=text, subject=pod.name))
            told = ""
        except UvccError as e:
            if e.what != told:
                text = f"the sweep stopped: {e.what}"
                say(ev.Alert(level="warn", name="sweep", text=text, hint="uvcc pods --sweep"))
            told = e.what
        await sleep(EVERY_S)
