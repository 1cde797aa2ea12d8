"""What runs beside a rollout's stages: each is killed once; it is told and comes back, or the run ends in order."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_rollout_pods import ctx, provider_of

from uvcc_console.core import events as ev
from uvcc_console.core import supervision
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.core.supervision import FIRST_S, LONGEST_S, SideTasks
from uvcc_console.fleet import pulse
from uvcc_console.fleet.procs import LocalProcess
from uvcc_console.rollout import conductor, ingest, side_tasks, telling
from uvcc_console.rollout.context import Halted, Rollout
from uvcc_console.rollout.stages.fleet import agents
from uvcc_console.rollout.stages.migration import checkpoint_copies
from uvcc_console.rollout.stages.verify import window_gates
from uvcc_console.runs import notify
from uvcc_console.runs.notices import Note, SoleSender
from uvcc_engine.contract.agent_protocol.agent_messages import AgentMessage
from uvcc_engine.contract.run_files.records import Malformed

__all__ = ["ctx"]
VITAL = {"the journal", "the beat", "the spend guard"}
WORKS = {
    "the beat": (side_tasks, "beat"),
    "the guard of the sidecar": (side_tasks, "guard_sidecar"),
    "the spend guard": (side_tasks, "keep_costs"),
    "the detectors": (side_tasks, "detect"),
    "the notices": (telling, "tell_operator"),
    "the gates of the full run": (window_gates, "hold_at_gates"),
    "the sweep": (side_tasks, "sweep_others"),
    "the watch over the provider's API": (side_tasks, "tell_silence"),
    "the copies of checkpoints": (checkpoint_copies, "keep_home"),
    "the care for agents": (agents, "keep_agents"),
    "the ingest of p0r0": (ingest, "run"),
}


class OtherDomains:
    """What a conductor of one domain among three has of the two others, without any."""

    def __init__(self) -> None:
        self.peers = self

    def acts(self, ctx: Rollout, acts: Any) -> Any:
        return acts

    def attach(self, runner: Any) -> None:
        return

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def part(self, ctx: Rollout, status: str, detail: str) -> None:
        return


class Silence:
    """The channel of an agent that says nothing."""

    async def messages(self) -> AsyncIterator[AgentMessage | Malformed]:
        await asyncio.Event().wait()
        yield Malformed("never", 1)

    async def close(self) -> None:
        return


def failing_once(work: Callable[..., Awaitable[None]], calls: list[str]) -> Callable[..., Awaitable[None]]:
    async def found(*args: Any) -> None:
        calls.append("")
        if len(calls) == 1:
            raise RuntimeError("a defect")
        await work(*args)

    return found


@pytest.mark.parametrize("name", [*WORKS, "the journal", "the other domains"])
async def test_each_side_task_that_dies_is_told_and_comes_back(
    ctx: Rollout, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_S", 0.01)
    calls: list[str] = []
    if name == "the journal":
        monkeypatch.setattr(ctx.bus, "run", failing_once(ctx.bus.run, calls))
    elif name == "the other domains":
        others = OtherDomains()
        monkeypatch.setattr(others, "run", failing_once(others.run, calls))
        monkeypatch.setattr(conductor.seats, "of", lambda _: others)
        monkeypatch.setattr(conductor, "FederatedParty", lambda *_: others)
    else:
        module, work = WORKS[name]
        monkeypatch.setattr(module, work, failing_once(getattr(module, work), calls))
    made = {"profile_name": "demo", "profile": {}, "job_kind": "private", "stages": ["quote", "teardown"]}
    ctx.say(ev.RunCreated(run="demo-1", replicas=1, pipeline_stages=1, tensor=1, **made))
    seen = asyncio.Event()

    async def stage(*_: object) -> str:
        member = ctx.members["p0r0"]
        member.agent = cast(Any, Silence())
        member.ingesting = ingest.start(ctx.beside, ctx.bus, member)
        await ctx.bus.wait(lambda s: any(a.text.startswith(f"{name} failed") for a in s.alerts) or None, 120.0)
        while len(calls) < 2:
            await asyncio.sleep(0)
        seen.set()
        if name in VITAL:
            await asyncio.Event().wait()  # what ends it is the conductor
        return "done"

    monkeypatch.setattr(conductor, "acts_of", lambda _: {"quote": stage})
    status = await asyncio.wait_for(conductor.conduct(ctx, ""), 120)
    events = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite")]
    (alert,) = [e for e in events if isinstance(e, ev.Alert) and e.name == "side_task"]
    assert (alert.level, alert.subject) == ("error", name)
    assert "RuntimeError: a defect" in alert.text
    (end,) = [e for e in events if isinstance(e, ev.RunEnded)]
    if name in VITAL:
        assert (status, end.detail) == (
            "torn_down",
            f"{name} failed: RuntimeError: a defect (this is a defect; uvcc logs has the details)",
        )
    else:
        assert (seen.is_set(), end.detail) == (True, "")
        assert status == "ok"
    assert any(isinstance(e, ev.StageChanged) and (e.name, e.status) == ("teardown", "ok") for e in events)
    assert provider_of(ctx).pods == {}


async def test_the_operator_is_notified_without_a_console_and_by_nobody_else_beside_the_conductor(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    by_console: list[Note] = []
    monkeypatch.setattr(notify, "operators_program", lambda: told.append)
    monkeypatch.setattr(telling, "LOOK_EVERY_S", 0.01)
    console = SoleSender(ctx.run_dir, by_console.append)
    looked, look = asyncio.Event(), notify.Notifier.look

    def looking(notifier: notify.Notifier, *at: Any) -> None:
        look(notifier, *at)
        looked.set()

    monkeypatch.setattr(notify.Notifier, "look", looking)
    made = {"profile_name": "demo", "profile": {}, "job_kind": "private", "stages": ["quote", "teardown"]}
    ctx.say(ev.RunCreated(run="demo-1", replicas=1, pipeline_stages=1, tensor=1, **made))

    async def stage(*_: object) -> str:
        await looked.wait()  # it has taken note of what there was
        ctx.say(ev.Alert(level="warn", name="straggler", text="slow", subject="p1r0"))
        async with asyncio.timeout(120):
            while not told:
                await asyncio.sleep(0.01)
        console(Note("warn", "p1r0: slow"))
        return "done"

    monkeypatch.setattr(conductor, "acts_of", lambda _: {"quote": stage})
    assert await asyncio.wait_for(conductor.conduct(ctx, ""), 120) == "ok"
    assert told[0] == "p1r0: slow"
    assert told[-1].startswith("demo-1: done")
    assert len(told) == 2
    assert not by_console
    console(Note("info", "later"))
    assert by_console == [Note("info", "later")]


@pytest.mark.parametrize("order", [{}, {"from": 3}], ids=["resumed", "from a checkpoint"])
@pytest.mark.parametrize("again", [False, True], ids=["", "halted once more"])
async def test_a_resume_of_what_was_halted_while_nobody_conducted_goes_on_and_asks_nobody_twice(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch, order: dict[str, int], again: bool
) -> None:
    """Its workers run by what the journal says, so their stage is entered, and ends halted."""
    made = {"profile_name": "demo", "profile": {}, "job_kind": "private", "stages": ["full", "teardown"]}
    ctx.say(ev.RunCreated(run="demo-1", replicas=1, pipeline_stages=1, tensor=1, **made))
    ctx.say(ev.HaltRequested(nonce="n1", mode="halt", by="op"))
    ctx.say(ev.HaltDone(nonce="n1", mode="halt", verified=3, total=3, step=7, seconds=3.0))
    ctx.say(ev.Intent(action="resume", by="op", args=order))
    since = ctx.bus.snapshot.seq  # as the command says it that starts a conductor for its order
    if again:
        ctx.say(ev.HaltRequested(nonce="n1", mode="hold", by="other"))
    entered: list[tuple[bool, int | None]] = []

    async def stage(_: object, resumed: bool) -> str:
        entered.append((resumed, ctx.start_from))
        ctx.start_from = None
        if len(entered) == 1:
            raise Halted(7)
        return "12 steps"

    limits = ctx.plan.profile.limits.model_copy(update={"wait": 0.01})
    ctx.plan = replace(ctx.plan, profile=ctx.plan.profile.model_copy(update={"limits": limits}))
    monkeypatch.setattr(conductor, "acts_of", lambda ctx: {"full": partial(stage, ctx)})
    status = await asyncio.wait_for(conductor.conduct(ctx, "resume", since), 120)
    as_asked = (True, order.get("from"))
    assert (status, entered) == (("halted", [as_asked]) if again else ("ok", [as_asked, as_asked]))


def test_everything_that_runs_beside_the_stages_is_killed_above() -> None:
    """What a conductor starts and nobody waits for is one of the tasks that the test before this one kills."""
    started: set[str] = set()
    for path in Path(conductor.__file__).parent.rglob("*.py"):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            if ast.unparse(call.func) == "beside.start":
                started.add(ast.unparse(call.args[0]).strip("f'\"").replace("{member.name}", "p0r0"))
    assert started == {*WORKS, "the journal", "the other domains"}


async def test_what_fails_again_and_again_is_tried_ever_more_seldom() -> None:
    told: list[ev.Event] = []
    waits: list[float] = []
    now = [0.0]

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds
        if len(waits) == 9:
            now[0] += 2 * LONGEST_S

    async def work() -> None:
        if len(waits) == 9:
            now[0] += 2 * LONGEST_S  # it lived for long
        if len(waits) == 11:
            return
        raise OSError("full")

    async with asyncio.TaskGroup() as group:
        SideTasks(group, told.append, pytest.fail, sleep=sleep, clock=lambda: now[0]).start("x", work)
    assert waits[:7] == [FIRST_S, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S]
    assert waits[9:] == [FIRST_S, 2.0]
    assert len(told) == 11


async def test_a_sidecar_that_died_is_replaced_at_the_next_look_within_three_seconds_and_alarmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the guard's own pauses, so that no busy machine counts: dead at 1 s, moving again when another was started."""
    now, started, told = [0.0], list[float](), list[ev.Event]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 10:
            raise asyncio.CancelledError

    def vital(run_dir: Path, name: str) -> pulse.Vital:
        dead = now[0] >= 1.0 and not started
        return pulse.Vital(None, pulse.DEAD) if dead else pulse.Vital(LocalProcess(7, 7), pulse.MOVING)

    def start(run_dir: Path, name: str, *args: str) -> Any:
        started.append(now[0])

    monkeypatch.setattr(side_tasks.asyncio, "sleep", sleep)
    monkeypatch.setattr(side_tasks.processes, "vital", vital)
    monkeypatch.setattr(side_tasks.processes, "start", start)
    lives = fold([ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent")])
    bus = SimpleNamespace(snapshot=lives, record=told.extend)
    run: Any = SimpleNamespace(bus=bus, run_dir=Path("run"), sidecar=None)
    with pytest.raises(asyncio.CancelledError):
        await side_tasks.guard_sidecar(run)
    assert len(started) == 1
    assert started[0] - 1.0 <= 3.0
    (alarm,) = told
    assert isinstance(alarm, ev.Alert)
    assert (alarm.level, "has died" in alarm.text) == ("error", True)
