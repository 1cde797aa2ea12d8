"""The hand-over checklist: each criterion decided by a fact, each deviation with its time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_run import RUN, START, STEPS, manifest_of, sent_by

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import shown
from uvcc_console.core.answers.shown import verified as verified_now
from uvcc_console.core.journal.journal import Journal
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.report.handoff import MET, NOT_MET, NOT_SHOWN, handoff, write_handoff
from uvcc_console.report.package import Package
from uvcc_console.report.recheck import digests
from uvcc_console.report.record import RunRecord
from uvcc_console.report.throughput import throughput
from uvcc_engine.contract.errors import UnreadableError


def add(run_dir: Path, *events: ev.Event) -> None:
    journal = Journal(run_dir / "journal.sqlite")
    journal.append(*events)
    journal.close()


def status(run_dir: Path, name: str) -> str:
    return next(c.status for c in handoff(run_dir).criteria if name in c.name)


def table(run_dir: Path, text: str) -> None:
    for path in (run_dir / "artifacts/full").rglob("training.csv"):
        path.write_text("step,loss,lr,toks_per_s\n" + text)
        sent_by(path.parent)


def test_a_good_run(run_dir: Path) -> None:
    write_artifacts(run_dir)
    found = handoff(run_dir)
    assert found.run == RUN
    assert not found.missing
    wanted = {"run.info", "training.csv", "run_full.log", "proof_bundle.json", "policy.json", "commits.jsonl"}
    assert {a.name.split("/")[-1] for a in found.attached} >= wanted
    assert not [a for a in found.attached if a.trouble]
    assert not found.deviations
    by_name = {c.name: c.status for c in found.criteria}
    assert by_name["loss falls"] == MET
    assert by_name["throughput is non-zero and stable"] == MET
    assert by_name["the proof bundle verifies"] == MET
    assert by_name["runs to the planned step without a hang or a lost worker"] == MET
    assert by_name["a checkpoint was saved"] == MET
    assert by_name["a resume from a checkpoint succeeded"] == NOT_SHOWN
    assert ("device", "cpu (all 3 pods)") in found.facts
    assert ("topology", "1 replica x 3 parties x 1 stage x 1 tensor rank") in found.facts
    text = write_handoff(run_dir).read_text()
    assert "| loss falls | met | full/p0r0/training.csv: 0.9167 -> 0.2500 in 3 rows" in text
    assert "(as the pods reported it, not signed) |" in text
    assert dict(found.result)["accuracy"].startswith("0.96875 (verified ")
    assert "step 3, manifest SHA-256" in text
    assert text.count("committed with three parties' signatures") == 3 + 1
    assert "## Deviations\n\n- none" in text
    assert found.to_json()["criteria"][0]["name"].startswith("runs to the planned step")


def test_what_the_training_ran_on_is_handed_over(run_dir: Path) -> None:
    facts = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_mib": "81559", "driver": "550.90.07"}
    facts |= {"code_hash": "ab" * 8, "launch": "python -m uvcc_engine.worker", "torch": "2.7.1+cu126"}
    for info in (run_dir / "artifacts/full").rglob("run.info"):
        info.write_text(info.read_text() + "".join(f"{k}: {v}\n" for k, v in facts.items()))
        sent_by(info.parent)
    found = dict(handoff(run_dir).facts)
    assert {k: found[k].removesuffix(" (all 3 pods)") for k in facts if k != "code_hash"} == {
        k: v for k, v in facts.items() if k != "code_hash"
    }
    assert "contradicts the signed policy" in found["p0r0 code_hash"]  # and so it is said


def test_throughput_is_held_against_the_phase_before_and_the_plan(run_dir: Path) -> None:
    """The same worker's table of the phase before says what was expected; a table that was changed is not read."""
    found = handoff(run_dir)
    assert [(t.table, t.unit, t.measured, t.smoke) for t in found.throughput] == [
        (f"full/p{p}r0/training.csv", "samples/s", 100.0 + p, 0.0) for p in range(3)
    ]
    assert "| full/p0r0/training.csv | samples/s | - | - | 100.0 | - |" in found.text()
    later = run_dir / "artifacts" / "later"
    for party, rate in ((0, 80), (1, 50), (2, 50)):
        folder = later / f"p{party}r0"
        folder.mkdir(parents=True)
        rows = "".join(f"{n},1,0.1,0,{rate if n else 1}\n" for n in range(10))  # the first is warm-up
        (folder / "training.csv").write_text("step,loss,lr,toks_per_s,samples_per_s\n" + rows)
        sent_by(folder)
    add(run_dir, ev.PhaseStarted(phase="later", engine_run=f"{RUN}.later", steps=10, sid_job=""))
    (later / "p2r0" / "training.csv").write_text("step,loss,lr,toks_per_s,samples_per_s\n1,1,0.1,0,9999\n")
    text = handoff(run_dir).text()
    assert "| later/p0r0/training.csv | samples/s | 100.0 | - | 80.0 | 80% |" in text
    assert "| later/p1r0/training.csv | samples/s | 101.0 | - | 50.0 | 50% |" in text
    assert "9,999" not in text
    assert handoff(run_dir).to_json()["throughput"][0]["smoke"] == 100.0


