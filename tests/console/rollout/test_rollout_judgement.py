"""The pure decisions of a rollout: preflight findings, why a phase cannot end well, gates, what may leave a pod."""

from __future__ import annotations

import re
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.plan.gate_words import gate_words
from uvcc_console.plan.plan import Phase, make_plan
from uvcc_console.plan.profile import available, load
from uvcc_console.plan.schema import GatesPart
from uvcc_console.rollout.stages.fleet.findings import Requirements, find_problems
from uvcc_console.rollout.stages.training.dying_words import last_line, last_words, no_room
from uvcc_console.rollout.stages.training.phases import trouble
from uvcc_console.rollout.stages.training.silence import hang
from uvcc_console.rollout.stages.verify.verification import measure

COORDS = ["p0r0s0t0", "p1r0s0t0", "p2r0s0t0"]


GPU = {"index": 0, "name": "H100", "uuid": "GPU-a", "memory_used": 3, "ecc_errors_uncorrected_volatile_total": 0}


def probe(**changes: Any) -> dict[str, Any]:
    base = {
        "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.1"},
        "skew_s": 0.0,
        "disk": {"free_mib": 9000.0},
        "memory": {},
    }
    return base | changes


def test_a_fleet_without_fault_passes() -> None:
    assert find_problems({"p0r0": probe(), "p1r0": probe(), "p2r0": probe()}, Requirements(GatesPart())) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.0", "numpy": "2.1"}},
            "torch is 2.12.0, on p0r0 it is 2.13.0",
        ),
        ({"skew_s": -47.2}, "its clock is -47.2 s off"),
        ({"disk": {"free_mib": 100.0}}, "100 MiB of disk are free"),
        ({"gpu_error": "no devices were found"}, "no devices were found"),
        ({"memory": {"available_mib": 90.0}}, "90 MiB of memory are free"),
        ({"memory": {"available_mib": 9e4, "cgroup_limit_mib": 512.0, "cgroup_used_mib": 500.0}}, "12 MiB of memory"),
        ({"gpus": []}, "it shows 0 of 1 GPUs"),
        (
            {"gpus": [GPU | {"ecc_errors_uncorrected_volatile_total": 2}]},
            "has 2 uncorrected memory errors",
        ),
        ({"gpus": [GPU | {"memory_used": 30000}]}, "GPU 0 (H100): 30000 MiB are in use"),
        (
            {"gpus": [GPU | {"memory_used": 30000}], "gpu_processes": [{"pid": 77, "gpu": "GPU-a"}]},
            "30000 MiB are in use by processes 77",
        ),
        ({"imports": {"torch": "2.13.0", "cuda": ""}}, "torch 2.13.0 was built without CUDA"),
    ],
)
def test_each_fault_is_named_with_its_pod(change: dict[str, Any], said: str) -> None:
    fleet = {name: probe(gpus=[dict(GPU)]) for name in ("p0r0", "p1r0", "p2r0")}
    found = find_problems(fleet | {"p1r0": fleet["p1r0"] | change}, Requirements(GatesPart(), gpus=1, cuda=True))
    assert [f.pod for f in found] == ["p1r0"]
    assert said in found[0].what
    assert found[0].hint


def test_a_torch_that_the_engine_cannot_run_on_is_named_with_its_cure_before_the_smoke() -> None:
    old = {"versions": {"python": "3.11.7", "torch": "2.4.1", "numpy": "2.1"}}
    gpus = [GPU | {"driver_version": "550.90.07"}]
    fleet = {name: probe(gpus=gpus, **old) for name in ("p0r0", "p1r0", "p2r0")}
    found = find_problems(fleet, Requirements(GatesPart(), gpus=1))
    assert [f.pod for f in found] == ["p0r0", "p1r0", "p2r0"]
    assert found[0].what == "torch 2.4.1 is too old, the engine needs 2.5 or newer"
    assert "fleet.packages: ['torch>=2.5,<2.11']" in found[0].hint
    fleet = {name: one | {"imports": {"torch": "2.7.0", "cuda": "12.6"}} for name, one in fleet.items()}
    assert find_problems(fleet, Requirements(GatesPart(), gpus=1)) == []  # what was imported counts


