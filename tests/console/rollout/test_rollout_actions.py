"""Intents about pods: each is answered in the journal, done or not, and triage changes one thing and goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.answers import triage
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.download_folder import DownloadFolder, PartialDownload
from uvcc_console.fleet.provider import Provider
from uvcc_console.plan import forecast
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.rollout import actions, flight
from uvcc_console.rollout import bus as bus_module
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_console.rollout.stages.training import phases, triage_rungs
from uvcc_engine.contract.agent_protocol import agent_commands, wire
from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.parsing.safepaths import Parts

PROFILE = {"job": {"kind": "lm", "steps": 50, "ranks": 3}, "env": {"KEEP": "1"}}


class Agent:
    """Answers like the agent of a pod that runs one worker."""

    up = True

    def __init__(self, sent: list[str]) -> None:
        self.sent = sent
        self.heard: list[dict[str, Any]] = []

    async def request(
        self, command: agent_commands.Command, *, nonce: str = "", timeout: float = 0.0
    ) -> dict[str, Any]:
        self.heard.append(agent_commands.to_json(command) | ({"nonce": nonce} if nonce else {}))
        return {"ok": True, "sent": self.sent, "asked": self.sent}


class World:
    """A rollout whose full phase runs, without any pod."""

    def __init__(self, folder: Path, kind: str = "lm") -> None:
        job = {"kind": kind, "steps": 50} | ({"argv": ["train"]} if kind == "command" else {})
        raw = PROFILE if kind == "lm" else {"job": job}
        plan = make_plan("r", "t", parse(raw))
        self.journal = Journal(folder / "journal.sqlite", source="test")
        self.bus = Bus(self.journal, poll_s=0.001)
        members = {name: Member(name, request) for name, request in plan.requests.items()}
        self.ctx = Rollout(plan, folder, self.bus, cast(Provider, None), cast(Any, None), members)
        self.agent = Agent(["p0r0s0t0"])
        for member in members.values():
            member.agent = cast(Any, self.agent)
        self.stages = StageRunner(self.bus, {}, frozenset(), 1.0, deciding=True)
        self.desk = actions.ActionRunner(self.ctx, self.stages)
        self.bus.commit(
            ev.RunCreated(
                run="r",
                profile_name="t",
                job_kind=kind,
                replicas=1,
                pipeline_stages=1,
                tensor=1,
                stages=list(plan.stages),
                profile=raw,
            ),
            ev.PhaseStarted(phase="full", engine_run="r.full", steps=50, sid_job=""),
            ev.StageChanged(name="full", status="running"),
        )

    async def ask(self, action: str, **args: str) -> ev.ActionDone:
        answers: list[ev.ActionDone] = []
        self.bus.listen(lambda e: answers.append(e) if isinstance(e, ev.ActionDone) else None)
        assert self.desk.take(ev.Intent(action=action, by="me", args=args))
        async with asyncio.timeout(120):
            while not answers:
                await asyncio.sleep(0.005)
        return answers[0]


async def _until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not happened():
            await asyncio.sleep(0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.desk.close()
    made.journal.close()


async def test_a_stack_dump_goes_to_the_workers_of_the_pod(world: World) -> None:
    done = await world.ask("stackdump", pod="p0r0")
    assert (done.ok, done.pod) == (True, "p0r0")
    assert world.agent.heard == [{"op": wire.SIGNAL, "run": "r.full", "coord": None, "signal": "USR1"}]
    world.agent.sent = []
    assert not (await world.ask("stackdump", pod="p0r0")).ok


async def test_what_cannot_be_done_is_answered_with_its_reason(world: World) -> None:
    assert "no pod 'p9r9'" in (await world.ask("fetch", pod="p9r9")).detail
    written = {"step": 20, "sha256": "ab" * 32}
    world.bus.commit(ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=written))
    assert "holds the only checkpoints" in (await world.ask("replace", pod="p0r0")).detail
    assert world.agent.heard == []  # nothing was ended for it
    assert not world.desk.take(ev.Intent(action="resume", by="me"))


async def test_a_defect_in_an_action_is_answered_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(command: agent_commands.Command, *, nonce: str = "") -> dict[str, Any]:
        raise AssertionError("nobody thought of this")

    monkeypatch.setattr(world.agent, "request", broken)
    done = await world.ask("stackdump", pod="p0r0")
    assert not done.ok
    assert "nobody thought of this" in done.detail
    assert "uvcc logs" in done.detail


@pytest.mark.parametrize("error", [OSError("full"), RecursionError("deep")])
async def test_a_snapshot_that_cannot_be_kept_is_told_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    tried: list[int] = []

    def keep(folder: Path, s: Snapshot, mark: str) -> None:
        tried.append(s.seq)
        if len(tried) < 3:
            raise error

    monkeypatch.setattr(bus_module, "KEEP_S", 0.001)
    monkeypatch.setattr(bus_module, "KEEP_AFTER", 1)
    monkeypatch.setattr(snapshot_cache, "keep", keep)
    following = asyncio.create_task(world.bus.run())
    for _ in range(3):  # until it keeps
        await asyncio.sleep(0)
    world.bus.record([ev.Alert(level="info", name="x", text="y")])
    await _until(lambda: len(tried) >= 3)
    following.cancel()
    assert caplog.text.count("no snapshot is kept beside the journal") == 2


class Shell:
    """A pod's link that is this machine: commands run in ``root``, and a log grows while it is fetched."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def sh(self, command: str, *, timeout: float = 0.0, limit: int = 0) -> str:
        done = subprocess.run(["sh", "-c", command], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    async def get(
        self, remote: str, into: DownloadFolder, parts: Parts, *, limit: int, growing: bool
    ) -> PartialDownload:
        path = self.root / remote
        with into.file(parts, limit=limit) as download:
            download.write(path.read_bytes()[:limit])
            download.keep()
        if path.name == "training.csv":
            with path.open("a") as f:
                f.write("2,0.4\n")
        return download


async def test_a_fetch_while_the_run_goes_on_takes_what_may_leave_and_nothing_else(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "pod" / ".uvcc/runs/r.full"
    (folder / "checkpoints/step-1").mkdir(parents=True)
    for name in ("training.csv", "stackdump_p0r0s0t0.txt", "inputs.sealed", "relay.token", "checkpoints/step-1/x"):
        (folder / name).write_text("step,loss\n1,0.5\n")
    world.ctx.members["p0r0"].link = cast(Any, Shell(tmp_path / "pod"))
    done = await world.ask("fetch", pod="p0r0")
    assert (done.ok, done.detail) == (True, "2 files in artifacts/fetched/full-p0r0")
    home = world.ctx.artifacts / "fetched/full-p0r0"
    assert sorted(p.name for p in home.iterdir()) == ["stackdump_p0r0s0t0.txt", "training.csv"]


class Answers:
    """A pod's link that gives what flight recorders left: to this question, to an older one, or damaged."""

    def __init__(self, agent: Agent, answers: dict[str, str]) -> None:
        self.agent, self.answers = agent, answers

    async def read(self, remote: str) -> bytes:
        name = remote.rpartition("/")[2]
        if name not in self.answers:
            raise UnreachableError(f"no {remote}")
        nonce = self.agent.heard[-1]["nonce"] if self.answers[name] == "new" else "old"
        entry = {"group": "world", "seq": 4, "op": "barrier", "state": "started", "ts": 100.0}
        answer = {"nonce": nonce, "ts": 101.0, "waiting_on": "", "tables": {"sequence": [entry]}}
        return b"{" if self.answers[name] == "damaged" else json.dumps(answer).encode()


async def test_flight_recorders_are_read_and_kept_and_who_is_silent_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "ANSWER_S", 0.2)
    monkeypatch.setattr(flight, "LOOK_S", 0.01)
    world.agent.sent = ["p0r0s0t0", "p0r1s0t0", "p0r2s0t0"]
    said = {"flight_p0r0s0t0.json": "new", "flight_p0r1s0t0.json": "old", "flight_p0r2s0t0.json": "damaged"}
    link = Answers(world.agent, said)
    world.ctx.members["p0r0"].link = cast(Any, link)
    done = await world.ask("flight")
    assert done.ok
    assert done.detail.startswith("1 of 3 workers answered: nothing differs; artifacts/flight/full-")
    seen = world.bus.snapshot.flight
    assert seen is not None
    assert seen.silent == ("p0r1s0t0", "p0r2s0t0")
    assert dict(seen.newest) == {"p0r0s0t0": "world #4 barrier, started, 1.0 s old"}
    assert [p.name for p in (world.ctx.run_dir / seen.folder).iterdir()] == ["flight_p0r0s0t0.json"]
    said.clear()
    assert "no flight recorder answered" in (await world.ask("flight")).detail
    world.agent.sent = []
    assert "no worker of r.full lives" in (await world.ask("flight")).detail


async def test_a_restart_ends_the_workers_and_resumes_once_the_stage_asks(world: World) -> None:
    asked = asyncio.create_task(world.ask("restart", pod="p0r0"))
    await _until(lambda: world.agent.heard)
    world.bus.commit(ev.StageChanged(name="full", status="failed", detail="killed"))
    assert (await asked).ok
    assert world.agent.heard[0]["signal"] == "KILL"
    assert world.stages.decisions.get_nowait() == "resume"


async def test_triage_halts_changes_one_thing_and_resumes(world: World) -> None:
    asked = asyncio.create_task(world.ask("triage"))
    await _until(lambda: world.bus.snapshot.halt.nonce)
    halts = [e for _, e in world.journal.since(0, kinds=("halt_requested",)) if isinstance(e, ev.HaltRequested)]
    assert [(h.mode, h.reason) for h in halts] == [("halt", "triage: compression off, buckets of 100 MB")]
    world.bus.commit(ev.StageChanged(name="full", status="waiting", detail="halted at step 7"))
    assert (await asked).ok
    env = world.ctx.plan.profile.env
    assert env == {"KEEP": "1", "NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100"}
    assert world.stages.decisions.get_nowait() == "resume"
    assert [t.rung for t in world.bus.snapshot.triage] == ["calm"]


async def test_triage_kills_workers_that_hang_once_the_ladder_of_the_halt_is_over(world: World) -> None:
    """Ranks in a collective that never ends take no halt: the next change was never tried on the run that it is for."""
    coord = "p0r0s0t0"
    world.bus.commit(ev.WorkerProcess(pod="p0r0", coord=coord, state="started", pid=7, engine_run="r.full"))
    asked = asyncio.create_task(world.ask("triage"))
    await _until(lambda: world.bus.snapshot.halt.nonce)
    nonce = world.bus.snapshot.halt.nonce
    assert world.agent.heard == []  # a worker that lives writes a checkpoint
    world.bus.commit(ev.HaltDone(nonce=nonce, mode="halt", verified=0, total=1, step=-1, seconds=75.0))
    assert world.bus.snapshot.detail == "0/1 verified"
    await _until(lambda: world.agent.heard)
    assert world.agent.heard[0]["signal"] == "TERM"
    world.bus.commit(
        ev.WorkerProcess(pod="p0r0", coord=coord, state="exited", pid=7, signal="SIGKILL", engine_run="r.full"),
        ev.StageChanged(name="full", status="failed", detail="killed"),
    )
    assert (await asked).ok
    assert world.stages.decisions.get_nowait() == "resume"
    assert [t.rung for t in world.bus.snapshot.triage] == ["calm"]


async def test_a_single_gpu_is_one_rank_and_a_window_is_over_after_its_attempt(world: World) -> None:
    world.bus.commit(ev.StageChanged(name="full", status="waiting"))
    world.bus.commit(ev.TriageTried(rung="calm", step=1), ev.StageChanged(name="full", status="waiting"))
    assert (await world.ask("nccl_debug")).ok
    assert world.ctx.plan.profile.env["NCCL_DEBUG"] == "INFO"
    triage_rungs.apply(world.ctx)  # as before each attempt: this one is the window's
    assert world.ctx.plan.profile.env["NCCL_DEBUG"] == "INFO"
    fresh = World(world.ctx.run_dir)  # another conductor, on the same journal
    world.bus.commit(ev.StageChanged(name="full", status="failed", detail="again"))
    fresh.bus.commit(ev.TriageTried(rung="single", step=1))
    triage_rungs.apply(fresh.ctx)
    assert [len(p.coords()) for p in fresh.ctx.plan.phases.values()] == [1] * len(fresh.ctx.plan.phases)
    fresh.journal.close()


async def test_each_rung_says_the_whole_environment(world: World) -> None:
    seen = []
    for rung in triage.LADDER[:-1]:
        stopped = ev.StageChanged(name="full", status="failed", detail="again")
        world.bus.commit(stopped, ev.TriageTried(rung=rung.word, step=1))
        triage_rungs.apply(world.ctx)
        seen.append(dict(world.ctx.plan.profile.env))
    assert seen == [{"KEEP": "1", **rung.env} for rung in triage.LADDER[:-1]]
    world.bus.commit(ev.StageChanged(name="full", status="failed", detail="again"))
    triage_rungs.apply(world.ctx)  # the loud window is over: what was tried before it is in force
    assert world.ctx.plan.profile.env == {"KEEP": "1", **triage.BY_WORD["unused"].env}


async def test_a_window_with_nothing_before_it_leaves_what_was_planned(world: World) -> None:
    world.bus.commit(ev.TriageTried(rung="loud", step=1))
    triage_rungs.apply(world.ctx)
    assert "NCCL_DEBUG" in world.ctx.plan.profile.env
    world.bus.commit(ev.StageChanged(name="full", status="failed", detail="again"))
    triage_rungs.apply(world.ctx)
    assert world.ctx.plan.profile.env == {"KEEP": "1"}


async def test_a_private_run_has_no_triage_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, "private")
    assert "signed as it is" in (await world.ask("triage")).detail
    world.journal.close()


