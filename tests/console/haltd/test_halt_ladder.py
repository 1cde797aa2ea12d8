"""The ladder alone: scripted stories, then any story that Hypothesis can think of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from uvcc_console.core import events as ev
from uvcc_console.halt.machine import (
    HALT,
    HOLD,
    KILL,
    RELEASE,
    TERM,
    TERMINATE,
    Journalled,
    Ladder,
    LadderAction,
    Send,
    Times,
)
from uvcc_engine.contract.agent_protocol.wire import AckCode, Lacks

PODS = {"p0r0": 1, "p1r0": 1, "p2r0": 1}


def sends(actions: list[LadderAction]) -> list[tuple[str, str]]:
    return [(a.pod, a.rung) for a in actions if isinstance(a, Send)]


def events(actions: list[LadderAction], kind: type) -> list[Any]:
    return [a.event for a in actions if isinstance(a, Journalled) and isinstance(a.event, kind)]


def stages(actions: list[LadderAction]) -> dict[str, str]:
    return {e.pod: e.stage for e in events(actions, ev.HaltAck)}


def all_report(ladder: Ladder, stage: str, now: float, *, step: int = 7, ckpt: str = "") -> list[LadderAction]:
    out: list[LadderAction] = []
    for pod in PODS:
        out += ladder.report(pod, stage, now, coord=f"{pod}s0t0", step=step, checkpoint=ckpt)
    return out


def to_rung(ladder: Ladder, rung: str) -> None:
    assert ladder.rung == rung


def test_hold_goes_to_all_at_once_and_commits_after_three_seconds() -> None:
    ladder = Ladder("n", PODS)
    first = ladder.start(HOLD, 0.0)
    assert sends(first) == [(p, HOLD) for p in PODS]
    assert [type(a) for a in first[:3]] == [Send] * 3  # the network before the disk
    assert stages(first) == dict.fromkeys(PODS, "sent")
    assert all(a.deadline_s == 5.0 for a in first if isinstance(a, Send))
    assert all_report(ladder, "held", 0.2)
    assert sends(ladder.tick(2.9)) == []
    commit = ladder.tick(3.0)
    assert sends(commit) == [(p, HALT) for p in PODS]
    assert [e.mode for e in events(commit, ev.HaltRequested)] == [HALT]
    all_report(ladder, "halted", 3.5, ckpt="ab")
    (done,) = events(all_report(ladder, "gone", 4.0, ckpt="ab"), ev.HaltDone)
    assert (done.mode, done.verified, done.total, done.step, done.seconds) == (HALT, 3, 3, 7, 4.0)
    assert ladder.done


def test_a_second_press_commits_at_once() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HOLD, 0.0)
    assert sends(ladder.request(HALT, 0.3)) == [(p, HALT) for p in PODS]


def test_release_in_time_and_release_too_late() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HOLD, 0.0)
    all_report(ladder, "held", 0.1)
    assert sends(ladder.request(RELEASE, 1.0)) == [(p, RELEASE) for p in PODS]
    (done,) = events(all_report(ladder, "released", 1.2), ev.HaltDone)
    assert (done.mode, done.verified) == (RELEASE, 3)
    late = Ladder("m", PODS)
    late.start(HALT, 0.0)
    (alert,) = events(late.request(RELEASE, 0.1), ev.Alert)
    assert alert.name == "halt_release_late"
    to_rung(late, HALT)


def test_a_release_that_not_all_acknowledge_goes_on_to_halt() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HOLD, 0.0)
    ladder.request(RELEASE, 1.0)
    ladder.report("p0r0", "released", 1.1)
    ladder.report("p1r0", "released", 1.1)
    out = ladder.tick(6.0)
    assert stages(out)["p2r0"] == "unknown"
    assert sends(out) == [(p, HALT) for p in PODS]
    assert "p2r0" in events(out, ev.HaltRequested)[0].reason


def test_a_release_that_comes_first_is_sent_and_awaited_for_a_step() -> None:
    """Whoever held has died: that a release of nothing was done at once left the pods to halt at their deadline."""
    ladder = Ladder("n", PODS)
    assert sends(ladder.start(RELEASE, 0.0)) == [(p, RELEASE) for p in PODS]
    assert not ladder.done
    assert ladder.rung == RELEASE
    ladder.tick(Times().release + 1.0)
    (done,) = events(all_report(ladder, "released", Times().hold - 0.5), ev.HaltDone)
    assert (done.mode, done.verified) == (RELEASE, 3)
    alone = Ladder("m", PODS)
    alone.start(RELEASE, 0.0)
    assert [e.mode for e in events(alone.tick(Times().hold), ev.HaltRequested)] == [HALT]


def test_where_a_pod_has_halted_by_itself_the_release_is_a_halt_of_all() -> None:
    """Its release was told as verified, for its workers were gone."""
    first, late = Ladder("n", PODS), Ladder("m", PODS)
    first.start(RELEASE, 0.0)
    late.start(HOLD, 0.0)
    late.report("p0r0", "halted", 6.0, coord="p0r0s0t0", step=7, checkpoint="ab")
    out = first.report("p0r0", "halted", 0.1, coord="p0r0s0t0", step=7, checkpoint="ab")
    for said in (out, late.request(RELEASE, 6.1)):
        assert {rung for _, rung in sends(said)} == {HALT}
        (asked,) = events(said, ev.HaltRequested)
        assert (asked.mode, asked.reason) == (HALT, "p0r0 had halted before the release came")


def test_where_no_worker_was_started_nothing_is_left_to_release() -> None:
    """Five seconds later the release had become a halt, for a pod had not acknowledged it."""
    ladder = Ladder("n", PODS)
    ladder.start(HOLD, 0.0)
    ladder.refused("p0r0", HOLD, 0.1, AckCode.NO_WORKER, "no worker")
    ladder.request(RELEASE, 1.0)
    ladder.report("p1r0", "released", 1.1)
    ladder.report("p2r0", "released", 1.1)
    (done,) = events(ladder.refused("p0r0", RELEASE, 1.1, AckCode.NO_WORKER, "no worker"), ev.HaltDone)
    assert (done.mode, done.verified) == (RELEASE, 3)


@pytest.mark.parametrize("rung", [TERM, KILL, TERMINATE])
def test_a_typed_rung_that_comes_first_halts_and_climbs_to_it(rung: str) -> None:
    """It was a halt only: what somebody had typed the run's name for was forgotten with the sidecar that had died."""
    ladder = Ladder("n", PODS, auto=(HOLD, HALT))
    said = sends(ladder.start(rung, 0.0))
    assert said == [(p, HALT) for p in PODS] + [(p, rung) for p in PODS]
    assert ladder.rung == rung


