"""Which run is the last: a clock that is set back between two starts does not make the older one the newer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uvcc_console.cli import common
from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.runs import order
from uvcc_console.runs.keeping import archive, delete, unpack
from uvcc_console.runs.processes import new_folder
from uvcc_console.ui.feed.home_model import find_runs


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))


def start(name: str, ts: float) -> Path:
    """A run of this name that was made when the wall clock said ``ts``, and has ended."""
    with new_folder(name) as folder:
        journal = Journal(folder / paths.JOURNAL, source="test")
        shape = {"job_kind": "private", "replicas": 1, "pipeline_stages": 1, "tensor": 1}
        made = ev.RunCreated(ts=ts, run=folder.name, profile_name=name, stages=["full"], **shape)  # type: ignore[arg-type]
        journal.append(made, ev.RunEnded(ts=ts + 1, status="ok"))
        journal.close()
        return folder


def test_the_last_run_is_the_one_that_was_started_last_whatever_the_clock_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, third = start("a", 9000.0), start("b", 5000.0), start("c", 7000.0)
    assert common.find_run("last") == third
    assert common.run_dirs() == [first, second, third]
    assert [r.run_dir for r in find_runs({})] == [third, second, first]
    assert main(["runs", "--json"]) == 0
    assert [r["run"] for r in json.loads(capsys.readouterr().out)] == [first.name, second.name, third.name]


def test_a_run_keeps_its_number_while_it_is_packed_away_and_no_number_is_given_twice() -> None:
    first, second = start("a", 9000.0), start("b", 8000.0)
    archive(first)
    delete(second)
    third = start("c", 7000.0)
    assert order.number_of(third) == 3
    unpack(first.name)
    assert common.find_run("last") == third


def test_runs_without_a_number_go_by_time_and_come_before_all_others() -> None:
    older, newer = start("a", 5000.0), start("b", 9000.0)
    for folder in (older, newer):
        (folder / order.NUMBER).unlink()
    (newer / order.NUMBER).write_bytes(b"9" * 4000)  # or with one that is none
    assert common.run_dirs() == [older, newer]
    assert common.find_run("last") == newer
    numbered = start("c", 1000.0)
    assert common.find_run("last") == numbered


def test_a_home_that_refuses_numbers_stops_no_start(tmp_path: Path) -> None:
    start("a", 5000.0)
    (tmp_path / order.NUMBER).unlink()
    (tmp_path / order.NUMBER).mkdir()  # also root can write no file there
    newer = start("b", 9000.0)
    assert common.find_run("last") == newer