def test_a_forecast_has_an_error_bar_and_is_scored(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.bus.commit(ev.CostTick(hourly=36.0, spent=0.0))
    for step, at in enumerate([0.0, 5.0, 7.0, 9.2, 11.0, 13.0]):
        record = {"ts": at, "step": step, "phase": "train", "bytes": 1000.0}
        world.bus.commit(ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=record))
    said = forecast.predict(replace(world.bus.snapshot, phase_began=0.0), 50)
    assert said is not None
    assert said.seconds == pytest.approx(100.0)
    assert said.seconds_error == pytest.approx(10.0)  # never below a tenth
    assert (said.cost, said.bytes) == (pytest.approx(1.0), pytest.approx(50_000.0))
    world.bus.commit(said)
    scored = forecast.score(world.bus.snapshot, 125.0)
    assert scored is not None
    assert scored.sigmas == pytest.approx(2.5)
    world.bus.commit(scored)
    view = world.bus.snapshot.prediction
    assert view is not None
    assert (view.scored, view.took_s) == (True, 125.0)


def test_that_one_party_sends_most_is_no_error_of_the_bytes(tmp_path: Path) -> None:
    """One party deals for the others: what a worker sends differs tenfold by party, and hardly from step to step."""
    world = World(tmp_path)
    for step in range(6):
        for party, each in enumerate((360_000, 350_000, 2_600_000)):
            record = {"ts": 2.0 * step, "step": step, "phase": "train", "sent_bytes": each * step}
            world.bus.commit(ev.HeartbeatRead(pod=f"p{party}r0", coord=f"p{party}r0s0t0", record=record))
    said = forecast.predict(world.bus.snapshot, 100)
    assert said is not None
    assert said.bytes == pytest.approx(100 * 3_310_000)
    assert said.bytes_error == pytest.approx(0.1 * said.bytes)


