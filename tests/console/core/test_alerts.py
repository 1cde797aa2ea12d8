"""Every detector, on the smallest run that shows what it looks for, and silent on the healthy one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from uvcc_console.core import alerts
from uvcc_console.core import events as ev
from uvcc_console.core.alerts.expense import expected
from uvcc_console.core.alerts.failed_proofs import failed_proof
from uvcc_console.core.alerts.finding import Finding
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import Snapshot

PROFILE = {
    "job": {"kind": "private", "checkpoint_every": 10, "plan": {"seq_len": 2048}},
    "gates": {"toks_per_s": 39.0, "disk_free_mib": 512},
    "limits": {"total": 10.0},
}
COORDS = [f"p{p}r{r}s0t0" for r in (0, 1) for p in (0, 1, 2)]
NOW = 1000.0


class Healthy:
    """A run of six workers that make a step a second; one thing is then made wrong."""

    def __init__(self, steps: int = 60) -> None:
        self.now = NOW
        created = ev.RunCreated(
            ts=1.0,
            run="r",
            profile_name="t",
            job_kind="private",
            replicas=2,
            pipeline_stages=1,
            tensor=1,
            stages=["full"],
            profile=PROFILE,
        )
        self.s = fold([created, *(self.pod(c) for c in COORDS)])
        self.add(ev.PhaseStarted(phase="full", engine_run="r.full", steps=500, sid_job=""))
        self.step = 0
        for _ in range(steps):
            self.tick()

    @staticmethod
    def pod(coord: str) -> ev.Event:
        return ev.PodChanged(pod=coord[:4], party=int(coord[1]), replica=int(coord[3]), provider="local", state="agent")

    def add(self, *events: ev.Event) -> None:
        for e in events:
            self.s = reduce(self.s, ev.from_json(e.kind, self.now, ev.to_json(e)) or e)

    def tick(self, seconds: float = 1.0, only: list[str] | None = None, **more: object) -> None:
        self.now += seconds
        self.step += 1
        for rank, coord in enumerate(COORDS):
            if only is not None and coord not in only:
                continue
            record = {"ts": self.now, "rank": rank, "step": self.step, "phase": "train", "mem_mib": 200.0}
            record["last_collective"] = {"group": "dp", "op": "all_reduce", "seq": self.step}
            self.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record={**record, **more}))
            loss = 1.0 / (1 + self.step)
            self.add(ev.Metric(coord=coord, step=self.step, values={"loss": loss, "toks_per_s": 50.0}))
        if self.step % 10 == 0:
            fields = {"step": self.step, "sha256": "ab"}
            self.add(ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=fields))

    def names(self, later: float = 0.0) -> set[str]:
        return {f.name for f in alerts.detect(self.s, self.now + later)}


def found(s: Snapshot, now: float, name: str) -> alerts.Finding:
    (one,) = [f for f in alerts.detect(s, now) if f.name == name][:1]
    return one


def test_a_healthy_run_is_left_alone() -> None:
    assert Healthy().names() == set()


def test_a_worker_that_says_nothing_and_not_one_that_has_ended() -> None:
    run = Healthy()
    for _ in range(20):
        run.tick(only=COORDS[1:])
    assert found(run.s, run.now, "stalled_heartbeat").subject == COORDS[0]
    assert "no heartbeat for 20 s" in found(run.s, run.now, "stalled_heartbeat").text
    run.add(ev.WorkerProcess(pod="p0r0", coord=COORDS[0], state="exited", rc=0))
    assert "stalled_heartbeat" not in run.names()


def test_slow_but_alive_is_measured_against_the_runs_own_pace() -> None:
    run = Healthy()
    for _ in range(6):
        run.tick(3.0)
    assert found(run.s, run.now, "slow_but_alive").text == "a step takes 3.00 s, usual is 1.00 s"


def test_a_hang_names_the_first_rank_that_differs() -> None:
    run = Healthy()
    step = run.step
    for _ in range(9):
        run.now += 4
        for rank, coord in enumerate(COORDS):
            seq = step + (0 if rank == 2 else 1)
            last = {"group": "dp", "op": "all_reduce", "seq": seq}
            record = {"ts": run.now, "rank": rank, "step": step, "phase": "train", "last_collective": last}
            run.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=record))
    hang = found(run.s, run.now, "hang_in_collective")
    assert f"first that differs: {COORDS[2]} is in dp all_reduce #60, the others in dp all_reduce #61" in hang.text
    assert hang.level == "error"


def test_a_step_that_is_foretold_to_take_long_is_no_hang() -> None:
    run = Healthy()
    step = run.step

    def wait(seconds: float) -> None:
        until = run.now + seconds
        while run.now < until:
            run.now += 4
            for rank, coord in enumerate(COORDS):
                record = {"ts": run.now, "rank": rank, "step": step, "phase": "train"}
                run.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=record))

    wait(36)
    assert "hang_in_collective" in run.names()
    run.add(ev.PlanForetold(steps=4, rounds=0, bytes=1e9, seconds=29.0))
    wait(100)
    assert "hang_in_collective" not in run.names()
    wait(180)
    assert "hang_in_collective" in run.names()


def test_a_straggler_and_a_party_that_falls_behind() -> None:
    run = Healthy()
    for _ in range(4):
        run.tick(only=COORDS[1:])
    assert found(run.s, run.now, "straggler").subject == COORDS[0]
    others = [c for c in COORDS if not c.startswith("p0")]
    for _ in range(4):
        run.tick(only=others)
    assert found(run.s, run.now, "skew_between_parties").subject == "P0"


def test_throughput_below_the_floor() -> None:
    run = Healthy()
    for step in range(61, 70):
        run.add(ev.Metric(coord=COORDS[0], step=step, values={"toks_per_s": 30.0}))
    assert found(run.s, run.now, "throughput_below_floor").text == "30 toks/s, floor is 39"


@pytest.mark.parametrize(
    ("losses", "name"),
    [
        ([math.nan], "loss_nan"),
        ([0.25] * 130, "loss_flat"),
        ([1.0 / (k + 1) for k in range(100)] + [0.9] * 60, "loss_diverging"),
        ([10.0 - 0.07 * k for k in range(100)] + [8.0] * 60, "loss_diverging"),
        ([2.5] * 50 + [0.012] * 50 + [0.018 + 1e-4 * k for k in range(50)], ""),  # it has learnt what there is
    ],
)
def test_a_loss_that_is_not_right(losses: list[float], name: str) -> None:
    run = Healthy(0)
    for step, loss in enumerate(losses):
        run.add(ev.Metric(coord=COORDS[0], step=step, values={"loss": loss}))
    assert {n for n in run.names() if n.startswith("loss")} == {name} - {""}


def test_numbers_that_left_the_fixed_point_are_told_once_with_what_to_do() -> None:
    run = Healthy(0)
    for count in (0.0, 3.0):
        for coord in COORDS:
            run.add(ev.Metric(coord=coord, step=10, values={"loss": 0.5, "overflow": count}, split="val"))
        assert ("numbers_overflow" in run.names()) == bool(count)
    told = found(run.s, run.now, "numbers_overflow")
    assert told.text == "3 numbers were too large for the fixed point after step 10"
    assert "clip_norm" in told.hint


def test_gates_data_memory() -> None:
    run = Healthy()
    run.tick(gate_entropy_mean=0.05, gate_collapse_frac=0.9, dt_fetch_s=0.6)
    assert {"gate_collapse", "slow_data"} <= run.names()
    creeping = Healthy(0)
    for k in range(60):
        creeping.tick(mem_mib=200.0 + 5 * k)
    assert "memory_creep" in creeping.names()
    once = Healthy(0)
    for k in range(60):  # a library is loaded half-way, and no more is taken from then on
        once.tick(mem_mib=(210.0 if k < 32 else 343.0) + k / 10)
        assert "memory_creep" not in once.names()
    on_gpu = Healthy(0)
    for k in range(60):
        on_gpu.tick(mem_mib=200.0, gpu_mem_alloc_mib=9000.0 + 100 * k)
    assert "memory_creep" in on_gpu.names()


def test_a_disk_that_fills_and_one_that_is_full() -> None:
    run = Healthy(1)
    for k in range(15):
        run.now += 30
        run.add(ev.PodTelemetry(pod="p1r0", disk_free_mib=20000.0 - 400 * k))
    assert "full in 18 min" in found(run.s, run.now, "disk_filling").text
    run.add(ev.PodTelemetry(pod="p1r0", disk_free_mib=100.0))
    assert found(run.s, run.now, "disk_filling").level == "error"


def test_checkpoints_overdue_and_refused() -> None:
    run = Healthy(19)
    run.s = fold([], run.s)
    for _ in range(25):
        run.tick()
    assert "checkpoint_overdue" not in run.names()
    late = Healthy(9)
    for step in range(10, 40):
        for coord in COORDS:
            record = {"ts": late.now, "rank": 0, "step": step, "phase": "train"}
            late.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=record))
    assert "last checkpoint at 0, planned every 10" in found(late.s, late.now, "checkpoint_overdue").text
    began = ev.PhaseStarted(phase="full", engine_run="r.full-2", steps=500, sid_job="", first_step=35)
    late.add(began)  # another pod in place of a lost one: the run goes on from where it was
    for step, overdue in ((54, False), (59, True)):
        for coord in COORDS:
            record = {"ts": late.now, "rank": 0, "step": step, "phase": "train"}
            late.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=record))
        assert ("checkpoint_overdue" in late.names()) == overdue
    assert "last checkpoint at 35" in found(late.s, late.now, "checkpoint_overdue").text
    fields = {"detail": "step-30: weights.safetensors is damaged"}
    late.add(ev.EngineEvent(pod="p2r1", level="warn", event="checkpoint_refused", fields=fields))
    assert found(late.s, late.now, "checkpoint_unverified").subject == "p2r1"


def test_spending_a_dead_path_a_fork_and_a_config_that_was_not_planned() -> None:
    run = Healthy()
    run.add(ev.CostTick(hourly=3.0, spent=9.5, forecast=10.0))
    run.add(ev.LinkChanged(pod="p0r1", path="relay", up=False))
    run.add(ev.ForkDetected(epoch=7, parties=[0, 2]))
    run.add(ev.EngineEvent(pod="p0r0", level="info", event="run_facts", fields={"coord": COORDS[0], "seq_len": 1024}))
    later = 31.0
    assert {"spend_above_plan", "path_dead", "root_fork", "not_as_planned"} <= run.names(later)
    assert found(run.s, run.now, "not_as_planned").text == "seq_len is 1024, planned 2048"


def outage(run: Healthy, event: str, *pods: str, url: str = "http://10.0.0.1:80", why: str = "refused") -> None:
    fields = {"url": url, "why": why}
    run.add(*(ev.EngineEvent(pod=pod, level="warn", event=event, fields=fields) for pod in pods))


def test_a_relay_that_is_away_is_named_in_place_of_who_waits_for_whom() -> None:
    run = Healthy()
    outage(run, "relay_down", "p0r0", "p1r0", "p2r0", why="Connection \x1b[31mrefused")
    outage(run, "relay_down", "p0r0", why="refuses this party")  # one more reason, not one more outage
    for _ in range(4):
        run.tick(10.0, step=run.step)
        run.step -= 1
    assert "hang_in_collective" not in run.names()
    told = found(run.s, run.now, "relay_away")
    assert told.text == (
        "the relay http://10.0.0.1:80 is out of reach of p0r0, p1r0, p2r0 for 40 s: refuses this party"
    )
    assert told.level == "error"
    assert "F9, then uvcc resume r" in told.hint
    outage(run, "relay_up", "p0r0", "p1r0", "p2r0")
    assert "relay_away" not in run.names()
    assert "hang_in_collective" in run.names()  # it is another reason now


def test_a_full_nats_server_is_not_said_to_be_away() -> None:
    run = Healthy()
    outage(run, "relay_down", "p0r0", url="nats://10.0.0.1:4222", why="its stream s is full: raise its max_bytes")
    for _ in range(4):
        run.tick(10.0, step=run.step)
        run.step -= 1
    told = found(run.s, run.now, "relay_away")
    assert told.text.startswith("the NATS server nats://10.0.0.1:4222 passes no message of p0r0 for 40 s: its stream s")
    assert told.hint.startswith("the run waits, and goes on once that is mended or the server is up again; else F9")


def test_a_worker_that_cannot_reach_a_party_says_where_and_why_before_its_first_step() -> None:
    run = Healthy(0)
    coord, why = COORDS[2], "cannot reach 10.0.0.2:24765: no \x1b[31manswer"

    def waits(seconds: float, whom: str = "p1") -> None:
        beat = {"ts": run.now, "rank": 2, "step": 0, "phase": "start", "waiting_on": whom, "waiting_s": seconds}
        run.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=beat))

    def told(seconds: float, **more: object) -> None:
        fields = {"coord": coord, "peer": 1, "since_s": seconds, "retransmits": 0, **more}
        run.add(ev.EngineEvent(pod=coord[:4], level="warn", event="waiting", fields=fields))

    told(5.0, why=why)
    waits(6.0)
    assert "peer_unreached" not in run.names()  # workers do not start at the same moment
    waits(16.0)
    alert = found(run.s, run.now, "peer_unreached")
    assert (alert.subject, alert.level) == (coord, "error")
    assert alert.text == "waits for p1 for 16 s: cannot reach 10.0.0.2:24765: no answer"
    assert "nc -vz" in alert.hint
    assert any("cannot reach 10.0.0.2:24765: no answer" in entry.text for entry in run.s.log)
    waits(16.0, "p0")  # another wait
    assert "peer_unreached" not in run.names()
    told(35.0)  # the connection stands, and the party is slow
    waits(40.0)
    assert "peer_unreached" not in run.names()


def test_a_relay_that_was_away_is_no_news_once_steps_come_or_the_next_attempt_has_begun() -> None:
    run = Healthy()
    outage(run, "relay_down", "p0r0", "p1r0", url="nats://10.0.0.1:4222")
    assert "relay_away" not in run.names()  # it may be back in a moment
    assert "the NATS server nats://10.0.0.1:4222" in found(run.s, run.now + 11, "relay_away").text
    for _ in range(30):
        run.tick()  # steps come, whatever has become of the word that it is back
    assert "relay_away" not in run.names()
    assert "relay_away" in run.names(11.0)
    run.add(ev.PhaseStarted(phase="full", engine_run="r.full", steps=500, sid_job="", attempt=1))
    assert not run.s.outages


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"p0r0": ["P2"], "p1r0": ["P2"], "p2r0": ["P1"]}, "P2 lied, or computes wrongly, if at most one"),
        ({"p0r0": ["P1", "P2"], "p1r0": []}, "P1 lied, or computes wrongly"),
        ({"p0r0": ["P1"], "p1r0": ["P0"], "p2r0": ["P0", "P1"]}, "P0 or P1 lied, and P2 did not"),
        ({"p0r0": ["P1", "P2"]}, "who lied does not follow"),
        ({"p0r0": None, "p1r0": ["\x1b[31m", 7, {}]}, "P1 lied, or computes wrongly"),
        ({"p0r0": ["P1"], "p1r0": ["P0"], "p2r0": []}, "who lied does not follow"),
    ],
)
def test_a_failed_proof_says_who_may_have_lied_by_what_all_parties_report(said: dict[str, Any], words: str) -> None:
    run = Healthy()
    for pod, names in said.items():
        fields = {"step": 7} | ({} if names is None else {"suspects": names})
        run.add(ev.EngineEvent(pod=pod, level="error", event="proof_failed", fields=fields))
    run.add(ev.EngineEvent(pod=next(iter(said)), level="error", event="proof_failed", fields={"step": 7}))
    told = found(run.s, run.now, "proof_failed")
    assert told.text.startswith("a proof of step 7 failed, and nothing of it was revealed")
    assert words in told.text
    assert failed_proof(fold([ev.PhaseStarted(phase="full", engine_run="again", steps=9, sid_job="")], run.s)) == ""


def test_nothing_is_judged_while_the_run_is_held_or_over() -> None:
    run = Healthy()
    run.add(ev.HaltRequested(nonce="n", mode="hold", by="me"))
    assert run.names(100.0) == set()
    run.add(ev.RunEnded(status="ok"))
    assert alerts.detect(run.s, run.now + 500) == []


def test_each_thing_is_told_once_until_it_was_gone() -> None:
    run, watch = Healthy(), alerts.Watch()
    run.add(ev.CostTick(hourly=3.0, spent=9.5, forecast=9.0))
    assert [e.kind for e in watch.look(run.s, run.now, run.now)] == ["alert"]
    assert watch.look(run.s, run.now + 5, run.now + 5) == []
    run.add(ev.CostTick(hourly=3.0, spent=1.0, forecast=9.0))
    assert watch.look(run.s, run.now + 6, run.now + 6) == []
    run.add(ev.CostTick(hourly=3.0, spent=9.5, forecast=9.0))
    assert watch.look(run.s, run.now + 7, run.now + 7) == [], "it was missing for a moment only"
    run.add(ev.CostTick(hourly=3.0, spent=1.0, forecast=9.0))
    run.tick(70.0)
    assert watch.look(run.s, run.now, run.now) == []
    run.add(ev.CostTick(hourly=3.0, spent=9.5, forecast=9.0))
    assert len(watch.look(run.s, run.now + 1, run.now + 1)) == 1


def test_a_run_that_ends_within_its_cap_at_its_own_pace_is_no_alarm_however_long_it_may_live() -> None:
    """What it may cost at most, by its time to live, is the cap itself for whoever sets one; that says nothing."""
    run = Healthy()
    run.add(ev.PhaseStarted(phase="full", engine_run="r.full", steps=1000, sid_job=""))
    run.tick()
    run.add(ev.CostTick(hourly=36.0, spent=0.5, forecast=10.0))
    left = 1000 - run.s.step
    assert expected(run.s) == pytest.approx(0.5 + 0.01 * left)  # a step a second
    assert "spend_above_plan" not in run.names()
    run.add(ev.CostTick(hourly=360.0, spent=0.6, forecast=10.0))
    assert found(run.s, run.now, "spend_above_plan").text == (
        f"spent $0.60, about ${0.6 + 0.1 * left:.2f} when it is done, cap $10.00"
    )
    run.add(ev.RunEnded(status="ok"))
    assert expected(run.s) is None


def hovers(s: Snapshot, now: float) -> Iterator[Finding]:
    """Found for five seconds of each twenty."""
    if now % 20 < 5:
        yield Finding("hovers", "39.9", "")


@pytest.mark.parametrize(("step_s", "told"), [(0.1, [0.0, 600.0, 1060.0]), (9.0, [0.0, 600.0])])
def test_what_hovers_at_its_limit_is_told_once_in_ten_minutes(
    step_s: float, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a quarter of an hour by turns; then it is gone for 80 s, which is less than ten slow steps."""
    monkeypatch.setattr(alerts, "DETECTORS", (hovers,))
    watch, line = alerts.Watch(), Series(array("d", [0.0, 1.0]), array("d", [step_s, step_s]), 2)
    s = replace(Healthy().s, series=MappingProxyType({"p0r0s0t0": MappingProxyType({"step_s": line})}))
    looks = [*range(0, 1000, 5), *(at for at in range(1000, 1060, 5) if at % 20 >= 5), 1060]
    assert [float(at) for at in looks if watch.look(s, float(at), float(at))] == told


@pytest.mark.parametrize("step", [3600.0, -900.0])
def test_a_clock_that_is_set_raises_no_alarm(step: float) -> None:
    """Every heartbeat looks an hour old at once, or is from the future; half a minute later it is judged as ever."""
    run, watch, up = Healthy(), alerts.Watch(), 50.0
    assert watch.look(run.s, run.now, up) == []
    run.now += step
    for _ in range(29):
        assert watch.look(run.s, run.now, up) == []
        run.now, up = run.now + 1.0, up + 1.0
    for _ in range(10):
        run.tick()
        up += 1.0
        assert watch.look(run.s, run.now, up) == []
    told = [e for s in range(1, 60) for e in watch.look(run.s, run.now + s, up + s) if isinstance(e, ev.Alert)]
    assert {e.name for e in told} == {"stalled_heartbeat"}
    assert all("no heartbeat for 16 s" in e.text for e in told)
