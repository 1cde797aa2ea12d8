"""A disk that takes nothing more, at the verbs that begin a run: one error, exit code 1, nothing is left behind."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ui"))
from ui_journals import RUN, Story

from uvcc_console.cli.follow import headless
from uvcc_console.cli.machine import doctor
from uvcc_console.cli.main import main
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UnreadableError, UvccError

MINE = "job: {kind: command, argv: ['true'], steps: 3}\nfleet: {provider: local}\nsmoke: {steps: 3}\n"
FULL = sqlite3.OperationalError("database or disk is full")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "watched").mkdir()
    return str(tmp_path / "mine.yaml")


def refusing(error: UvccError, cause: Exception) -> Any:
    def refuse(*_: object, **__: object) -> int:
        raise error from cause

    return refuse


@pytest.mark.parametrize("when", ["opened", "written"])
@pytest.mark.parametrize("verb", ["rollout", "adopt"])
def test_a_run_that_cannot_be_written_down_is_one_error_and_leaves_no_folder(
    mine: str, verb: str, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder stayed, and the code was that of a journal that cannot be read."""
    if when == "opened":
        monkeypatch.setattr(Journal, "__init__", refusing(UnreadableError("journal x: full", "is it?"), FULL))
    else:
        monkeypatch.setattr(Journal, "append", refusing(UvccError("cannot write the journal"), FULL))
    what = mine if verb == "rollout" else str(Path(mine).with_name("watched"))
    assert main([verb, what, *(["--headless", "--yes"] if verb == "rollout" else [])]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: cannot write the new run {paths.runs_dir()}")
    assert said.endswith("database or disk is full (free disk space, or set UVCC_HOME to a writable folder)")
    assert not list(paths.runs_dir().iterdir())


def test_what_is_refused_before_the_disk_is_asked_keeps_its_reason(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "append", refusing(UvccError("another thing"), ValueError("x")))
    with pytest.raises(UvccError, match="another thing"):
        processes.create_run(mine)
    assert not list(paths.runs_dir().iterdir())


def test_the_doctor_leaves_nothing_on_a_full_disk(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(path: Path, text: str) -> int:
        path.touch()  # the name fits in still
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_text)
    assert doctor.data_folder().level == "error"
    assert not list(paths.data_dir().iterdir())


def test_a_run_whose_end_a_full_disk_did_not_take_has_not_lost_its_conductor(
    mine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had torn all down and left; who followed was told that it had died, and to resume what is gone."""
    run_dir = paths.run_dir(RUN)
    Story().full(3).write(run_dir)
    monkeypatch.setattr(headless, "full_disk", lambda folder: f"the disk of {folder} is full (0.0 MiB free)")
    monkeypatch.setattr(processes, "STARTING_S", 0.0)
    watched = headless.follow(run_dir, None, [], progress=False)
    assert watched.orphaned
    assert headless.report(watched, run_dir, as_json=False) == 1
    said = capsys.readouterr().err
    assert f"the conductor of {RUN} has ended, and the disk of {run_dir} is full" in said
    assert f"make room there, then end it with: uvcc teardown {RUN}" in said
    assert "resume" not in said
