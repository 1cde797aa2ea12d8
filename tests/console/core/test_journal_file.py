"""A run in a folder that nobody may write, an archive or somebody else's, is read like any other."""

from __future__ import annotations

import shutil
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from uvcc_console.cli import common
from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.paths import JOURNAL
from uvcc_console.report import verify
from uvcc_engine.contract.errors import UnreadableError


def story(folder: Path, ts: float = 1000.0) -> Journal:
    """A run's journal, still open."""
    journal = Journal(paths.ensure(folder) / JOURNAL, source="test", clock=lambda: ts)
    made = ev.RunCreated(
        run=folder.name, profile_name="x", job_kind="command", replicas=1, pipeline_stages=1, tensor=1, stages=[]
    )
    journal.append(made, ev.RunEnded(status="ok", detail=""))
    return journal


def barred(folder: Path) -> Path:
    """SQLite cannot put its file beside the journal: as in a folder that is not writable, but for root as well."""
    (folder / f"{JOURNAL}-wal").mkdir()
    return folder


def test_a_journal_in_a_folder_that_is_not_writable_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    run = paths.run_dir("run-1")
    story(run).close()
    barred(run)
    journal = Journal(run / JOURNAL, readonly=True)
    assert read_all(journal).ended
    journal.close()
    assert verify.pins_of(run) is None
    assert main(["status", "run-1"]) == 0
    assert main(["runs"]) == 0
    said = capsys.readouterr()
    assert "unreadable" not in said.out + said.err


def test_runs_there_stand_in_the_order_of_their_making() -> None:
    for name, ts in (("b", 1000.0), ("a", 2000.0)):
        story(paths.run_dir(name), ts).close()
        barred(paths.run_dir(name))
    assert [p.name for p in common.run_dirs()] == ["b", "a"]


def test_rows_that_nobody_may_look_for_are_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written last lies in another file until the last process closes the journal: without it an older state
    would be told as the newest."""
    live = story(tmp_path / "live")
    shutil.copytree(tmp_path / "live", tmp_path / "copied", ignore=shutil.ignore_patterns("*-shm"))
    live.close()
    asked: list[str] = []

    class Refused(sqlite3.Connection):
        """As SQLite does where the folder is not writable."""

        def execute(self, statement: str, *_: object) -> sqlite3.Cursor:  # type: ignore[override]
            if "busy_timeout" in statement:
                return super().execute(statement)
            asked.append(statement)
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY
            raise error

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Refused))
    reader = Journal(tmp_path / "copied" / JOURNAL, readonly=True)
    with pytest.raises(UnreadableError, match="copy the run's folder"):
        reader.last_seq()
    reader.close()
    assert asked[0] == "PRAGMA schema_version"


def test_a_damaged_journal_is_told_as_before(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"no journal at all" * 300)
    reader = Journal(tmp_path / JOURNAL, readonly=True)
    with pytest.raises(UnreadableError, match="the file is no journal, or it is damaged"):
        reader.newest()
    reader.close()
