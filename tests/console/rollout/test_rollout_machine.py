"""The stage machine and its journal: order, retries, halts, decisions, adoption; stages here are small fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.rollout import bus as bus_module
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted, all_of
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    journal.append(
        ev.RunCreated(
            run="r",
            profile_name="demo",
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=["provision", "drill", "full", "gate", "teardown"],
        )
    )
    yield Bus(journal)
    journal.close()


class Script:
    """Stages that do what the test says, one outcome per entry, and note how they were entered."""

    def __init__(self, **outcomes: list[str | Exception]) -> None:
        self.entered: list[tuple[str, bool]] = []
        self._outcomes = outcomes

    def acts(self) -> dict[str, Callable[[bool], Awaitable[str]]]:
        return {name: self._act(name) for name in self._outcomes}

    def _act(self, name: str) -> Callable[[bool], Awaitable[str]]:
        async def act(again: bool) -> str:
            self.entered.append((name, again))
            outcome = self._outcomes[name].pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return act


def stages(bus: Bus, script: Script, wait_s: float = 120.0, begun: bool = True, **options: Any) -> StageRunner:
    if begun:
        bus.commit(ev.PhaseStarted(phase="full", engine_run="r.full", steps=12, sid_job="ab"))
    keeping = options.pop("keeping", frozenset({"drill", "full"}))
    return StageRunner(bus, script.acts(), keeping, wait_s, clock=lambda: 0.0, **options)


def statuses(bus: Bus) -> dict[str, str]:
    return {v.name: v.status for v in bus.snapshot.stages}


def when_it_runs(bus: Bus, stage: str, act: Callable[[Bus], None]) -> None:
    """Call ``act`` once, when the stage begins."""
    done: list[str] = []

    def heard(event: ev.Event) -> None:
        if isinstance(event, ev.StageChanged) and (event.name, event.status) == (stage, "running") and not done:
            done.append(stage)
            asyncio.get_running_loop().call_soon(act, bus)

    bus.listen(heard)


async def decide_when(bus: Bus, machine: StageRunner, stage: str, status: str, action: str) -> None:
    await bus.wait(lambda s: any(v.name == stage and v.status == status for v in s.stages), 120.0)
    machine.decide(action)


async def test_stages_run_in_order_and_leave_their_detail(bus: Bus) -> None:
    script = Script(provision=["3 pods"], full=["12 steps"])
    assert await stages(bus, script).run() == ("ok", "")
    assert script.entered == [("provision", False), ("full", False)]
    assert [v.detail for v in bus.snapshot.stages if v.status == "ok"] == ["3 pods", "12 steps"]


async def test_a_failure_of_a_stage_that_cannot_be_resumed_ends_the_run_at_once(bus: Bus) -> None:
    script = Script(provision=[ConfigError("no offer", "raise the cap")], full=["never"])
    assert await stages(bus, script).run() == ("failed", "no offer (raise the cap)")
    assert script.entered == [("provision", False)]
    assert bus.snapshot.status == "failed"


async def test_a_failed_run_waits_and_goes_on_when_resumed(bus: Bus, tmp_path: Path) -> None:
    script = Script(full=[UvccError("worker p1r0s0t0 was killed"), "12 steps"])
    machine = stages(bus, script)
    resuming = asyncio.create_task(decide_when(bus, machine, "full", "failed", "resume"))
    assert await machine.run() == ("ok", "")
    await resuming
    assert script.entered == [("full", False), ("full", True)]
    assert bus.snapshot.status == "running"
    waited = [e for _, e in iter_events(tmp_path / "journal.sqlite") if isinstance(e, ev.StageChanged) and e.until]
    assert [(e.name, e.status, e.until) for e in waited] == [("full", "failed", 120.0)]


async def test_a_failure_before_there_are_workers_or_of_the_settings_is_not_waited_for(bus: Bus) -> None:
    script = Script(full=[UvccError("sharing the inputs failed")])
    assert (await stages(bus, script, begun=False).run())[0] == "failed"
    script = Script(full=[ConfigError("two pods of P0 have different identities")])
    assert (await stages(bus, script).run())[0] == "failed"
    assert all(v.until == 0.0 for v in bus.snapshot.stages)


async def test_a_halt_is_no_failure_and_is_waited_for(bus: Bus) -> None:
    script = Script(full=[Halted(7), "12 steps"])
    machine = stages(bus, script)
    resuming = asyncio.create_task(decide_when(bus, machine, "full", "waiting", "resume"))
    assert await machine.run() == ("ok", "")
    await resuming


async def test_a_halt_before_there_are_workers_keeps_the_next_stage_from_beginning(bus: Bus) -> None:
    for mode in ("hold", "halt"):
        bus.commit(ev.HaltRequested(nonce="n1", mode=mode, by="op", drill=False, reason=""))
    refused = Script(drill=["held"])
    status, detail = await stages(bus, refused, wait_s=0.01, begun=False).run()
    assert status == "halted"
    assert detail.startswith("halted before any worker began, and before drill")
    assert not refused.entered
    script = Script(drill=["held"], full=["12 steps"])
    machine = stages(bus, script, begun=False)
    resuming = asyncio.create_task(decide_when(bus, machine, "drill", "waiting", "resume"))
    assert await machine.run() == ("ok", "")
    await resuming
    assert script.entered == [("drill", False), ("full", False)]  # answered once, and begun as if nothing had been


async def test_who_waits_for_a_decision_says_whether_pods_cost_meanwhile(bus: Bus, tmp_path: Path) -> None:
    for mode in ("hold", "halt"):
        bus.commit(ev.HaltRequested(nonce="n1", mode=mode, by="op", drill=False, reason=""))
    for state, words in (("planned", "there is no pod; this waits until"), ("ready", "pods kept until")):
        bus.commit(ev.PodChanged(pod="p0r0", party=0, replica=0, provider="prime", state=state, price_hr=2.0))
        await stages(bus, Script(drill=["held"]), wait_s=0.01, begun=False).run()
        found = [e for _, e in iter_events(tmp_path / "journal.sqlite") if isinstance(e, ev.StageChanged) and e.until]
        assert words in found[-1].detail


async def test_a_drill_that_a_halt_kept_from_beginning_can_be_skipped(bus: Bus) -> None:
    bus.commit(ev.HaltRequested(nonce="n1", mode="halt", by="op", drill=False, reason=""))
    bus.commit(ev.HaltDone(nonce="n1", mode="halt", drill=False, verified=0, total=0, step=-1, seconds=3.0))
    assert bus.snapshot.detail == "before any worker began"
    assert bus.snapshot.log[-1].text == "HALT before any worker began, 3.0 s"
    script = Script(drill=["held"], full=["12 steps"])
    machine = stages(bus, script, begun=False)
    skipping = asyncio.create_task(decide_when(bus, machine, "drill", "waiting", "skip"))
    assert await machine.run() == ("ok", "")
    await skipping
    assert script.entered == [("full", False)]


async def test_without_a_decision_in_time_the_run_keeps_its_end(bus: Bus) -> None:
    script = Script(full=[Halted(7)])
    status, detail = await stages(bus, script, wait_s=0.01).run()
    assert status == "halted"
    assert detail.startswith("halted at step 7")


async def test_only_safe_stages_can_be_skipped(bus: Bus) -> None:
    script = Script(full=[UvccError("no"), "12 steps"], gate=[UvccError("loss rose")])
    machine = stages(bus, script, patient=True)

    async def operator() -> None:
        await decide_when(bus, machine, "full", "failed", "skip")
        machine.decide("retry")
        await decide_when(bus, machine, "gate", "failed", "skip")

    acting = asyncio.create_task(operator())
    assert await machine.run() == ("ok", "")
    await acting
    assert statuses(bus)["gate"] == "skipped"
    assert script.entered == [("full", False), ("full", True), ("gate", False)]


async def test_a_decision_made_before_there_is_something_to_decide_is_void(bus: Bus) -> None:
    script = Script(full=[UvccError("no")])
    machine = stages(bus, script, wait_s=0.01)
    machine.decide("resume")
    assert (await machine.run())[0] == "failed"


async def test_of_two_who_resume_at_once_the_second_does_not_undo_the_next_halt(bus: Bus) -> None:
    """Its order lay there until the run was halted again, and started it at once."""
    script = Script(full=[Halted(7), Halted(9), "never"])
    machine = stages(bus, script, wait_s=0.05)
    script_of_two = asyncio.create_task(decide_when(bus, machine, "full", "waiting", "resume"))

    def second(event: ev.Event) -> None:
        if isinstance(event, ev.StageChanged) and event.status == "running":
            machine.decide("resume")

    bus.listen(second)
    assert (await machine.run())[0] == "halted"
    await script_of_two
    assert script.entered == [("full", False), ("full", True)]


async def test_two_decisions_in_one_moment_are_one(bus: Bus) -> None:
    script = Script(full=[Halted(7), Halted(9), "never"])
    machine = stages(bus, script, wait_s=0.05)

    async def both() -> None:
        await decide_when(bus, machine, "full", "waiting", "resume")
        machine.decide("resume")

    deciding = asyncio.create_task(both())
    assert (await machine.run())[0] == "halted"
    await deciding
    assert script.entered == [("full", False), ("full", True)]


async def test_a_halt_between_two_phases_keeps_the_next_from_beginning(bus: Bus, tmp_path: Path) -> None:
    """Its verdict is there at once, since no worker runs; the next phase's workers were started behind it."""
    script = Script(full=["12 steps"])
    machine = stages(bus, script)
    bus.commit(ev.WorkerProcess(pod="p0r0", coord="p0r0s0t0", state="started", pid=3))
    bus.commit(ev.WorkerProcess(pod="p0r0", coord="p0r0s0t0", state="exited", rc=0))
    bus.commit(ev.HaltRequested(nonce="n", mode="halt", by="op"))
    bus.commit(ev.HaltDone(nonce="n", mode="halt", verified=1, total=1, step=2, seconds=0.0))
    resuming = asyncio.create_task(decide_when(bus, machine, "full", "waiting", "resume"))
    assert await machine.run() == ("ok", "")
    await resuming
    (said,) = [v.detail for v in bus.snapshot.stages if v.name == "full"]
    assert said == "12 steps"
    told = [
        e
        for _, e in iter_events(tmp_path / "journal.sqlite")
        if isinstance(e, ev.StageChanged) and e.status == "waiting"
    ]
    assert [e.detail.partition(";")[0] for e in told] == ["halted while no worker ran, and before full"]
    assert script.entered == [("full", False)]


