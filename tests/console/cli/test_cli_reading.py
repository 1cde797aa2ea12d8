"""Reading verbs on a hand-made journal: what they print, and how runs are found."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_console.cli.follow import headless
from uvcc_console.cli.follow.headless import ProgressLine, Watched, outcome, render, report
from uvcc_console.cli.main import main
from uvcc_console.cli.view.runs import table
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.answers.shown import clock
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.fleet import procs, pulse
from uvcc_console.plan.profile import load
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.terms.operation import Operation

T0 = 1_795_223_700.0
(ONE_OPERATOR,) = Operation.of(Topology()).sentences()
COORDS = ["p0r0s0t0", "p1r0s0t0", "p2r0s0t0"]
VALUES = {"accuracy": 0.96, "loss": 1.25}
BUNDLE = b"what was verified"
STAGES = ["plan", "provision", "full", "verify-full", "teardown"]


def story(run: str, *, ended: bool, ok: bool = True) -> list[ev.Event]:
    """A short run on three pods, verified if ``ok``."""
    _, profile = load("demo")
    out: list[ev.Event] = [
        ev.RunCreated(
            ts=T0,
            run=run,
            profile_name="demo",
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=STAGES,
            profile=profile.model_dump(mode="json"),
            seed=5,
        ),
        ev.StageChanged(ts=T0 + 1, name="plan", status="ok", detail="private"),
        ev.StageChanged(ts=T0 + 1, name="provision", status="ok", detail="3 pods"),
        ev.StageChanged(ts=T0 + 2, name="full", status="running"),
    ]
    for p, c in enumerate(COORDS):
        pod = ev.PodChanged(
            ts=T0 + 2, pod=c[:4], party=p, replica=0, provider="local", state="agent", address=f"u@127.0.0.1:{4000 + p}"
        )
        out.append(pod)
    out.append(ev.PhaseStarted(ts=T0 + 3, phase="full", engine_run=f"{run}.full", steps=4, sid_job="5a" * 32))
    for n in range(4):
        for c in COORDS:
            ts = T0 + 4 + 0.5 * n
            out.append(ev.Metric(ts=ts, coord=c, step=n, values={"loss": 2.0 - 0.25 * n, "lr": 0.1}))
            out.append(ev.HeartbeatRead(ts=ts, pod=c[:4], coord=c, record={"step": n, "phase": "train", "pid": 77}))
            out.append(ev.RootReported(ts=ts, coord=c, epoch=n, root="ab" * 32))
    if not ended:
        return out
    out += [
        ev.ResultReported(
            ts=T0 + 7, pod=c[:4], coord=c, phase="full", result_hash="cd" * 32, values={"accuracy": 0.96, "loss": 1.25}
        )
        for c in COORDS
    ]
    detail = "" if ok else "epoch 2: leaves differ"
    out += [
        ev.StageChanged(ts=T0 + 7, name="full", status="ok", detail="4 steps"),
        ev.PhaseVerdict(
            ts=T0 + 8,
            phase="full",
            ok=ok,
            global_root="ef" * 32 if ok else "",
            sid_job="5a" * 32,
            detail=detail,
            values={"accuracy": 0.96, "loss": 1.25} if ok else {},
            result_hashes=["cd" * 32] if ok else [],
            level="transcripts" if ok else "",
            pinned=ok,
            files={"proof_bundle.json": hashlib.sha256(BUNDLE).hexdigest()} if ok else {},
        ),
        ev.StageChanged(ts=T0 + 8, name="verify-full", status="ok" if ok else "failed", detail=detail),
        ev.StageChanged(ts=T0 + 9, name="teardown", status="ok", detail="every pod is proven gone"),
        ev.RunEnded(ts=T0 + 9.5, status="ok" if ok else "failed", detail=detail),
    ]
    return out


def write(run: str, events: list[ev.Event]) -> Path:
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / run
    (folder / "artifacts/full").mkdir(parents=True)
    (folder / "artifacts/full/proof_bundle.json").write_bytes(BUNDLE)
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(*events)
    journal.close()
    return folder


def test_runs_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    write("demo-20261121-0120-cd34", story("demo-20261121-0120-cd34", ended=True, ok=False))
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["RUN", "PROFILE", "STATUS", "STAGE", "STEP", "VERIFIED", "CREATED"]
    assert lines[1].split()[:6] == ["demo-20261121-0115-ab12", "demo", "ok", "teardown", "3/4", "yes"]
    assert lines[2].split()[:6] == ["demo-20261121-0120-cd34", "demo", "failed", "teardown", "3/4", "NO"]
    assert main(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["run"][-4:], r["verified"], r["live"]) for r in rows] == [("ab12", True, False), ("cd34", False, False)]


def test_the_list_of_runs_fits_a_small_terminal() -> None:
    rows = [
        ("demo-20261121-0115-ab12", "demo", "running", "verify-full", "60/60", "-", "2026-11-21 01:15"),
        ("mlp-smoke-20261121-0120-cd34", "mlp-smoke", "ok", "teardown", "120/120", "yes", "2026-11-21 01:20"),
    ]
    whole, small, least = table(rows, 200), table(rows, 80), table(rows, 40)
    assert whole == [
        "RUN                           PROFILE    STATUS   STAGE           STEP  VERIFIED  CREATED",
        "demo-20261121-0115-ab12       demo       running  verify-full    60/60  -         2026-11-21 01:15",
        "mlp-smoke-20261121-0120-cd34  mlp-smoke  ok       teardown     120/120  yes       2026-11-21 01:20",
    ]
    assert max(map(len, small)) <= 80
    assert small[0].split() == ["RUN", "PROFILE", "STATUS", "STAGE", "STEP", "VERIFIED"]
    assert least[0].split() == ["RUN", "STATUS", "STAGE", "STEP", "VERIFIED"]
    assert [line.split()[0] for line in least[1:]] == [row[0] for row in rows]


def test_status_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    assert main(["status"]) == 0
    assert capsys.readouterr().out == (
        "demo-20261121-0115-ab12  demo  ok\n"
        "stages   +plan +provision +full +verify-full +teardown\n"
        "phase    full attempt 0: step 3 of 4, loss 1.2500\n"
        "agreed   epoch 3\n"
        "pod      p0r0     local        agent    u@127.0.0.1:4000\n"
        "pod      p1r0     local        agent    u@127.0.0.1:4001\n"
        "pod      p2r0     local        agent    u@127.0.0.1:4002\n"
        "worker   p0r0s0t0   train    step 3     heartbeat -      abababababab\n"
        "worker   p1r0s0t0   train    step 3     heartbeat -      abababababab\n"
        "worker   p2r0s0t0   train    step 3     heartbeat -      abababababab\n"
        f"result   full: verified at {clock(T0 + 8)}\n"
        "         accuracy 0.9600, loss 1.2500\n"
        f"         global root {'ef' * 32}\n"
        f"         result hash {'cd' * 32}\n"
        f"operated {ONE_OPERATOR}\n"
        "cost     0.00 spent, 0.00 an hour\n"
    )


def test_nothing_that_a_pod_says_later_changes_what_was_verified(capsys: pytest.CaptureFixture[str]) -> None:
    lie = {"accuracy": 0.9999, "loss": 1.25}
    late = ev.ResultReported(ts=T0 + 8.5, pod="p1r0", coord="p0r0s0t0", phase="full", result_hash="ee" * 32, values=lie)
    events = story("demo-20261121-0115-ab12", ended=True)
    write("demo-20261121-0115-ab12", [*events[:-1], late, events[-1]])
    for verb in (["status"], ["status", "--json"], ["runs", "--json"]):
        assert main(verb) == 0
        said = capsys.readouterr().out.replace('"reported": [', "\0").split("\0")[0]
        assert "0.9999" not in said
        assert "ee" * 32 not in said
    assert main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"]["full"] == document["shown"]["full"]["values"] == {"accuracy": 0.96, "loss": 1.25}
    assert document["shown"]["full"]["mark"] == "verified"
    assert [r["pod"] for r in document["reported"] if r["values"] == lie] == ["p1r0"]
    assert main(["watch", "--kind", "result"]) == 0
    assert {json.loads(line)["mark"] for line in capsys.readouterr().out.splitlines()} == {"reported, not verified"}


def test_a_flipped_byte_takes_the_word_verified_back(capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    bundle = folder / "artifacts/full/proof_bundle.json"
    bundle.write_bytes(bytes([BUNDLE[0] ^ 1]) + BUNDLE[1:])
    assert main(["status"]) == 1
    text = capsys.readouterr().out
    assert f"full: VERIFIED at {clock(T0 + 8)}, but proof_bundle.json has changed since: not verified now" in text
    assert "accuracy 0.9600, loss 1.2500 (changed since it was verified)" in text
    assert main(["status", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verified"] is False
    assert document["verdicts"]["full"]["changed"] == ["proof_bundle.json"]
    assert main(["runs"]) == 0
    assert "CHANGED" in capsys.readouterr().out
    o = outcome(watched(folder), folder)
    assert "proof_bundle.json has changed since: not verified now" in render(o)
    assert "96.00 % (changed since it was verified)" in render(o)
    bundle.unlink()
    assert main(["status"]) == 1


def test_before_the_verdict_numbers_are_marked_as_reported(capsys: pytest.CaptureFixture[str]) -> None:
    events = [e for e in story("demo-20261121-0115-ab12", ended=True) if not isinstance(e, ev.PhaseVerdict)]
    folder = write("demo-20261121-0115-ab12", events)
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert "result   full: reported, not verified" in text
    assert "accuracy 0.9600, loss 1.2500 (reported, not verified)" in text
    o = outcome(watched(folder), folder)
    assert "96.00 % (reported, not verified)" in render(o)


def test_status_says_when_nobody_conducts_a_run_that_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=False))
    assert main(["status", "demo-20261121-0115"]) == 0
    assert "nobody conducts it: uvcc resume or uvcc teardown" in capsys.readouterr().out
    part = story("part-20261121-0115-ab12", ended=False)  # one domain's, which it cannot take up alone
    write("part-20261121-0115-ab12", [replace(e, apart=True) if isinstance(e, ev.RunCreated) else e for e in part])
    assert main(["status", "part-20261121-0115"]) == 0
    assert "nobody conducts it: uvcc teardown)" in capsys.readouterr().out
    assert main(["status", "demo-20261121-0115", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stage"] == "full"
    assert document["step"] == 3
    assert document["verified"] is None
    assert [w["pid"] for w in document["workers"]] == [77, 77, 77]
    assert document["figures"]["p0r0s0t0"] == {"loss": 1.25, "lr": 0.1}


def test_watch_ends_where_nothing_conducts_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=False))
    gone = subprocess.Popen(["true"])
    gone.wait()
    (folder / "conductor.json").write_text(json.dumps({"pid": gone.pid, "starttime": 1}))
    assert main(["watch", "last"]) == 0
    assert '"run_ended"' not in capsys.readouterr().out


def test_watch_streams_events_and_can_filter(capsys: pytest.CaptureFixture[str]) -> None:
    events = story("demo-20261121-0115-ab12", ended=True)
    write("demo-20261121-0115-ab12", events)
    assert main(["watch", "last"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["seq"] for r in rows] == list(range(1, len(events) + 1))
    assert rows[0]["kind"] == "run_created"
    assert rows[-1] == {
        "seq": len(events),
        "ts": T0 + 9.5,
        "kind": "run_ended",
        "status": "ok",
        "detail": "",
        "leaks": [],
    }
    assert main(["watch", "--kind", "stage", "--since", "4"]) == 0
    kinds = {json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()}
    assert kinds == {"stage"}


def test_attach_as_json_is_a_stream_of_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    assert main(["attach", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[-1]["status"] == "ok"
    assert rows[-1]["verdicts"]["full"]["ok"] is True


def test_runs_are_found_by_prefix_last_and_current(capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("demo-20261121-0115-ab12", "demo-20261121-0120-cd34"):
        write(run, story(run, ended=True))
    assert main(["status", "demo-20261121-012"]) == 0
    assert capsys.readouterr().out.startswith("demo-20261121-0120-cd34")
    assert main(["status", "demo-"]) == 2
    assert "fits 2 runs" in capsys.readouterr().err
    assert main(["status", "dema"]) == 2
    assert "did you mean demo-" in capsys.readouterr().err
    assert main(["status", "current"]) == 2
    assert "no run is live" in capsys.readouterr().err


def test_a_journal_that_is_no_journal_is_unreadable_not_fatal(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / "broken"
    folder.mkdir(parents=True)
    (folder / "journal.sqlite").write_bytes(b"not a database, rather long, and certainly not SQLite" * 40)
    assert main(["status", "broken"]) == 2
    assert "broken" in capsys.readouterr().err
    write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    assert main(["runs", "--json"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert [(r["run"], r["status"]) for r in rows] == [("broken", "unreadable"), ("demo-20261121-0115-ab12", "ok")]
    assert "not a database" in rows[0]["detail"]
    assert "broken" in said.err


def test_halting_what_has_ended_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    for verb in ("halt", "resume"):
        assert main([verb]) == 2
        assert "has ended (ok)" in capsys.readouterr().err
    assert main(["teardown"]) == 0
    assert capsys.readouterr().out == "demo-20261121-0115-ab12: 3 pods proven gone (ok)\n"


def test_profiles_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    assert "\ndemo " in "\n" + capsys.readouterr().out
    assert main(["profiles", "show", "demo"]) == 0
    assert capsys.readouterr().out.startswith("# demo:")
    assert main(["profiles", "show", "demo", "--set", "job.steps=9"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["steps"] == 9
    assert main(["profiles", "show", "dmo"]) == 2


def test_paths_names_the_folders_of_data_and_of_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The manual sends whoever looks for a key to the latter, which lies elsewhere where UVCC_HOME is not set."""
    assert main(["paths", "--json"]) == 0
    told, home = json.loads(capsys.readouterr().out), os.environ["UVCC_HOME"]
    assert (told["data"], told["config"]) == (home, f"{home}/config")
    monkeypatch.delenv("UVCC_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert main(["paths"]) == 0
    assert f"\nconfig          {paths.config_dir()}\n" in capsys.readouterr().out


def watched(run_dir: Path) -> Watched:
    journal = Journal(run_dir / "journal.sqlite", readonly=True)
    seen = ProgressLine()
    for _, event in journal.since(0):
        seen.see(event)
    found = Watched(read_all(journal), seen)
    journal.close()
    return found


def test_the_summary_of_a_verified_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True))
    w = watched(run_dir)
    assert render(outcome(w, run_dir)) == (
        "demo-20261121-0115-ab12: ok, verified\n"
        "  accuracy     96.00 %\n"
        "  loss         1.2500\n"
        f"  global root  {'ef' * 32}\n"
        f"  result hash  {'cd' * 32}\n"
        f"  sid job      {'5a' * 32}\n"
        f"  operated     {ONE_OPERATOR}\n"
        "  time         9.5 s (first training step after 4.0 s)\n"
        f"  artifacts    {run_dir / 'artifacts'}"
    )
    assert report(w, run_dir, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 0.96
    assert w.progress.step_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("at", "later", "told"),
    [
        (60.0, [("teardown", "running")], ["preflight failed  pod p0r0: no CUDA", "teardown running"]),
        (60.0, [], ["preflight failed  pod p0r0: no CUDA"]),
        (-60.0, [("teardown", "running")], ["teardown running"]),
    ],
    ids=["gone on before anybody looked", "still there", "before anybody followed"],
)
def test_who_follows_reads_why_a_stage_failed(
    at: float, later: list[tuple[str, str]], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, ts = "demo-20261121-0115-ab12", time.time() + at
    stages = [("preflight", "failed"), *later]
    more = [
        ev.StageChanged(ts=ts, name=n, status=s, detail="pod p0r0: no CUDA" if s == "failed" else "") for n, s in stages
    ]
    run_dir = write(name, [*story(name, ended=False)[:1], *more, ev.RunEnded(ts=ts, status="failed", detail="x")])
    assert headless.follow(run_dir, None, []).snapshot.ended
    assert capsys.readouterr().err.splitlines() == told


def test_a_run_that_does_not_verify_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=True, ok=False))
    assert report(watched(run_dir), run_dir, as_json=False) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out


