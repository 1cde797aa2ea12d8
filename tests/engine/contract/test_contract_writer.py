from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.contract import RunWriter, Ticker
from uvcc_engine.contract.errors import ConfigError, PeerLostError, UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import Control, HaltRequest, read_halt, write_halt
from uvcc_engine.contract.run_files.waiting import Waiting


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_five_lines_make_a_run_watchable(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path / "run", run="m7c-1") as w:
        for step in range(3):
            w.metrics(step, loss=2.0 - step, lr=0.1, toks_per_s=100.0)
            w.heartbeat(step, "train")
        w.exit("done", step=3)
    run = tmp_path / "run"
    assert (run / "training.csv").read_text() == "step,loss,lr,toks_per_s\n0,2,0.1,100\n1,1,0.1,100\n2,0,0.1,100\n"
    beats = lines(run / "heartbeat_rank0.jsonl")
    assert [b["step"] for b in beats] == [0, 1, 2]
    assert beats[2]["loss"] == 0.0
    assert beats[2]["pid"] == os.getpid()
    assert beats[2]["mem_mib"] > 1
    record = files.read_json(run / "exit.json")
    assert (record["run"], record["status"], record["step"]) == ("m7c-1", "done", 3)


def test_samples_per_s_is_an_added_last_column(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, run="r") as w:
        w.metrics(0, 1.5, 0.1, 0.0, samples_per_s=64.0)
        with pytest.raises(UvccError, match="a row of 4 values"):
            w.metrics(1, 1.5, 0.1, 0.0)
    assert (tmp_path / "training.csv").read_text() == "step,loss,lr,toks_per_s,samples_per_s\n0,1.5,0.1,0,64\n"


def test_resume_cuts_later_rows_and_an_unfinished_one(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, run="r") as w:
        for step in range(5):
            w.metrics(step, 1.0, 0.1, 0.0)
            w.val(step, 1.0, 2.7)
    with (tmp_path / "training.csv").open("a") as f:
        f.write("5,0.")
    with RunWriter.open(tmp_path, run="r", resume_step=2) as w:
        w.metrics(3, 9.0, 0.1, 0.0)
        w.val(3, 9.0, 2.7)
    rows = (tmp_path / "training.csv").read_text().splitlines()
    assert [r.split(",")[:2] for r in rows] == [["step", "loss"], ["0", "1"], ["1", "1"], ["2", "1"], ["3", "9"]]
    assert (tmp_path / "val.csv").read_text().splitlines()[-2:] == ["2,1,2.7", "3,9,2.7"]