def test_a_wrong_clock_of_the_operators_machine_is_told_from_the_pods() -> None:
    fleet = {f"p{n}r0": probe(skew_s=3599.5 + n) for n in range(3)}
    found = find_problems(fleet, Requirements(GatesPart()))
    assert {f.what.partition(" are ")[0] for f in found} == {"its clock and those of all other pods"}
    assert "synchronise it" in found[0].hint
    fleet["p1r0"] = probe(skew_s=-3600.0)  # they do not agree: each is told for itself
    assert {f.what for f in find_problems(fleet, Requirements(GatesPart()))} == {
        f"its clock is {probe['skew_s']:+.1f} s off this machine's, gates.clock_skew_s is 30"
        for probe in fleet.values()
    }


def test_of_two_clocks_that_disagree_neither_is_blamed() -> None:
    """A domain with one pod: its own console may be the one that is a day behind."""
    (found,) = find_problems({"p2r0": probe(skew_s=86400.0)}, Requirements(GatesPart()))
    assert found.what == "its clock is +86400.0 s off this machine's, gates.clock_skew_s is 30"
    assert found.hint.startswith("one of the two is wrong")


def full_phase() -> Phase:
    _, profile = load("demo")
    return make_plan("demo-1", "demo", profile).phases["full"]


def running(*more: ev.Event) -> Snapshot:
    start: list[ev.Event] = [
        ev.PhaseStarted(phase="full", engine_run="demo-1.full", steps=60, sid_job="ab"),
        *(ev.WorkerProcess(pod=c[:4], coord=c, state="started", pid=n + 1) for n, c in enumerate(COORDS)),
    ]
    return fold([*start, *more])


def exited(coord: str, rc: int, signal: str = "") -> ev.Event:
    return ev.WorkerProcess(pod=coord[:4], coord=coord, state="exited", rc=rc, signal=signal)


def test_a_running_phase_has_no_trouble() -> None:
    assert trouble(running(), full_phase()) is None
    assert trouble(running(exited(COORDS[0], 0)), full_phase()) is None


def test_the_killed_worker_is_named_whoever_noticed_first() -> None:
    found = trouble(running(exited(COORDS[0], 4), exited(COORDS[2], 4), exited(COORDS[1], -9, "SIGKILL")), full_phase())
    assert found is not None
    assert found.what == "worker p1r0s0t0 of P1 was killed by SIGKILL"
    assert found.coord == "p1r0s0t0"


def test_a_broken_protocol_explains_those_that_only_lost_a_peer() -> None:
    found = trouble(running(exited(COORDS[0], 4), exited(COORDS[2], 3)), full_phase())
    assert found is not None
    assert found.what == "worker p2r0s0t0 of P2 ended with exit code 3"


def test_a_fork_comes_before_everything_and_forbids_a_resume() -> None:
    s = running(exited(COORDS[1], -9, "SIGKILL"), ev.ForkDetected(epoch=3, parties=[0, 2]))
    found = trouble(s, full_phase())
    assert found is not None
    assert "FORK at epoch 3" in found.what
    assert "do not resume" in found.hint


def test_while_the_halt_ladder_works_its_signals_are_no_failure() -> None:
    asked = ev.HaltRequested(nonce="n", mode="halt", by="cli")
    ended = [exited(c, -15, "SIGTERM") for c in COORDS]
    assert trouble(running(asked, ended[0]), full_phase()) is None
    done = ev.HaltDone(nonce="n", mode="halt", verified=0, total=3, step=-1, seconds=75.0)
    found = trouble(running(asked, *ended, done), full_phase())
    assert found is not None
    assert "without a checkpoint" in found.what


