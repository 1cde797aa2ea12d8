"""Preflight between pods: ways that are dialled for real, ranks' reports that are judged, one event for each pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.fleet.provider import Pod
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import gpu_kernels, preflight
from uvcc_console.rollout.stages.fleet.findings import Problem
from uvcc_console.rollout.stages.links import fabric, ports, relay
from uvcc_console.rollout.stages.links.fabric import Fabric
from uvcc_engine.contract.errors import UvccError


class Shell:
    """A pod's link whose commands run here. ``walled``: what listens on this pod cannot be reached."""

    host_key = ""

    def __init__(self) -> None:
        self.walled = False
        self.started: list[asyncio.subprocess.Process] = []

    async def sh(self, command: str, *, timeout: float = 0.0, stdin: bytes = b"") -> str:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate(stdin)
        return out.decode().strip()

    async def open(self, command: str) -> Listener:
        process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        self.started.append(process)
        return Listener(process, self.walled)


class Listener:
    def __init__(self, process: asyncio.subprocess.Process, walled: bool) -> None:
        self._process = process
        self._walled = walled
        self.stdout = self

    async def readline(self) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return b"1" if self._walled else line  # nobody listens on port 1

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has had all its callers
            self._process.kill()


@pytest.fixture
async def ctx(tmp_path: Path) -> AsyncIterator[Rollout]:
    _, profile = load("demo", ["topology.replicas=2", "smoke.replicas=2"])
    plan = make_plan("demo-1", "demo", profile)
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    members = {
        n: Member(n, r, Pod(r.name, r.party, r.replica, "x", n, "u", "127.0.0.1", 22)) for n, r in plan.requests.items()
    }
    for m in members.values():
        m.link = Shell()  # type: ignore[assignment]
    key = asyncssh.generate_private_key("ssh-ed25519")
    yield Rollout(plan, tmp_path, Bus(journal), None, key, members)  # type: ignore[arg-type]
    for m in members.values():
        for process in m.link.started:  # type: ignore[union-attr]
            await process.communicate()
    journal.close()


def wall(ctx: Rollout, name: str) -> None:
    link = ctx.members[name].link
    assert isinstance(link, Shell)
    link.walled = True


def with_link(ctx: Rollout, kind: str) -> None:
    profile = ctx.plan.profile.model_copy(update={"link": kind})
    object.__setattr__(ctx.plan, "profile", profile)


async def test_every_way_is_dialled_in_both_directions(ctx: Rollout) -> None:
    ways = await relay.dial_all(ctx, {"p0r0": ["p1r0"], "p1r0": ["p0r0"], "p2r0": ["p0r0", "p1r0"]})
    assert set(ways) == {("p0r0", "p1r0"), ("p1r0", "p0r0"), ("p2r0", "p0r0"), ("p2r0", "p1r0")}
    assert all(isinstance(way, float) for way in ways.values())


async def test_a_wall_before_a_sister_pod_stops_the_preflight(ctx: Rollout) -> None:
    with_link(ctx, "auto")
    wall(ctx, "p1r1")
    found = await fabric.ports(ctx)
    assert [f.pod for f in found.findings] == ["p1r0"]
    assert found.findings[0].what.startswith("it cannot open a connection to p1r1: ")
    assert "refused" in found.findings[0].what
    assert "firewall" in found.findings[0].hint
    assert found.facts["p1r1"]["ports_open"] == "3/3"  # its own way out is open
    assert found.facts["p1r0"]["ports_open"] == "2/3"


@pytest.mark.parametrize(
    ("kind", "stops"), [("auto", False), ("direct", True), pytest.param("relay", False, marks=pytest.mark.ci(__file__))]
)
async def test_a_wall_between_parties_matters_only_where_they_talk_directly(
    ctx: Rollout, kind: str, stops: bool
) -> None:
    with_link(ctx, kind)
    wall(ctx, "p2r0")
    found = await fabric.ports(ctx)
    across = [f.pod for f in found.findings if f.pod != "p2r1"]
    assert sorted(across) == (["p0r0", "p1r0"] if stops else [])
    if kind == "relay":
        assert {f["ports_open"] for f in found.facts.values()} <= {"1/1", "0/1"}  # sisters alone are dialled


REPORT: dict[str, Any] = {
    "coord": "p0r0s0t0",
    "backend": "gloo",
    "groups": {"dp": {"size": 2, "ms": 4.0, "mib_s": 500.0}},
    "pairs": {"1": {"rtt_ms": 2.0, "out_mib_s": 90.0, "in_mib_s": 80.0}},
    "trouble": [],
}


