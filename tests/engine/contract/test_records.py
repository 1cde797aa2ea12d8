"""Records of a run directory: whatever the text, reading answers; and what a worker writes is read back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_engine.contract.run_files import files, records
from uvcc_engine.contract.run_files.records import (
    EngineRecord,
    Exit,
    Facts,
    Heartbeat,
    Malformed,
    ReportedRoot,
    Result,
    parse,
)
from uvcc_engine.contract.run_files.writer import RunWriter

NAMES = (
    files.heartbeat_name(0),
    files.EVENTS,
    files.exit_name(1, lead=False),
    files.result_name(0),
    files.RUN_JSON,
    "training.csv",
    "heartbeat_rank0.jsonl/../x",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = ("step", "phase", "coord", "event", "fields", "ts", "level", "epoch", "root", "pairs", "values", "result_hash")
RECORDS = st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(["epoch_root", "p0r0s0t0", 3, "ab" * 32]))


@given(st.sampled_from(NAMES), st.text() | JSON.map(lambda v: json.dumps(v)) | RECORDS.map(lambda v: json.dumps(v)))
def test_reading_answers_for_every_text(src: str, text: str) -> None:
    found = parse(src, text)
    if isinstance(found, Heartbeat | EngineRecord):
        assert isinstance(found.fields.get("step", 0), int)
    if isinstance(found, Malformed):
        assert found.why.isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"step":' + "9" * 5000 + "}", "{" + '"a":{' * 60_000, ""])
@pytest.mark.parametrize("src", NAMES)
def test_what_is_too_deep_or_too_large_is_malformed(src: str, text: str) -> None:
    assert isinstance(parse(src, text), Malformed)


@pytest.mark.parametrize(
    ("src", "found"),
    [
        (files.heartbeat_name(0), {"step": "12/100", "phase": "train"}),
        (files.heartbeat_name(0), {"step": None}),
        (files.heartbeat_name(0), {"step": 1, "phase": 3}),
        (files.EVENTS, {"event": "x", "fields": ["a"]}),
        (files.EVENTS, {"event": "epoch_root", "fields": {"epoch": 1}}),
        (files.EVENTS, {"event": "x", "ts": "now"}),
        (files.exit_name(0), {"step": 1e300}),
        (files.result_name(0), {"result_hash": 3}),
        (files.result_name(0), {"values": [1]}),
        (files.RUN_JSON, {"coord": 3}),
        ("training.csv", {}),
    ],
)
def test_what_cannot_be_meant_is_malformed(src: str, found: dict[str, Any]) -> None:
    assert isinstance(parse(src, json.dumps(found)), Malformed)


def test_what_a_worker_writes_is_read_back(tmp_path: Path) -> None:
    now = [100.0]
    with RunWriter.open(tmp_path, "r", 0, "p1r0s0t0", clock=lambda: now[0]) as writer:
        writer.describe({"job": {"steps": 5}})
        writer.heartbeat(3, "train", "going on", halt_nonce="n", loss=0.5, dt_fetch_s=0.1)
        writer.event("epoch_root", epoch=2, root="ab" * 32, pairs={"0": "cd" * 32})
        writer.event("resumed", "warn", step=3)
        writer.result("ef" * 32, {"accuracy": 0.5})
        writer.exit("failed", step=3, error=ValueError("no"))
    lines = {p.name: p.read_text().splitlines() for p in tmp_path.iterdir()}
    beat = parse(files.heartbeat_name(0), lines[files.heartbeat_name(0)][0])
    assert isinstance(beat, Heartbeat)
    assert (beat.coord, beat.step, beat.phase) == ("p1r0s0t0", 3, "train")
    assert dict(beat.fields) == json.loads(lines[files.heartbeat_name(0)][0])
    root, event = (parse(files.EVENTS, line) for line in lines[files.EVENTS])
    assert root == ReportedRoot(epoch=2, root="ab" * 32, pairs={"0": "cd" * 32})
    assert event == EngineRecord(name="resumed", level="warn", by="p1r0s0t0", ts=100.0, fields={"step": 3})
    exited = parse(files.exit_name(0), lines[files.exit_name(0)][0])
    assert isinstance(exited, Exit)
    assert (exited.run, exited.coord, exited.status, exited.step) == ("r", "p1r0s0t0", "failed", 3)
    assert exited.error == "ValueError: no"
    result = parse(files.result_name(0), lines[files.result_name(0)][0])
    assert result == Result(run="r", coord="p1r0s0t0", result_hash="ef" * 32, values={"accuracy": 0.5})
    facts = parse(files.RUN_JSON, lines[files.RUN_JSON][0])
    assert isinstance(facts, Facts)
    assert facts.fields["job"] == {"steps": 5}


def test_no_record_is_read_without_a_bound() -> None:
    assert isinstance(
        parse(files.heartbeat_name(0), '{"step": 1, "x": "' + "y" * records.LONGEST_LINE + '"}'), Malformed
    )
    wide = parse(files.heartbeat_name(0), json.dumps({"step": 1, **{f"k{n}": n for n in range(5000)}}))
    assert isinstance(wide, Heartbeat)
    assert len(wide.fields) <= records.BEAT_NODES + 1


@pytest.mark.parametrize("key", ["hint", "cure"])
def test_the_hint_of_an_exit_is_read_under_its_former_name_too(key: str) -> None:
    said = {"coord": "p0r0s0t0", "status": "failed", "error": "the disk is full", key: "free space"}
    found = parse(files.exit_name(0, lead=True), json.dumps(said))
    assert isinstance(found, Exit)
    assert found.hint == "free space"