def test_a_resume_forgets_how_the_workers_ended() -> None:
    again = ev.PhaseStarted(phase="full", engine_run="demo-1.full", steps=60, sid_job="ab", attempt=1)
    assert trouble(running(exited(COORDS[1], -9, "SIGKILL"), again), full_phase()) is None


def test_silence_is_a_hang_unless_the_run_is_held() -> None:
    beat = ev.HeartbeatRead(ts=100.0, pod="p0r0", coord=COORDS[0], record={"step": 3})
    s = running(beat)
    assert hang(s, full_phase(), 50.0, 120.0, 210.0) is None
    found = hang(s, full_phase(), 50.0, 120.0, 221.0)
    assert found is not None
    assert "121 s" in found.what
    held = running(beat, ev.HaltRequested(nonce="n", mode="hold", by="tui"))
    assert hang(held, full_phase(), 50.0, 120.0, 500.0) is None


def test_beats_of_before_the_clock_was_set_back_count_for_nothing() -> None:
    """They seemed to be of the future: a run that hung was not told of for as long as the clock had been set back."""
    s = running(ev.HeartbeatRead(ts=3700.0, pod="p0r0", coord=COORDS[0], record={"step": 3}))
    assert hang(s, full_phase(), 100.0, 120.0, 210.0) is None
    assert hang(s, full_phase(), 100.0, 120.0, 221.0) is not None


def smoked(*, losses: tuple[float, ...] = (2.3, 2.1), hashes: int = 1, ok: bool = True, drill: float = 0.8) -> Snapshot:
    created = ev.RunCreated(
        run="r", profile_name="d", job_kind="private", replicas=1, pipeline_stages=1, tensor=1, stages=[]
    )
    events: list[ev.Event] = [created, ev.PhaseStarted(phase="smoke", engine_run="r.smoke", steps=2, sid_job="ab")]
    for c in COORDS:
        events += [ev.Metric(coord=c, step=n, values={"loss": x}) for n, x in enumerate(losses)]
    for n, c in enumerate(COORDS):
        events.append(ev.ResultReported(coord=c, phase="smoke", result_hash=f"h{n % hashes}", values={}))
    events += [
        ev.HaltRequested(nonce="n", mode="hold", by="conductor", drill=True),
        ev.HaltDone(nonce="n", mode="hold", verified=3, total=3, step=1, seconds=drill, drill=True),
        ev.PhaseVerdict(phase="smoke", ok=ok, global_root="", sid_job="", detail="" if ok else "leaves: missing"),
    ]
    return fold(events)


def test_a_good_smoke_passes_every_gate() -> None:
    gates = list(measure(smoked(), GatesPart(), "smoke"))
    assert [(g.name, g.ok) for g in gates] == [
        ("loss_falls", True),
        ("result_hashes", True),
        ("verifier", True),
        ("halt_drill_s", True),
    ]


@pytest.mark.parametrize(
    ("change", "gate", "measured"),
    [
        ({"losses": (2.1, 2.3)}, "loss_falls", "-0.2000"),
        ({"hashes": 2}, "result_hashes", "2"),
        ({"ok": False}, "verifier", "leaves: missing"),
        ({"drill": 7.5}, "halt_drill_s", "7.5 s"),
    ],
)
def test_each_gate_fails_by_its_own_measure(change: dict[str, Any], gate: str, measured: str) -> None:
    failed = [g for g in measure(smoked(**change), GatesPart(), "smoke") if not g.ok]
    assert [(g.name, g.measured) for g in failed] == [(gate, measured)]


def test_floors_are_gates_only_when_asked_for() -> None:
    found = {g.name: g for g in measure(smoked(), GatesPart(toks_per_s=50.0, gate_entropy=0.5), "smoke")}
    assert not found["toks_per_s"].ok
    assert found["gate_entropy"].measured == "not reported"