def test_a_drill_holds_releases_and_is_timed() -> None:
    ladder = Ladder("n", PODS, drill=True)
    first = ladder.start(HOLD, 10.0)
    assert all(a.deadline_s == Times().drill + 2 * Times().release for a in first if isinstance(a, Send))
    assert sends(all_report(ladder, "held", 10.4)) == [(p, RELEASE) for p in PODS]
    (done,) = events(all_report(ladder, "released", 10.9), ev.HaltDone)
    assert (done.mode, done.drill, done.verified, done.step) == (HOLD, True, 3, 7)
    assert abs(done.seconds - 0.9) < 1e-9
    assert sends(ladder.tick(100.0)) == []  # a drill never becomes a halt


def test_patience_lengthens_a_drill_that_includes_the_workers_start() -> None:
    assert Times.patient(5.0).drill == Times().drill > Times().hold
    assert Times.patient(45.0).hold == 45.0
    assert Times.patient(45.0).drill - 45.0 == Times().drill - Times().hold == 20.0


def test_a_drill_does_not_verify_what_ran_to_its_end_without_being_held() -> None:
    """A program that never looks at the control file is over before the drill is: that proves nothing of a halt."""
    ladder = Ladder("n", PODS, drill=True, checkpoints=False)
    ladder.start(HOLD, 0.0)
    for pod in ("p0r0", "p1r0"):
        ladder.report(pod, "held", 0.5, step=3)
    ladder.report("p2r0", "gone", 0.6, step=60)
    assert ladder.rung == RELEASE
    ladder.report("p0r0", "released", 0.7)
    (done,) = events(ladder.report("p1r0", "gone", 0.8, step=60), ev.HaltDone)
    assert (done.verified, done.total) == (2, 3), "one that was held, released and then ended was held"


