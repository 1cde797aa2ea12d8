"""Two runs as they really were, private and a language model, cut off at the moments that an operator lives through.

Each was made with ``uvcc rollout``: halted in its full run, resumed, a worker killed with SIGKILL, resumed, ended. What
workers said is as the console journals it now: once, with the worker whose word it is.
``python tests/console/ui/recorded_runs.py FOLDER`` draws every moment at every size, for people to look at.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from ui_desk import OrderingApp, desk

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import Changes
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.report import recording
from uvcc_console.ui.actions.saved_screens import screen_text
from uvcc_console.ui.app import UvccApp
from uvcc_console.ui.judging.rechecks import Rechecks

FOLDER: Final = Path(__file__).parent / "recorded"
RUNS: Final = ("private", "lm")
SIZES: Final = ((60, 20), (80, 24), (120, 40), (160, 50), (200, 60))
PAGE: Final = 1000


def _training(phase: str, part: float) -> Callable[[Snapshot], bool]:
    """Whether workers train in this phase and are through this part of it."""

    def holds(s: Snapshot) -> bool:
        there = s.phase == phase and s.stage is not None and s.stage.name == phase and s.status == "running"
        return there and s.step >= max(1.0, part * s.steps_planned)

    return holds


def _stage(name: str, status: str) -> Callable[[Snapshot], bool]:
    return lambda s: s.stage is not None and (s.stage.name, s.stage.status) == (name, status)


def _all_held(s: Snapshot) -> bool:
    return bool(s.halt.acks) and all(ack[0] == "held" for ack in s.halt.acks.values())


MOMENTS: Final[dict[str, Callable[[Snapshot], bool]]] = {
    "planned": _stage("provision", "running"),
    "bootstrap": lambda s: any(p.state == "agent" for p in s.pods.values()),
    "preflight": _stage("preflight", "running"),
    "smoke": _training("smoke", 0.5),
    "verify": _stage("verify-smoke", "running"),
    "full": _training("full", 0.1),
    "held": lambda s: not s.halt.drill and s.halt.mode == "hold" and _all_held(s),
    "halted": lambda s: s.status == "halted" and _stage("full", "waiting")(s),
    "resumed": lambda s: s.attempt > 0 and _training("full", 0.3)(s),
    "failed": lambda s: s.status == "failed",
    "result": lambda s: bool(s.ended),
}
"""What is true when a moment has come; the first time counts."""


@dataclass(frozen=True)
class RecordedRun:
    """A run's events, and after how many of them each moment has come."""

    name: str
    events: tuple[ev.Event, ...]
    moments: dict[str, int] = field(default_factory=dict)


@cache
def recorded(name: str) -> RecordedRun:
    """A recording that lies beside this file, with its moments."""
    with recording.played(FOLDER / name) as run_dir:
        events = tuple(event for _, event in iter_events(run_dir / "journal.sqlite"))
    s, found = Snapshot(), {}
    for n, event in enumerate(events, 1):
        s = reduce(s, event, n)
        for moment, holds in MOMENTS.items():
            if moment not in found and holds(s):
                found[moment] = n
    return RecordedRun(name, events, found)


class CutOff:
    """A recorded run up to a moment, as ``desk`` takes a story."""

    def __init__(self, run: RecordedRun, moment: str) -> None:
        self.events = run.events[: run.moments[moment]]
        self.now = self.events[-1].ts
        self.run = next(e.run for e in self.events if isinstance(e, ev.RunCreated))

    def write(self, folder: Path) -> Path:
        """The journal of the run, as it was then."""
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(folder / "journal.sqlite", source="recorded")
        for at in range(0, len(self.events), PAGE):
            journal.append(*self.events[at : at + PAGE])
        journal.close()
        return folder


class _AsThen(Rechecks):
    """Nothing had changed when this was recorded; the evidence itself does not lie beside the recording."""

    def look(self, s: Snapshot, now: float) -> Changes:
        return {}


@asynccontextmanager
async def seen(
    name: str, moment: str, folder: Path, size: tuple[int, int] = (160, 50), **options: Any
) -> AsyncIterator[OrderingApp]:
    """The console on a recorded run at a moment of it."""
    cut = CutOff(recorded(name), moment)
    run_dir = folder / "runs" / cut.run

    def as_then(app: UvccApp) -> None:
        app.rechecks = _AsThen(run_dir)

    async with desk(cut, run_dir, size, 0.7, as_then, **options) as d:
        await d.settle()
        yield d


async def _drawn(out: Path) -> None:
    for name in RUNS:
        for moment in recorded(name).moments:
            for size in SIZES:
                with tempfile.TemporaryDirectory() as folder:
                    async with seen(name, moment, Path(folder), size) as d:
                        place = out / f"{name}-{moment}-{size[0]}x{size[1]}"
                        place.with_suffix(".svg").write_text(d.app.export_screenshot())
                        place.with_suffix(".txt").write_text(screen_text(d.app))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(_drawn(Path(sys.argv[1])))