def test_ceilings_are_gates_only_when_asked_for() -> None:
    record = {"step": 3, "gate_collapse_frac": 0.02, "gpu_mem_reserved_mib": 30_000.0}
    s = running(ev.HeartbeatRead(ts=1.0, pod="p0r0", coord=COORDS[0], record=record))
    assert not {"gate_collapse", "gpu_mem_mib"} & {g.name for g in measure(s, GatesPart(), "full")}
    found = {g.name: g for g in measure(s, GatesPart(gate_collapse=0.01, gpu_mem_mib=40_960), "full")}
    assert (found["gate_collapse"].ok, found["gate_collapse"].measured) == (False, "0.02")
    assert (found["gpu_mem_mib"].ok, found["gpu_mem_mib"].wanted) == (True, "<= 40960")


def test_a_stall_in_the_smoke_is_a_gate_when_asked_for() -> None:
    stalled = ev.EngineEvent(ts=1.0, pod="p0r0", level="warn", event="watchdog_dump", fields={"age_s": 70.0})
    s = running(stalled)
    assert "watchdog_dumps" not in {g.name for g in measure(s, GatesPart(), "full")}
    (gate,) = (g for g in measure(s, GatesPart(watchdog_dumps=0), "full") if g.name == "watchdog_dumps")
    assert (gate.ok, gate.wanted, gate.measured) == (False, "<= 0", "1")
    assert next(g for g in measure(s, GatesPart(watchdog_dumps=1), "full") if g.name == "watchdog_dumps").ok


def test_what_really_runs_is_held_against_the_plan_before_full() -> None:
    plan = {"parameters": 233320, "seq_len": 128, "precision": "bf16", "save_every": 40}
    created = ev.RunCreated(
        ts=0.5, run="r", profile_name="t", job_kind="lm", replicas=1, pipeline_stages=1, tensor=1, stages=[],
        profile={"job": {"kind": "lm", "plan": plan}},
    )  # fmt: skip

    def config(*told: dict[str, Any]) -> ev.GateMeasured:
        facts = [
            ev.EngineEvent(ts=2.0, pod="p0r0", level="info", event="run_facts", fields={"coord": COORDS[i], **fields})
            for i, fields in enumerate(told)
        ]
        s = fold([created, ev.PhaseStarted(ts=1.0, phase="smoke", engine_run="r.smoke", steps=2, sid_job=""), *facts])
        return next(g for g in measure(s, GatesPart(halt_drill_s=0), "smoke") if g.name == "config")

    good = config(plan)
    assert (good.ok, good.measured) == (True, "as planned")
    assert good.wanted == "parameters 233320, seq_len 128, precision bf16, save_every 40"
    other = config(plan, {**plan, "precision": "fp32", "seq_len": 256})
    said = f"{COORDS[1]}: precision is fp32, planned bf16; {COORDS[1]}: seq_len is 256, planned 128"
    assert (other.ok, other.measured) == (False, said)
    assert config({"parameters": 233320, "seq_len": 128}).measured == "precision, save_every not reported"
    assert not config().ok


def test_a_failed_worker_is_told_in_the_words_of_its_exit_record() -> None:
    told = {"coord": COORDS[1], "status": "failed", "error": "error= the loss is hint=NaN", "hint": "a smaller rate"}
    s = running(ev.EngineEvent(pod="p1r0", level="error", event="exit", fields=told), exited(COORDS[1], 1))
    assert last_words(s, COORDS[1]) == ("error= the loss is hint=NaN", "a smaller rate")
    assert last_words(s, COORDS[0]) is None
    again = ev.WorkerProcess(pod="p1r0", coord=COORDS[1], state="started", pid=9)
    assert last_words(reduce(s, again), COORDS[1]) is None


