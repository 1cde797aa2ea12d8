"""The reducer: what a run looks like after what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from uvcc_console.core import events as ev
from uvcc_console.core.alerts import progress
from uvcc_console.core.folding.reducing import changed
from uvcc_console.core.folding.reported_state import AGREEMENT_KEEP
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.journal.journal import Follower, Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.errors import UnreadableError, UvccError

CREATED = ev.RunCreated(
    ts=1.0,
    run="r",
    profile_name="demo",
    job_kind="private",
    replicas=1,
    pipeline_stages=1,
    tensor=1,
    stages=["plan", "full"],
)
COORDS = ("p0r0s0t0", "p1r0s0t0", "p2r0s0t0")


def _pairs(coord: str, digest: str) -> dict[str, str]:
    return {c: digest for c in COORDS if c != coord}


def test_stages_move_in_order() -> None:
    s = fold(
        [CREATED, ev.StageChanged(ts=2, name="plan", status="running"), ev.StageChanged(ts=3, name="plan", status="ok")]
    )
    assert [(x.name, x.status) for x in s.stages] == [("plan", "ok"), ("full", "pending")]
    assert s.stages[0].started == 2
    assert s.stages[0].ended == 3
    assert s.stage is s.stages[0]


def test_a_pod_that_was_left_behind_and_ended_later_is_no_leak_any_more() -> None:
    left = ev.RunEnded(status="failed", leaks=["uvcc-r-p0r0", "uvcc-r-p1r0"])
    s = fold([CREATED, left, ev.PodChanged(pod="p0r0", party=0, replica=0, provider="x", state="gone")])
    assert s.leaks == ("uvcc-r-p1r0",)


def test_no_worker_runs_on_the_machine_that_came_instead_of_another() -> None:
    """Else a phase whose only pod was replaced would wait for workers that were never started."""

    def pod(name: str, state: str) -> ev.PodChanged:
        return ev.PodChanged(pod=name, party=int(name[1]), replica=0, provider="x", state=state)

    started = [
        ev.WorkerProcess(pod=c[:4], coord=c, state="started", pid=7, rc=None, signal="")
        for c in ("p0r0s0t0", "p1r0s0t0")
    ]
    phase = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="")
    s = fold([CREATED, pod("p0r0", "agent"), pod("p1r0", "agent"), phase, *started, pod("p0r0", "gone")])
    assert {c: w.state for c, w in s.workers.items()} == {"p0r0s0t0": "started", "p1r0s0t0": "started"}
    s = reduce(s, pod("p0r0", "creating"))
    assert {c: (w.state, w.pid) for c, w in s.workers.items()} == {"p0r0s0t0": ("", 0), "p1r0s0t0": ("started", 7)}


def test_a_worker_that_was_started_again_has_said_nothing_yet() -> None:
    """Else it would be called silent, and an alarm raised, while it still loads."""
    coord = COORDS[0]

    def started(pid: int, at: float) -> ev.WorkerProcess:
        return ev.WorkerProcess(ts=at, pod="p0r0", coord=coord, state="started", pid=pid)

    beat = ev.HeartbeatRead(ts=20.0, pod="p0r0", coord=coord, record={"step": 7, "phase": "train"})
    phase = ev.PhaseStarted(ts=90.0, phase="full", engine_run="r.full", steps=9, sid_job="")
    s = fold([CREATED, phase, started(7, 10.0), beat, started(7, 60.0)])  # told again when a conductor comes back
    assert (s.workers[coord].beat_ts, s.workers[coord].phase) == (20.0, "train")
    s = fold([phase, started(8, 91.0)], s)
    assert (s.workers[coord].beat_ts, s.workers[coord].phase, s.step) == (0.0, "", 7)


def test_the_end_of_the_attempt_before_is_not_told_again_behind_a_resume() -> None:
    """Right behind the resume the log said that every worker had ended: the new ones, to whoever read it."""

    def process(state: str, pid: int, rc: int | None = None) -> ev.WorkerProcess:
        return ev.WorkerProcess(pod="p0r0", coord="p0r0s0t0", state=state, pid=pid, rc=rc, engine_run="r.full")

    phase = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="")
    s = fold([phase, process("started", 7), process("exited", 7, rc=0)])
    assert [e.text for e in s.log if "exit" in e.text] == ["worker p0r0s0t0 exit 0"]
    s = fold([replace(phase, attempt=1), process("exited", 7, rc=0)], s)
    assert [e.text for e in s.log if "exit" in e.text] == ["worker p0r0s0t0 exit 0"]
    s = fold([process("started", 8), process("exited", 8, rc=1)], s)
    assert [e.text for e in s.log if "exit" in e.text] == ["worker p0r0s0t0 exit 0", "worker p0r0s0t0 exit 1"]


def test_what_comes_with_every_step_is_no_line_of_the_log() -> None:
    """Of a run of six pods it left no room for anything else."""
    names = ["fwd_open_ok", "bwd_open_ok", "pipeline_tick", "checkpoint_written"]
    told = [ev.EngineEvent(pod="p0r0", level="info", event=name, fields={"step": 3, "count": 1}) for name in names]
    assert [entry.text.partition(" count")[0] for entry in fold([CREATED, *told]).log] == [
        "checkpoint written at step 3"
    ]


def test_a_resume_counts_no_silence_from_the_attempt_before() -> None:
    """The worker of a failed attempt said nothing for minutes, and right after the resume it was called silent."""
    coord = "p0r0s0t0"

    def process(state: str, pid: int, signal: str = "") -> ev.WorkerProcess:
        return ev.WorkerProcess(ts=30.0, pod="p0r0", coord=coord, state=state, pid=pid, signal=signal)

    beat = ev.HeartbeatRead(ts=20.0, pod="p0r0", coord=coord, record={"step": 7, "phase": "train"})
    phase = ev.PhaseStarted(ts=10.0, phase="full", engine_run="r.full", steps=9, sid_job="")
    ended = fold([CREATED, phase, process("started", 7), beat, process("exited", 7, "SIGKILL")])
    resumed = fold([replace(phase, ts=90.0, attempt=1)], ended)
    assert not [*progress.stalled_heartbeat(resumed, 91.0)]
    assert (resumed.workers[coord].beat_ts, resumed.step) == (0.0, 7)
    pod = ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent")
    lost = fold([CREATED, pod, phase, process("started", 7), beat])
    replaced = fold([replace(pod, state=state) for state in ("gone", "asked")], lost)
    assert [*progress.stalled_heartbeat(lost, 91.0)]
    assert not [*progress.stalled_heartbeat(replaced, 91.0)]


def test_an_epoch_is_agreed_only_when_all_workers_reported_and_no_pair_differs() -> None:
    s = fold([CREATED])
    for coord in COORDS[:2]:
        s = reduce(s, ev.RootReported(coord=coord, epoch=4, root="aa" + coord, pairs=_pairs(coord, "d")))
    assert s.agreed_epoch == -1
    s = reduce(s, ev.RootReported(coord=COORDS[2], epoch=4, root="bb", pairs=_pairs(COORDS[2], "d")))
    assert s.agreed_epoch == 4


@pytest.mark.parametrize(("masks", "epochs"), [(0, (4,)), (1, ())])
def test_roots_of_a_start_under_other_masks_are_not_held_against_those_of_before(
    masks: int, epochs: tuple[int, ...]
) -> None:
    """A run that starts over sends other messages in the same epochs: that is no fork."""
    phase = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="")
    s = fold([CREATED, phase, *(ev.RootReported(coord=c, epoch=4, root="aa", pairs=_pairs(c, "d")) for c in COORDS)])
    assert s.agreed_epoch == 4
    again = ev.PhaseStarted(**{**ev.to_json(phase), "attempt": 1, "masks": masks})
    s = reduce(s, again)
    assert tuple(a.epoch for a in s.agreement) == epochs
    assert s.agreed_epoch == (4 if epochs else -1)


def test_after_a_replaced_pod_the_agreed_epoch_is_told_as_the_step_of_the_run() -> None:
    """Its policy counts epochs from 0 again: "agree @ step 4" stood beside step 24 of 60."""
    s = fold([CREATED, ev.PhaseStarted(phase="full", engine_run="r.full", steps=60, sid_job="", first_step=20)])
    assert s.agreed_step == -1
    s = fold([ev.RootReported(coord=c, epoch=4, root="aa", pairs=_pairs(c, "d")) for c in COORDS], s)
    assert (s.agreed_epoch, s.agreed_step) == (4, 24)


def test_a_smoke_with_fewer_replicas_than_the_run_is_agreed_by_those_it_has() -> None:
    two = ev.RunCreated(**{**ev.to_json(CREATED), "replicas": 2, "profile": {"smoke": {"replicas": 1}}})
    for phase, agreed in (("smoke", 4), ("full", -1)):
        s = fold([two, ev.PhaseStarted(phase=phase, engine_run=f"r.{phase}", steps=9, sid_job="")])
        for coord in COORDS:
            s = reduce(s, ev.RootReported(coord=coord, epoch=4, root="aa", pairs=_pairs(coord, "d")))
        assert s.agreed_epoch == agreed


def test_a_differing_pair_is_not_agreement() -> None:
    s = fold([CREATED])
    for coord in COORDS:
        digest = "x" if coord == COORDS[1] else "d"
        s = reduce(s, ev.RootReported(coord=coord, epoch=4, root=coord, pairs=_pairs(coord, digest)))
    assert s.agreed_epoch == -1


def test_acks_of_another_halt_are_not_believed_and_never_go_back() -> None:
    s = fold([CREATED, ev.HaltRequested(nonce="n1", mode="hold", by="f9")])
    s = reduce(s, ev.HaltAck(pod="p0r0", nonce="old", stage="halted", step=9))
    assert not s.halt.acks
    s = reduce(s, ev.HaltAck(pod="p0r0", nonce="n1", stage="held", step=9))
    s = reduce(s, ev.HaltAck(pod="p0r0", nonce="n1", stage="seen"))
    assert s.halt.acks["p0r0"][:2] == ("held", 9)


def test_the_second_press_of_the_same_halt_keeps_its_evidence() -> None:
    s = fold(
        [
            CREATED,
            ev.HaltRequested(nonce="n", mode="hold", by="f9"),
            ev.HaltAck(pod="p", nonce="n", stage="held", step=3),
            ev.HaltRequested(nonce="n", mode="halt", by="f9"),
        ]
    )
    assert s.halt.mode == "halt"
    assert s.halt.acks["p"][0] == "held"


def test_a_halt_that_is_over_is_not_under_way_again_because_it_was_asked_for_once_more() -> None:
    """A commit of the command line may come behind the end: a conductor waited for an end that came no more."""
    halted = [
        CREATED,
        ev.HaltRequested(nonce="n", mode="hold", by="cli"),
        ev.HaltRequested(nonce="n", mode="halt", by="haltd"),
        ev.HaltDone(nonce="n", mode="halt", verified=0, total=3, step=43, seconds=38.8),
    ]
    assert fold([*halted, ev.HaltRequested(nonce="n", mode="halt", by="cli")]).halt.done
    assert not fold([*halted, ev.HaltRequested(nonce="n", mode="kill", by="cli")]).halt.done  # a rung of its own
    assert not fold([*halted[:3], ev.HaltRequested(nonce="n", mode="halt", by="cli")]).halt.done
    assert not fold([*halted, ev.HaltRequested(nonce="m", mode="halt", by="cli")]).halt.done


def test_a_hold_that_met_a_halt_under_way_ended_as_a_halt() -> None:
    """The run was told as halted while its conductor took the hold for an open one: nothing could be resumed."""
    s = fold(
        [
            CREATED,
            ev.HaltRequested(nonce="one", mode="halt", by="cli"),
            ev.HaltRequested(nonce="two", mode="hold", by="cli"),
            ev.HaltDone(nonce="two", mode="halt", verified=3, total=3, step=4, seconds=1.0),
        ]
    )
    assert (s.status, s.halt.mode, s.halt.done) == ("halted", "halt", True)


def test_a_drill_that_was_not_verified_is_not_shown_as_one_that_passed() -> None:
    """Asked for while no worker ran it took no time, and the bar above the panels said "drill \u2713 0.0 s"."""
    told = ev.HaltDone(nonce="n", mode="hold", verified=0, total=3, step=2, seconds=0.01, drill=True)
    s = fold([CREATED, ev.HaltRequested(nonce="n", mode="hold", by="cli", drill=True), told])
    assert (s.halt.done, s.halt.last_drill_s) == (True, fold([CREATED]).halt.last_drill_s)


def test_drill_time_survives_the_next_phase() -> None:
    s = fold(
        [
            CREATED,
            ev.HaltRequested(nonce="d", mode="hold", by="wizard", drill=True),
            ev.HaltDone(nonce="d", mode="release", verified=3, total=3, step=1, seconds=0.8, drill=True),
            ev.PhaseStarted(phase="full", engine_run="r.full", steps=10, sid_job="ab"),
        ]
    )
    assert s.halt.last_drill_s == 0.8
    assert s.status == "running"


def test_a_resume_truncates_the_curve_instead_of_drawing_back() -> None:
    s = fold([CREATED])
    for step, loss in [(1, 2.0), (2, 1.5), (3, 1.2), (2, 1.4)]:
        s = reduce(s, ev.Metric(coord="p0r0s0t0", step=step, values={"loss": loss}))
    assert list(s.series["p0r0s0t0"]["loss"]) == [(1, 2.0), (2, 1.4)]


@given(st.lists(st.tuples(st.integers(0, 90), st.sampled_from(COORDS), st.sampled_from("dx")), max_size=200))
def test_what_is_kept_of_the_roots_is_the_newest_epochs_in_their_order(said: list[tuple[int, str, str]]) -> None:
    s, roots = fold([CREATED]), dict[int, dict[str, str]]()
    for epoch, coord, digest in said:
        s = reduce(s, ev.RootReported(coord=coord, epoch=epoch, root=coord + digest, pairs=_pairs(coord, digest)))
        roots.setdefault(epoch, {})[coord] = coord + digest
        roots = {k: roots[k] for k in sorted(roots)[-AGREEMENT_KEEP:]}
        assert [a.epoch for a in s.agreement] == list(roots)
    assert {a.epoch: dict(a.roots) for a in s.agreement} == roots


def test_a_copy_with_other_values_is_a_record_of_its_own_and_has_no_other_fields() -> None:
    s = fold([CREATED])
    other = changed(s, spent=2.0, detail="x")
    assert (other.spent, other.detail, other.run, s.spent) == (2.0, "x", "r", 0.0)
    assert dataclasses.replace(s, spent=2.0, detail="x") == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        other.spent = 3.0  # type: ignore[misc]
    with pytest.raises(KeyError, match="colour"):
        changed(s, colour="red")


class ReducerMachine(RuleBasedStateMachine):
    """Any order of events: never an exception, never a lie about agreement or halts."""

    def __init__(self) -> None:
        super().__init__()
        self.s: Snapshot = fold([CREATED])
        self.events: list[ev.Event] = [CREATED]

    def _apply(self, event: ev.Event) -> None:
        self.events.append(event)
        self.s = reduce(self.s, event)

    @rule(coord=st.sampled_from(COORDS), step=st.integers(-1, 50))
    def beat(self, coord: str, step: int) -> None:
        self._apply(ev.HeartbeatRead(pod=coord[:4], coord=coord, record={"step": step, "phase": "train"}))

    @rule(coord=st.sampled_from(COORDS), epoch=st.integers(0, 4), digest=st.sampled_from(["d", "d", "d", "x"]))
    def root(self, coord: str, epoch: int, digest: str) -> None:
        self._apply(ev.RootReported(coord=coord, epoch=epoch, root=coord + digest, pairs=_pairs(coord, digest)))

    @rule(nonce=st.sampled_from(["a", "b"]), mode=st.sampled_from(["hold", "halt", "release"]))
    def ask(self, nonce: str, mode: str) -> None:
        self._apply(ev.HaltRequested(nonce=nonce, mode=mode, by="f9"))

    @rule(
        nonce=st.sampled_from(["a", "b"]),
        pod=st.sampled_from(["p0r0", "p1r0"]),
        stage=st.sampled_from(["seen", "held", "halted"]),
    )
    def ack(self, nonce: str, pod: str, stage: str) -> None:
        self._apply(ev.HaltAck(pod=pod, nonce=nonce, stage=stage, step=3))

    @rule(step=st.integers(0, 30), loss=st.floats(0, 5))
    def metric(self, step: int, loss: float) -> None:
        self._apply(ev.Metric(coord=COORDS[0], step=step, values={"loss": loss}))

    @invariant()
    def agreement_has_evidence(self) -> None:
        if self.s.agreed_epoch >= 0:
            agreed = {a.epoch: a for a in self.s.agreement}.get(self.s.agreed_epoch)
            assert agreed is not None
            assert len(agreed.roots) == 3

    @invariant()
    def curves_run_forward(self) -> None:
        for by_name in self.s.series.values():
            for line in by_name.values():
                assert list(line.xs()) == sorted(set(line.xs()))

    @invariant()
    def replay_is_the_same(self) -> None:
        if len(self.events) % 7 == 0:
            assert fold(self.events) == self.s


ReducerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestReducer = ReducerMachine.TestCase


def test_journal_round_trip_and_two_writers(tmp_path: Path) -> None:
    one = Journal(tmp_path / "j.sqlite", source="conductor", clock=lambda: 5.0)
    two = Journal(tmp_path / "j.sqlite", source="haltd", clock=lambda: 6.0)
    one.append(CREATED, ev.StageChanged(name="plan", status="running"))
    two.append(ev.HaltRequested(nonce="n", mode="hold", by="f9"))
    follower = Follower(Journal(tmp_path / "j.sqlite", readonly=True))
    assert [e.kind for e in follower.poll()] == ["run_created", "stage", "halt_requested"]
    assert follower.snapshot.halt.asked == 6.0
    assert follower.poll() == []
    one.append(ev.RunEnded(status="ok"))
    assert [e.kind for e in follower.poll()] == ["run_ended"]
    assert read_all(one) == follower.snapshot


def test_who_closes_a_journal_last_is_waited_for(tmp_path: Path) -> None:
    """Its last reader holds it alone while it tidies up; who is impatient with writers opens it all the same."""
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    last = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    last.execute("PRAGMA locking_mode=EXCLUSIVE")
    last.execute("BEGIN IMMEDIATE")
    closing = threading.Timer(0.3, last.close)  # its disk takes so long
    closing.start()
    journal = Journal(path, busy_s=0.01)
    closing.join()
    busy = sqlite3.connect(path, isolation_level=None)
    busy.execute("BEGIN IMMEDIATE")
    with pytest.raises(UvccError, match="locked"):
        journal.append(ev.RunEnded(status="ok", detail=""))
    busy.close()
    journal.close()


def test_a_missing_journal_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="uvcc runs"):
        Journal(tmp_path / "none.sqlite", readonly=True)


def test_events_of_a_newer_version_are_skipped_not_fatal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.append(CREATED)
    with contextlib.closing(sqlite3.connect(tmp_path / "j.sqlite")) as db, db:
        db.execute("INSERT INTO events(ts, source, kind, data) VALUES (1, 'x', 'from_the_future', '{}')")
    assert read_all(journal).run == "r"


def test_unknown_fields_are_dropped_and_every_kind_round_trips() -> None:
    assert ev.from_json("run_ended", 1.0, {"status": "ok", "new_field": 1}) == ev.RunEnded(ts=1.0, status="ok")
    for kind, cls in ev.kinds().items():
        assert cls.kind == kind


def test_an_older_journal_s_words_for_a_hint_are_read() -> None:
    said = {"level": "warn", "name": "gpu", "text": "idle", "remedy": "take fewer"}
    assert ev.from_json("alert", 1.0, said) == ev.Alert(
        ts=1.0, level="warn", name="gpu", text="idle", hint="take fewer"
    )
    coord = COORDS[0]
    for key in ("hint", "cure"):
        fields = {"coord": coord, "status": "failed", "error": "the disk is full", key: "free space"}
        running = ev.WorkerProcess(pod="p0r0", coord=coord, state="started", pid=1)
        s = fold([CREATED, running, ev.EngineEvent(pod="p0r0", event="exit", level="error", fields=fields)])
        assert (s.workers[coord].error, s.workers[coord].hint) == ("the disk is full", "free space")


def test_what_was_seen_on_a_gpu_stands_beside_the_evidence_and_never_replaces_it() -> None:
    s = fold([ev.HaltRequested(nonce="n", mode="halt", by="x", ts=1.0)])
    s = fold([ev.HaltAck(pod="p0r0", nonce="n", stage="gone", step=4, checkpoint="c", ts=2.0)], s)
    before = s.halt.acks["p0r0"]
    s = fold([ev.HaltAck(pod="p0r0", nonce="n", stage="gone", gpu="used", detail="GPU still used by 7", ts=3.0)], s)
    s = fold([ev.HaltAck(pod="p1r0", nonce="other", stage="gone", gpu="empty", ts=4.0)], s)
    assert (s.halt.acks["p0r0"], dict(s.halt.gpus)) == (before, {"p0r0": "used"})
    assert s.log[-1].level == "error"