def test_bytes_are_foretold_from_what_the_smoke_counted_for_all_of_the_fulls_workers_and_scored(tmp_path: Path) -> None:
    world = World(tmp_path)
    start = 1 << 20  # the handshake is not the steps'
    for step, sent in enumerate([start, start + 1000, start + 2000, start + 3060]):
        record = {"ts": float(step), "step": step, "phase": "train", "sent_bytes": sent}
        world.bus.commit(ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=record))
    said = forecast.predict(world.bus.snapshot, 50, workers=6)
    assert said is not None
    assert said.bytes == pytest.approx(1030 * 50 * 6)  # the first measured step pays for starting
    assert said.bytes_error == pytest.approx(0.1 * said.bytes)
    world.bus.commit(said, ev.PhaseStarted(phase="full", engine_run="r.again", steps=50, sid_job=""))
    for step in (0, 1, 3, 50):  # heartbeats between were dropped
        record = {"ts": float(step), "step": step, "phase": "train", "sent_bytes": start + 1133 * step}
        world.bus.commit(ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=record))
    assert forecast.moved(world.bus.snapshot) == pytest.approx(1133 * 50)
    scored = forecast.score(world.bus.snapshot, 50.0)
    assert scored is not None
    assert scored.bytes_sigmas == pytest.approx(abs(1133 * 50 - said.bytes) / said.bytes_error)


