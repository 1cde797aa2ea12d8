"""The little that a halt needs to know of a run, read in milliseconds however long the journal is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import Snapshot

ASKED: Final = tuple(
    e.kind
    for e in (
        ev.RunCreated,
        ev.PodChanged,
        ev.PhaseStarted,
        ev.HaltRequested,
        ev.HaltDone,
        ev.Followed,
        ev.RunEnded,
    )
)
KINDS: Final = tuple(
    e.kind
    for e in (
        ev.RunCreated,
        ev.PodChanged,
        ev.PhaseStarted,
        ev.WorkerProcess,
        ev.HaltRequested,
        ev.HaltAck,
        ev.HaltDone,
        ev.Consent,
        ev.CostTick,
        ev.RunEnded,
    )
)
_PAGE: Final = 10_000


def halt_snapshot(run_dir: Path) -> Snapshot:
    """A run's pods, its last halt and whether it has ended: what an order needs before it leaves.

    A day has thousands of ticks of the meter and signs of workers; none of them is read. Raises UnreadableError without
    a journal.
    """
    journal = Journal(run_dir / JOURNAL, readonly=True)
    try:
        s = Snapshot()
        while True:
            count = 0
            for seq, event in journal.since(s.seq, _PAGE, kinds=ASKED):
                s = reduce(s, event, seq)
                count += 1
            if count < _PAGE:
                return s
    finally:
        journal.close()
