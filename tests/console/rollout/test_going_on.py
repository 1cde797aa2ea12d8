"""A run whose profile says so goes on by itself behind what may pass, so often and no more; all else waits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from demorun import Demo, user_at
from test_rollout_judgement import COORDS, exited, full_phase, running
from test_rollout_machine import Script, bus, decide_when, stages

from uvcc_console.cli.follow.headless import waits_for_decision
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.plan.own_resumes import BY
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted, PassingError
from uvcc_console.rollout.going_on import GoingOn
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_console.rollout.stages.training.phases import trouble
from uvcc_console.rollout.stages.training.silence import deserted, hang
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.bars import banner_lines
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreachableError, UvccError

__all__ = ["bus"]
KILLED = PassingError("worker p1r0s0t0 of P1 was killed by SIGKILL")


def machine(bus: Bus, script: Script, most: int, *, pause_s: float = 0.0, taken: int = 0) -> StageRunner:
    """A conductor's stages that obey the orders in their journal."""
    found = stages(bus, script, by_itself=GoingOn(most, bus.commit, pause_s, taken))
    bus.listen(lambda event: found.decide(event.action) if isinstance(event, ev.Intent) else None)
    return found


def told(folder: Path) -> list[ev.StageChanged]:
    return [e for _, e in iter_events(folder / "journal.sqlite") if isinstance(e, ev.StageChanged) and e.until]


async def test_it_goes_on_as_often_as_it_may_and_then_waits(bus: Bus, tmp_path: Path) -> None:
    script = Script(full=[KILLED, UnreachableError("pod p1r0 does not answer"), KILLED, "12 steps"])
    made = machine(bus, script, 2)
    decide_what_waits(bus, made)
    assert await made.run() == ("ok", "")
    assert script.entered == [("full", False), ("full", True), ("full", True), ("full", True)]
    first, second, third = told(tmp_path)
    assert "; goes on by itself in 0 s (1 of 2); there is no pod; this waits until" in first.detail
    assert "(2 of 2)" in second.detail
    assert "by itself" not in third.detail
    words = [f"it goes on by itself from the last common checkpoint ({n} of 2)" for n in (1, 2)]
    assert [a.text.partition(" (uvcc")[0] for a in bus.snapshot.alerts] == words
    orders = [e for _, e in iter_events(tmp_path / "journal.sqlite") if isinstance(e, ev.Intent)]
    assert [(e.action, e.by) for e in orders] == [("resume", BY)] * 2
    again = GoingOn(3, bus.commit)
    again.replay(orders)  # another conductor counts on
    assert again.taken == 2


def decide_what_waits(bus: Bus, made: StageRunner) -> None:
    """Somebody resumes whatever does not go on by itself."""

    def heard(event: ev.Event) -> None:
        if isinstance(event, ev.StageChanged) and event.until and not event.again:
            asyncio.get_running_loop().call_soon(made.decide, "resume")

    bus.listen(heard)


@pytest.mark.parametrize(
    "error",
    [
        UvccError("worker p1r0s0t0 of P1 ended with exit code 1: the disk is full"),
        ProtocolError("P2 altered a product", party=2),
        Halted(7),
    ],
)
async def test_what_somebody_has_to_look_at_waits(bus: Bus, tmp_path: Path, error: UvccError) -> None:
    script = Script(full=[error, "12 steps"])
    made = machine(bus, script, 5)
    status = "waiting" if isinstance(error, Halted) else "failed"
    deciding = asyncio.create_task(decide_when(bus, made, "full", status, "resume"))
    assert await made.run() == ("ok", "")
    await deciding
    assert [(e.again, "by itself" in e.detail) for e in told(tmp_path)] == [(0.0, False)]


async def test_a_gate_that_fails_waits(bus: Bus, tmp_path: Path) -> None:
    script = Script(full=["12 steps"], gate=[KILLED, "measured"])
    made = stages(bus, script, by_itself=GoingOn(5, bus.commit, 0.0), keeping=frozenset({"full", "gate"}))
    deciding = asyncio.create_task(decide_when(bus, made, "gate", "failed", "retry"))
    assert await made.run() == ("ok", "")
    await deciding
    assert [e.again for e in told(tmp_path)] == [0.0]


async def test_who_decides_before_its_time_is_obeyed_at_once_and_none_is_counted(bus: Bus) -> None:
    script = Script(full=[KILLED, "12 steps"])
    made = machine(bus, script, 1, pause_s=100.0)
    deciding = asyncio.create_task(decide_when(bus, made, "full", "failed", "resume"))
    assert await made.run() == ("ok", "")
    await deciding
    assert made.by_itself is not None
    assert made.by_itself.taken == 0
    assert not bus.snapshot.alerts


async def test_a_halt_that_is_asked_for_meanwhile_keeps_it_where_it_is(bus: Bus, tmp_path: Path) -> None:
    script = Script(full=[KILLED, "12 steps"])
    made = machine(bus, script, 1, pause_s=0.01)

    def heard(event: ev.Event) -> None:
        if isinstance(event, ev.StageChanged) and event.again:
            halt = ev.HaltRequested(nonce="n1", mode="halt", by="operator", drill=False, reason="")
            asyncio.get_running_loop().call_soon(partial(bus.commit, halt))

    bus.listen(heard)
    decide_what_waits(bus, made)
    assert await made.run() == ("ok", "")
    assert [bool(e.again) for e in told(tmp_path)] == [True, False]
    assert not [e for _, e in iter_events(tmp_path / "journal.sqlite") if isinstance(e, ev.Intent)]