def test_a_smoke_too_short_to_count_between_steps_tells_bytes_since_its_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = {"ts": 1.0, "step": 2, "phase": "train", "sent_bytes": 2000, "samples_per_s": 10.0}
    world.bus.commit(ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=record))
    assert forecast.volume(world.bus.snapshot) == (1000.0, 100.0)
    for sent in ("many", [1], {}, True, 1e999, -5, 10**400):  # a pod says what it likes
        world.bus.commit(
            ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=record | {"step": 3, "sent_bytes": sent})
        )
        assert forecast.volume(world.bus.snapshot) == (0.0, 0.0)
    world.journal.close()


async def test_pods_are_replaced_one_at_a_time(world: World) -> None:
    """Two operators at 3 a.m., or one who is impatient: each would have rented a pod of that name."""
    member = world.ctx.members["p0r0"]
    member.replacing = True
    done = await world.ask("replace", pod="p0r0")
    assert not done.ok
    assert "p0r0 is being replaced" in done.detail
    member.replacing = False
    written = {"step": 20, "sha256": "ab" * 32}
    world.bus.commit(ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=written))
    assert "holds the only checkpoints" in (await world.ask("replace", pod="p0r0")).detail
    assert not member.replacing  # whatever came of it


async def test_a_pod_out_of_reach_is_replaced_without_waiting_for_who_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its relay gone the others' workers wait a quarter of an hour, and the replacing had given up by then."""
    phase = world.ctx.plan.phases["full"]
    ended: list[str] = []

    async def unreachable(*_: object, **__: object) -> None:
        raise UnreachableError("pod p0r0 did not acknowledge signal in 30 s")

    async def stop(ctx: Any, stopped: Any) -> None:
        ended.append(stopped.name)
        world.bus.commit(ev.StageChanged(name="full", status="failed"))

    async def go_on(ctx: Any, names: list[str]) -> str:
        return f"{', '.join(names)} is another now"

    monkeypatch.setattr(world.agent, "request", unreachable)
    monkeypatch.setattr(actions.phases, "stop_workers", stop)
    monkeypatch.setattr(actions.lm_migration, "check", lambda ctx, names: phase)
    monkeypatch.setattr(actions.lm_migration, "rescue", unreachable_never)
    monkeypatch.setattr(actions.lm_migration, "go_on", go_on)
    done = await world.ask("replace", pod="p0r0")
    assert (done.ok, done.detail) == (True, "p0r0 is another now")
    assert ended == ["full"]


