"""The hand-over checklist: each criterion decided by a fact, each deviation with its time."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_run import RUN, START

from uvcc_console.core import events as ev
from uvcc_console.core.journal import Journal
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.report.handoff import MET, NOT_MET, NOT_SHOWN, handoff, write_handoff
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


def test_a_good_run(run_dir: Path) -> None:
    write_artifacts(run_dir)
    found = handoff(run_dir)
    assert found.run == RUN
    assert not found.missing
    assert {n.split("/")[-1] for n, _ in found.attached} >= {
        "run.info",
        "training.csv",
        "run_full.log",
        "proof_bundle.json",
    }
    assert not found.deviations
    by_name = {c.name: c.status for c in found.criteria}
    assert by_name["loss falls"] == MET
    assert by_name["throughput is non-zero and stable"] == MET
    assert by_name["the proof bundle verifies"] == MET
    assert by_name["runs to the planned step without a hang or a lost worker"] == MET
    assert by_name["a checkpoint was saved"] == NOT_MET
    assert by_name["a resume from a checkpoint succeeded"] == NOT_SHOWN
    assert ("device", "cpu (all 3 pods)") in found.facts
    assert ("topology", "1 replicas x 3 parties x 1 stages x 1 tensor ranks") in found.facts
    text = write_handoff(run_dir).read_text()
    assert "| loss falls | met | full/p0r0/training.csv: 1.0000 -> 0.3333 in 3 rows" in text
    assert "## Deviations\n\n- none" in text
    assert found.to_json()["criteria"][0]["name"].startswith("runs to the planned step")


def test_checkpoint_and_resume(run_dir: Path) -> None:
    add(
        run_dir,
        ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields={"step": 10, "sha256": "aa"}),
        ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields={"step": 20, "sha256": "bb"}),
        ev.EngineEvent(pod="p0r0", level="info", event="resumed", fields={"step": 20}),
    )
    assert handoff(run_dir).checkpoints == [("p0r0", 20, "bb")]
    assert "step 20, manifest SHA-256 `bb`\n" in handoff(run_dir).text()
    add(run_dir, ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_committed", fields={"step": 20}))
    assert "`bb`, committed with three parties' signatures\n" in handoff(run_dir).text()
    assert handoff(run_dir).to_json()["checkpoints"][0]["committed"] is True
    assert status(run_dir, "checkpoint was saved") == MET
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
    again = ev.PhaseStarted(ts=START + 70, phase="full", engine_run="x.full", steps=9, sid_job="", attempt=1)
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
    with pytest.raises(RedactionError, match="key-shaped"):
        write_handoff(run_dir)
    assert not (run_dir / "artifacts/handoff.md").exists()
