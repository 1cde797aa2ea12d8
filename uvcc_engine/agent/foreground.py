"""``uvcc-engine worker SPEC.json``: one worker in the foreground, without an agent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from uvcc_engine.agent.processes.child import run
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker that a JSON file describes; its exit code. Raises UnreadableError, ConfigError."""
    parser = RaisingParser(prog="uvcc-engine worker", description="run one worker in the foreground")
    parser.add_argument("spec", type=Path, help="JSON of a WorkerSpec; an empty dir means runs/RUN beside the file")
    path: Path = parser.parse_args(argv).spec
    spec = WorkerSpec.from_json(files.read_json(path))
    directory = path.absolute().parent / (spec.dir or f"runs/{spec.run}")
    return run(replace(spec, dir=os.fspath(directory)))