async def test_an_adopted_run_skips_what_is_done_and_enters_the_rest_again(bus: Bus) -> None:
    bus.commit(ev.StageChanged(name="provision", status="ok"), ev.StageChanged(name="full", status="running"))
    script = Script(provision=["never"], full=["12 steps"], gate=["ok"])
    assert await stages(bus, script, adopted=True).run() == ("ok", "")
    assert script.entered == [("full", True), ("gate", False)]


@pytest.mark.parametrize(("behind", "entered"), [("n1", 2), ("n0", 1), ("", 1)])
async def test_what_was_asked_before_a_conductor_lived_is_decided_behind_that_halt_alone(
    bus: Bus, behind: str, entered: int
) -> None:
    script = Script(full=[Halted(7), Halted(9), "12 steps"])
    machine = stages(bus, script, wait_s=0.01, adopted=True)
    bus.commit(ev.HaltRequested(nonce="n1", mode="halt", by="op", drill=False, reason=""))
    bus.commit(ev.HaltDone(nonce="n1", mode="halt", drill=False, verified=3, total=3, step=7, seconds=3.0))
    machine.decided_before(behind, lambda: machine.decide("resume"))
    status, detail = await machine.run()
    assert (status, len(script.entered)) == ("halted", entered)
    assert detail.startswith(f"halted at step {9 if entered == 2 else 7}")  # once, and not behind the next one


