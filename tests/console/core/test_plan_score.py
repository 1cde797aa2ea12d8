"""What a plan foretold of a step, held against what the workers measured, at any time of the full run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from uvcc_console.cli.follow import jsonview
from uvcc_console.cli.view import status
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.plan.plan_score import BY_SMOKE, lines, score
from uvcc_console.ui.drawing.paint import width_of
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels import rollout

TOLD = ev.PlanForetold(steps=9, rounds=22.0, bytes=3e6, seconds=0.5)


def run(told: ev.PlanForetold = TOLD, phase: str = "full", steps: int = 3, counted: int = 3) -> Snapshot:
    """Three workers that made so many steps of 0.8 s; of the last ``3 - counted`` none counted its messages."""
    events: list[ev.Event] = [told, ev.PhaseStarted(phase=phase, engine_run="r.full", steps=9, sid_job="ab")]
    for party in range(3):
        coord = f"p{party}r0s0t0"
        events.append(ev.WorkerProcess(pod=f"p{party}r0", coord=coord, pid=1, state="started"))
        for step in range(1, steps + 1):
            beat = {"ts": 100 + 0.8 * step, "step": step, "phase": "train", "coord": coord}
            beat |= {"step_rounds": 22.0, "step_bytes": (1.0 + party) * 5e5} if party < counted and step > 1 else {}
            events.append(ev.HeartbeatRead(pod=f"p{party}r0", coord=coord, record=beat))
    return fold(events)


def test_every_figure_stands_beside_what_was_measured_and_a_miss_is_named(tmp_path: Path) -> None:
    s = run()
    found = {one.name: one for one in score(s)}
    assert list(found) == ["rounds", "bytes", "seconds"]  # nothing is paid: no dollars
    assert (found["rounds"].off, found["rounds"].held) == (0.0, True)
    assert found["bytes"].off == pytest.approx(0.0)
    assert found["seconds"].measured == pytest.approx(0.8)
    assert (found["seconds"].held, round(found["seconds"].off, 3)) == (False, -0.375)
    assert lines(s)[0] == "a step's rounds   22.0 foretold, 22.0 measured: +0.0%, held"
    assert lines(s)[2] == "a step's seconds  0.500 s foretold, 0.800 s measured: -37.5%, MISSED"
    shown = status.text(s, tmp_path, 0.0)
    assert all(f"plan     {line}" in shown for line in lines(s))
    told = jsonview.document(s, tmp_path)["plan_score"]
    assert [one["held"] for one in told] == [True, True, False]


def test_counts_are_foretold_for_as_many_audits_as_were_drawn() -> None:
    told = dataclasses.replace(
        TOLD, rounds=22.5, bytes=3.3e6, audits=0.3, audited=0.25, audit_rounds=2.0, audit_bytes=1e6
    )
    drawn = {"step_rounds": 23.0, "step_bytes": 3.6e6 / 3, "step_audits": 0.6, "step_audited": 0.5}
    found = [ev.HeartbeatRead(pod=f"p{p}r0", coord=f"p{p}r0s0t0", record=_beat(p) | drawn) for p in range(3)]
    by_name = {one.name: one for one in score(fold(found, run(told)))}
    assert (by_name["rounds"].off, by_name["bytes"].off) == (0.0, pytest.approx(0.0))
    never = {one.name: one for one in score(run(told))}  # none was drawn in these steps
    assert (never["rounds"].foretold, never["bytes"].foretold) == (22.0, pytest.approx(3e6))


def _beat(party: int) -> dict[str, object]:
    return {"ts": 103.2, "step": 4, "phase": "train", "coord": f"p{party}r0s0t0"}


def test_a_range_is_held_too_and_what_the_smoke_said_stands_beside_it(tmp_path: Path) -> None:
    wide = dataclasses.replace(TOLD, low=0.4, high=0.9)
    said = ev.Forecast(steps=10, seconds=9.0, seconds_error=1.0)
    s = fold([said], run(wide))
    assert [one.name for one in score(s)] == ["rounds", "bytes", "seconds", BY_SMOKE]
    assert lines(s)[2] == (
        "a step's seconds  0.500 s foretold, 0.800 s measured: -37.5%, MISSED, in its range of 0.400 to 0.900 s"
    )
    assert lines(s)[3] == "a step's seconds by the smoke 0.900 s foretold, 0.800 s measured: +12.5%, held"
    assert jsonview.document(s, tmp_path)["plan_score"][2]["in_range"] is True
    narrow = run(dataclasses.replace(wide, high=0.7))
    assert "MISSED, outside of its range of 0.400 to 0.700 s" in lines(narrow)[2]


def test_a_price_makes_dollars_of_the_seconds_also_when_the_pods_are_gone() -> None:
    s = dataclasses.replace(run(), hourly=36.0)
    assert score(s)[-1].measured == pytest.approx(0.008)
    forecast = ev.Forecast(steps=9, seconds=7.2, seconds_error=1.0, cost=0.072)
    gone = fold([forecast], run())
    assert score(gone)[-1].measured == pytest.approx(0.008)


def test_what_was_not_foretold_or_not_measured_is_no_figure() -> None:
    assert score(fold([TOLD])) == []
    assert score(run(phase="smoke")) == []
    assert score(run(steps=0)) == []
    split = run(dataclasses.replace(TOLD, rounds=0.0))
    assert [one.name for one in score(split)] == ["bytes", "seconds"]
    assert "not foretold" in lines(split)[-1]
    assert [one.name for one in score(run(counted=2))] == ["rounds", "seconds"]  # a part of the bytes is no sum


def test_a_domain_does_not_hold_its_own_bytes_against_those_of_all_three() -> None:
    alone = dataclasses.replace(run(counted=1), apart=True, workers={"p0r0s0t0": run().workers["p0r0s0t0"]})
    assert [one.name for one in score(alone)] == ["rounds", "seconds"]
    assert lines(alone)[-1] == "a step's bytes    not scored: a domain hears of its own party's workers only"


def test_the_page_of_the_rollout_shows_the_same_words_at_every_width() -> None:
    s = run()
    for width in (60, 160):
        drawn = rollout.page_lines(View(snap=s, now=200.0), width)
        told = " ".join(" ".join(text for text, _ in line) for line in drawn)
        for one in score(s):
            assert one.words() in " ".join(told.split())
        assert max(width_of(line) for line in drawn) <= width
    assert rollout.score_lines(View(snap=fold([TOLD]), now=0.0), 80) == []