def test_a_run_without_its_conductor_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=False))
    w = watched(run_dir)
    w.orphaned = True
    assert report(w, run_dir, as_json=False) == 1
    assert "uvcc resume demo-20261121-0115-ab12" in capsys.readouterr().err
    w.snapshot = replace(w.snapshot, apart=True)  # which no domain can alone
    assert report(w, run_dir, as_json=False) == 1
    said = capsys.readouterr().err
    assert "uvcc resume" not in said
    assert "uvcc teardown demo-20261121-0115-ab12   then begin the next attempt: uvcc rollout --domain" in said


def test_the_progress_line_names_stage_step_loss_pace_and_agreement() -> None:
    run_dir = write("demo-20261121-0115-ab12", story("demo-20261121-0115-ab12", ended=False))
    w = watched(run_dir)
    assert w.progress.line(w.snapshot) == "full running  step 3/4  loss 1.2500  0.50 s/step  agreed 3"


def test_whoever_follows_a_rollout_is_told_that_its_conductor_is_frozen_and_that_it_moves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "STOPPED_S", 0.2)
    out = io.StringIO()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        who = procs.identify(child.pid)
        assert who is not None
        (tmp_path / "conductor.json").write_text(json.dumps({"pid": who.pid, "starttime": who.starttime}))
        told = headless.tell_of_frozen(tmp_path, headless.Printer(out), "")
        assert out.getvalue() == ""
        child.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 120.0
        while "is frozen" not in out.getvalue():
            assert time.monotonic() < end
            told = headless.tell_of_frozen(tmp_path, headless.Printer(out), told)
        assert f"kill -CONT {child.pid}" in out.getvalue()
        assert headless.tell_of_frozen(tmp_path, headless.Printer(out), told) == told
        assert out.getvalue().count("is frozen") == 1
        child.send_signal(signal.SIGCONT)
        while "moves again" not in out.getvalue():
            assert time.monotonic() < end
            told = headless.tell_of_frozen(tmp_path, headless.Printer(out), told)
    finally:
        child.kill()
        child.wait()