def test_a_drill_with_a_frozen_pod_releases_the_others_and_says_so() -> None:
    ladder = Ladder("n", PODS, drill=True)
    ladder.start(HOLD, 0.0)
    for pod in ("p0r0", "p1r0"):
        ladder.report(pod, "held", 0.5, step=3)
    assert not stages(ladder.tick(Times().drill - 0.1))  # it may still be starting
    out = ladder.tick(Times().drill)
    assert stages(out)["p2r0"] == "unknown"
    assert ("p0r0", RELEASE) in sends(out)
    assert ladder.rung == RELEASE
    for pod in ("p0r0", "p1r0"):
        ladder.report(pod, "released", Times().drill + 0.2)
    end = ladder.tick(Times().drill + Times().release)
    (done,) = events(end, ev.HaltDone)
    assert (done.verified, done.total) == (2, 3)
    assert [a.name for a in events(end, ev.Alert)] == ["drill_not_released"]


def test_an_unacknowledged_command_is_sent_again_and_an_acknowledged_one_is_not() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HALT, 0.0)
    ladder.acked("p0r0", HALT, 0.01)
    assert sends(ladder.tick(0.4)) == []
    assert sends(ladder.tick(0.5)) == [("p1r0", HALT), ("p2r0", HALT)]
    assert sends(ladder.tick(1.0)) == [("p1r0", HALT), ("p2r0", HALT)]


def test_silence_is_unknown_and_then_the_armed_rungs_are_climbed() -> None:
    ladder = Ladder("n", PODS, auto=(HOLD, HALT, TERM, KILL, TERMINATE))
    ladder.start(HALT, 0.0)
    for pod in PODS:
        ladder.acked(pod, HALT, 0.0)
    for pod in ("p0r0", "p1r0"):
        ladder.report(pod, "gone", 1.0, step=7, checkpoint="ab")
    out = ladder.tick(60.0)
    assert stages(out) == {"p2r0": "unknown"}
    assert sends(out) == [("p2r0", TERM)]  # never again to those that are verified
    assert sends(ladder.tick(75.0)) == [("p2r0", KILL)]
    assert sends(ladder.tick(80.0)) == [("p2r0", TERMINATE)]
    (done,) = events(ladder.tick(200.0), ev.HaltDone)
    assert (done.verified, done.total) == (2, 3)
    (again,) = events(ladder.report("p2r0", "gone", 300.0, step=7, checkpoint="ab"), ev.HaltDone)
    assert again.verified == 3


def test_a_pod_whose_link_is_down_is_terminated_at_its_provider() -> None:
    ladder = Ladder("n", {"p0r0": 1, "p1r0": 1}, auto=(HOLD, HALT, TERM, KILL, TERMINATE))
    ladder.link("p1r0", False, 0.0)
    assert stages(ladder.start(HALT, 0.0))["p1r0"] == "unknown"
    ladder.report("p0r0", "gone", 1.0, step=7, checkpoint="ab")
    for now in (60.0, 75.0):
        assert sends(ladder.tick(now)) == []  # nothing reaches it by its agent
    assert sends(ladder.tick(80.0)) == [("p1r0", TERMINATE)]
    out = ladder.report("p1r0", "gone", 90.0, path="api", detail="the pod is gone", lacks=Lacks.NO_EXIT)
    assert events(out, ev.HaltDone)


def test_a_pod_that_is_proven_gone_stays_so_when_its_link_goes_down_with_it() -> None:
    ladder = Ladder("n", {"p0r0": 1, "p1r0": 1}, auto=(HOLD, HALT, TERM, KILL, TERMINATE))
    ladder.start(HALT, 0.0)
    out = ladder.report("p1r0", "gone", 1.0, path="api", detail="the pod is gone", lacks=Lacks.NO_EXIT)
    assert stages(out) == {"p1r0": "gone"}
    later = ladder.link("p1r0", False, 2.0)
    for now in (60.0, 75.0, 80.0):
        later += ladder.tick(now)
    assert "p1r0" not in stages(later)


def test_a_pod_that_was_out_of_reach_is_asked_to_halt_before_it_is_terminated() -> None:
    ladder = Ladder("n", {"p0r0": 1})
    ladder.start(HALT, 0.0)
    assert sends(ladder.tick(60.0)) == [("p0r0", HALT)]
    to_rung(ladder, TERM)
    ladder.tick(75.0)  # the verdict, without it
    assert sends(ladder.tick(100.0)) == [("p0r0", HALT)]
    ladder.acked("p0r0", HALT, 100.5)
    assert sends(ladder.tick(160.0)) == []
    assert sends(ladder.tick(160.5)) == [("p0r0", TERM)]