def test_reports_become_facts_of_the_slowest_rank() -> None:
    slow = {**REPORT, "coord": "p0r0s1t0", "groups": {"dp": {"size": 2, "ms": 9.0, "mib_s": 50.0}}, "pairs": {}}
    found = fabric.check_fabric({"p0r0": fabric.reports_of(json.dumps([REPORT, slow]))}, {"p0r0": 2})
    assert found.findings == ()
    assert found.facts["p0r0"] == {
        "all_reduce_dp": {"size": 2, "ms": 9.0, "mib_s": 50.0, "backend": "gloo"},
        "pair_p1": REPORT["pairs"]["1"],
    }


def test_what_failed_is_found_with_its_hint_and_a_rank_without_report_too() -> None:
    bad = {**REPORT, "groups": {}, "trouble": [{"part": "groups", "what": "no sister came", "hint": "look at p0r1"}]}
    found = fabric.check_fabric({"p0r0": fabric.reports_of(json.dumps([bad])), "p1r0": []}, {"p0r0": 1, "p1r0": 1})
    assert [(f.pod, f.what) for f in found.findings] == [
        ("p0r0", "p0r0s0t0: no sister came"),
        ("p1r0", "1 of its 1 ranks ended without a report"),
    ]
    assert found.findings[0].hint.startswith("look at p0r1; open the pods' ports")
    assert all(f.hint for f in found.findings)


@pytest.mark.parametrize("text", ["", "no shell", "[", '{"coord": 3}', "[3]", '[{"coord": "p0r0s0t0"}]', "[" * 9999])
def test_a_pod_that_reports_something_else_is_named(text: str) -> None:
    found = fabric.check_fabric({"p0r0": fabric.reports_of(text)}, {"p0r0": 1})
    assert {f.pod for f in found.findings} == {"p0r0"}
    assert all(f.hint for f in found.findings)


def healthy(*changed: str) -> dict[str, Any]:
    return {
        "versions": {"python": "3.11", "torch": "2", "numpy": "2"},
        "skew_s": 99.0 if changed else 0.0,
        "disk": {"free_mib": 9000.0},
        "memory": {"available_mib": 4000.0},
        "gpus": [{"name": "H100", "driver_version": "550.1"}],
        "imports": {"torch": "2", "cuda": "12.4", "nccl": "2.21.5"},
    }


