"""The demo as its users run it: real pods over SSH, real secret sharing, halted, killed, resumed, verified, gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demorun import PATIENCE_S, Demo, Uvcc, user_at
from time_authority import Authority, authority
from transparency_log import Log, transparency_log

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import iter_events

# few enough rows that no loop is worth compiling: nine fresh pods would compile it nine times
SMALL = ("--set", "job.test_rows=200")
# long enough that a run is still in its full phase when it is told to stop, however slow the commands are
STEPS = "80"  # so that some are left after a halt, when a worker and then a conductor are killed

pytestmark = [pytest.mark.ci("tests/console/test_tmux_demo.py"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def uvcc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uvcc]:
    with user_at(tmp_path_factory.mktemp("home")) as user:
        yield user


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    with authority(tmp_path_factory.mktemp("tsa") / "a") as made:
        yield made


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    with transparency_log(tmp_path_factory.mktemp("log") / "a") as made:
        yield made


@pytest.fixture(scope="module")
def two_demos(uvcc: Uvcc, dated: Authority, public: Log) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two demos of one seed at once: one undisturbed, the other halted, then its worker killed, then its conductor, and
    resumed each time.

    Returns the two summaries and what was seen on the way.
    """
    asked = [f"evidence.timestamp={dated.url}", f"evidence.log={public.url}", f"evidence.log_key={public.pem}"]
    calm = Demo.start(uvcc, "--seed", "5", "--steps", STEPS, *SMALL, *(w for one in asked for w in ("--set", one)))
    rough = Demo.start(uvcc, "--seed", "5", "--steps", STEPS, *SMALL)
    seen: dict[str, Any] = {}
    rough.reach(2)
    seen["live"] = uvcc.json("status", rough.run)
    seen["runs"] = uvcc.json("runs")
    seen["halt"] = uvcc.run("halt", rough.run, "--json")
    seen["halted"] = uvcc.json("status", rough.run)
    seen["resume"] = uvcc.run("resume", rough.run)
    assert seen["halt"].returncode == 0, (seen["halt"].stdout, seen["halt"].stderr, seen["live"]["stage"])
    rough.reach(json.loads(seen["halt"].stdout)["step"] + 2)
    victim = next(w for w in uvcc.json("status", rough.run)["workers"] if w["coord"] == "p1r0s0t0")
    os.kill(victim["pid"], signal.SIGKILL)
    seen["failed"] = rough.outcome()
    seen["after_kill"] = uvcc.json("status", rough.run)
    again = uvcc.start("resume", rough.run, "--wait", "--json")
    rough.reach(max(w["step"] for w in seen["after_kill"]["workers"]) + 2)
    os.kill(uvcc.json("status", rough.run)["conductor"], signal.SIGKILL)
    _, said = again.communicate(timeout=PATIENCE_S)
    seen["orphaned"] = (again.returncode, said)
    seen["resumed"] = uvcc.run("resume", rough.run, "--wait", "--json")
    seen["calm"] = calm.outcome()
    return seen["calm"][1], json.loads(seen["resumed"].stdout), seen