def test_kill_needs_to_be_armed_or_asked_for() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HALT, 0.0)
    for pod in PODS:
        ladder.acked(pod, HALT, 0.0)
    ladder.tick(60.0)
    to_rung(ladder, TERM)
    assert events(ladder.tick(75.0), ev.HaltDone)
    assert sends(ladder.tick(76.0)) == [(p, TERM) for p in PODS]  # slower now, but nothing beyond it
    assert sends(ladder.tick(77.9)) == []
    assert sends(ladder.tick(78.0)) == [(p, TERM) for p in PODS]
    assert {r for _, r in sends(ladder.request(KILL, 80.0))} == {KILL}


def test_different_steps_are_an_error_and_a_missing_checkpoint_is_told() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HALT, 0.0)
    ladder.report("p0r0", "gone", 1.0, step=7, checkpoint="ab")
    ladder.report("p1r0", "gone", 1.0, step=7, checkpoint="ab")
    out = ladder.report("p2r0", "gone", 1.0, step=8, detail="halted without a checkpoint", lacks=Lacks.NOT_NAMED)
    assert {a.name for a in events(out, ev.Alert)} == {"halt_step_mismatch", "halt_no_checkpoint"}
    assert "p2r0 at 8" in events(out, ev.Alert)[0].text
    assert events(out, ev.HaltDone)[0].verified == 2


def test_a_pod_is_as_far_as_its_slowest_worker() -> None:
    ladder = Ladder("n", {"p0r0": 2})
    ladder.start(HALT, 0.0)
    assert stages(ladder.report("p0r0", "halted", 0.1, coord="p0r0s0t0", step=5)) == {"p0r0": "seen"}
    assert stages(ladder.report("p0r0", "held", 0.2, coord="p0r0s1t0", step=5)) == {"p0r0": "held"}
    assert stages(ladder.report("p0r0", "halted", 0.3, coord="p0r0s1t0", step=5)) == {"p0r0": "halted"}
    assert not events(ladder.report("p0r0", "gone", 0.4, coord="p0r0s0t0"), ev.HaltDone)
    assert events(ladder.report("p0r0", "gone", 0.5, coord="p0r0s1t0"), ev.HaltDone)


def test_a_worker_that_died_without_proof_is_not_waited_for() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HALT, 0.0)
    ladder.report("p0r0", "gone", 1.0, coord="a", step=7, checkpoint="ab")
    ladder.report("p1r0", "gone", 1.0, coord="b", step=7, checkpoint="ab")
    out = ladder.report(
        "p2r0", "gone", 1.0, coord="c", detail="ended by SIGKILL without an exit.json", lacks=Lacks.NO_EXIT
    )
    (done,) = events(out, ev.HaltDone)
    assert (done.verified, done.total, done.step) == (2, 3, 7)
    assert "SIGKILL" in events(out, ev.HaltAck)[0].detail


def test_a_command_owes_no_checkpoint_and_a_finished_worker_neither() -> None:
    ladder = Ladder("n", {"p0r0": 1}, checkpoints=False)
    ladder.start(HALT, 0.0)
    (done,) = events(ladder.report("p0r0", "gone", 1.0, detail="ended by SIGTERM", lacks=Lacks.NO_EXIT), ev.HaltDone)
    assert done.verified == 1
    ladder = Ladder("n", {"p0r0": 1, "p1r0": 1})
    ladder.start(HALT, 0.0)
    ladder.report("p0r0", "gone", 1.0, detail="done without a checkpoint", lacks=Lacks.DONE)
    (done,) = events(
        ladder.refused("p1r0", HALT, 1.0, AckCode.NO_WORKER, "no worker of run x was started on this pod"), ev.HaltDone
    )
    assert done.verified == 2


def test_a_refusal_is_unknown_with_its_reason_and_asked_again() -> None:
    ladder = Ladder("n", PODS)
    ladder.start(HOLD, 0.0)
    out = ladder.refused("p0r0", HOLD, 0.1, AckCode.FINAL, "run x is already halting")
    assert events(out, ev.HaltAck)[0].detail == "run x is already halting"
    assert ("p0r0", HOLD) in sends(ladder.tick(0.6))


