"""Several workers of a party: where they meet, whose keys the policy lists, which ports they get, what they report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.wheel import Wheel
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.decoder import Decoder
from uvcc_console.rollout.stages.links.ports import LINKS, MASTERS, free_ports
from uvcc_console.rollout.stages.links.relay import relay_started
from uvcc_console.rollout.stages.links.worlds import meeting_places
from uvcc_console.rollout.stages.training import agree
from uvcc_engine.contract.agent_protocol.agent_messages import Lines
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.transcript.signing.identity import Identity


class FakeLink:
    """Runs a pod's scripts here."""

    host_key = ""

    async def sh(self, command: str, *, stdin: bytes) -> str:
        assert command.startswith("python3 -S - ")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command.split()[1:],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate(stdin)
        return out.decode()


@pytest.fixture
def ctx(tmp_path: Path) -> Rollout:
    """Two replicas, two stages and two tensor ranks on six pods of this machine."""
    settings = ["topology.replicas=2", "topology.stages=2", "topology.tensor=2", "topology.microbatches=2"]
    plan = make_plan("demo-1", "demo", load("demo", settings)[1], seed=3)
    members = {}
    for name, request in plan.requests.items():
        pod = Pod(request.name, request.party, request.replica, "local", "id", host="127.0.0.1", region="here")
        own = 1 + request.party + 3 * request.replica
        identity = Identity(bytes([own] * 32), bytes([own + 50] * 32))
        members[name] = Member(name, request, pod, FakeLink(), identity=identity.public.to_json())  # type: ignore[arg-type]
    bus = Bus(Journal(tmp_path / "journal.sqlite", source="test"))
    key = asyncssh.generate_private_key("ssh-ed25519")
    wheel = Wheel(tmp_path / "w.whl", "ab" * 32)
    return Rollout(plan, tmp_path, bus, None, key, members, wheel)  # type: ignore[arg-type]


async def test_every_worker_is_told_its_rank_and_where_rank_0_of_its_party_is(ctx: Rollout) -> None:
    phase = ctx.plan.phases["full"]
    found = await meeting_places(ctx, phase)
    assert len(found) == 24
    for party in range(3):
        mine = {c: env for c, env in found.items() if c.startswith(f"p{party}")}
        assert sorted(int(env["RANK"]) for env in mine.values()) == list(range(8))
        assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in mine.values()}) == 1
    assert found["p1r1s0t1"]["RANK"] == "5"
    assert found["p1r1s0t1"]["LOCAL_RANK"] == "1"
    assert len({env["MASTER_PORT"] for env in found.values()}) == 3
    told = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.EngineEvent)]
    assert [(e.event, e.fields["phase"]) for e in told] == [("dp_master_port_selected", "full")] * 3
    alone = await meeting_places(ctx, ctx.plan.phases["smoke"])
    assert {env["WORLD_SIZE"] for env in alone.values()} == {"4"}  # the ranks of one pod meet, too


async def test_a_partys_only_pod_meets_where_no_other_machine_reaches_it(ctx: Rollout) -> None:
    for name, member in ctx.members.items():
        assert member.pod is not None
        member.pod = dataclasses.replace(member.pod, host=f"pod-{name}.example")
    alone = await meeting_places(ctx, ctx.plan.phases["smoke"])
    assert {env["MASTER_ADDR"] for env in alone.values()} == {"127.0.0.1"}
    found = await meeting_places(ctx, ctx.plan.phases["full"])
    assert found["p1r1s0t0"]["MASTER_ADDR"] == "pod-p1r0.example"  # for its sealed ranks


async def test_pods_of_one_host_never_get_the_same_port(ctx: Rollout) -> None:
    found = await free_ports(dict.fromkeys(ctx.members, 5), ctx.members, LINKS)
    ports = [p for some in found.values() for p in some]
    assert len(set(ports)) == 30
    assert all(p in LINKS for p in ports)
    assert not set(LINKS) & set(MASTERS)
    with pytest.raises(UvccError, match="of 6 ports are free"):
        await free_ports(dict.fromkeys(ctx.members, 1), ctx.members, range(ports[0], ports[0] + 2))


def test_the_policy_lists_the_keys_that_each_pod_made(ctx: Rollout) -> None:
    shared = {"owner": "aa" * 32, "commitments": ["11" * 32, "22" * 32, "33" * 32]}
    policy = agree.draft(ctx, ctx.plan.phases["full"], shared)
    assert policy.public(1, 1).to_json() == ctx.members["p1r1"].identity
    assert policy.public(1).to_json() == ctx.members["p1r0"].identity
    alone = agree.draft(ctx, ctx.plan.phases["smoke"], shared)
    assert all(not p.pods for p in alone.parties)


def test_every_rank_of_a_pod_reports_its_result() -> None:
    decoder = Decoder("p0r0", "demo-1.full", "full", "p0r0s0t0")
    found: list[Any] = []
    for name, coord in (("result.json", "p0r0s0t0"), ("result_rank1.json", "p0r0s0t1")):
        record = {"run": "demo-1.full", "coord": coord, "result_hash": "ab" * 32, "values": {"loss": 0.5}}
        lines = Lines(run="demo-1.full", src=name, ino=1, off=1, lines=[json.dumps(record)])
        found += decoder.events(lines)
    assert [e.coord for e in found if isinstance(e, ev.ResultReported)] == ["p0r0s0t0", "p0r0s0t1"]


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("http://127.0.0.1:81", {"relay_url_local": "http://127.0.0.1:81", "address_kind": "loopback", "tls": False}),
        ("https://10.1.2.3:443", {"relay_url_public": "https://10.1.2.3:443", "address_kind": "private", "tls": True}),
        ("https://8.8.8.8:1", {"relay_url_public": "https://8.8.8.8:1", "address_kind": "public", "tls": True}),
        (
            "tls://ada:word@nats.org:4222",
            {"relay_url_public": "tls://nats.org:4222", "address_kind": "name", "tls": True},
        ),
        ("http://[::1]:9", {"relay_url_local": "http://[::1]:9", "address_kind": "loopback", "tls": False}),
    ],
)
def test_a_relay_is_told_by_phase_and_without_credentials(ctx: Rollout, url: str, fields: dict[str, Any]) -> None:
    told = relay_started(ctx.plan.phases["full"], "relay", url, pod="p0r1", replica=1)
    assert isinstance(told, ev.EngineEvent)
    assert (told.event, told.fields["phase"], told.fields["replica"]) == ("privacy_relay_started", "full", 1)
    assert {k: told.fields[k] for k in fields} == fields
    assert "word" not in json.dumps(told.fields)