def test_an_undisturbed_demo_is_verified(two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    calm, _, seen = two_demos
    assert seen["calm"][0] == 0
    assert (calm["status"], calm["verified"], calm["leaks"]) == ("ok", True, [])
    assert calm["accuracy"] > 0.8
    assert calm["gates"] == {"result_hashes": True, "verifier": True, "halt_drill_s": True}
    assert calm["drill_s"] > 0
    assert "verify-full running" in seen["calm"][2]


def test_a_service_dated_the_policies_before_the_first_step_and_the_bundles_after_the_last(
    uvcc: Uvcc, dated: Authority, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    run = two_demos[0]["run"]
    said = uvcc.json("timestamp", run, "--authority", str(dated.certificate))
    order = [said[phase][name] for phase in ("smoke", "full") for name in ("policy.json", "proof_bundle.json")]
    assert order == sorted(order)
    stages = {v["name"]: v for v in uvcc.json("status", run)["stages"]}
    assert said["full"]["policy.json"] < stages["full"]["ended"] - 1  # steps take longer than that


def test_a_public_log_has_each_policy_before_its_run(
    uvcc: Uvcc, public: Log, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    said = uvcc.json("verify", two_demos[0]["run"], "--log-key", str(public.pem))
    assert (said["verdict"], len(said["logged"])) == ("VERIFIED", 2)
    texts = [b64decode(json.loads(body)["spec"]["data"]["content"]).split()[0] for body in public.asked]
    assert texts == [b"UVCC_LOG_POLICY_V1", b"UVCC_LOG_RUN_V1"] * 2  # of the smoke, then of the full run


def test_nothing_that_honest_pods_say_is_malformed(
    uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    for run in (two_demos[0]["run"], two_demos[1]["run"]):
        s = fold(e for _, e in iter_events(uvcc.home / "runs" / run / "journal.sqlite"))
        assert dict(s.malformed) == {}, [line.text for line in s.log if "malformed" in line.text]
        assert not [a for a in s.alerts if a.source in ("ingest", "listener", "detector_failed")]


def test_a_halt_stops_every_worker_at_one_step_with_a_verified_checkpoint(
    two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    seen = two_demos[2]
    assert seen["halt"].returncode == 0, seen["halt"].stderr
    done = json.loads(seen["halt"].stdout)
    assert (done["verified"], done["total"]) == (3, 3)
    workers = seen["halted"]["workers"]
    assert {w["step"] for w in workers} == {done["step"]}
    acks = seen["halted"]["halt"]["acks"].values()
    assert {a["stage"] for a in acks} == {"gone"}
    assert all(len(a["checkpoint"]) == 64 for a in acks)
    assert seen["halted"]["status"] == "halted"


def test_the_resume_after_the_halt_cites_the_certificate_that_the_halt_left(
    uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    cited = json.loads(two_demos[2]["halt"].stdout)["certificate"]
    assert len(cited) == 64
    events = [e for _, e in iter_events(uvcc.home / "runs" / two_demos[1]["run"] / "journal.sqlite")]
    asked = [e.args.get("certificate", "") for e in events if isinstance(e, ev.Intent) and e.action == "resume"]
    assert asked == [cited, "", ""]  # the other resumes follow deaths, not halts
    begun = [e.certificate for e in events if isinstance(e, ev.PhaseStarted) and e.phase == "full"]
    assert begun[:3] == ["", cited, ""]
    assert not any(begun[3:])


def test_a_killed_worker_is_a_named_failure_that_can_be_resumed(
    two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    seen = two_demos[2]
    code, _, said = seen["failed"]
    assert code == 1
    assert "worker p1r0s0t0 of P1 was killed by SIGKILL" in said
    after = seen["after_kill"]
    failed = next(s for s in after["stages"] if s["name"] == "full")
    died = next(w["heartbeat_ts"] for w in after["workers"] if w["coord"] == "p1r0s0t0")
    assert failed["status"] == "failed"
    assert failed["ended"] - died < 150.0  # not one of the waits of minutes; seconds on a machine that has room
    assert {w["state"] for w in after["workers"]} == {"exited"}
    assert seen["resumed"].returncode == 0, seen["resumed"].stdout


def test_halt_kill_and_resume_leave_no_trace_in_the_result(
    two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    calm, rough, _ = two_demos
    assert rough["verified"] is True
    for key in ("sid_job", "global_root", "result_hash", "values"):
        assert rough[key] == calm[key], key


def test_a_live_run_is_seen_from_other_processes(
    two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    calm, rough, seen = two_demos
    assert {r["run"]: r["live"] for r in seen["runs"]} == {calm["run"]: True, rough["run"]: True}
    live = seen["live"]
    assert (live["phase"], live["stage"], live["status"]) == ("full", "full", "running")
    assert [p["state"] for p in live["pods"]] == ["agent"] * 3
    assert all(w["pid"] for w in live["workers"])
    assert seen["resume"].returncode == 0


def test_the_processes_of_a_run_leave_a_log_that_one_verb_reads(
    uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    run = two_demos[1]["run"]
    rows = [json.loads(line) for line in uvcc.run("logs", run, "--json").stdout.splitlines()]
    assert {r["process"] for r in rows} == {"conductor", "haltd"}
    assert {r["run"] for r in rows} == {run}
    assert [r["ts"] for r in rows] == sorted(r["ts"] for r in rows)
    stages = [r["stage"] for r in rows if r["message"].startswith("the stage is through")]
    assert stages == list(dict.fromkeys(stages))
    assert {"provision", "smoke", "full", "collect"} <= set(stages)
    asked = {r["nonce"] for r in rows if r["process"] == "haltd" and "asked for" in r["message"]}
    taken = {r["pod"] for r in rows if r.get("nonce") in asked and "is taken" in r["message"]}
    assert taken == {"p0r0", "p1r0", "p2r0"}
    failed = [r["message"] for r in rows if r["level"] == "error"]
    assert any("killed by SIGKILL" in text for text in failed), failed
    one = [json.loads(line) for line in uvcc.run("logs", run, "--json", "--pod", "p1r0").stdout.splitlines()]
    assert one == [r for r in rows if r.get("pod", "").endswith("p1r0")] != []
    for name in ("conductor.log", "haltd.log"):  # nothing was said past the loggers
        assert (uvcc.home / "runs" / run / name).read_text() == ""


def test_evidence_came_home_and_secrets_did_not(
    uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    artifacts = Path(two_demos[1]["artifacts"])
    names = {str(p.relative_to(artifacts)) for p in artifacts.rglob("*") if p.is_file()}
    wanted = {f"full/p{p}r0/transcript_p{p}r0s0t0/leaves.bin" for p in range(3)}
    wanted |= {f"full/p{p}r0/{name}" for p in range(3) for name in ("result.json", "exit.json", "training.csv")}
    wanted |= {"full/proof_bundle.json", "full/policy.json", "run_full.log", "run_full.jsonl", "dp_layout.json"}
    wanted |= {
        "full/dp_roots.json",
        "full/dp_matrix.md",
        "smoke/proof_bundle.json",
        "MANIFEST.json",
        "MANIFEST.json.sig",
    }
    assert wanted <= names
    assert not [
        n for n in names if any(word in n for word in ("sealed", "token", "identity", ".safetensors", "ed25519"))
    ]
    log = (artifacts / "run_full.log").read_text()
    assert log.count("EVENT dp_preflight_ok") == 3
    assert "EVENT verifier_ok" in log
    for path in (artifacts / "full", artifacts.parent):
        again = uvcc.run("verify", str(path), "--require", "pinned,transcripts,full,manifest")
        assert again.returncode == 0, again.stderr
        assert "VERIFIED     phase full" in again.stdout
    elsewhere = artifacts.parent.parent.parent / "copy"
    shutil.copytree(artifacts, elsewhere)
    assert uvcc.run("verify", str(elsewhere)).returncode == 3
    leaves = artifacts / "full/p2r0/transcript_p2r0s0t0/leaves.bin"
    data = bytearray(leaves.read_bytes())
    data[len(data) // 2] ^= 1
    leaves.write_bytes(data)
    refused = uvcc.run("verify", str(artifacts / "full"))
    assert refused.returncode == 1
    assert "p2r0" in refused.stderr or "P2" in refused.stderr


def test_nothing_of_a_run_is_left(uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    assert uvcc.processes() == {}
    assert uvcc.on_pods() == {}
    assert list(uvcc.temp.iterdir()) == []
    assert uvcc.json("pods") == []


def test_an_interrupt_tears_everything_down_and_waits_for_it(
    uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    demo = Demo.start(uvcc, "--steps", STEPS, *SMALL)
    uvcc.events(demo.run, lambda e: e["kind"] == "pod" and e["state"] == "booting")
    demo.interrupt()
    code, summary, _ = demo.outcome()
    assert code == 130
    assert (summary["status"], summary["leaks"]) == ("torn_down", [])
    assert uvcc.processes() == {}
    assert list(uvcc.temp.iterdir()) == []


def test_a_killed_conductor_is_replaced_by_one_that_adopts_its_pods(
    uvcc: Uvcc, two_demos: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> None:
    run, seen = two_demos[1]["run"], two_demos[2]
    code, said = seen["orphaned"]
    assert code == 1
    assert f"uvcc resume {run}" in said
    assert seen["resumed"].returncode == 0, seen["resumed"].stderr
    events = [e for _, e in iter_events(uvcc.home / "runs" / run / "journal.sqlite")]
    addresses = {(e.pod, e.address) for e in events if isinstance(e, ev.PodChanged) and e.address}
    assert sorted(pod for pod, _ in addresses) == ["p0r0", "p1r0", "p2r0"]  # one address each from first to last
