"""Processes of this product that nobody needs any more: their parent or their run's folder is gone.

Nothing here ends a process by its name: a stray is known by pid and start time, and it is one only for a stated reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from uvcc_console.core import paths
from uvcc_console.fleet import procs
from uvcc_console.fleet.procs import LocalProcess

YOUNG_S: Final = 60.0  # whoever has just been started may still be writing down what it is
_RUNS: Final = {"uvcc_console.haltd": "halt sidecar", "uvcc_console.rollout.conductor": "conductor"}
_POD: Final = "uvcc_console.fleet.local.localpod"
_BENCH: Final = "uvcc_console.bench."


@dataclass(frozen=True, slots=True)
class Stray:
    """One process, what it is, and why nobody needs it."""

    process: LocalProcess
    what: str
    why: str


def find(*, young_s: float = YOUNG_S) -> list[Stray]:
    """Strays of this user, oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            module, args = _module(process.cmdline())
            if not module or (who := procs.identify(process.pid)) is None or procs.age_s(who) < young_s:
                continue
            if verdict := _verdict(process, module, args):
                found.append(Stray(who, *verdict))
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or not ours to look at
    return sorted(found, key=lambda s: s.process.starttime)


def end(strays: list[Stray]) -> list[Stray]:
    """End exactly these processes; returns those that would not end."""
    wanted = {s.process.pid: s.process for s in strays}
    left = procs.stop_all(lambda: {pid for pid, who in wanted.items() if procs.alive(who)})
    return [s for s in strays if s.process.pid in left]


def _verdict(process: psutil.Process, module: str, args: list[str]) -> tuple[str, str] | None:
    if module in _RUNS and args:
        runs = _runs_dir(process)
        if runs is not None and not (runs / args[0]).is_dir():
            return f"{_RUNS[module]} of {args[0]}", "its run's folder is gone"
    elif module == _POD and "--home" in args[:-1]:
        home = Path(args[args.index("--home") + 1])
        if not home.is_dir():
            return f"local pod {home.name}", "its home is gone"
    elif module.startswith(_BENCH) and process.ppid() == 1:
        return f"benchmark process {module.removeprefix(_BENCH)}", "the benchmark that started it is gone"
    return None


def _module(words: list[str]) -> tuple[str, list[str]]:
    """(module, arguments) of a ``python -m MODULE ARGS``; ("", []) for anything else."""
    if len(words) > 2 and words[1] == "-m" and words[2].startswith("uvcc_console."):
        return words[2], words[3:]
    return "", []


def _runs_dir(process: psutil.Process) -> Path | None:
    """Where that process looks for its run: below its own UVCC_HOME, not this process's, else in the usual data folder.
    None where that cannot be told from here: nobody is a stray by a guess."""
    theirs = process.environ()  # whoever may not read it learns nothing: see ``find``
    if home := theirs.get("UVCC_HOME", ""):
        return Path(home) / "runs" if Path(home).is_absolute() else None
    same = all(theirs.get(name) == os.environ.get(name) for name in ("HOME", "XDG_DATA_HOME"))
    return paths.usual_dir() / "runs" if same else None