def test_a_program_that_never_began_is_told_by_the_last_line_of_its_own_log() -> None:
    lines = ["", "python3: can't open file 'x.py'\x1b[31m", "  "]
    of_another = ev.LogLines(pod="p0r0", src=f"worker_{COORDS[0]}.log", lines=["fine"])
    s = running(exited(COORDS[1], 2), ev.LogLines(pod="p1r0", src=f"worker_{COORDS[1]}.log", lines=lines), of_another)
    assert last_line(s, COORDS[1]) == "python3: can't open file 'x.py'"
    assert last_line(running(), COORDS[1]) == ""


def test_what_a_worker_noted_as_routine_is_not_told_as_the_reason_of_its_end() -> None:
    """A worker that was killed writes nothing more: its newest line is of something else."""
    noted = "2026-11-27 01:54:37,197 INFO several processes may measure matrix products at once"

    def told(*lines: str) -> str:
        log = ev.LogLines(pod="p1r0", src=f"worker_{COORDS[1]}.log", lines=list(lines))
        return last_line(running(exited(COORDS[1], -9, "SIGKILL"), log), COORDS[1])

    assert told(noted) == ""
    assert told("Killed: out of memory", noted) == "Killed: out of memory"
    assert told(noted, noted.replace("INFO", "ERROR")) == noted.replace("INFO", "ERROR")


def test_a_worker_that_found_no_room_for_its_last_words_is_told_by_its_pods_disk() -> None:
    """Its log ended in mid-line, and what was told of its end was half a traceback."""

    def told(free: float) -> tuple[str, str] | None:
        pod = ev.PodChanged(pod="p1r0", party=1, replica=0, provider="local", state="agent")
        disk = ev.PodTelemetry(pod="p1r0", cpu=0.0, mem_mib=0.0, disk_free_mib=free, gpus=[])
        return no_room(running(pod, disk, exited(COORDS[1], 1)), COORDS[1])

    assert told(600.0) is None
    found = told(0.0)
    assert found is not None
    assert found[0] == "the disk of pod p1r0 is full"
    assert "make room there" in found[1]
    assert no_room(running(), COORDS[1]) is None


SHIPPED = sorted(found.name for found in available())


@pytest.mark.parametrize("name", SHIPPED)
def test_the_gates_of_every_shipped_profile_are_told_in_words(name: str) -> None:
    _, found = load(name)
    text = gate_words(found.gates, found.job.kind)
    assert not re.search(r"True|False|None|[\[\]{}_']", text), text
    assert ("the proof verifies" in text) == (found.job.kind == "private")


def test_a_gate_that_is_off_is_not_told() -> None:
    off = GatesPart(loss_falls=False, verifier="any", halt_drill_s=0, disk_free_mib=0)
    assert gate_words(off, "private") == "1 result hash, clocks within 30 s"
    on = GatesPart(at=[120, 500], toks_per_s=9000, gate_collapse=0.25, watchdog_dumps=0)
    text = gate_words(on, "lm")
    for words in ("at least 9000 tokens/s", "at most 25% of the gates", "at most 0 stalls", "at steps 120, 500"):
        assert words in text


def test_a_plan_that_was_not_kept_is_told_as_its_profile_spells_it() -> None:
    plan = {"shard": True, "hidden": [64, 32], "precision": "bf16"}
    created = ev.RunCreated(
        run="r", profile_name="d", job_kind="lm", replicas=1, pipeline_stages=1, tensor=1, stages=[],
        profile={"job": {"plan": plan}},
    )  # fmt: skip
    facts = {"coord": COORDS[0], "shard": False, "hidden": [64, 32]}
    s = fold([created, ev.EngineEvent(pod="p0r0", level="info", event="run_facts", fields=facts)])
    gate = next(g for g in measure(s, GatesPart(loss_falls=False, halt_drill_s=0), "smoke") if g.name == "config")
    assert gate.wanted == "shard true, hidden [64, 32], precision bf16"
    assert "shard is false, planned true" in gate.measured