async def test_a_defect_in_a_stage_is_a_named_failure(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(provision=[KeyError("price")])
    status, detail = await stages(bus, script).run()
    assert (status, "KeyError: 'price'" in detail) == ("failed", True)
    assert "KeyError" in caplog.text


async def test_concurrent_work_raises_its_first_operator_error() -> None:
    async def fail() -> None:
        raise UvccError("pod p1r0 is lost")

    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(UvccError, match="pod p1r0 is lost"):
        await all_of([hang(), fail(), hang()])


async def test_the_bus_sees_what_another_process_writes(bus: Bus, tmp_path: Path) -> None:
    heard: list[ev.Event] = []
    bus.listen(heard.append)
    following = asyncio.create_task(bus.run())
    other = Journal(tmp_path / "journal.sqlite", source="cli")
    other.append(ev.Intent(action="teardown", by="cli"))
    other.close()
    await bus.wait(lambda s: any("asked for teardown" in e.text for e in s.log), 120.0)
    following.cancel()
    assert next(e for e in heard if isinstance(e, ev.Intent)).action == "teardown"


async def test_a_newer_heartbeat_takes_the_place_of_one_not_yet_written(bus: Bus) -> None:
    before = bus.snapshot.seq
    for n in range(57):
        bus.record([ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record={"step": n})])
    assert bus.snapshot.workers == {}
    bus.commit()
    assert bus.snapshot.workers["p0r0s0t0"].step == 56
    assert bus.snapshot.seq == before + 1