def test_tokens_are_held_against_the_gate_of_the_plan(run_dir: Path) -> None:
    table(run_dir, "1,1,0.1,500\n2,1,0.1,700\n")
    record = RunRecord.load(run_dir)
    asked = replace(record.snapshot, profile={"gates": {"toks_per_s": 550.0}})
    rows = list(throughput(Package(replace(record, snapshot=asked), lambda: START), "full"))
    assert [(t.unit, t.measured, t.floor) for t in rows] == [("tokens/s", 600.0, 550.0)] * 3
    assert rows[0].line() == "| full/p0r0/training.csv | tokens/s | - | 550.0 | 600.0 | - |"


def test_a_checkpoint_is_committed_only_with_three_signatures_in_the_package(run_dir: Path) -> None:
    full = run_dir / "artifacts/full"
    first = handoff(run_dir).checkpoints[0]
    assert (first.pod, first.step, first.sha256, first.committed) == ("p0r0", STEPS, manifest_of(0), True)
    for path in full.glob("*/commits.jsonl"):
        record = json.loads(path.read_text())
        record["parties"][1]["manifest"] = manifest_of(0)  # what P1 did not sign
        path.write_text(json.dumps(record) + "\n")
        sent_by(path.parent)  # a pod that lies gives the checksums of its lie
    found = handoff(run_dir)
    assert not any(k.committed for k in found.checkpoints)
    assert status(run_dir, "checkpoint was saved") == NOT_SHOWN
    assert "committed with" not in found.text()
    assert found.to_json()["checkpoints"][0]["committed"] is False


def test_an_event_alone_commits_nothing(run_dir: Path) -> None:
    fields = {"step": STEPS + 7, "sha256": "bb"}
    add(
        run_dir,
        ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=fields),
        ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_committed", fields=fields),
    )
    assert handoff(run_dir).checkpoints[0].committed is False
    assert status(run_dir, "checkpoint was saved") == NOT_SHOWN


def test_a_resume_stands_in_the_log_that_came_home(run_dir: Path) -> None:
    add(run_dir, ev.EngineEvent(pod="p0r0", level="info", event="resumed", fields={"step": 2}))
    assert status(run_dir, "resume") == NOT_SHOWN
    log = run_dir / "artifacts/full/p0r0/events.jsonl"
    log.write_text(json.dumps({"event": "resumed", "fields": {"step": 2}}) + "\n")
    assert status(run_dir, "resume") == NOT_SHOWN  # not as the pod sent it
    sent_by(log.parent)
    assert status(run_dir, "resume") == MET


def test_bad_curves_are_not_met(run_dir: Path) -> None:
    table(run_dir, "0,1.0,0.1,50\n1,1.1,0.1,50\n2,1.2,0.1,50\n")
    assert status(run_dir, "loss falls") == NOT_MET
    table(run_dir, "".join(f"{i},{9 - i},0.1,{rate}\n" for i, rate in enumerate([100, 5, 90, 4, 110, 6, 95, 3])))
    assert status(run_dir, "throughput") == NOT_MET
    table(run_dir, "0,1,0.1,0\n1,0.5,0.1,0\n2,0.4,0.1,0\n")
    assert status(run_dir, "throughput") == NOT_MET
    table(run_dir, "0,1,0.1,oops\n")
    with pytest.raises(UnreadableError, match=r"training\.csv"):
        handoff(run_dir)


def test_deviations_have_their_time(run_dir: Path) -> None:
    add(
        run_dir,
        ev.StageChanged(ts=START + 500, name="full", status="failed", detail="P1 lost"),
        ev.PhaseStarted(ts=START + 501, phase="full", engine_run=f"{RUN}.full", steps=3, sid_job="0", attempt=1),
        ev.WorkerProcess(ts=START + 502, pod="p1r0", coord="p1r0s0t0", state="exited", rc=-9, signal="KILL"),
        ev.HaltRequested(ts=START + 503, nonce="n", mode="halt", by="cli"),
        ev.HaltRequested(ts=START + 504, nonce="d", mode="hold", by="conductor", drill=True),
        ev.RunEnded(ts=START + 505, status="failed", detail="gave up", leaks=["pod-9"]),
    )
    found = handoff(run_dir)
    assert [d.ts - START for d in found.deviations] == [500, 501, 502, 503, 505]
    assert "left behind: pod-9" in found.deviations[-1].text
    assert status(run_dir, "planned step") == NOT_MET
    text = found.text()
    assert "2023-11-14T22:21:42.000Z worker p1r0s0t0 ended with KILL" in text