def journalled(ctx: Rollout) -> dict[str, ev.EngineEvent]:
    events = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.EngineEvent)]
    return {e.pod: e for e in events if e.event.startswith("dp_preflight_")}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The costly looks, replaced by ones that only say that they were asked for."""
    asked: list[str] = []

    def look(name: str, result: Any) -> Any:
        async def act(ctx: Rollout) -> Any:
            asked.append(name)
            return result

        return act

    pair = {"rtt_ms": 3.0, "out_mib_s": 40.0, "in_mib_s": 30.0}
    group = {"size": 2, "ms": 1.0, "mib_s": 700.0, "backend": "nccl"}
    pods = [f"p{p}r{r}" for p in range(3) for r in range(2)]

    async def compiled(ctx: Rollout, names: Collection[str]) -> dict[str, dict[str, Any]]:
        return {name: {"ok": True, "kernels_s": 12.5} for name in names}

    monkeypatch.setattr(gpu_kernels, "compiled", compiled)
    monkeypatch.setattr(preflight, "relay_round_trips", look("relay", dict.fromkeys(pods, 1.5)))
    monkeypatch.setattr(fabric, "ports", look("ports", Fabric({n: {"ports_open": "3/3"} for n in pods}, ())))
    measured = {n: {"pair_p1": pair, "all_reduce_dp": group} for n in pods}
    monkeypatch.setattr(fabric, "ranks", look("ranks", Fabric(measured, ())))
    return asked


async def test_one_event_for_each_pod_tells_all_that_was_measured(
    ctx: Rollout, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probed(member: Member) -> dict[str, Any]:
        return healthy()

    monkeypatch.setattr(preflight, "probe_member", probed)
    said = await preflight.preflight(ctx)
    assert looks == ["relay", "ports", "ranks"]
    assert said == (
        "6 pods, relay round trip 1.5 ms at most, between parties 3.0 ms and 30.0 MiB/s at worst, "
        "all_reduce 700 MiB/s at worst (nccl)"
    )
    told = journalled(ctx)
    assert {e.event for e in told.values()} == {"dp_preflight_ok"}
    assert len(told) == 6
    fields = told["p2r1"].fields
    assert (fields["driver"], fields["cuda"], fields["nccl"]) == ("550.1", "12.4", "2.21.5")
    assert {"clock_skew_s", "disk_free_mib", "memory_mib", "relay_rtt_ms", "ports_open", "pair_p1"} <= set(fields)
    json.dumps(fields)


async def test_each_pod_that_was_looked_at_is_told_at_once_and_one_that_is_lost_stays_so(
    ctx: Rollout, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probed(member: Member) -> dict[str, Any]:
        return healthy()

    monkeypatch.setattr(preflight, "probe_member", probed)
    ctx.say(*(ctx.pod_event(m, "lost" if m.name == "p1r1" else "agent") for m in ctx.members.values()))
    await preflight.preflight(ctx)
    told = {name: (pod.state, pod.detail) for name, pod in ctx.bus.snapshot.pods.items()}
    assert told.pop("p1r1") == ("lost", "")
    assert set(told.values()) == {("agent", pod_states.LOOKED_AT)}


async def test_a_failure_stops_before_anything_costs_more(
    ctx: Rollout, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probed(member: Member) -> dict[str, Any]:
        return healthy(*["clock"] * (member.name == "p1r1"))

    monkeypatch.setattr(preflight, "probe_member", probed)
    with pytest.raises(UvccError, match=r"pod p1r1: its clock is \+99\.0 s off") as caught:
        await preflight.preflight(ctx)
    assert caught.value.hint
    assert looks == []  # no relay, no rank was started
    told = journalled(ctx)
    assert told["p1r1"].event == "dp_preflight_failed"
    assert told["p1r1"].fields["hints"] == ["have the pod synchronise its clock, or replace it"]
    assert {e.event for n, e in told.items() if n != "p1r1"} == {"dp_preflight_ok"}


async def test_ports_that_are_shut_keep_the_ranks_from_starting(
    ctx: Rollout, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probed(member: Member) -> dict[str, Any]:
        return healthy()

    async def shut(ctx: Rollout) -> Fabric:
        return Fabric({}, (Problem("p0r1", "it cannot open a connection to p0r0: timed out", "open it"),))

    monkeypatch.setattr(preflight, "probe_member", probed)
    monkeypatch.setattr(fabric, "ports", shut)
    with pytest.raises(UvccError, match="pod p0r1: it cannot open"):
        await preflight.preflight(ctx)
    assert looks == ["relay"]


async def test_it_can_be_left_out(ctx: Rollout, looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def probed(member: Member) -> dict[str, Any]:
        return healthy()

    monkeypatch.setattr(preflight, "probe_member", probed)
    object.__setattr__(ctx.plan, "profile", ctx.plan.profile.model_copy(update={"dp_preflight": False}))
    await preflight.preflight(ctx)
    assert looks == ["relay"]


def test_processes_on_a_gpu_are_read_as_the_tool_prints_them() -> None:
    listed = "4711, GPU-a\n 12, GPU-b\n[Not Supported]\n\n"
    assert preflight.parse_processes(listed) == [{"pid": 4711, "gpu": "GPU-a"}, {"pid": 12, "gpu": "GPU-b"}]


@pytest.mark.parametrize("said", ["Welcome!\n{}", "[1]", "[" * 100_000, "", "p1r0 12"])
async def test_a_pod_that_answers_something_else_is_named(ctx: Rollout, said: str) -> None:
    """A shell that greets whoever logs in, or a pod that means harm, ended the conductor with a traceback."""
    member, link = ctx.members["p0r0"], ctx.members["p0r0"].link

    async def answers(command: str, *, timeout: float = 0.0, stdin: bytes = b"") -> str:
        return said

    link.sh = answers  # type: ignore[union-attr, method-assign, assignment]
    with pytest.raises(UvccError, match="pod p0r0 does not answer as asked"):
        await relay.dial_all(ctx, {"p0r0": ["p1r0"]})
    if said:
        with pytest.raises(UvccError, match="pod p0r0 does not answer as asked"):
            await ports.free_ports({"p0r0": 1}, {"p0r0": member}, range(20_000, 20_010))


async def test_a_way_of_which_a_pod_says_nothing_is_none(ctx: Rollout) -> None:
    async def answers(command: str, *, timeout: float = 0.0, stdin: bytes = b"") -> str:
        return "{}"

    ctx.members["p0r0"].link.sh = answers  # type: ignore[union-attr, method-assign, assignment]
    ways = await relay.dial_all(ctx, {"p0r0": ["p1r0"]})
    assert ways == {("p0r0", "p1r0"): "its pod said nothing of it"}