def test_a_dead_link_is_unknown_at_once_and_tried_when_it_is_back() -> None:
    ladder = Ladder("n", PODS)
    ladder.link("p1r0", False, 0.0)
    first = ladder.start(HALT, 0.0)
    assert sends(first) == [("p0r0", HALT), ("p2r0", HALT)]
    assert stages(first)["p1r0"] == "unknown"
    ladder.acked("p0r0", HALT, 0.1)
    ladder.acked("p2r0", HALT, 0.1)
    assert sends(ladder.link("p1r0", True, 5.0)) == [("p1r0", HALT)]
    lost = ladder.link("p0r0", False, 6.0)
    assert stages(lost) == {"p0r0": "unknown"}


def test_those_who_stopped_speak_for_a_peer_out_of_reach_but_do_not_verify_it() -> None:
    ladder = Ladder("n", PODS, votes=True)
    ladder.start(HALT, 0.0)
    ladder.link("p1r0", False, 0.0)
    for pod in ("p0r0", "p2r0"):
        ladder.acked(pod, HALT, 0.1)
    told = ladder.report("p0r0", "halted", 0.2, coord="p0r0s0t0", step=7, checkpoint="a")
    told += ladder.report("p2r0", "halted", 0.2, coord="p2r0s0t0", step=7, checkpoint="b")
    (link,) = events(told, ev.LinkChanged)
    assert (link.pod, link.path, link.up) == ("p1r0", "peer", True)
    (ack,) = [e for e in events(told, ev.HaltAck) if e.pod == "p1r0"]
    assert (ack.stage, ack.path, ack.step) == ("unknown", "peer", 7)
    ladder.report("p0r0", "gone", 0.3, coord="p0r0s0t0", step=7, checkpoint="a")
    ladder.report("p2r0", "gone", 0.3, coord="p2r0s0t0", step=7, checkpoint="b")
    assert not ladder.done
    up = ladder.link("p1r0", True, 1.0)
    assert sends(up) == [("p1r0", HALT)]
    last = ladder.report("p1r0", "gone", 1.2, coord="p1r0s0t0", step=7, checkpoint="c")
    (done,) = events(last, ev.HaltDone)
    assert (done.verified, done.total, done.step) == (3, 3, 7)


def test_nobody_speaks_for_others_without_a_vote_or_at_different_steps() -> None:
    for votes, steps in ((False, (7, 7)), (True, (7, 8))):
        ladder = Ladder("n", PODS, votes=votes)
        ladder.start(HALT, 0.0)
        told = ladder.report("p0r0", "halted", 0.2, coord="p0r0s0t0", step=steps[0])
        told += ladder.report("p2r0", "halted", 0.2, coord="p2r0s0t0", step=steps[1])
        told += ladder.link("p1r0", False, 0.3)
        assert events(told, ev.LinkChanged) == []
        assert [e.path for e in events(told, ev.HaltAck) if e.pod == "p1r0"] == ["ssh"]


def test_nothing_to_halt_is_done_at_once() -> None:
    assert events(Ladder("n", {}).start(HALT, 0.0), ev.HaltDone)[0].total == 0


