"""The run's own processes as the console sees them: whether they move, and starting them when a wish needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from uvcc_console.core.paths import DOMAIN
from uvcc_console.runs.disk_space import full_disk
from uvcc_console.ui.judging.lamps import DEAD, FROZEN, STARTING, Lamp
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import control

CONDUCTOR, HALTD = "conductor", "haltd"
ADOPTS = ("resume", "teardown")


class Processes(Protocol):
    """What the console needs to know of conductor and halt sidecar."""

    def alive(self, name: str) -> bool:
        """Whether exactly that process lives."""

    def lamp(self, name: str) -> Lamp:
        """Whether it moves, starts (it has left no record yet), is frozen, or is dead."""

    def start(self, name: str, *args: str) -> None:
        """Start it detached. Raises UvccError."""


class RunProcesses:
    """The processes of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def _name(self, name: str) -> str:
        """In a domain's console another console conducts the run: here its sidecar counts."""
        return HALTD if name == CONDUCTOR and (self._run_dir / DOMAIN).exists() else name

    def alive(self, name: str) -> bool:
        from uvcc_console.runs import processes

        return bool(processes.running(self._run_dir, self._name(name)))

    def lamp(self, name: str) -> Lamp:
        from uvcc_console.runs import processes

        name = self._name(name)
        found = processes.vital(self._run_dir, name)
        if found.moving:
            return Lamp(words=full_disk(self._run_dir))
        if found.who is not None:
            return Lamp(FROZEN, found.words())
        return Lamp(DEAD if (self._run_dir / f"{name}.json").exists() else STARTING)

    def start(self, name: str, *args: str) -> None:
        from uvcc_console.runs import processes

        processes.start(self._run_dir, name, *args)


def see_to(processes: Processes, action: str, seq: int) -> str:
    """See that somebody acts on what was asked for at journal sequence ``seq``; a word if one had to be started.

    A halt wants the sidecar, which takes up what is unfinished; resume and teardown want a conductor, old or new.
    """
    if action in control.MODES:
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