async def test_a_full_queue_makes_its_senders_wait_and_drops_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "MAX_QUEUE", 50)
    for n in range(57):
        bus.record([ev.LogLines(pod="p0r0", src="worker.log", lines=[f"line {n}"])])
    sender = asyncio.ensure_future(bus.room())
    await asyncio.sleep(0)
    assert not sender.done()
    bus.commit()
    await asyncio.wait_for(sender, 120.0)
    assert [e.text for e in bus.snapshot.log] == [f"line {n}" for n in range(57)]


async def test_the_bus_gives_up_waiting(bus: Bus) -> None:
    with pytest.raises(TimeoutError):
        await bus.wait(lambda s: s.ended or None, 0.01)


JUDGING = frozenset({"full", "gate", "verify-full", "collect"})


async def test_a_failed_judgement_keeps_the_pods_for_a_decision_and_can_be_repeated(bus: Bus, tmp_path: Path) -> None:
    wrong = VerificationError("transcript", "the signed root of epoch 0")
    outcomes: dict[str, list[str | Exception]] = {"full": ["12 steps"], "verify-full": [wrong, wrong, "12 epochs"]}
    script = Script(**outcomes, collect=[UnreadableError("cannot read it"), "9 files"])
    machine = stages(bus, script, keeping=JUDGING, end=100.0)
    turns = iter(("retry", "resume", "resume"))

    async def operator() -> None:
        for seen in range(1, 4):
            await bus.wait(lambda s, seen=seen: sum(" failed: " in e.text for e in s.log) == seen, 120.0)
            machine.decide(next(turns))

    acting = asyncio.create_task(operator())
    assert await machine.run() == ("ok", "")
    await acting
    waited = [e for _, e in iter_events(tmp_path / "journal.sqlite") if isinstance(e, ev.StageChanged) and e.until]
    assert [(e.name, e.until) for e in waited] == [("verify-full", 100.0), ("verify-full", 100.0), ("collect", 100.0)]
    assert all("there is no pod; this waits until" in e.detail and "uvcc teardown" in e.detail for e in waited)


async def test_nobody_waits_beyond_the_runs_end_of_life(bus: Bus) -> None:
    script = Script(gate=[UvccError("loss rose")])
    status, detail = await stages(bus, script, keeping=JUDGING, end=0.01).run()
    assert (status, detail) == ("failed", "loss rose")


