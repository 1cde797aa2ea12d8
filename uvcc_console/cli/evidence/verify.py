"""``uvcc verify PATH``: check a run, its artifacts or a proof bundle; ``--help`` lists the exit codes."""

from __future__ import annotations

import os
from pathlib import Path

from uvcc_console.cli import common


def run(argv: list[str]) -> int:
    from uvcc_console.report.verify import run_verify
    from uvcc_engine.transcript.proof.cli import parser

    parser("uvcc verify", common.VerbParser).parse_args(argv)
    return run_verify(argv, path_of)


def path_of(word: str) -> Path:
    """A path, or the folder of the run that is called so."""
    path = Path(word)
    if os.path.lexists(path) or not common.run_dirs():
        return path
    known = {d.name for d in common.run_dirs()}
    if word in ("last", "current") or any(name.startswith(word) for name in known):
        return common.find_run(word)
    return path