def of_an_older_release(run_dir: Path, *, noted: bool) -> None:
    """A bundle that this release cannot read. ``noted``: the older one verified just these bytes."""
    full = run_dir / "artifacts/full"
    path = full / "proof_bundle.json"
    was = path.read_bytes()
    path.write_bytes(was.replace(b'"version":3}', b'"version":2}'))
    assert path.read_bytes() != was
    verdict = RunRecord.load(run_dir).snapshot.verdicts["full"]
    if noted:
        told = {"values": dict(verdict.values), "result_hashes": verdict.result_hashes, "files": digests(full)}
        roots = {"global_root": verdict.global_root, "run_root": verdict.run_root, "sid_job": verdict.sid_job}
        add(run_dir, ev.PhaseVerdict(phase="full", ok=True, **told, **roots))


def test_what_an_older_release_verified_is_not_refuted_because_this_one_cannot_read_it(run_dir: Path) -> None:
    """The home screen, ``uvcc runs`` and the hand-over say one thing of it: verified then, and unchanged since."""
    of_an_older_release(run_dir, noted=True)
    record = RunRecord.load(run_dir)
    assert verified_now(record.snapshot, record.changed) is not False
    assert shown(record.snapshot, "full", record.changed).verified
    found = handoff(run_dir)
    assert "not by this release" in dict(found.result)["accuracy"]
    assert "NOT VERIFIED" not in found.text()
    assert status(run_dir, "the proof bundle verifies") == NOT_SHOWN
    fact = next(c.fact for c in found.criteria if c.name == "the proof bundle verifies")
    assert fact.startswith("verified ")
    assert "verify it with the release that wrote it" in fact
    assert any("this release cannot read it: the bundle's policy" in d.text for d in found.deviations)
    proof = Package(record).proof("full")
    assert proof.refusal == "VERIFIED BY ANOTHER RELEASE, NOT BY THIS ONE"


def test_a_bundle_that_nobody_verified_is_not_verified_whatever_release_it_says_it_is_of(run_dir: Path) -> None:
    """Whoever alters a bundle cannot make it one of an older release: its bytes are not those that were verified."""
    of_an_older_release(run_dir, noted=False)
    found = handoff(run_dir)
    assert "NOT VERIFIED" in dict(found.result)["accuracy"]
    assert status(run_dir, "the proof bundle verifies") == NOT_MET
    assert Package(RunRecord.load(run_dir)).proof("full").refusal == "NOT VERIFIED"


def test_missing_files_are_named(run_dir: Path) -> None:
    (run_dir / "artifacts/full/proof_bundle.json").unlink()
    found = handoff(run_dir)
    assert "proof_bundle.json" in found.missing
    assert "- [ ] proof_bundle.json: not there" in found.text()
    with pytest.raises(UnreadableError):
        handoff(run_dir.parent)


def test_an_end_that_is_told_again_after_a_resume_is_one_end_of_before(run_dir: Path) -> None:
    killed = {"pod": "p0r0", "coord": "p0r0s0t0", "state": "exited", "pid": 77, "rc": -9, "signal": "SIGKILL"}
    add(run_dir, ev.WorkerProcess(ts=START + 60, **killed))  # type: ignore[arg-type]
    assert status(run_dir, "runs to the planned step") == NOT_MET
    again = ev.PhaseStarted(ts=START + 70, phase="full", engine_run="x.full", steps=STEPS, sid_job="", attempt=1)
    done = {**killed, "pid": 78, "rc": 0, "signal": ""}
    add(
        run_dir,
        again,
        ev.WorkerProcess(ts=START + 71, **killed),  # type: ignore[arg-type]
        ev.WorkerProcess(ts=START + 80, **done),  # type: ignore[arg-type]
    )
    assert status(run_dir, "runs to the planned step") == MET
    assert [d.text for d in handoff(run_dir).deviations if "SIGKILL" in d.text] == [
        "worker p0r0s0t0 ended with SIGKILL"
    ]


def test_what_must_not_leave_is_not_handed_over(run_dir: Path) -> None:
    from uvcc_console.report.redact import RedactionError

    info = next((run_dir / "artifacts/full").rglob("run.info"))
    info.write_text(info.read_text() + "job.seed: " + "c0ffee11" * 8 + "\n")
    sent_by(info.parent)
    with pytest.raises(RedactionError, match="key-shaped"):
        write_handoff(run_dir)
    assert not (run_dir / "artifacts/handoff.md").exists()


def test_what_a_pod_measured_in_parts_is_written_in_words(run_dir: Path) -> None:
    write_artifacts(run_dir)
    measured = {"cpus": 2, "pair_p1": {"rtt_ms": 7.0, "out_mib_s": 63.8}, "gpus": ["H100", "H100"], "none": None}
    add(run_dir, ev.EngineEvent(pod="p0r0", level="info", event="dp_preflight_ok", fields=measured))
    text = write_handoff(run_dir).read_text()
    assert "preflight p0r0: cpus 2, pair_p1 (rtt_ms 7.0, out_mib_s 63.8), gpus (H100, H100)" in text
    assert not re.search(r"\{'|\['|\bNone\b", text)