async def test_a_commands_pod_that_is_replaced_while_it_runs_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waited for it: what had run there was gone, and the run stood still until its stall limit."""
    world = World(tmp_path, "command")
    member = world.ctx.members["p0r0"]
    world.bus.commit(ev.WorkerProcess(pod="p0r0", coord="p0r0s0t0", state="started", pid=7))

    async def another(ctx: Rollout, name: str) -> str:
        member.in_hand, member.replaced = True, 1
        world.bus.commit(ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="gone"))
        await asyncio.sleep(0)
        assert not phase.done()  # as long as nobody knows whether there will be another
        member.in_hand = False
        world.bus.commit(ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent"))
        return "p0r0 is another now"

    async def stage() -> str:
        found = await phases.outcome(world.ctx, world.ctx.plan.phases["full"])
        assert found is not None
        world.bus.commit(ev.StageChanged(name="full", status="failed", detail=found.what))
        return found.what

    monkeypatch.setattr(actions.replacing, "replace_pod", another)
    phase = asyncio.create_task(stage())
    await asyncio.sleep(0)
    done = await world.ask("replace", pod="p0r0")
    assert (done.ok, done.detail) == (True, "p0r0 is another now")
    assert await phase == "what ran on p0r0 went with the pod that was replaced"
    assert world.stages.decisions.get_nowait() == "retry"
    world.desk.close()
    world.journal.close()


async def unreachable_never(*_: object) -> None:
    """What is rescued of a pod that has nothing more."""