def test_pauses_double_and_have_an_end(bus: Bus) -> None:
    pauses = [GoingOn(99, bus.commit, taken=n).pause(KILLED) for n in range(7)]
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


async def test_it_does_not_wait_beyond_the_runs_end_for_its_time(bus: Bus, tmp_path: Path) -> None:
    script = Script(full=[KILLED])
    made = stages(bus, script, wait_s=0.02, by_itself=GoingOn(5, bus.commit, 10.0))
    assert (await made.run())[0] == "failed"
    assert [e.again for e in told(tmp_path)] == [0.0]


@pytest.mark.parametrize(
    ("ends", "passing"),
    [
        ([(-9, "SIGKILL")], True),
        ([(4, "")], True),
        ([(5, "")], True),
        ([(3, "")], False),
        ([(1, "")], False),
        ([(70, "")], False),
        ([(-9, "SIGKILL"), (4, "")], True),
        ([(-9, "SIGKILL"), (3, "")], False),  # a proof that failed is not passed over because somebody else was killed
    ],
)
def test_which_ends_of_workers_may_pass(ends: list[tuple[int, str]], passing: bool) -> None:
    found = trouble(running(*(exited(COORDS[n], *end) for n, end in enumerate(ends))), full_phase())
    assert found is not None
    assert found.passing is passing


def test_a_silence_may_pass() -> None:
    quiet = hang(running(), full_phase(), 0.0, 120.0, 1000.0)
    stopped = deserted(running(exited(COORDS[1], 0)), full_phase(), 1000.0)
    assert [found.passing for found in (quiet, stopped) if found] == [True, True]


def test_a_fork_never_passes() -> None:
    s = running(exited(COORDS[1], -9, "SIGKILL"), ev.ForkDetected(epoch=3, parties=[0, 2]))
    found = trouble(s, full_phase())
    assert found is not None
    assert not found.passing


def test_where_domains_must_sign_it_is_refused_in_the_profile() -> None:
    with pytest.raises(ConfigError, match="a resume that domains must sign"):
        load("demo", ["limits.resumes=1", "consent.resume=2"])
    with pytest.raises(ConfigError, match=r"limits\.resumes"):
        load("demo", ["limits.resumes=-1"])


def test_the_screen_says_when_and_a_shell_waits(bus: Bus) -> None:
    failed = partial(ev.StageChanged, name="full", status="failed", detail="it was killed", until=900.0)
    view = View(snap=running(failed(again=108.0)), now=100.0)
    rows = "\n".join(plain(row) for row in banner_lines(view, 120))
    assert "r resumes, t tears down; by itself in 8.0 s" in rows
    asked = ev.HaltRequested(nonce="n1", mode="hold", by="operator", drill=False, reason="")
    view = View(snap=running(failed(again=108.0), asked), now=100.0)
    assert not any("by itself in" in plain(row) for row in banner_lines(view, 120))
    assert not waits_for_decision(running(failed(again=108.0)))
    assert waits_for_decision(running(failed()))


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    with user_at(tmp_path / "home") as user:
        sets = ("--set", "job.test_rows=200", "--set", "limits.resumes=2")
        yield Demo.start(user, "--seed", "5", "--steps", "100", *sets)


@pytest.mark.ci("tests/console/rollout/test_rollout_machine.py")
@pytest.mark.timeout(600)
def test_a_run_whose_worker_and_conductor_are_killed_at_night_is_verified_in_the_morning(demo: Demo) -> None:
    demo.reach(2)
    seen = demo.uvcc.json("status", demo.run)
    victim = next(w for w in seen["workers"] if w["coord"] == "p1r0s0t0")
    os.kill(victim["pid"], signal.SIGKILL)
    demo.reach(max(w["step"] for w in seen["workers"]) + 20)
    os.kill(demo.uvcc.json("status", demo.run)["conductor"], signal.SIGKILL)
    code, summary, said = demo.outcome()
    assert code == 0, said
    assert (summary["status"], summary["verified"]) == ("ok", True)
    assert "goes on by itself from the last common checkpoint (1 of 2)" in said
    assert "goes on by itself under another one (2 of 2)" in said
    events = [e for _, e in iter_events(demo.uvcc.home / "runs" / demo.run / "journal.sqlite")]
    assert [(e.action, e.by) for e in events if isinstance(e, ev.Intent)] == [("resume", BY)] * 2
    (failed,) = [e for e in events if isinstance(e, ev.StageChanged) and e.status == "failed"]
    assert "worker p1r0s0t0 of P1 was killed by SIGKILL" in failed.detail


def test_the_screen_names_the_two_decisions_once() -> None:
    """What the conductor says to a shell names the commands; where their keys stand behind it, that is all."""
    told = "halted at step 61; pods kept until 14:13 for a decision: uvcc resume (r) or uvcc teardown (t)"
    for status in ("waiting", "failed"):
        s = running(ev.StageChanged(name="full", status=status, detail=told, until=900.0))
        shown = "\n".join(plain(row) for row in banner_lines(View(snap=s, now=100.0), 160))
        assert "at step 61; pods kept until 14:13 for a decision   r resumes, t tears down; 13 m 20 s left" in shown
        assert "uvcc resume" not in shown
