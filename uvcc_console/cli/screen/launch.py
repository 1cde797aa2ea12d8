"""Starting a rollout from the command line, with the TUI or without. Shared by ``demo`` and ``rollout``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, INTERRUPTED
from uvcc_console.runs import processes

if TYPE_CHECKING:
    from uvcc_console.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class SeatAtTable:
    """One domain's part of a run: what it does of the plan, and how its seat is written into the run's folder."""

    part: Callable[[Plan], Plan]
    take: Callable[[Path], None]


def has_terminal() -> bool:
    """Whether a full-screen console can be shown here."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def launch(
    profile: str,
    settings: Sequence[str],
    *,
    name: str = "",
    seed: int | None = None,
    tui: bool,
    as_json: bool = False,
    quiet: bool = False,
    proposal: bytes = b"",
    seat: SeatAtTable | None = None,
) -> int:
    """Create the run, start its conductor and show it. Returns the exit code.

    ``proposal``: what three domains approved, to which the run is held; ``seat``: as one of these domains, which drives
    its own pods only.
    """
    from uvcc_console.cli.follow import headless

    with headless.interruptible() as received:
        part = seat.part if seat is not None else None
        patient = tui and seat is None
        run_dir = processes.create_run(
            profile, settings, seed=seed, name=name, patient=patient, tell=common.say, part=part
        )
        if proposal:
            from uvcc_engine.contract.run_files.files import write_atomic
            from uvcc_engine.transcript.signed.proposals import FILE

            write_atomic(run_dir / FILE, proposal)
        if seat is not None:
            seat.take(run_dir)
        if received:
            processes.end_run(run_dir, "torn_down", "interrupted before anything was started")
            return INTERRUPTED
        child = processes.start(run_dir, processes.CONDUCTOR)
        if not tui:
            if not quiet:
                common.say(f"run {run_dir.name}")
            watched = headless.follow(run_dir, child, received, progress=not quiet)
            return headless.report(watched, run_dir, as_json=as_json)
        if received:
            watched = headless.follow(run_dir, child, received)
            return headless.report(watched, run_dir, as_json=as_json)
    return show(run_dir)


def show(run_dir: Path, *, readonly: bool = False, replay: bool = False) -> int:
    """The TUI on a run; afterwards what came of it, where it has ended."""
    from uvcc_console.ui.app import run_app  # and what reports its end is loaded when it has ended

    code = run_app(run_dir, readonly=readonly, replay=replay)
    s = common.load_snapshot(run_dir)
    if replay:
        return int(code or 0)
    if not s.ended:
        return int(code or 0)  # the console itself has said how to come back
    from uvcc_console.cli.follow import headless

    watched = headless.Watched(s, headless.ProgressLine())
    return headless.report(watched, run_dir, as_json=False) if not code else FAILED
