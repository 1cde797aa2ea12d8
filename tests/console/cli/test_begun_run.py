"""A run whose console ended while it was being written down: it is none, and hides no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli import common
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.runs import processes

MINE = "job: {kind: command, argv: ['true'], steps: 3}\nfleet: {provider: local}\nsmoke: {steps: 3}\n"


def test_a_run_is_there_when_its_first_event_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that was closed in those milliseconds left a journal without a table: damaged, to whoever looked, and
    the last run of all, which could not be torn down."""
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    (tmp_path / "mine.yaml").write_text(MINE)
    made = processes.create_run(str(tmp_path / "mine.yaml"))
    assert common.find_run("last") == made
    assert common.load_snapshot(made).run == made.name
    assert [p.name for p in made.iterdir() if JOURNAL in p.name] == [JOURNAL]

    def ended(journal: Journal, *batch: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", ended)
    with pytest.raises(KeyboardInterrupt):
        processes.create_run(str(tmp_path / "mine.yaml"))
    assert common.run_dirs() == [made]
