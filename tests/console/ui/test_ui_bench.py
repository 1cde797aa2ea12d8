"""The benchmark's own parts: what it feeds is what it says it feeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from uvcc_console.bench import console, feeder
from uvcc_console.bench.terminal import Terminal
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events, read_all


def test_the_feeder_writes_what_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.append(*feeder.opening(6))
    monkeypatch.setattr(sys, "argv", ["feeder", str(path), "6", "2000", "10", "0.4"])
    feeder.main()
    told = json.loads(capsys.readouterr().out)
    found = sum(len(e.lines) for _, e in iter_events(path) if isinstance(e, ev.LogLines))
    assert found == told["lines"] > 0
    s = read_all(journal)
    journal.close()
    assert len(s.workers) == 6
    assert s.agreed_epoch >= 1


def test_the_rows_carry_the_names_and_bars_that_are_asked_for() -> None:
    row = console.chart(1)
    assert (row.name, row.metric, row.reference) == ("chart_6x2000", "seconds", 0.010)
    assert row.ratio is not None


def test_the_terminal_shows_what_a_program_prints_and_passes_keys() -> None:
    program = "import sys; print('ready', flush=True); print('got', sys.stdin.readline().strip(), flush=True)"
    with Terminal([sys.executable, "-c", program]) as terminal:
        assert terminal.wait_for(b"ready") > 0
        terminal.press(b"hello\n")
        terminal.wait_for(b"got hello")