async def test_a_refused_setting_does_not_cost_the_checkpoints_that_there_are(bus: Bus) -> None:
    fields = {"step": 5, "sha256": "ab"}
    machine = stages(bus, Script(full=[ConfigError("there is no checkpoint of step 9"), "12 steps"]))
    bus.commit(ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=fields))
    deciding = asyncio.create_task(decide_when(bus, machine, "full", "failed", "resume"))
    assert await machine.run() == ("ok", "")
    await deciding


async def test_an_earlier_checkpoint_takes_a_judging_stage_back_to_its_training(bus: Bus) -> None:
    script = Script(**{"full": ["12 steps", "12 steps"], "verify-full": [UvccError("no"), "12 epochs"]})
    machine = stages(bus, script, keeping=JUDGING)
    deciding = asyncio.create_task(decide_when(bus, machine, "verify-full", "failed", "back"))
    assert await machine.run() == ("ok", "")
    await deciding
    assert script.entered == [("full", False), ("verify-full", False), ("full", True), ("verify-full", False)]
    assert statuses(bus)["verify-full"] == "ok"


async def test_an_earlier_checkpoint_chosen_while_nobody_conducted_counts_too(bus: Bus) -> None:
    bus.commit(ev.StageChanged(name="full", status="ok"), ev.StageChanged(name="verify-full", status="failed"))
    script = Script(**{"full": ["12 steps"], "verify-full": ["12 epochs"]})
    chosen = [True]

    def going_back() -> bool:
        return bool(chosen and chosen.pop())

    assert await stages(bus, script, adopted=True, going_back=going_back).run() == ("ok", "")
    assert script.entered == [("full", True), ("verify-full", False)]


def test_a_stage_that_no_plan_has_stands_before_what_is_to_be_done(bus: Bus) -> None:
    bus.commit(ev.StageChanged(name="provision", status="ok"), ev.StageChanged(name="full", status="failed", until=9.0))
    bus.commit(ev.StageChanged(name="drill", status="ok"), ev.StageChanged(name="adopt", status="waiting", until=5.0))
    assert [v.name for v in bus.snapshot.stages] == ["provision", "drill", "adopt", "full", "gate", "teardown"]
    assert bus.snapshot.stage is not None
    assert bus.snapshot.stage.name == "adopt"
    bus.commit(ev.StageChanged(name="adopt", status="ok"))
    assert bus.snapshot.stage.name == "full"


def ended_by_a_halt(bus: Bus) -> None:
    """The run's one worker is through; a halt was asked for and is not proved."""
    ended = ev.WorkerProcess(pod="p0r0", coord="p0r0s0t0", state="exited", rc=0)
    asked = ev.HaltRequested(nonce="n", mode="halt", by="P1")
    bus.commit(ended, asked)


async def test_three_domains_wait_after_a_halt_whose_proof_comes_after_its_workers_ended(bus: Bus) -> None:
    """A domain's workers end because their peers were halted, before its own sidecar has proved anything."""
    script = Script(full=[Halted(11), "12 steps"])
    machine = stages(bus, script, halts_only=True)
    when_it_runs(bus, "full", ended_by_a_halt)
    resuming = asyncio.create_task(decide_when(bus, machine, "full", "waiting", "resume"))
    running = asyncio.create_task(machine.run())
    await bus.wait(lambda s: any(v.name == "full" and v.status == "running" for v in s.stages), 120.0)
    bus.commit(ev.HaltDone(nonce="n", mode="halt", verified=1, total=1, step=11, seconds=0.1))
    assert await running == ("ok", "")
    await resuming
    assert script.entered == [("full", False), ("full", True)]


async def test_three_domains_do_not_wait_after_a_halt_that_nothing_proves(bus: Bus) -> None:
    script = Script(full=[Halted(11)])
    machine = stages(bus, script, halts_only=True, proof_s=0.01)
    when_it_runs(bus, "full", ended_by_a_halt)
    assert (await machine.run())[0] == "halted"
    assert all(v.until == 0.0 for v in bus.snapshot.stages)
