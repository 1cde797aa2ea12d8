"""How an order to tear down reaches whoever obeys it, whatever state the run's own machinery is in.

The usual way is an intent in the journal. A disk that is full, or a process that is frozen in the middle of a commit,
closes it; pods cost money all the same. Then a conductor that moves is told by a signal, one that is frozen makes way
for another, and the journal follows when it can. What counts in the end is what the provider lists.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.cli import common
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet import pulse
from uvcc_console.plan.plan import pod_prefix
from uvcc_console.plan.profile import parse
from uvcc_console.runs import domain, processes
from uvcc_engine.contract.errors import ConfigError, UvccError

BUSY_S: Final = 1.0  # longer than any ordinary commit of another process
EACH_S: Final = 2.0
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Order:
    """``child``: the new conductor if one was needed; ``noted``: whether the journal took the order."""

    child: subprocess.Popen[bytes] | None
    noted: bool


def order(run_dir: Path) -> Order:
    """Have the run torn down. Raises ConfigError while domains must still sign for it."""
    if why := domain.missing(common.load_summary(run_dir), "terminate"):  # else the order would be followed in vain
        raise ConfigError(why, "a domain signs with: uvcc domain consent RUN terminate")
    conductor = _settled(run_dir, processes.CONDUCTOR)
    if conductor.moving and _noted(run_dir):
        return Order(None, noted=True)
    if conductor.moving and conductor.who is not None:
        common.say("uvcc: the order goes to the conductor by a signal; the journal follows when it can")
        os.kill(conductor.who.pid, signal.SIGTERM)
        return Order(None, noted=False)
    for name, found in ((processes.CONDUCTOR, conductor), (processes.HALTD, _settled(run_dir, processes.HALTD))):
        if found.who is not None and not found.moving:
            common.say(f"uvcc: the {name} makes way: {found.words()}")
            pulse.end(found.who)
    seq = _noted(run_dir)
    since = ["--since", str(seq)] if seq else []
    return Order(processes.start(run_dir, processes.CONDUCTOR, "--adopt", "teardown", *since), noted=bool(seq))


def see_through(run_dir: Path, s: Snapshot, given: Order) -> tuple[bool, list[str] | None]:
    """Follow a tear-down of which the journal may not tell: whether the run's end is written, and what is listed then.

    None: the provider gave no answer.
    """
    journal = Journal(run_dir / processes.JOURNAL, readonly=True)
    proof = DeletionProof(run_dir, s)
    try:
        while True:
            if any(True for _ in journal.since(s.seq, 1, (ev.RunEnded.kind,))):
                return True, []
            over = not processes.conducted(run_dir) and (given.child is None or given.child.poll() is not None)
            if proof.look(now=over) or over:
                return False, proof.left
            time.sleep(POLL_S)
    finally:
        journal.close()


def _settled(run_dir: Path, name: str) -> pulse.Vital:
    """How that process is; one that has just been stopped is given the moment after which it counts as frozen."""
    end = time.monotonic() + pulse.STOPPED_S + 1.0
    while (found := processes.vital(run_dir, name)).moving and found.stopped and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _noted(run_dir: Path) -> int:
    """The order's place in the journal; 0 where that takes nothing now."""
    try:
        journal = Journal(run_dir / processes.JOURNAL, source="cli", busy_s=BUSY_S)
        try:
            return journal.append(ev.Intent(action="teardown", by="cli"))
        finally:
            journal.close()
    except UvccError as e:
        common.say(f"uvcc: the order cannot be written down: {e.what}")
        return 0


class DeletionProof:
    """What the provider says of a run's pods, asked now and then: for when the journal cannot tell."""

    def __init__(self, run_dir: Path, s: Snapshot) -> None:
        self._run_dir = run_dir
        self._fleet: dict[str, Any] = dict(s.profile.get("fleet", {}))
        self._prefix = pod_prefix(s.run, parse(dict(s.profile)))
        self._due = 0.0
        self.left: list[str] | None = None

    def look(self, *, now: bool = False) -> bool:
        """Whether the provider lists none of them any more."""
        if now or time.monotonic() >= self._due:
            try:
                self.left = asyncio.run(self._listed())
            except UvccError:
                self.left = None
            self._due = time.monotonic() + EACH_S
        return self.left == []

    async def _listed(self) -> list[str]:
        from uvcc_console.fleet.provider_kinds import provider_for

        provider = provider_for(self._fleet, self._run_dir)
        try:
            return [pod.name for pod in await provider.list(self._prefix)]
        finally:
            await provider.close()
