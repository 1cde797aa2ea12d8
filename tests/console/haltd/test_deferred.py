"""Events of a halt that the journal does not take at once: they are written before whoever halted is gone."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli.main import main
from uvcc_console.cli.steer import halt
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import procs
from uvcc_console.haltd.service import Service
from uvcc_console.runs import processes


class Commits(logging.Handler):
    """Somebody in the middle of a commit, who is through with it when the first complaint about that is logged."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.ERROR)
        self._db = sqlite3.connect(journal.path, isolation_level=None)
        self._db.execute("BEGIN IMMEDIATE")

    def emit(self, record: logging.LogRecord) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT")


def journalled(journal: Journal) -> list[str]:
    return [e.kind for _, e in journal.since(0, kinds=(ev.HaltRequested.kind, ev.HaltDone.kind))]


def story(name: str, state: str, *more: ev.Event) -> tuple[Path, Journal]:
    run_dir = paths.run_dir(name)
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(
        ev.PodChanged(pod="p0r0", party=0, replica=0, provider="x", state=state),
        ev.PhaseStarted(phase="full", engine_run=f"{name}.full", steps=9, sid_job=""),
        *more,
    )
    return run_dir, journal


async def test_a_verdict_is_written_though_somebody_was_in_the_middle_of_a_commit() -> None:
    run_dir, journal = story("busy", "gone")
    busy = Commits(journal)
    logging.getLogger().addHandler(busy)
    try:
        # where no pod is left nothing is waited for: the verdict comes with the order
        await Service(run_dir, request=ev.HaltRequested(nonce="n", mode="release", by="test")).run()
    finally:
        logging.getLogger().removeHandler(busy)
    assert journalled(journal) == [ev.HaltRequested.kind, ev.HaltDone.kind]
    journal.close()


def test_a_command_that_halts_by_itself_leaves_when_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar is frozen: what this process did is in nobody else's head."""
    run_dir, journal = story("alone", "gone", ev.HaltRequested(nonce="n", mode="hold", by="test"))
    db, report = sqlite3.connect(journal.path, isolation_level=None), halt.report
    db.execute("BEGIN IMMEDIATE")  # until the verdict is told

    def told(*words: Any) -> int:
        db.execute("COMMIT")
        return report(*words)

    monkeypatch.setattr(halt, "report", told)
    with subprocess.Popen(["sleep", "600"]) as frozen:
        os.kill(frozen.pid, signal.SIGSTOP)
        who = procs.identify(frozen.pid)
        assert who is not None
        (run_dir / "haltd.json").write_text(json.dumps({"pid": who.pid, "starttime": who.starttime}))
        try:
            assert main(["halt", "alone", "--release"]) == 0
            assert journalled(journal) == [ev.HaltRequested.kind, ev.HaltRequested.kind, ev.HaltDone.kind]
        finally:
            frozen.kill()
    journal.close()
