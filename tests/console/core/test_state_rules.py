"""Small rules of the reducer that an operator goes by: since when, how bad, of which run, how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.bulk_folding import Folding
from uvcc_console.core.folding.state import MALFORMED_KEEP, fold, reduce
from uvcc_console.core.snapshot import AGENT_PATHS, Snapshot

POD = "p0r0"
PATH = next(iter(sorted(AGENT_PATHS)))


def _pod(state: str = "agent", **more: Any) -> ev.PodChanged:
    return ev.PodChanged(**{"ts": 1.0, "pod": POD, "party": 0, "replica": 0, "provider": "x", "state": state} | more)


def _link(ts: float, up: bool, path: str = PATH, detail: str = "") -> ev.LinkChanged:
    return ev.LinkChanged(ts=ts, pod=POD, path=path, up=up, detail=detail)


def _started(run: str = "r.full", **more: Any) -> ev.PhaseStarted:
    return ev.PhaseStarted(**{"ts": 2.0, "phase": "full", "engine_run": run, "steps": 9, "sid_job": ""} | more)


def _levels(s: Snapshot) -> list[str]:
    return [line.level for line in s.log]


@pytest.mark.parametrize(("state", "level"), [("agent", "info"), ("gone", "info"), ("failed", "error")])
def test_a_pod_that_is_broken_is_an_error_and_no_other(state: str, level: str) -> None:
    assert _levels(fold([_pod(state)])) == [level]


def test_what_a_pods_next_word_does_not_say_stays_as_it_was() -> None:
    known = _pod(address="1.2.3.4", price_hr=2.0, identity="id", host_key="key")
    first = fold([known, _link(3.0, False, detail="lost")]).pods[POD]
    again = fold([known, _link(3.0, False, detail="lost"), _pod("lost")]).pods[POD]
    assert again == replace(first, state="lost", detail="")
    assert (again.address, again.price_hr, again.host_key, again.trouble) == ("1.2.3.4", 2.0, "key", "lost")


def test_a_path_is_up_or_down_since_that_was_first_said() -> None:
    events: list[ev.Event] = [_pod(), _link(5.0, True)]
    assert fold(events).pods[POD].paths[PATH] == (True, 5.0)
    events.append(_link(9.0, True))
    assert fold(events).pods[POD].paths[PATH] == (True, 5.0)
    events.append(_link(12.0, False, detail="reset"))
    s = fold(events)
    assert (s.pods[POD].paths[PATH], s.pods[POD].trouble) == ((False, 12.0), "reset")
    assert _levels(s)[-1] == "warn"
    events.append(_link(15.0, True))
    s = fold(events)
    assert (s.pods[POD].paths[PATH], s.pods[POD].trouble) == ((True, 15.0), "")
    assert fold([_pod(), _link(5.0, False, "relay", "slow")]).pods[POD].trouble == "", "that of the relay is no agent's"
    assert fold([_link(5.0, True)]).pods == {}


def test_evidence_of_a_halt_never_goes_back_but_a_pod_may_fall_silent() -> None:
    asked = ev.HaltRequested(ts=3.0, nonce="n", mode="halt", by="t")

    def ack(stage: str, **more: Any) -> ev.HaltAck:
        return ev.HaltAck(**{"ts": 4.0, "pod": POD, "nonce": "n", "stage": stage} | more)

    told = [_pod(), asked, ack("halted", step=0, checkpoint="ab")]
    assert fold(told).halt.acks[POD] == ("halted", 0, "ab", 4.0)
    assert fold([*told, ack("seen")]).halt.acks[POD][0] == "halted"
    assert fold([*told, ack("halted", nonce="other", step=9)]).halt.acks[POD][1] == 0
    assert fold([*told, ack("gone", step=-1)]).halt.acks[POD][:3] == ("gone", 0, "ab")
    assert fold([*told, ack("gone", step=0)]).halt.acks[POD][1] == 0
    silent = fold([*told, ack("unknown", ts=8.0)])
    assert silent.halt.acks[POD] == ("unknown", 0, "ab", 8.0)
    assert _levels(silent)[-1] == "error"


def test_a_checkpoint_of_another_run_that_comes_home_is_none_of_this_one() -> None:
    home = ev.CheckpointHome(ts=3.0, pod=POD, engine_run="r.smoke", step=7, sha256="ab" * 32, path="x")
    assert fold([_pod(), _started(), home]).home == {}
    assert fold([_pod(), _started("r.smoke"), home]).home == {POD: (7, "ab" * 32)}


def test_a_change_of_settings_is_told_in_its_own_words() -> None:
    change = ev.SettingsChanged(ts=1.0, changes={"job.lr": 0.5, "job.batch": None}, by="op")
    assert fold([change]).log[-1].text == "from the next attempt on job.lr = 0.5, job.batch as planned, asked by op"


def test_a_domain_that_says_the_same_again_is_shown_and_not_told_again() -> None:
    first = ev.DomainReported(ts=1.0, party=2, stage="full", status="running", step=3, steps=9, detail="d")
    s = fold([first])
    view = s.domains[2]
    assert (view.party, view.stage, view.status, view.step, view.steps, view.detail) == (
        2,
        "full",
        "running",
        3,
        9,
        "d",
    )
    again = fold([first, replace(first, ts=2.0, step=4)])
    assert (len(again.log), again.domains[2].step) == (len(s.log), 4)
    for other in ({"stage": "verify"}, {"status": "failed"}, {"detail": "else"}):
        assert len(fold([first, replace(first, **other)]).log) == len(s.log) + 1, other
    for status, level in (("failed", "error"), ("halt", "error"), ("silent", "error"), ("waiting", "warn")):
        assert _levels(fold([replace(first, status=status)])) == [level]


def test_what_cannot_be_read_is_counted_from_however_many_places() -> None:
    events = [ev.LinesMalformed(where=f"w{n}", count=2, src="s", sample="x") for n in range(MALFORMED_KEEP + 3)]
    s = fold([*events, events[0], ev.LinesMalformed(where="w1", count=-5)])
    assert (s.malformed["w0"], s.malformed["w1"], s.malformed["others"]) == (4, 3, 6)
    assert len(s.malformed) == MALFORMED_KEEP + 1
    assert len(s.log) == MALFORMED_KEEP + 4, "one without a sample says nothing"
    mine = ev.LinesMalformed(where="j", src="s", sample="x", journalled=True)
    assert len(fold([mine, mine]).log) == 1, "those of the journal come again with every reading"


def test_the_outcome_of_a_try_is_what_came_of_the_stage_behind_it() -> None:
    tried = ev.TriageTried(ts=1.0, rung="nccl", step=5, by="op")

    def then(*statuses: str) -> list[str]:
        stages = [ev.StageChanged(ts=2.0, name="full", status=s, detail="why") for s in statuses]
        return [t.outcome for t in fold([_pod(), _started(), tried, *stages]).triage]

    assert then("running") == [""]
    assert then("running", "ok") == ["the stage went through"]
    assert then("running", "failed") == ["0 steps, then why"]
    assert then("waiting", "ok") == ["0 steps, then why"]


def test_a_run_that_failed_runs_again_with_its_next_stage_but_for_its_teardown() -> None:
    failed = [ev.StageChanged(ts=1.0, name="full", status="failed", detail="why")]
    assert (fold(failed).status, fold(failed).detail) == ("failed", "why")
    assert fold([*failed, ev.StageChanged(ts=2.0, name="teardown", status="running")]).status == "failed"
    assert fold([*failed, ev.StageChanged(ts=2.0, name="verify", status="ok")]).status == "failed"
    again = fold([*failed, ev.StageChanged(ts=2.0, name="full", status="running")])
    assert (again.status, again.detail) == ("running", "")


def test_epochs_are_agreed_on_however_they_are_folded() -> None:
    coords = [f"p{p}r0s0t0" for p in range(3)]
    created = ev.RunCreated(
        ts=0.0, run="r", profile_name="p", job_kind="private", replicas=1, pipeline_stages=1, tensor=1, stages=[]
    )
    born = [ev.WorkerProcess(ts=3.0, pod=c[:4], coord=c, state="started", pid=n) for n, c in enumerate(coords, 1)]
    roots = [ev.RootReported(ts=4.0, coord=c, epoch=e, root="ab") for e in (2, 1, 3) for c in coords]
    split = [
        ev.RootReported(ts=5.0, coord=c, epoch=4, root="ab", pairs={coords[1 - n]: "xy"[n]} if n < 2 else {})
        for n, c in enumerate(coords)
    ]
    start, wanted = [created, _started(), *born], (2, 2, 3, 3)
    found = []
    for upto in (3, 6, 9, 9):
        more = roots[:upto] if len(found) < 3 else [*roots, *split]
        s, folding = Snapshot(), Folding(Snapshot())
        for seq, event in enumerate([*start, *more], 1):
            s = reduce(s, event, seq)
            folding.add(event, seq)
        assert folding.snapshot.agreed_epoch == s.agreed_epoch
        found.append(s.agreed_epoch)
    assert tuple(found) == wanted


@pytest.mark.parametrize(("event", "curve"), [("sample_written", "sample"), ("steps_repeated", "repeated")])
def test_what_a_trainer_says_of_itself_is_kept(event: str, curve: str) -> None:
    said = ev.EngineEvent(ts=3.0, pod=POD, level="info", event=event, fields={"text": "once", "n": 3})
    kept = getattr(fold([_pod(), _started(), said]), curve)
    assert kept == ("once" if curve == "sample" else {"text": "once", "n": 3})
    if curve == "repeated":
        rolled = replace(said, fields={"after": 4})
        assert fold([_pod(), _started(), rolled]).repeated == {}


def test_facts_and_waits_are_of_the_worker_that_is_named_or_of_its_pod() -> None:
    def said(event: str, **fields: Any) -> ev.EngineEvent:
        return ev.EngineEvent(ts=3.0, pod=POD, level="info", event=event, fields=fields)

    s = fold([_pod(), said("run_facts", coord="p0r0s1t0", steps=9), said("run_facts", steps=8)])
    assert {c: f["steps"] for c, f in s.facts.items()} == {"p0r0s1t0": 9, POD: 8}
    s = fold([_pod(), said("waiting", coord="p0r0s1t0", peer=2, since_s=5.0), said("waiting", peer=1, since_s=6.0)])
    assert {c: (w.peer, w.since_s) for c, w in s.waits.items()} == {"p0r0s1t0": ("p2", 5.0), POD: ("p1", 6.0)}


def test_a_worker_is_exited_only_while_it_is() -> None:
    ended = ev.WorkerProcess(ts=5.0, pod=POD, coord="p0r0s0t0", state="exited", rc=0, pid=3)
    begun = replace(ended, ts=6.0, state="started", rc=None, pid=4)
    assert fold([ended]).workers["p0r0s0t0"].exited == 5.0
    assert fold([ended, begun]).workers["p0r0s0t0"].exited == 0.0
