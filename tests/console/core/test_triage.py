"""The triage ladder: one change at a time, in order, with what each did."""

from __future__ import annotations

from uvcc_console.core import events as ev
from uvcc_console.core.answers import triage
from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import Snapshot


def run_of(kind: str, *more: ev.Event) -> Snapshot:
    created = ev.RunCreated(
        run="r", profile_name="t", job_kind=kind, replicas=1, pipeline_stages=1, tensor=1, stages=["full"]
    )
    started = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="")
    return fold([created, started, ev.StageChanged(name="full", status="running"), *more])


def beat(step: int) -> ev.Event:
    return ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record={"step": step, "phase": "train"})


def test_the_ladder_is_the_operators_sheet_one_change_at_a_time() -> None:
    s, words = run_of("lm"), []
    while (rung := triage.propose(s)) is not None:
        words.append(rung.word)
        s = fold([ev.TriageTried(rung=rung.word, step=5, by="me")], s)
    assert words == ["calm", "dynamic", "unused", "loud", "single"]
    assert "every change of the ladder was tried" in triage.impossible(s)
    calm, dynamic, unused = triage.LADDER[:3]
    assert dict(calm.env) == {"NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100"}
    assert (dynamic.env["NSA_DDP_STATIC_GRAPH"], dynamic.env["NSA_DDP_FIND_UNUSED"]) == ("0", "0")
    assert (unused.env["NSA_DDP_STATIC_GRAPH"], unused.env["NSA_DDP_FIND_UNUSED"]) == ("1", "1")
    assert triage.LADDER[-1].single


def test_what_was_tried_is_kept_with_what_it_did() -> None:
    s = run_of("lm", beat(5), ev.TriageTried(rung="calm", step=5, by="me"), beat(12))
    assert triage.story(s) == ["compression off, buckets of 100 MB, from step 5: runs"]
    s = fold([ev.StageChanged(name="full", status="failed", detail="no sign of life")], s)
    assert triage.story(s) == ["compression off, buckets of 100 MB, from step 5: 7 steps, then no sign of life"]
    assert triage.propose(s) is triage.LADDER[1]


def test_where_it_makes_no_sense_it_says_why() -> None:
    assert "signed as it is" in triage.impossible(run_of("private"))
    assert triage.impossible(run_of("command")) == ""
