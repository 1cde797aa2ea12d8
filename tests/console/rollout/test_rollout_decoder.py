"""What agents say becomes events: each file of the run contract, pieces, damage, cursors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.events import reserved
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.rollout import ingest
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member
from uvcc_console.rollout.decoder import Decoder
from uvcc_console.rollout.stages.migration import private_migration
from uvcc_engine.contract.agent_protocol.agent_messages import (
    Ack,
    AgentMessage,
    Dropped,
    Lines,
    Rewind,
    Telemetry,
    WorkerChange,
)
from uvcc_engine.contract.run_files.records import Malformed

RUN = "demo-1.full"


def lines(src: str, *rows: str, off: int = 10) -> Lines:
    return Lines(run=RUN, src=src, ino=5, off=off, lines=list(rows))


def decoder() -> Decoder:
    return Decoder("p1r0", RUN, "full", "p1r0s0t0")


async def test_a_pods_vital_signs_are_journalled_every_half_minute(tmp_path: Path) -> None:
    class Channel:
        async def messages(self) -> AsyncIterator[AgentMessage | Malformed]:
            for ts in (100.0, 102.0, 129.0, 131.0):
                yield Telemetry(ts=ts, cpu=0.5, mem_mib=900.0, disk_free_mib=4000.0)

    journal = Journal(tmp_path / "journal.sqlite")
    bus, member = Bus(journal), Member("p0r0", PodRequest("p0r0", 0, 0))
    member.agent = cast(Any, Channel())
    member.decoders["r.smoke"] = Decoder("p0r0", "r.smoke", "smoke", "p0r0s0t0")
    await ingest.run(bus, member)
    bus.commit()
    found = [e for _, e in journal.since(0) if isinstance(e, ev.PodTelemetry)]
    assert [e.disk_free_mib for e in found] == [4000.0, 4000.0]
    journal.close()


def test_only_the_newest_heartbeat_of_a_batch_counts_per_worker() -> None:
    rows = [json.dumps({"coord": c, "step": n}) for n, c in enumerate(["p1r0s0t0", "p1r0s0t1", "p1r0s0t0"])]
    found = decoder().events(lines("heartbeat_rank0.jsonl", *rows))
    assert [(e.coord, e.record["step"]) for e in found if isinstance(e, ev.HeartbeatRead)] == [
        ("p1r0s0t0", 2),
        ("p1r0s0t1", 1),
    ]


def test_training_rows_follow_their_header() -> None:
    i = decoder()
    found = i.events(lines("training.csv", "step,loss,lr,toks_per_s,samples_per_s", "1,2.5,0.1,0,300"))
    assert found == [
        ev.Metric(coord="p1r0s0t0", step=1, values={"loss": 2.5, "lr": 0.1, "toks_per_s": 0.0, "samples_per_s": 300.0})
    ]
    later = i.events(lines("training.csv", "2,2.25,0.1,0,310"))
    assert isinstance(later[0], ev.Metric)
    assert later[0].values["samples_per_s"] == 310.0
    val = i.events(lines("val.csv", "10,3.5,33.1"))
    assert val == [ev.Metric(coord="p1r0s0t0", step=10, values={"loss": 3.5, "ppl": 33.1}, split="val")]


def test_epoch_roots_and_other_events_are_told_apart() -> None:
    root = {"ts": 1.0, "event": "epoch_root", "fields": {"coord": "p1r0s0t0", "epoch": 3, "root": "ab", "pairs": {}}}
    other = {"ts": 2.0, "level": "warn", "event": "waiting", "fields": {"party": 2}}
    found = decoder().events(lines("events.jsonl", json.dumps(root), json.dumps(other), "{half"))
    assert found[0] == ev.RootReported(coord="p1r0s0t0", epoch=3, root="ab")
    assert found[1] == ev.EngineEvent(pod="p1r0", level="warn", event="waiting", fields={"party": 2}, at=2.0)
    assert found[2] == ev.LinesMalformed(where="p1r0", count=1, src="events.jsonl", sample="{half")


def test_a_result_that_arrives_in_pieces_is_read_once_it_is_whole() -> None:
    i = decoder()
    record = {"run": RUN, "coord": "p1r0s0t0", "result_hash": "cd", "values": {"loss": 0.5, "note": "x"}}
    text = json.dumps(record, indent=1).splitlines()
    assert i.events(lines("result.json", *text[:3])) == []
    found = i.events(lines("result.json", *text[3:]))
    assert found == [
        ev.ResultReported(pod="p1r0", coord="p1r0s0t0", phase="full", result_hash="cd", values={"loss": 0.5}),
    ]


def test_a_result_of_another_run_is_not_believed() -> None:
    stale = json.dumps({"run": "demo-0.full", "result_hash": "cd", "values": {}})
    assert decoder().events(lines("result.json", stale)) == []
    assert decoder().events(replace(lines("result.json", stale), run="demo-0.full")) == []


def test_how_a_worker_ended_is_told_with_its_words() -> None:
    record = {"run": RUN, "status": "failed", "step": 4, "error": "P2 lied", "party": 2, "ts": 3.0}
    found = decoder().events(lines("exit.json", json.dumps(record)))
    assert found == [
        ev.EngineEvent(
            pod="p1r0",
            level="error",
            event="exit",
            fields={"status": "failed", "step": 4, "error": "P2 lied", "party": 2, "coord": "p1r0s0t0"},
        )
    ]
    killed = WorkerChange(run=RUN, coord="p1r0s0t0", state="exited", pid=7, rc=-9, signal="SIGKILL")
    assert decoder().events(killed) == [
        ev.WorkerProcess(pod="p1r0", coord="p1r0s0t0", state="exited", pid=7, rc=-9, signal="SIGKILL", engine_run=RUN)
    ]


def test_a_link_that_comes_back_ends_no_worker_by_the_phase_before() -> None:
    """The agent tells of the workers of every run that is watched: those of the smoke have the same names."""
    smoke = Decoder("p1r0", "demo-1.smoke", "smoke", "p1r0s0t0")
    now = [
        ev.PhaseStarted(phase="full", engine_run=RUN, steps=9, sid_job=""),
        *decoder().events(WorkerChange(run=RUN, coord="p1r0s0t0", state="started", pid=8)),
    ]
    before = WorkerChange(run="demo-1.smoke", coord="p1r0s0t0", state="exited", pid=7, rc=0)
    worker = fold([*now, *smoke.events(before)]).workers["p1r0s0t0"]
    assert (worker.state, worker.pid, worker.rc) == ("started", 8, None)
    over = fold([*now, *decoder().events(replace(before, run=RUN, pid=8))]).workers["p1r0s0t0"]
    assert (over.state, over.rc) == ("exited", 0)


def test_logs_drops_and_rewinds_are_reported() -> None:
    i = decoder()
    assert i.events(lines("worker_p1r0s0t0.log", "hello")) == [
        ev.LogLines(pod="p1r0", src="worker_p1r0s0t0.log", lines=["hello"])
    ]
    told = "2026-11-25T07:17:10.777Z info {} coord=p1r0s0t0"
    both = [told.format("epoch_root"), told.format("worker_start"), "Traceback"]
    assert (
        i.events(lines("worker_p1r0s0t0.log", *both))
        == [  # what events.jsonl says as well comes once
            ev.LogLines(pod="p1r0", src="worker_p1r0s0t0.log", lines=both[1:])
        ]
    )
    assert i.events(lines("worker_p1r0s0t0.log", both[0])) == []
    assert isinstance(i.events(lines("build.log", both[0]))[0], ev.LogLines)  # no log of a worker
    dropped = i.events(Dropped(run=RUN, n=12))
    assert isinstance(dropped[0], ev.Alert)
    assert "12 lines" in dropped[0].text
    rewind = i.events(Rewind(run=RUN, src="events.jsonl", reason="truncated"))
    assert isinstance(rewind[0], ev.EngineEvent)
    assert i.events(Ack(nonce="n", ok=True)) == []


def test_of_several_workers_it_is_told_whose_word_an_event_is() -> None:
    line = '{"ts":2.0,"seq":1,"coord":"p1r0s1t0","level":"info","event":"released","fields":{"step":4}}'
    both = ("p1r0s0t0", "p1r0s1t0")
    (found,) = Decoder("p1r0", RUN, "full", both[0], coords=both).events(lines("events.jsonl", line))
    assert isinstance(found, ev.EngineEvent)
    assert found.fields == {"step": 4, "coord": "p1r0s1t0"}


def test_cursors_follow_what_became_events() -> None:
    i = decoder()
    i.events(lines("events.jsonl", off=120))
    i.events(lines("training.csv", "1,2,3,4", off=44))
    assert i.cursors == {f"{RUN}/events.jsonl": [5, 120], f"{RUN}/training.csv": [5, 44]}


@pytest.mark.parametrize("name", sorted(reserved.RESERVED))
def test_a_pod_cannot_speak_for_the_console(name: str) -> None:
    line = json.dumps({"event": name, "level": "info", "ts": 1.0, "fields": {"phase": "full", "ok": True}})
    [found] = decoder().events(lines("events.jsonl", line))
    assert isinstance(found, ev.EngineEvent)
    assert (found.event, found.fields["event"]) == (reserved.EVENT, name)


def test_a_forged_succession_decides_nothing(tmp_path: Path) -> None:
    """As an event of a pod that is in the journal already, of a version that let it in."""
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    journal.append(ev.EngineEvent(pod="p1r0", level="warn", event="succession", fields={"phase": "full"}))
    journal.close()
    assert private_migration.all_of(cast(Any, SimpleNamespace(run_dir=tmp_path))) == []


def test_what_a_worker_says_it_runs_tells_how_many_tokens_a_step_takes() -> None:
    train = {"batch_size": 8, "accumulate": 2, "seq_len": 128, "lr": 0.003}
    told = {"run": RUN, "coord": "p1r0s0t0", "config": {"train": train}, "parameters": 9, "code_hash": "0" * 64}
    (found,) = decoder().events(lines("run.json", json.dumps(told)))
    assert isinstance(found, ev.EngineEvent)
    size = {"batch_size": 8, "accumulate": 2, "seq_len": 128}
    assert found.fields == {**size, "parameters": 9, "coord": "p1r0s0t0"}
