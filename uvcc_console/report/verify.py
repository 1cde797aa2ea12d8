"""``uvcc verify``: the transcript verifier; inside a run's folder, identities are pinned from the run's journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uvcc_console.report.record import JOURNAL, RunRecord
from uvcc_engine.transcript import cli


def pins_of(path: Path) -> dict[str, str] | None:
    """Identities that the pods of the run around ``path`` showed when they were bootstrapped; None outside a run."""
    for folder in (path, *path.resolve().parents):
        if (folder / JOURNAL).is_file():
            return RunRecord.load(folder).pins() or None
    return None


def run_verify(argv: Sequence[str]) -> int:
    """The verb: ``PATH [--allowed-signers F] [--policy F] [--transcripts DIR] [--against BUNDLE] [--json]``.

    Exit code 0 if all holds, 1 if something does not (named on stderr), 2 if it could not be read.
    """
    return cli.main(argv, pins=pins_of, prog="uvcc verify")
