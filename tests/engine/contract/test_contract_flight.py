"""A worker tells what its collectives are at: once per question, whatever its main thread does."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from uvcc_engine.contract.run_files import flight
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.contract.run_files.writer import RunWriter, Ticker


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "registered", {})


def test_each_question_of_this_run_is_answered_once(tmp_path: Path) -> None:
    flight.ask(tmp_path, "r", "before-this-worker")
    recorder = flight.FlightRecorder(tmp_path, "r", "p0r0s0t0", clock=lambda: 7.0)
    flight.provide("sequence", lambda: [{"seq": 3}])
    assert not recorder.look(None)
    flight.ask(tmp_path, "another", "n")
    assert not recorder.look(None)
    flight.ask(tmp_path, "r", "n")
    assert recorder.look(Waiting("p2", 4.0))
    assert not recorder.look(None)
    assert json.loads((tmp_path / flight.name_of("p0r0s0t0")).read_text()) == {
        "run": "r", "coord": "p0r0s0t0", "nonce": "n", "ts": 7.0, "waiting_on": "p2", "waiting_s": 4.0,
        "tables": {"sequence": [{"seq": 3}]},
    }  # fmt: skip


def test_a_table_that_cannot_be_read_and_a_damaged_question_harm_nothing(tmp_path: Path) -> None:
    def changes() -> object:
        raise RuntimeError("deque mutated during iteration")

    recorder = flight.FlightRecorder(tmp_path, "r", "p0r0s0t0")
    flight.provide("bad", changes)
    flight.provide("good", lambda: {"n": 1})
    (tmp_path / flight.REQUEST).write_text("[1, 2")
    assert not recorder.look(None)
    (tmp_path / flight.REQUEST).write_text("[1, 2]")
    assert not recorder.look(None)
    flight.ask(tmp_path, "r", "n")
    assert recorder.look(None)
    found = json.loads((tmp_path / flight.name_of("p0r0s0t0")).read_text())["tables"]
    assert found == {"bad": {"error": "RuntimeError: deque mutated during iteration"}, "good": {"n": 1}}


def test_the_heartbeats_thread_answers_while_the_main_thread_waits(tmp_path: Path) -> None:
    answered = threading.Event()
    flight.provide("sequence", lambda: answered.set() or [])
    with RunWriter.open(tmp_path, "r", 0, "p0r0s0t0") as writer, Ticker(writer, lambda: Waiting("p1"), period_s=0.01):
        flight.ask(tmp_path, "r", "n")
        assert answered.wait(120), "the ticker did not look"
    assert json.loads((tmp_path / flight.name_of("p0r0s0t0")).read_text())["waiting_on"] == "p1"
