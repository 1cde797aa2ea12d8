"""What a worker that has ended left behind of why: its exit record, else the last line that its program wrote."""

from __future__ import annotations

import re
from typing import Final

from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.run_files.files import log_name
from uvcc_engine.contract.text import clean

MOST = 200
_ROUTINE: Final = re.compile(r"[\d:,.T -]+ (?:INFO|DEBUG) ")  # how such a line of a worker's own log begins


def last_words(s: Snapshot, coord: str) -> tuple[str, str] | None:
    """What a worker's exit record said of its end, and what to do about it, if it could still write one."""
    worker = s.workers.get(coord)
    return (worker.error, worker.hint) if worker is not None and worker.error else None


def last_line(s: Snapshot, coord: str) -> str:
    """The newest line of a worker's own log that may be a reason; "" where none is known. A program that never began
    says why only there; what a worker noted as a matter of routine, minutes before it was killed, explains nothing."""
    name = f"/{log_name(coord)}"
    lines = (e.text for e in reversed(s.log) if e.source.endswith(name) and e.text.strip())
    return clean(next((line for line in lines if not _ROUTINE.match(line)), ""), MOST)
