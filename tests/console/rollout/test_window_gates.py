"""Gates of the full run itself: what a window shows, what a miss does, and what is measured again after going back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.plan import measurable
from uvcc_console.plan.profile import load
from uvcc_console.plan.schema import GatesPart, LmJobSettings, PrivateJobSettings, Profile
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.fleet.preflight import attention_check
from uvcc_console.rollout.stages.training import lm, resume_rehearsal
from uvcc_console.rollout.stages.verify import window_gates
from uvcc_engine.contract.errors import ConfigError

COORDS = ["p0r0s0t0", "p0r1s0t0"]
GATES = GatesPart(toks_per_s=100, gate_entropy=0.5, gate_collapse=0.1, fetch_s=5, at=[4, 8])


def rows(*losses: float, rate: float = 500.0, first: int = 1) -> list[ev.Event]:
    return [
        ev.Metric(coord=COORDS[0], step=first + n, values={"loss": y, "toks_per_s": rate}) for n, y in enumerate(losses)
    ]


def beats(steps: range, **figures: float) -> list[ev.Event]:
    usual = {"gate_entropy_mean": 1.0, "gate_collapse_frac": 0.0, "dt_fetch_s": 0.01} | figures
    return [
        ev.HeartbeatRead(pod="p0r0", coord=c, record={"step": n, "phase": "train", "ts": 1.0 * n, **usual})
        for n in steps
        for c in COORDS
    ]


STARTED = [ev.PhaseStarted(phase="full", engine_run="r.full", steps=20, sid_job="")]


class Conducted:
    """A rollout as far as the gates see it: a snapshot that grows by what is said."""

    def __init__(self, *events: ev.Event, gates: GatesPart = GATES) -> None:
        self.said: list[ev.Event] = []
        self.heard: list[Any] = []
        self.snapshot = Snapshot()
        self.bus = self
        self.plan = SimpleNamespace(profile=SimpleNamespace(gates=gates))
        self.add(*STARTED, *events)

    def add(self, *events: ev.Event) -> None:
        for event in events:
            self.snapshot = reduce(self.snapshot, event)
            for listener in self.heard:
                listener(event)

    def listen(self, listener: Any) -> None:
        self.heard.append(listener)

    def say(self, *events: ev.Event) -> None:
        self.said += events
        self.add(*events)

    def look(self, judged: set[int]) -> None:
        window_gates.look(cast(Rollout, self), judged)

    def rehearse(self) -> None:
        resume_rehearsal.look(cast(Rollout, self))

    def names(self, kind: type[ev.Event]) -> list[Any]:
        return [e for e in self.said if isinstance(e, kind)]


def test_windows_that_hold_are_said_once_and_nothing_is_held() -> None:
    run, judged = Conducted(*rows(5, 4, 3), *beats(range(0, 4))), set[int]()
    run.look(judged)
    assert run.said == []  # step 4 is not there yet
    run.add(*rows(2.5, first=4), *beats(range(4, 5)))
    run.look(judged)
    run.look(judged)
    said = run.names(ev.GateMeasured)
    assert [(g.name, g.ok) for g in said] == [
        (f"{name}@4", True) for name in ("loss_falls", "toks_per_s", "gate_entropy", "gate_collapse", "fetch_s")
    ]
    assert run.names(ev.HaltRequested) == []
    assert judged == {4} == window_gates.judged_before(run.snapshot)


@pytest.mark.parametrize(
    ("events", "missed"),
    [
        ([*rows(2, 2.1, 2.2, 2.3, first=5), *beats(range(5, 9))], "loss_falls@8 (wanted > 0, measured -0.3000)"),
        ([*rows(3, 2, 1, 0.5, first=5, rate=20), *beats(range(5, 9))], "toks_per_s@8 (wanted >= 100, measured 20)"),
        (
            [*rows(3, 2, 1, 0.5, first=5), *beats(range(5, 9), gate_entropy_mean=0.2)],
            "gate_entropy@8 (wanted >= 0.5, measured 0.2)",
        ),
        (
            [*rows(3, 2, 1, 0.5, first=5), *beats(range(5, 9), gate_collapse_frac=0.4)],
            "gate_collapse@8 (wanted <= 0.1, measured 0.4)",
        ),
        ([*rows(3, 2, 1, 0.5, first=5), *beats(range(5, 9), dt_fetch_s=7.0)], "fetch_s@8 (wanted <= 5, measured 7)"),
    ],
)
def test_a_miss_is_held_with_its_reason(events: list[ev.Event], missed: str) -> None:
    run = Conducted(*rows(5, 4, 3, 2.5), *beats(range(0, 5)), *events)
    run.look(set())
    (hold,) = run.names(ev.HaltRequested)
    assert (hold.mode, hold.by, hold.drill) == ("hold", "conductor", False)
    assert hold.reason == f"gate not passed: {missed}"
    (alert,) = run.names(ev.Alert)
    assert alert.text == hold.reason
    assert "uvcc resume" in alert.hint


def test_a_spike_within_a_window_is_no_miss() -> None:
    run = Conducted(*rows(5, 9, 4.5, 4, 4, 30, 3.5, 3), *beats(range(0, 9)), gates=GatesPart(at=[8]))
    run.look(set())
    assert [g.ok for g in run.names(ev.GateMeasured)] == [True]


def test_a_figure_that_is_not_reported_is_a_miss() -> None:
    run = Conducted(*rows(5, 4, 3, 2.5), gates=GatesPart(gate_entropy=0.5, at=[4]))
    run.look(set())
    assert "gate_entropy@4 (wanted >= 0.5, measured not reported)" in run.names(ev.HaltRequested)[0].reason


def test_a_run_that_is_being_halted_is_not_held_again() -> None:
    asked = ev.HaltRequested(nonce="n", mode="halt", by="F9")
    run = Conducted(*rows(1, 2, 3, 4), asked, gates=GatesPart(at=[4]))
    run.look(set())
    assert [g.ok for g in run.names(ev.GateMeasured)] == [False]
    assert run.names(ev.HaltRequested) == []


def test_the_smoke_is_not_measured_in_windows() -> None:
    smoke = ev.PhaseStarted(phase="smoke", engine_run="r.smoke", steps=20, sid_job="")
    run = Conducted(smoke, *rows(1, 2, 3, 4), gates=GatesPart(at=[4]))
    run.look(set())
    assert run.said == []


async def test_what_is_gone_back_before_is_measured_again_and_nothing_else() -> None:
    run = Conducted(*rows(5, 4, 3, 4.5, 4, 3, 2, 1), *beats(range(0, 9)), gates=GatesPart(at=[4, 8]))
    looks = 0

    async def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:  # a conductor's resume from the last checkpoint, then one from step 5 by choice
            run.add(ev.PhaseStarted(phase="full", engine_run="r.full", steps=20, sid_job="", attempt=1))
            run.add(*rows(0.9, first=9))
        if looks == 5:
            run.add(ev.PhaseStarted(phase="full", engine_run="r.full", steps=20, sid_job="", attempt=2, start=5))
            run.add(*rows(9, 9, 9, first=6))
        if looks == 8:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await window_gates.hold_at_gates(cast(Rollout, run), sleep)  # type: ignore[arg-type]
    said = [(g.name, g.ok) for g in run.names(ev.GateMeasured)]
    assert said == [("loss_falls@4", True), ("loss_falls@8", True), ("loss_falls@8", False)]


@pytest.mark.parametrize(
    ("at", "every", "said"),
    [
        ([100, 100], 1, "in ascending order"),
        ([500, 100], 1, "in ascending order"),
        ([10, 700], 1, "names step 700, the full run ends with step 600"),
        ([100, 110], 10, "loss_falls needs 2 rows, steps 101 to 110 of gates.at have 1"),
    ],
)
def test_windows_that_cannot_be_measured_are_refused_by_the_plan(at: list[int], every: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        measurable.check_windows(600, GatesPart(at=at), every)
    assert said in str(caught.value)
    measurable.check_windows(600, GatesPart(at=[100, 500]), every)


REPEATED = {"first": 5, "last": 8, "rows": 4, "checkpoint": 8, "differs": -1}


@pytest.mark.parametrize(
    ("repeated", "ok", "told"),
    [
        (REPEATED, True, "steps 5 to 8 again"),
        (REPEATED | {"differs": 6}, False, "step 6 came out differently when steps 5 to 8 were repeated"),
        (REPEATED | {"checkpoint": -1}, False, "steps 5 to 8 again, with the same 4 losses"),
        ({"first": "x", "differs": None}, False, ""),
    ],
)
def test_a_halt_and_its_exact_resume_are_rehearsed_once(repeated: dict[str, object], ok: bool, told: str) -> None:
    run = Conducted(*beats(range(0, 6)), gates=GatesPart(resume_at=6))
    run.rehearse()
    assert run.said == []
    run.add(*beats(range(6, 8)))
    run.rehearse()
    run.rehearse()
    (halt,) = run.names(ev.HaltRequested)
    assert (halt.mode, halt.by, halt.drill) == ("halt", "conductor", False)
    assert halt.nonce == resume_rehearsal.nonce_of(run.snapshot, 6)
    run.add(ev.PhaseStarted(phase="full", engine_run="r.full", steps=20, sid_job="", attempt=1, start=4))
    run.add(*beats(range(4, 8)))
    run.rehearse()  # at step 7 again, before it says anything: it is not halted another time
    run.add(ev.EngineEvent(pod="p0r0", level="info", event="steps_repeated", fields=repeated))
    run.rehearse()
    run.rehearse()
    (gate,) = run.names(ev.GateMeasured)
    assert (gate.name, gate.ok) == ("exact_resume@6", ok)
    assert told in gate.measured
    assert [h.mode for h in run.names(ev.HaltRequested)] == ["halt"] + ["hold"] * (not ok)


def test_what_a_smoke_repeated_is_no_word_of_the_full_run() -> None:
    smoke = ev.PhaseStarted(phase="smoke", engine_run="r.smoke", steps=20, sid_job="")
    said = ev.EngineEvent(pod="p0r0", level="info", event="steps_repeated", fields=REPEATED)
    run = Conducted(smoke, said, *STARTED, *beats(range(0, 3)), gates=GatesPart(resume_at=6))
    run.rehearse()
    assert run.said == []


def test_a_rehearsal_that_never_came_is_said_at_the_end() -> None:
    run = Conducted(*beats(range(0, 20)), gates=GatesPart(resume_at=6))
    resume_rehearsal.close(cast(Rollout, run))
    resume_rehearsal.close(cast(Rollout, run))
    assert [(g.ok, g.measured) for g in run.names(ev.GateMeasured)] == [(False, "no step was repeated")]


def test_somebodys_halt_is_not_taken_for_the_rehearsal() -> None:
    run = Conducted(
        *beats(range(0, 8)), ev.HaltRequested(nonce="n", mode="halt", by="F9"), gates=GatesPart(resume_at=6)
    )
    run.rehearse()
    assert run.said == []


@pytest.mark.parametrize(
    ("at", "train", "said"),
    [
        (60, {"save_every": 40}, ""),
        (40, {"save_every": 40}, "the first checkpoint is that of step 40"),
        (120, {"save_every": 40}, "the full run ends with step 120"),
        (60, {"save_every": 0}, "needs a checkpoint before its step"),
    ],
)
def test_a_rehearsal_that_could_repeat_nothing_is_refused_by_the_plan(
    at: int, train: dict[str, int], said: str
) -> None:
    job = LmJobSettings(kind="lm", steps=120, overrides={"train": train})
    try:
        measurable.check_resume(job, 120, GatesPart(resume_at=at))
        told = ""
    except ConfigError as e:
        told = str(e)
    assert (said in told) if said else not told
    with pytest.raises(ConfigError, match="of language models"):
        measurable.check_resume(PrivateJobSettings(kind="private", steps=9), 9, GatesPart(resume_at=2))


def test_steps_of_gates_are_numbers_above_zero() -> None:
    for wrong in ([0], [-5], ["x"]):
        with pytest.raises(ValueError, match=r"gates\.at|greater than 0|valid integer"):
            GatesPart.model_validate({"at": wrong})


@pytest.mark.parametrize("name", ["m7c-1gpu", "m7c-2xa100"])
def test_the_shipped_profiles_measure_what_their_launch_plan_asks(name: str) -> None:
    profile: Profile = load(name)[1]
    assert profile.gates.at == [100, 500]
    assert (profile.gates.fetch_s, profile.gates.attention) == (5, "full")
    assert attention_check(profile, {"p0r0": {"gpus": []}}) == "full"


def test_attention_is_tried_where_it_is_computed_on_gpus() -> None:
    profile = load("local-lm-smoke")[1]
    assert attention_check(profile, {"p0r0": {"gpus": [{"name": "H100"}]}}) == ""  # it computes on processors
    on_gpus = load("m7c-1gpu")[1]
    auto = on_gpus.model_copy(update={"gates": on_gpus.gates.model_copy(update={"attention": "auto"})})
    assert attention_check(auto, {"p0r0": {"gpus": [{"name": "H100"}]}}) == "full"
    assert attention_check(auto, {"p0r0": {"gpus": []}}) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('warning\n[{"name": "causality", "ok": true, "detail": "8 edits"}]', ""),
        ('[{"name": "causality", "ok": false, "detail": "edit at 7 seen at 3\\u001b[2J"}]', "causality: edit at 7"),
        ('[{"name": "causality", "ok": "yes", "detail": ""}]', "causality"),
        ("[]", "it did not answer"),
        ("Segmentation fault", "it did not answer"),
        ("", "it did not answer"),
        ('{"name": 1}', "it did not answer"),
        ("[" * 100000, "it did not answer"),
    ],
)
def test_a_pods_word_on_its_attention_is_read_totally(text: str, said: str) -> None:
    found = lm.proven(text)
    assert found["ok"] == (said == "")
    assert said in found.get("error", "")
    assert "\x1b" not in str(found)


def test_a_snapshot_keeps_each_window_apart() -> None:
    s = fold([ev.GateMeasured(name=f"loss_falls@{n}", ok=True, wanted="> 0", measured="+1") for n in (4, 8)])
    assert [g.name for g in s.gates] == ["loss_falls@4", "loss_falls@8"]
