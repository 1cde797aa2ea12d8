"""What a new conductor does about pods out of reach, and what comes before any pod goes; real sockets, no agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import asyncssh
import pytest
from sshfake import SshFake

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.fleet.provider import Pod, Provider
from uvcc_console.plan.plan import KEEPING, make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout import conductor, finish
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_console.rollout.stages.fleet import adoption, provision
from uvcc_engine.contract.errors import UnreachableError, UvccError


async def answer(process: Any) -> None:
    process.exit(0)


class Market:
    """A provider that lists what it is told to, and notes what it is asked to delete."""

    name = "fake"

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.deletes: list[str] = []
        self.silent = False

    async def list(self, prefix: str) -> list[Pod]:
        if self.silent:
            raise UnreachableError("the provider does not answer")
        return list(self.pods.values())

    async def delete(self, pod: Pod) -> None:
        self.deletes.append(pod.name)


class Fleet:
    """Three pods whose SSH servers are real; the provider lists them as they are told to."""

    def __init__(self, folder: Path) -> None:
        _, profile = load("demo")
        plan = make_plan("demo-1", "demo", profile)
        self.journal = Journal(folder / "journal.sqlite", source="test")
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self.provider = Market()
        self.hosts: dict[str, SshFake] = {}
        members = {name: Member(name, request) for name, request in plan.requests.items()}
        self.ctx = Rollout(plan, folder, Bus(self.journal), cast(Provider, self.provider), self.key, members)
        self.machine = StageRunner(self.ctx.bus, {}, KEEPING, 1.0, end=4e9)
        self.ctx.say(
            ev.RunCreated(
                run="demo-1",
                profile_name="demo",
                job_kind="private",
                replicas=1,
                pipeline_stages=1,
                tensor=1,
                stages=list(plan.stages),
            ),
            ev.StageChanged(name="provision", status="ok"),
        )

    async def up(self, name: str, port: int = 0) -> None:
        host = self.hosts.get(name) or SshFake(self.key, answer)
        host.port = host.port or port
        self.hosts[name] = await host.start()
        m = self.ctx.members[name]
        pod = Pod(m.request.name, m.request.party, m.request.replica, "fake", name)
        self.provider.pods[m.request.name] = replace(pod, user="tester", host="127.0.0.1", port=host.port)

    def told(self) -> list[tuple[str, str]]:
        found = [e for _, e in iter_events(self.ctx.run_dir / "journal.sqlite") if isinstance(e, ev.StageChanged)]
        return [(e.status, e.detail) for e in found if e.name == adoption.STAGE]

    async def waits_for(self, text: str) -> None:
        def shown(s: Any) -> bool:
            return s.stage is not None and s.stage.status == "waiting" and text in s.stage.detail

        await self.ctx.bus.wait(shown, 120.0)


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(adoption, "AGAIN_S", (0.02, 0.05))
    monkeypatch.setattr(adoption, "LISTED_S", 600.0)
    monkeypatch.setattr(adoption.processes, "start", lambda *args: None)
    made = Fleet(tmp_path)
    for name in made.ctx.members:
        await made.up(name)
    yield made
    for member in made.ctx.members.values():
        await provision.detach(member)
    for host in made.hosts.values():
        await host.stop()
    made.journal.close()


async def test_pods_that_answer_are_adopted_at_once(fleet: Fleet) -> None:
    await adoption.adopt(fleet.ctx, fleet.machine)
    assert fleet.told() == [("running", ""), ("ok", "3 of 3 pods")]


async def test_a_pod_out_of_reach_is_named_and_waited_for_and_nothing_is_deleted(fleet: Fleet) -> None:
    await fleet.hosts["p1r0"].stop()
    adopting = asyncio.create_task(adoption.adopt(fleet.ctx, fleet.machine))
    await fleet.waits_for("p1r0: pod p1r0 at")
    stage = fleet.ctx.bus.snapshot.stage
    assert stage is not None
    assert stage.until == fleet.machine.end
    for part in ("refuses connections", "tried again by itself", "pods kept until", "uvcc teardown (t)"):
        assert part in stage.detail
    assert "p0r0" not in stage.detail
    link = fleet.ctx.members["p0r0"].link
    assert link is not None
    assert link.up  # the others are back meanwhile
    await fleet.up("p1r0")
    await asyncio.wait_for(adopting, 120.0)
    assert fleet.told()[-1] == ("ok", "3 of 3 pods")
    assert fleet.provider.deletes == []


async def test_another_host_key_is_waited_for_too_and_never_trusted(fleet: Fleet) -> None:
    await adoption.adopt(fleet.ctx, fleet.machine)
    member = fleet.ctx.members["p2r0"]
    fleet.ctx.say(fleet.ctx.pod_event(member, "ready"))  # the key is pinned from now on
    await provision.detach(member)
    sound = fleet.hosts["p2r0"]
    await sound.stop()
    stranger = SshFake(fleet.key, answer, port=sound.port)
    await stranger.start()
    adopting = asyncio.create_task(adoption.adopt(fleet.ctx, fleet.machine))
    await fleet.waits_for("shows another host key")
    assert stranger.commands == []
    await stranger.stop()
    await sound.start()
    await asyncio.wait_for(adopting, 120.0)


async def test_a_provider_that_does_not_answer_ends_nothing(fleet: Fleet) -> None:
    fleet.provider.silent = True
    adopting = asyncio.create_task(adoption.adopt(fleet.ctx, fleet.machine))
    await fleet.waits_for("the provider: the provider does not answer")
    fleet.provider.silent = False
    fleet.machine.decide("retry")
    await asyncio.wait_for(adopting, 120.0)
    assert fleet.provider.deletes == []


async def test_only_a_pod_that_stays_unlisted_is_lost(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fleet.ctx.members["p0r0"].request.name
    pod = fleet.provider.pods.pop(name)
    adopting = asyncio.create_task(adoption.adopt(fleet.ctx, fleet.machine))
    await fleet.waits_for("p0r0: the provider does not list it")
    fleet.provider.pods[name] = pod  # its list lagged
    await asyncio.wait_for(adopting, 120.0)
    assert fleet.told()[-1] == ("ok", "3 of 3 pods")
    await provision.detach(fleet.ctx.members["p0r0"])
    del fleet.provider.pods[name]
    monkeypatch.setattr(adoption, "LISTED_S", 0.05)
    await asyncio.wait_for(adoption.adopt(fleet.ctx, fleet.machine), 120.0)
    assert fleet.ctx.bus.snapshot.pods["p0r0"].state == "lost"
    assert fleet.told()[-1] == ("ok", "2 of 3 pods")


# -- before pods go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["failed", "halted", "torn_down", "ok"])
async def test_evidence_comes_home_before_pods_go(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    order: list[str] = []

    def note(name: str, raises: Exception | None = None) -> Any:
        async def act(ctx: Rollout, *_: Any) -> list[str]:
            order.append(name)
            if raises is not None:
                raise raises
            return []

        return act

    monkeypatch.setattr(finish, "stop_workers", note("workers stop"))
    monkeypatch.setattr(finish, "last_words", note("evidence", OSError("disk full")))  # never an obstacle
    monkeypatch.setattr(finish, "teardown", note("teardown"))
    fleet.ctx.members["p0r0"].agent = object()  # type: ignore[assignment]
    fleet.ctx.say(ev.PhaseStarted(phase="full", engine_run="demo-1.full", steps=9, sid_job=""))
    await finish.finish(fleet.ctx, status, "")
    fleet.ctx.members["p0r0"].agent = None
    assert order == (["teardown"] if status == "ok" else ["workers stop", "evidence", "teardown"])


async def test_a_pod_that_hangs_does_not_keep_the_others_evidence_from_coming(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[str] = []

    async def fetch(ctx: Rollout, phase: Any, member: Member) -> int:
        if member.name == "p0r0":
            await asyncio.Event().wait()
        came.append(member.name)
        return 1

    monkeypatch.setitem(finish.last_words.__globals__, "fetch", fetch)
    monkeypatch.setattr(finish, "stop_workers", _nothing)
    await adoption.adopt(fleet.ctx, fleet.machine)
    fleet.ctx.members["p1r0"].agent = object()  # type: ignore[assignment]
    fleet.ctx.say(
        ev.StageChanged(name="full", status="failed"),
        ev.PhaseStarted(phase="full", engine_run="demo-1.full", steps=9, sid_job=""),
    )
    await finish.evidence_home(fleet.ctx, 0.2)
    fleet.ctx.members["p1r0"].agent = None
    assert sorted(came) == ["p1r0", "p2r0"]
    assert any("not all evidence came home" in a.text for a in fleet.ctx.bus.snapshot.alerts)


async def _nothing(*_: Any) -> None:
    return None


async def test_a_run_that_cannot_be_opened_but_has_pods_has_not_ended(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.ctx.say(fleet.ctx.pod_event(fleet.ctx.members["p0r0"], "agent"))

    def broken(*_: Any) -> Rollout:
        raise UvccError("the key is unreadable")

    monkeypatch.setattr(conductor, "open_rollout", broken)
    with pytest.raises(UvccError, match="unreadable"):
        await asyncio.to_thread(conductor.run_conductor, fleet.ctx.run_dir, "resume", 0)
    events = [e for _, e in iter_events(fleet.ctx.run_dir / "journal.sqlite")]
    assert not [e for e in events if isinstance(e, ev.RunEnded)]
    assert "nobody conducts: the key is unreadable" in next(e for e in events if isinstance(e, ev.Alert)).text
