"""Seconds of a step: the model on numbers that rehearsals and rollouts gave, and where a number moves what."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.plan import forecast, plan_score
from uvcc_console.plan.plan_score import WITHIN
from uvcc_console.plan.step_forecast import CONSOLE, LEAST, apart, here


def rehearsed(wall: float, high: float, party_cpu: float, all_cpu: float, cores: float = 2.0) -> dict[str, Any]:
    took = {"wall": wall, "low": 0.8 * wall, "high": high, "early": 1.5, "cores": cores, "replicas": 1}
    return {
        "rounds": 20.0,
        "bytes": 1e6,
        "busiest": 1.5,
        "processes": took | {"party_cpu": party_cpu, "all_cpu": all_cpu},
    }


RECORDED = {
    "logistic regression": (rehearsed(0.15408, 0.20758, 0.02957, 0.08202), 1, 0.109, 0.144),
    "mlp-digits": (rehearsed(0.15281, 0.18653, 0.03013, 0.08243), 1, 0.294, 0.180),
    "mlp-digits, two replicas": (rehearsed(0.13223, 0.21735, 0.02745, 0.07517), 2, 0.177, 0.197),
    "a GPT of one block": (rehearsed(1.84821, 2.25834, 0.29938, 0.78038), 1, 1.518, 1.407),
    "trees": (rehearsed(0.85529, 1.07929, 0.11742, 0.30815), 1, 0.331, 0.385),
    "k-means, proved": (rehearsed(0.43621, 0.44293, 0.09507, 0.27512), 1, 0.775, 0.704),
}
"""Rollouts on two processors that other work loaded (16 to 26 runnable processes): what was rehearsed just before, how
many replicas, a step by the smoke, and the median step of the full run."""
SETTLED = ("logistic regression", "mlp-digits", "mlp-digits, two replicas")
"""Those during which the load stayed as it was; of the others the smoke, minutes later, knew better."""


@pytest.mark.parametrize("name", RECORDED)
def test_the_smoke_foretold_what_real_rollouts_took(name: str) -> None:
    step, replicas, by_smoke, took = RECORDED[name]
    said = here(step, replicas)
    told = ev.PlanForetold(steps=9, rounds=1.0, bytes=1.0, seconds=0.0, low=said.low, high=said.high, here=True)
    assert abs(forecast.settled(smoke(3, told, by_smoke))[0] / took - 1.0) <= WITHIN
    if name != "k-means, proved":  # whose load rose, beyond what the rehearsal had seen
        assert said.low <= took <= said.high
    assert (abs(said.seconds / took - 1.0) <= WITHIN) == (name in SETTLED)


def test_local_pods_share_processors_and_a_replica_more_takes_its_part() -> None:
    one, two = here(rehearsed(0.1, 0.11, 0.06, 0.18), 1), here(rehearsed(0.1, 0.11, 0.06, 0.18), 2)
    slower = 1.0 / (1.0 - CONSOLE / 2.0)
    assert one.seconds == pytest.approx(0.1 * slower)
    assert two.seconds == pytest.approx((0.1 + 0.09) * slower)
    assert one.network_s == 0.0
    roomy = here(rehearsed(0.1, 0.11, 0.06, 0.18, cores=64.0), 2)
    assert roomy.seconds == pytest.approx(0.1, rel=0.05)  # there are processors for both


def test_the_range_says_what_else_the_machine_did_and_is_never_narrower_than_a_quarter() -> None:
    quiet, busy = here(rehearsed(0.1, 0.11, 0.06, 0.18), 1), here(rehearsed(0.5, 0.9, 0.06, 0.18), 1)
    assert (quiet.low, quiet.high) == (
        pytest.approx((1 - LEAST) * quiet.seconds),
        pytest.approx((1 + LEAST) * quiet.seconds),
    )
    assert busy.low < 0.1 < busy.seconds < 0.9 < busy.high


def test_pods_apart_take_rounds_bytes_and_the_busiest_party() -> None:
    found = apart(rehearsed(0.1, 0.3, 0.06, 0.18), 0.02, 1e7)
    assert found.network_s == pytest.approx(20 * 0.01 + 1.5 * 0.1)  # the line of the party that deals is the fullest
    assert found.seconds == pytest.approx(found.network_s + 0.06)
    assert found.high == pytest.approx(found.network_s + 0.3)


def smoke(steps: int, told: ev.PlanForetold | None, took: float = 0.3) -> Snapshot:
    """Of one worker, whose steps took so many seconds."""
    events: list[ev.Event] = [told] if told is not None else []
    events.append(ev.PhaseStarted(phase="smoke", engine_run="r.smoke", steps=steps, sid_job="ab"))
    for step in range(steps + 1):
        beat = {"ts": 100 + took * step, "step": step, "phase": "train", "coord": "p0r0s0t0"}
        events.append(ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=beat))
    return fold(events)


def test_the_first_steps_of_a_short_smoke_are_not_taken_for_those_that_follow() -> None:
    told = ev.PlanForetold(steps=9, rounds=1.0, bytes=1.0, seconds=0.2, early=1.5, more=0.05)
    assert forecast.settled(smoke(3, told)) == pytest.approx([0.2 + 0.05] * 2)
    assert forecast.settled(smoke(8, told)) == pytest.approx([0.3 + 0.05] * 7)
    assert forecast.settled(smoke(3, None)) == pytest.approx([0.3] * 2)
    near = replace(told, low=0.1, high=0.22, here=True)
    assert forecast.settled(smoke(3, near)) == pytest.approx([0.22] * 2)  # not beyond what was rehearsed there
    assert forecast.settled(smoke(8, near)) == pytest.approx([0.35] * 7)  # so many steps know better
    assert forecast.settled(smoke(3, replace(near, here=False))) == pytest.approx([0.25] * 2)
    said = forecast.predict(smoke(3, told), 10)
    assert said is not None
    assert said.seconds == pytest.approx(2.5)


def drilled(*, rate: bool) -> Snapshot:
    """A smoke of two steps of 0.2 s behind one that also paid for starting, held for the drill in between."""
    profile = {"job": {"kind": "private", "batch": 128}}
    created = ev.RunCreated(
        run="r",
        profile_name="p",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=["smoke"],
        profile=profile,
    )
    events: list[ev.Event] = [created]
    events.append(ev.PhaseStarted(phase="smoke", engine_run="r.smoke", steps=2, sid_job="ab"))
    beats = ((100.0, 0, "start", 0.0), (102.2, 1, "released", 128 / 1.1), (102.4, 2, "", 128 / 0.2))
    for pod, (ts, step, said, per_s) in itertools.product(("p0r0", "p1r0"), beats):
        coord, phase = f"{pod}s0t0", "train" if step < 2 else "evaluate"
        beat = {"ts": ts, "step": step, "phase": phase, "coord": coord, "msg": said}
        events.append(ev.HeartbeatRead(pod=pod, coord=coord, record=beat))
        if rate and step:
            events.append(ev.Metric(coord=coord, step=step, values={"loss": 1.0, "samples_per_s": per_s}))
    return fold(events)


def test_a_smoke_that_was_held_foretells_by_the_step_behind_it() -> None:
    """As the demonstration's: the time of its hold, and of its first step, are none of the sixty steps that follow."""
    said = forecast.predict(drilled(rate=True), 60)
    assert said is not None
    assert said.seconds == pytest.approx(60 * 0.2)
    assert said.seconds_error == pytest.approx(60 * 0.2 / 2)  # two steps that nothing was rehearsed for
    assert forecast.predict(drilled(rate=False), 60) is None  # the hold is no measure of a step


