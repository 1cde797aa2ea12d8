"""Journals that hold what no writer of today would write: every reader opens them, counts the rows and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ui_journals import Story

from uvcc_console.cli.main import main
from uvcc_console.core import alerts
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.journal.journal import Journal, iter_events, read_all
from uvcc_console.haltd.journal_view import JournalView
from uvcc_console.plan import forecast
from uvcc_console.report.record import RunRecord
from uvcc_console.ui.feed.source import JournalSource, ReplaySource

RUN = "demo-20261121-0115-ab12"
POD, COORD = "p1r0", "p1r0s0t0"
DEEP = "[" * 100_000
ROWS: list[tuple[str, Any]] = [
    ("heartbeat", {"pod": POD, "coord": COORD, "record": {"step": None}}),
    ("heartbeat", {"pod": POD, "coord": COORD, "record": {"step": "12/100"}}),
    ("heartbeat", {"pod": POD, "coord": COORD, "record": {"step": True}}),
    ("heartbeat", {"pod": POD, "coord": COORD, "record": {"step": 1e400}}),
    ("heartbeat", {"pod": POD, "coord": COORD, "record": ["step", 1]}),
    ("heartbeat", {"pod": [POD], "coord": COORD, "record": {}}),
    ("heartbeat", {"coord": COORD, "record": {"step": 1}}),
    ("engine", {"pod": POD, "level": "info", "event": "waiting", "fields": ["a"]}),
    ("engine", {"pod": POD, "level": "info", "event": "checkpoint_written", "fields": {"step": "x"}}),
    ("engine", {"pod": POD, "level": "info", "event": "x", "fields": {}, "at": "then"}),
    ("metric", {"coord": COORD, "step": 3.5, "values": {}}),
    ("metric", {"coord": COORD, "step": 3, "values": {"loss": "low"}}),
    ("metric", {"coord": COORD, "step": 10**30, "values": {"loss": 1.0}}),
    ("root", {"coord": COORD, "epoch": 1}),
    ("root", {"coord": COORD, "epoch": 1, "root": "ab", "pairs": ["p0r0s0t0"]}),
    ("lines", {"pod": POD, "src": "a.log", "lines": "not a list"}),
    ("lines", {"pod": POD, "src": "a.log", "lines": [1, None]}),
    ("worker", {"pod": POD, "coord": COORD, "state": "exited", "pid": "7"}),
    ("telemetry", {"pod": POD, "gpus": ["junk"]}),
    ("telemetry", {"pod": POD, "disk_free_mib": True}),
    ("cursor", {"pod": POD, "cursors": {"r/a": ["x", "y"]}}),
    ("result", {"coord": COORD, "phase": "full", "result_hash": 7, "values": {}}),
    ("alert", {"level": "warn", "name": None, "text": "x"}),
    ("cost", {"hourly": "much", "spent": 1}),
    ("stage", "full"),
    ("gate", None),
    ("pod", 7),
]
RAW = ["{half", "", DEEP, '{"pod": "' + "9" * 5000, "9" * 5000, b"\xff\xfe\x00", None, 7, '"text"']
# what passes for a record, and is odd only inside: nothing of it may stop a detector, a report or a screen
INSIDE: list[dict[str, Any]] = [
    {"step": 5, "phase": "train", "ts": "x", "mem_mib": 10**400, "sent_bytes": True, "loss": float("nan")},
    {"step": 6, "phase": ["train"], "rank": "first", "last_collective": {"seq": None, "group": [1]}, "waiting_on": 3},
    {"step": 7, "phase": "train", "last_collective": "x #99999999999999999999999999", "collective_seq": [2]},
    {"step": 8, "phase": "train", "last_collective": ["a"], "gate_entropy_mean": False, "dt_fetch_s": float("inf")},
]
FIELDS: list[dict[str, Any]] = [
    {
        "step": 4,
        "sha256": ["x"],
        "retransmits": True,
        "count": -3,
        "peer": {"a": 1},
        "coord": ["p0"],
        "since_s": "long",
    },
    {"group": 7, "seconds": "x", "t_s": float("nan"), "coord": "p0r0s99999999999999t1", "kind": [1], "count": 1e9},
    {"step": 4.0, "microbatch": 0, "start": float("nan"), "end": 1, "coord": {}, "phase": 3},
]
EVENTS = (
    *("waiting", "checkpoint_written", "checkpoint_committed", "resumed", "group_ready", "dp_ready", "pipeline_tick"),
    *("run_facts", "protocol_error", "link_up", "relay_started", "dp_master_port_selected", "exit", "succession"),
)


@pytest.fixture(autouse=True)
def _as_an_operator_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_STRICT", "")


@pytest.fixture
def run_dir() -> Path:
    folder = Story(steps=30).full(20).write(Path(os.environ["UVCC_HOME"]) / "runs" / RUN)
    db = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    put = "INSERT INTO events(ts, source, kind, data) VALUES (?,?,?,?)"
    last = db.execute("SELECT MAX(ts) FROM events").fetchone()[0]
    for kind, data in ROWS:
        db.execute(put, (last, "x", kind, json.dumps(data)))
    for raw in RAW:
        db.execute(put, (last, "x", "heartbeat", raw if raw is not None else "null"))
    db.execute(put, ("when", "x", "heartbeat", "{}"))
    db.execute(put, (1e300, "x", "alert", json.dumps({"level": "info", "name": "n", "text": "late"})))
    db.execute(put, (last, "x", b"\xff\xfe", "{}"))
    for record in INSIDE:
        row = {"pod": POD, "coord": COORD, "record": record}
        db.execute(put, (last, "x", "heartbeat", json.dumps(row)))
    for event in EVENTS:
        for fields in FIELDS:
            row = {"pod": POD, "level": "info", "event": event, "fields": fields}
            db.execute(put, (last, "x", "engine", json.dumps(row)))
    row = {"pod": POD, "coord": "p0r99999999999s99999999t99999999", "state": "exited", "rc": 1}
    db.execute(put, (last, "x", "worker", json.dumps(row)))
    db.execute(put, (last + 1, "x", "stage", json.dumps({"name": "full", "status": "running", "detail": "goes on"})))
    db.close()
    return folder


def counted(folder: Path) -> dict[str, int]:
    journal = Journal(folder / "journal.sqlite", readonly=True)
    try:
        return dict(read_all(journal).malformed)
    finally:
        journal.close()


def test_every_odd_row_is_counted_by_pod_and_what_follows_is_read(run_dir: Path) -> None:
    journal = Journal(run_dir / "journal.sqlite", readonly=True)
    s = read_all(journal)
    journal.close()
    inside = 3 + len(RAW) + 2  # steps that are none, and rows whose time or content is none
    assert sum(s.malformed.values()) >= len(ROWS) + len(RAW) + 2
    assert s.malformed[POD] >= 12
    assert s.malformed["journal"] >= inside
    assert s.stage is not None
    assert s.stage.detail == "goes on"  # the very last row
    assert s.workers[COORD].step == 8
    told = [line.text for line in s.log if "malformed line" in line.text]
    assert len(told) == len(set(told)) < 40  # one a kind, however many there are


def test_every_fold_over_events_reads_it(run_dir: Path) -> None:
    path = run_dir / "journal.sqlite"
    events = [e for _, e in iter_events(path)]
    snapshot = fold(events)
    assert sum(isinstance(e, ev.LinesMalformed) for e in events) >= len(ROWS)
    found = alerts.detect(snapshot, snapshot.updated + 1.0)
    assert not [f for f in found if f.name == "detector_failed"]
    forecast.predict(snapshot, 100)
    forecast.moved(snapshot)
    journal = Journal(path, readonly=True)
    view = JournalView(journal)
    while view.poll():
        pass
    assert view.targets()
    journal.close()
    live, replay = JournalSource(path, budget_s=60.0), ReplaySource(path, budget_s=60.0)
    assert live.poll()
    replay.seek(replay.end)
    replay.poll()
    assert live.snapshot.malformed == replay.snapshot.malformed == snapshot.malformed
    live.close()


@pytest.mark.ci("tests/console/report/test_figures.py")
def test_reports_are_written_from_it(run_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    from uvcc_console.report import metrics
    from uvcc_console.report.artifacts import layout, write_artifacts
    from uvcc_console.report.figures import drawings, write_figures
    from uvcc_console.report.handoff import write_handoff
    from uvcc_console.report.run_log import Translator, human, machine

    record = RunRecord.load(run_dir)
    assert dict(metrics.table(record))
    metrics.schedule(record)
    metrics.dp_map(record)
    assert drawings(record)
    assert layout(record)
    lines = list(Translator(run_dir).translate(record.events))
    assert human(lines)
    assert machine(lines)
    assert write_artifacts(run_dir)
    assert write_handoff(run_dir).exists()
    assert write_figures(run_dir).written


@pytest.mark.parametrize(
    "argv",
    [["runs"], ["runs", "--json"], ["status", RUN], ["status", RUN, "--json"], ["watch", RUN, "--no-follow"]],
    ids=" ".join,
)
def test_the_reading_verbs_go_on(run_dir: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if argv[0] == "status":
        n = counted(run_dir)[POD]
        assert f"{POD}: malformed lines: {n}" in said.out if argv[-1] == RUN else f'"{POD}": {n}' in said.out


def test_a_page_of_rows_that_are_no_events_is_not_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db, db:
        for _ in range(25):
            db.execute("INSERT INTO events(ts, source, kind, data) VALUES (1, 'x', 'from_the_future', '{}')")
    journal.append(ev.RunEnded(status="ok"))
    assert [e.kind for _, e in journal.since(0, limit=10)] == ["run_ended"]
    journal.close()


def test_an_error_of_the_program_itself_is_not_hidden_from_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ev.RunEnded(status="ok")
    object.__setattr__(odd, "leaks", 7)
    assert fold([odd]).malformed == {"journal": 1}
    monkeypatch.setenv("UVCC_STRICT", "1")
    with pytest.raises(TypeError):
        reduce(fold([]), odd)


def test_every_event_of_today_passes_its_own_check() -> None:
    for event in [*Story(steps=30).finished().events, *Story(replicas=2, price=1.0).full(3).hanging(3).events]:
        assert ev.from_json(event.kind, event.ts, json.loads(json.dumps(ev.to_json(event)))) == event
