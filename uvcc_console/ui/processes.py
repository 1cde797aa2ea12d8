"""The run's own processes as the console sees them: whether they live, and starting them when a wish needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.errors import UvccError

CONDUCTOR, HALTD = "conductor", "haltd"
ADOPTS = ("resume", "teardown")
START_S = 5.0


class Processes(Protocol):
    """What the console needs to know of conductor and halt sidecar."""

    def alive(self, name: str) -> bool:
        """Whether exactly that process lives."""

    def start(self, name: str, *args: str) -> None:
        """Start it detached. Raises UvccError."""


class RunProcesses:
    """The processes of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def alive(self, name: str) -> bool:
        from uvcc_console.runs import processes

        if name == CONDUCTOR and (self._run_dir / "domain.json").exists():
            name = HALTD  # a domain's console: another console conducts the run
        return bool(processes.running(self._run_dir, name))

    def start(self, name: str, *args: str) -> None:
        from uvcc_console.runs import processes

        processes.start(self._run_dir, name, *args)


def conducted(processes: Processes, snap: Snapshot, now: float) -> bool:
    """Whether somebody conducts the run, or it has ended; a conductor that is just starting gets ``START_S``."""
    return bool(snap.ended) or now - snap.updated <= START_S or processes.alive(CONDUCTOR)


def see_to(processes: Processes, action: str, seq: int) -> str:
    """See that somebody acts on what was asked for at journal sequence ``seq``; a word if one had to be started.

    A halt wants the sidecar, which takes up what is unfinished; resume and teardown want a conductor, old or new.
    """
    if action in ("hold", "halt", "release"):
        if processes.alive(HALTD):
            return ""
        processes.start(HALTD)
        return "the halt sidecar was not running: started"
    if processes.alive(CONDUCTOR):
        return ""
    if action not in ADOPTS:
        raise UvccError("nobody conducts this run", "r takes it up first")
    processes.start(CONDUCTOR, "--adopt", action, "--since", str(seq))
    return "nobody conducted this run: a new conductor takes it up"