def test_a_new_run_moves_an_earlier_table_aside(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        with RunWriter.open(tmp_path, run="r") as w:
            w.metrics(0, loss, 0.1, 0.0)
    found = {p.name: p.read_text().splitlines()[1].split(",")[1] for p in tmp_path.glob("training.csv*")}
    assert found == {"training.csv.1": "1", "training.csv.2": "2", "training.csv": "3"}


def test_resume_refuses_other_columns(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, run="r") as w:
        w.metrics(0, 1.0, 0.1, 0.0)
    with RunWriter.open(tmp_path, run="r", resume_step=0) as w, pytest.raises(ConfigError, match="other columns"):
        w.metrics(1, 1.0, 0.1, 0.0, samples_per_s=1.0)


def test_heartbeat_every_step_at_once_and_repeats_throttled(tmp_path: Path) -> None:
    clock = Clock()
    with RunWriter.open(tmp_path, run="r", rank=3, coord="p1r0s0t0", clock=clock) as w:
        assert w.heartbeat(1, "train")
        assert not w.heartbeat(1, "train")
        assert w.heartbeat(2, "train")
        assert w.heartbeat(2, "hold", halt_nonce="n1")
        assert w.heartbeat(2, "hold", halt_nonce="n2")
        clock.now += 0.6
        assert w.heartbeat(2, "hold", halt_nonce="n2")
        assert not w.beat_again()
        clock.now += 4.5
        assert w.beat_again(Waiting("p2r0s0t0", 2.0))
        assert w.heartbeat(3, "train")
    beats = lines(tmp_path / "heartbeat_rank3.jsonl")
    assert [b.get("halt_nonce") for b in beats] == [None, None, "n1", "n2", "n2", "n2", None]
    assert (beats[5]["waiting_on"], beats[5]["waiting_s"]) == ("p2r0s0t0", 2.0)
    assert max(b["ts"] - a["ts"] for a, b in pairwise(beats)) <= 5.0


def test_a_total_stands_in_every_heartbeat_until_the_next_one(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, run="r") as w:
        w.heartbeat(1, "train", sent_bytes=100)
        w.heartbeat(2, "train", sent_bytes=250, waiting_on="p1")
        w.heartbeat(2, "evaluate")
        w.heartbeat(2, "done")
    beats = lines(tmp_path / "heartbeat_rank0.jsonl")
    assert [b.get("sent_bytes") for b in beats] == [100, 250, 250, 250]
    assert [b.get("waiting_on") for b in beats] == [None, "p1", None, None]


def test_ticker_beats_while_the_main_thread_waits(tmp_path: Path) -> None:
    clock = Clock()
    asked: list[float] = []
    with RunWriter.open(tmp_path, run="r", clock=clock) as w:
        w.heartbeat(7, "train")

        def waits_for() -> Waiting:
            asked.append(clock.now)
            clock.now += 2.5
            return Waiting("p1r0s0t0")

        ticker = Ticker(w, waits_for, period_s=0.001)
        with ticker:
            while len(asked) < 5:
                time.sleep(0)
        assert ticker.error is None
    beats = lines(tmp_path / "heartbeat_rank0.jsonl")
    assert len(beats) >= 3
    assert {b["step"] for b in beats} == {7}
    assert beats[-1]["waiting_on"] == "p1r0s0t0"


def test_events_count_on_after_a_restart_for_each_coord(tmp_path: Path) -> None:
    for _ in range(2):
        for coord in ("p0r0s0t0", "p0r1s0t0"):
            with RunWriter.open(tmp_path, run="r", coord=coord, clock=Clock()) as w:
                w.event("party_start", device="cpu")
                w.event("held", "warn", nonce="n", text="x" * 300_000)
    found = [(e["coord"], e["seq"]) for e in lines(tmp_path / "events.jsonl")]
    assert sorted(found) == [(c, s) for c in ("p0r0s0t0", "p0r1s0t0") for s in range(4)]
    assert lines(tmp_path / "events.jsonl")[0]["fields"] == {"device": "cpu"}


def test_only_the_lead_writes_tables_and_each_rank_its_own_exit(tmp_path: Path) -> None:
    with (
        RunWriter.open(tmp_path, run="r", rank=0) as lead,
        RunWriter.open(tmp_path, run="r", rank=1, coord="p0r0s0t1", lead=False) as other,
    ):
        lead.metrics(0, 1.0, 0.1, 0.0)
        other.metrics(0, 2.0, 0.1, 0.0)
        other.heartbeat(0, "train")
        lead.exit("done", step=1)
        other.exit("failed", step=1, error=PeerLostError("no sign of party 2", "look at it", party=2))
        other.result("ab" * 32, {"loss": 1.0}, "sig")
    assert (tmp_path / "training.csv").read_text().count("\n") == 2
    assert lines(tmp_path / "heartbeat_rank1.jsonl")[0]["loss"] == 2.0
    assert files.read_json(tmp_path / "exit.json")["status"] == "done"
    failed = files.read_json(tmp_path / "exit_rank1.json")
    assert (failed["error"], failed["hint"], failed["party"]) == ("no sign of party 2", "look at it", 2)
    assert files.read_json_of_run(tmp_path / "result_rank1.json", "r") is not None


def test_documents_of_an_earlier_run_are_not_believed(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, run="old") as w:
        w.exit("done", step=9)
    assert files.read_json_of_run(tmp_path / "exit.json", "new") is None
    (tmp_path / "exit.json").write_text('{"run": "new", "sta')
    assert files.read_json_of_run(tmp_path / "exit.json", "new") is None


def test_run_facts_in_both_forms(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, run="r") as w:
        w.describe({"device": "cpu", "topology": {"replicas": 2}, "versions": {"torch": "2.13.0"}})
    assert files.read_json(tmp_path / "run.json")["topology"] == {"replicas": 2}
    assert "topology.replicas: 2\n" in (tmp_path / "run.info").read_text()


def test_heartbeat_file_is_rotated_before_it_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvcc_engine.contract.run_files.writer.HEARTBEAT_KEEP_BYTES", 1000)
    with RunWriter.open(tmp_path, run="r") as w:
        for step in range(20):
            w.heartbeat(step, "train")
    kept = lines(tmp_path / "heartbeat_rank0.jsonl.1") + lines(tmp_path / "heartbeat_rank0.jsonl")
    assert kept[-1]["step"] == 19
    assert (tmp_path / "heartbeat_rank0.jsonl").stat().st_size <= 1200


@contextmanager
def small_disk() -> Iterator[None]:
    """Files of this process may not grow past 4000 bytes: the kernel refuses as it does on a full disk.

    Not a fixture: pytest reports a test before it takes the fixtures down, and its own log is such a file too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_full_disk_is_a_clear_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    with small_disk(), RunWriter.open(tmp_path, run="r") as w:
        with pytest.raises(UvccError, match=r"cannot write .*training\.csv") as caught:
            for step in range(10_000):
                w.metrics(step, 1.0, 0.1, 0.0)
        assert caught.value.hint
        with pytest.raises(UvccError, match=r"cannot write .*exit\.json"):
            w.exit("failed", error="x" * 5000)
        w.exit("failed", error="short")
    rows = (tmp_path / "training.csv").read_text()
    assert rows.endswith("\n")
    assert all(len(r.split(",")) == 4 for r in rows.splitlines())
    assert sorted(p.name for p in tmp_path.iterdir() if "tmp" in p.name) == []


def test_control_file_forms(tmp_path: Path) -> None:
    control = Control(tmp_path, "r")
    assert control.poll(0.0) is None
    (tmp_path / ".HALT").touch()
    assert control.poll(0.0) == HaltRequest("halt", run="r")
    write_halt(tmp_path, HaltRequest("hold", "n1", "r", 50.0))
    assert control.poll(49.0) == HaltRequest("hold", "n1", "r", 50.0)
    overdue = control.poll(51.0)
    assert overdue is not None
    assert (overdue.mode, overdue.nonce, overdue.vote) == ("halt", "n1", 2)
    write_halt(tmp_path, HaltRequest("release", "n1", "r"))
    released = control.poll(99.0)
    assert released is not None
    assert released.vote == 0
    control.clear()
    assert control.poll(99.0) is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ('{"mode": "halt", "nonce": "n", "run": "another"}', None),
        ('{"mode": "halt", "nonce": "n", "ru', None),
        ('{"mode": "hold", "nonce": "n", "run": "r", "deadline": "soon"}', None),
        ('{"mode": "hold"}', "hold"),
        ("stop please\n", "halt"),
        ("\n", "halt"),
        ('{"mode": "freeze", "run": "r"}', "halt"),
    ],
)
def test_only_whole_requests_of_this_run_are_obeyed(tmp_path: Path, text: str, mode: str | None) -> None:
    (tmp_path / ".HALT").write_text(text)
    found = read_halt(tmp_path, "r")
    assert (found.mode if found else None) == mode


def test_worker_spec_is_strict_and_round_trips() -> None:
    spec = WorkerSpec(
        run="demo-1.smoke", kind="command", coord="p1r1s0t0", topology=Topology(replicas=2), argv=["true"]
    )
    assert WorkerSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.rank == 1
    with pytest.raises(ConfigError, match=r"'polcy'.*did you mean 'policy'"):
        WorkerSpec.from_json({**spec.to_json(), "polcy": "x"})
    for bad in ({"attempt": "1"}, {"resume": 1}, {"argv": [1]}, {"run": "../x"}, {"kind": "x"}, {"coord": "p0"}):
        with pytest.raises(ConfigError):
            WorkerSpec.from_json({**spec.to_json(), **bad})
    with pytest.raises(ConfigError, match="lacks 'coord'"):
        WorkerSpec.from_json({"run": "r", "kind": "lm"})


def test_run_id_cannot_leave_its_directory() -> None:
    for bad in ("", "..", "a/b", "/x", "x" * 200):
        with pytest.raises(ConfigError, match="not a run id"):
            files.checked_run_id(bad)


@pytest.mark.parametrize(
    ("name", "run"),
    [("run-1", "run-1"), ("größe 3", "gr-e-3"), (".hidden", "hidden"), ("模型", "run"), ("x" * 200, "x" * 128)],
)
def test_a_folder_of_any_name_has_a_run_id(tmp_path: Path, name: str, run: str) -> None:
    assert files.run_id_of(tmp_path / name) == files.checked_run_id(run)