def test_the_only_step_that_was_measured_stands_for_all() -> None:
    assert forecast.step_times(smoke(1, None)) == pytest.approx([0.3])


def test_what_the_smoke_took_besides_its_steps_is_foretold_once() -> None:
    told = ev.PlanForetold(steps=9, rounds=1.0, bytes=1.0, seconds=0.2)
    events: list[ev.Event] = [
        told,
        ev.PhaseStarted(ts=90.0, phase="smoke", engine_run="r.smoke", steps=8, sid_job="ab"),
    ]
    for step in range(9):
        beat = {"ts": 95.0 + 0.5 * step, "step": step, "phase": "train", "coord": "p0r0s0t0"}
        events.append(ev.HeartbeatRead(ts=95.0 + 0.5 * step, pod="p0r0", coord="p0r0s0t0", record=beat))
    events.append(ev.StageChanged(ts=100.0, name="smoke", status="ok"))
    ended = fold(events)
    said = forecast.predict(ended, 100)
    assert said is not None
    assert said.beside_s == pytest.approx(100.0 - 90.0 - 8 * 0.5)
    assert said.seconds == pytest.approx(100 * 0.5 + said.beside_s)
    assert said.seconds_error == pytest.approx(math.hypot(0.1 * 50.0, said.beside_s / 2))
    resumed = forecast.predict(replace(ended, attempt=1), 100)
    assert resumed is not None
    assert (resumed.beside_s, resumed.seconds) == (0.0, pytest.approx(50.0))
    full = fold([said, ev.PhaseStarted(phase="full", engine_run="r.full", steps=100, sid_job="ab")], ended)
    (by_smoke,) = [one for one in plan_score.score(_trained(full)) if one.name == plan_score.BY_SMOKE]
    assert by_smoke.foretold == pytest.approx(0.5)  # a step, without what stands beside all of them


def _trained(s: Snapshot) -> Snapshot:
    beats = ({"ts": 200.0 + 0.5 * k, "step": k, "phase": "train", "coord": "p0r0s0t0"} for k in range(4))
    return fold([ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=beat) for beat in beats], s)
