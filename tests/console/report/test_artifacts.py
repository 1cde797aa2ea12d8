"""Artifacts with the seeds' names: what the runbooks assert is in them, values are those of the signed bundle."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report_run import RUN, START, make_run

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.report.run_log import LogEvent, Translator, human, machine, without_secrets
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.job.topology import Topology


def now() -> float:
    return START + 1000


def test_what_the_runbook_asserts(run_dir: Path) -> None:
    write_artifacts(run_dir, now)
    lines = (run_dir / "artifacts/run_full.log").read_text().splitlines()
    assert all(
        re.fullmatch(r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\] EVENT [a-z0-9_]+ \{.*\}", line) for line in lines
    )
    named = [line.split()[2] for line in lines]
    assert named.count("dp_preflight_ok") == 3
    assert named.count("verifier_ok") == 1
    assert named.count("party_done") == 3
    hashes = json.loads(next(line for line in lines if "EVENT dp_result_hashes" in line).split(" ", 3)[3])
    assert len(hashes["unique_hashes"]) == 1
    ok = json.loads(next(line for line in lines if "EVENT dp_preflight_ok" in line).split(" ", 3)[3])
    assert (ok["party_id"], ok["replica_id"]) == (0, 0)
    for name in ("dp_layout.json", "full/dp_roots.json", "full/dp_matrix.md", "full/proof_bundle.json"):
        assert (run_dir / "artifacts" / name).is_file()


def test_machine_log_says_the_same(run_dir: Path) -> None:
    write_artifacts(run_dir, now)
    records = [json.loads(line) for line in (run_dir / "artifacts/run_full.jsonl").read_text().splitlines()]
    lines = (run_dir / "artifacts/run_full.log").read_text().splitlines()
    assert [r["event"] for r in records] == [line.split()[2] for line in lines]
    assert set(records[0]) == {"ts", "t_rel_s", "event", "fields"}
    assert records[0]["t_rel_s"] == 0.0
    assert [r["t_rel_s"] for r in records] == sorted(r["t_rel_s"] for r in records)


def test_logs_tell_neither_secrets_nor_where_the_operator_keeps_things(run_dir: Path) -> None:
    write_artifacts(run_dir, now)
    for path in (run_dir / "artifacts").glob("*"):
        if path.is_file():
            assert "hidden" not in path.read_text()
            assert str(run_dir) not in path.read_text()
    kept = without_secrets({"relay_token": 1, "token_file": "t", "a": [{"private_key": 2, "toks_per_s": 3}]})
    assert kept == {"token_file": "t", "a": [{"toks_per_s": 3}]}


def test_roots_are_those_of_the_bundle(tmp_path: Path) -> None:
    run_dir = tmp_path / RUN
    made = make_run(run_dir, Topology(2, 1, 2, 4))
    write_artifacts(run_dir, now)
    bundle = json.loads(made.bundle.read_text())
    full = run_dir / "artifacts/full"
    roots = json.loads((full / "dp_roots.json").read_text())
    assert [e["global_root_hex"] for e in roots["epochs"]] == [f"0x{e['global_root']}" for e in bundle["epochs"]]
    first = {w["coord"]: "0x" + w["roots"][0]["statement"]["root"] for w in bundle["workers"]}
    order = ["p0r1s0t0", "p0r1s0t1", "p1r1s0t0", "p1r1s0t1", "p2r1s0t0", "p2r1s0t1"]
    assert roots["epochs"][0]["replica_epoch_roots_hex"][1] == [first[c] for c in order]
    audit = json.loads((full / "audit_bundle.json").read_text())
    assert [len(s["subsession_root_hex"]) for s in audit["subsession_roots"]] == [66] * 4
    assert audit["topology"] == {"R": 2, "S": 1, "T": 2, "M": 4}
    assert audit["global_root_hex"] == f"0x{bundle['epochs'][-1]['global_root']}"
    assert audit["sid_job_hex"] == f"0x{made.policy.sid_job.hex()}"
    by_coord = json.loads((full / "roots_by_coord.json").read_text())
    assert len(by_coord) == 12
    assert {"party", "replica", "stage", "tp", "local_rank", "pod_id", "ssh_host", "epoch_root_hex"} <= set(by_coord[0])
    assert by_coord[0]["ssh_host"] == "127.0.0.1"
    assert max(w["local_rank"] for w in by_coord) == 3
    matrix = (full / "dp_matrix.md").read_text()
    assert "| 1 | 0x" in matrix
    assert bundle["result_hashes"][0] in matrix


def test_layout_names_every_pod(run_dir: Path) -> None:
    write_artifacts(run_dir, now)
    found = json.loads((run_dir / "artifacts/dp_layout.json").read_text())
    assert found["providers_by_party"] == {"0": "local", "1": "local", "2": "local"}
    node = {"party_id": 1, "replica_id": 0, "provider_type": "local", "pod_id": "p1r0"}
    assert {**node, "ssh_user": "pod", "ssh_host": "127.0.0.1", "ssh_port": 2201} in found["nodes"]


def test_run_logs_only_grow(run_dir: Path) -> None:
    write_artifacts(run_dir, now)
    log = run_dir / "artifacts/run_full.log"
    before = log.read_bytes()
    journal = Journal(run_dir / "journal.sqlite")
    journal.append(ev.Intent(ts=START + 900, action="teardown", by="cli"))
    journal.close()
    write_artifacts(run_dir, now)
    assert log.read_bytes().startswith(before)
    assert b"EVENT intent" in log.read_bytes()[len(before) :]
    log.write_bytes(b"something else\n")
    write_artifacts(run_dir, now)
    assert [p.read_bytes() for p in log.parent.glob("run_full.2*.log")] == [b"something else\n"]


def test_failures_are_told(tmp_path: Path) -> None:
    events = [
        ev.PodChanged(ts=1.0, pod="p0r0", party=0, replica=0, provider="local", state="failed", detail="no disk"),
        ev.WorkerProcess(ts=2.0, pod="p0r0", coord="p0r0s0t0", state="exited", rc=-9, signal="KILL"),
        ev.ForkDetected(ts=3.0, epoch=4, parties=[0, 2]),
        ev.PhaseVerdict(ts=4.0, phase="full", ok=False, global_root="", sid_job="", detail="pairing: epoch 4"),
        ev.RunEnded(ts=5.0, status="failed", leaks=["pod-7"]),
    ]
    found = list(Translator(tmp_path).translate(events))
    told = {e.name: e.fields for e in found}
    names = ["pod_failed", "party_failed", "fork_detected", "dp_result_hashes", "verifier_failed", "run_ended"]
    assert list(told) == names
    assert told["party_failed"]["signal"] == "KILL"
    assert told["dp_result_hashes"] == {"phase": "full", "unique_hashes": [], "mark": "reported, not verified"}
    assert told["verifier_failed"]["detail"] == "pairing: epoch 4"
    assert told["run_ended"]["leaks"] == ["pod-7"]


def test_time_stamps() -> None:
    line = human([LogEvent(START + 0.25, "x", {})])
    assert line == "[2023-11-14T22:13:20.250Z] EVENT x {}\n"
    assert machine([]) == ""


def test_run_without_a_bundle_still_has_its_logs(tmp_path: Path) -> None:
    run_dir = tmp_path / RUN
    make_run(run_dir)
    (run_dir / "artifacts/full/proof_bundle.json").write_text("{}")
    written = [p.name for p in write_artifacts(run_dir, now)]
    assert written == ["run_full.log", "run_full.jsonl", "dp_layout.json"]
    with pytest.raises(UnreadableError):
        write_artifacts(tmp_path / "nowhere", now)