class AnyStory(RuleBasedStateMachine):
    """Whatever happens: no evidence is invented, no rung is skipped back, nothing unarmed is sent."""

    @initialize(
        workers=st.lists(st.integers(1, 2), min_size=1, max_size=4),
        drill=st.booleans(),
        mode=st.sampled_from([HOLD, HALT, RELEASE, KILL]),
        auto=st.sets(st.sampled_from([TERM, KILL, TERMINATE])),
    )
    def begin(self, workers: list[int], drill: bool, mode: str, auto: set[str]) -> None:
        self.now = 0.0
        self.drill = drill
        self.auto = auto | {HOLD, HALT}
        self.workers = {f"p{i}": n for i, n in enumerate(workers)}
        self.ladder = Ladder("n", self.workers, drill=drill, auto=self.auto, times=Times())
        self.said: dict[str, set[tuple[str, str]]] = {p: set() for p in self.workers}
        self.asked: set[str] = {HOLD if drill else mode}
        self.dones: list[ev.HaltDone] = []
        self.up = dict.fromkeys(self.workers, True)
        self.rungs: list[str] = []
        self.ended: set[str] = set()
        self.take(self.ladder.start(HOLD if drill else mode, 0.0))

    def take(self, actions: list[LadderAction]) -> None:
        for a in actions:
            if isinstance(a, Send):
                assert a.pod in self.workers
                assert self.up[a.pod] or a.rung == TERMINATE, "sent over a dead link"
                if a.rung in (TERM, KILL, TERMINATE):
                    assert a.rung in self.auto | self.asked, f"{a.rung} was neither armed nor asked for"
            elif isinstance(a.event, ev.HaltDone):
                self.dones.append(a.event)
            elif isinstance(a.event, ev.HaltAck):
                assert not (a.event.pod in self.ended and a.event.stage == "unknown"), "a proven end became unknown"
                self.ended |= {a.event.pod} if a.event.stage == "gone" else set()
        self.rungs.append(self.ladder.rung)

    @rule(seconds=st.floats(0.0, 70.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.ladder.tick(self.now))

    @rule(data=st.data(), stage=st.sampled_from(["seen", "held", "released", "halted", "gone"]))
    def worker_reports(self, data: st.DataObject, stage: str) -> None:
        pod = data.draw(st.sampled_from(sorted(self.workers)))
        coord = f"{pod}w{data.draw(st.integers(0, self.workers[pod] - 1))}"
        proof = data.draw(st.sampled_from(["", "ab"]))
        self.said[pod].add((coord, stage if stage != "gone" or proof else "lost"))
        lacks = Lacks.NOTHING if proof else Lacks.NO_EXIT
        self.take(self.ladder.report(pod, stage, self.now, coord=coord, step=3, checkpoint=proof, lacks=lacks))

    @rule(data=st.data(), rung=st.sampled_from([HOLD, HALT, RELEASE, TERM]))
    def agent_acknowledges(self, data: st.DataObject, rung: str) -> None:
        self.take(self.ladder.acked(data.draw(st.sampled_from(sorted(self.workers))), rung, self.now))

    @rule(data=st.data(), up=st.booleans())
    def link_changes(self, data: st.DataObject, up: bool) -> None:
        pod = data.draw(st.sampled_from(sorted(self.workers)))
        self.up[pod] = up
        self.take(self.ladder.link(pod, up, self.now))

    @precondition(lambda self: not self.drill)
    @rule(mode=st.sampled_from([HALT, RELEASE, KILL, TERMINATE]))
    def somebody_asks(self, mode: str) -> None:
        self.asked.add(mode)
        self.take(self.ladder.request(mode, self.now))

    @invariant()
    def verified_only_by_evidence(self) -> None:
        for done in getattr(self, "dones", []):
            if done.drill:
                held = (len({c for c, s in said if s == "held"}) >= self.workers[p] for p, said in self.said.items())
                assert done.verified <= sum(held)
            if done.mode != HALT:
                continue
            proven = sum(
                len({c for c, s in said if s == "gone"}) >= self.workers[pod] for pod, said in self.said.items()
            )
            assert done.verified <= proven

    @invariant()
    def a_drill_never_halts(self) -> None:
        if getattr(self, "drill", False):
            assert set(self.rungs) <= {HOLD, RELEASE}

    @invariant()
    def the_ladder_only_climbs(self) -> None:
        order = {HOLD: 0, RELEASE: 0, HALT: 1, TERM: 2, KILL: 3, TERMINATE: 4}
        climbed = [order[r] for r in getattr(self, "rungs", [])]
        assert climbed == sorted(climbed)

    def teardown(self) -> None:
        """However the story went, enough time brings a verdict."""
        if not hasattr(self, "ladder"):
            return
        for _ in range(400):
            self.now += 1.0
            self.take(self.ladder.tick(self.now))
        assert self.dones
        assert self.ladder.done


AnyStory.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestAnyStory = AnyStory.TestCase


def test_pods_that_were_held_at_one_step_and_went_on_from_it_did_not_stop_at_different_steps() -> None:
    ladder = Ladder("n", PODS, drill=True)
    ladder.start(HOLD, 0.0)
    for pod in PODS:
        ladder.report(pod, "held", 0.1, step=7)
    out = [a for i, pod in enumerate(PODS) for a in ladder.report(pod, "released", 0.2, step=7 + i)]
    assert events(out, ev.Alert) == []
    assert events(out, ev.HaltDone)[0].step == 7
