"""The relay between machines speaks TLS under the run's own certificate, which the replica's pods are given."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Pod
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.links import relay
from uvcc_engine.contract.agent_protocol.agent_commands import RelayCommand

PATIENCE_S = 500.0


@dataclass
class Host:
    """A pod's link and channel: files in a folder of its own, the relay a real process of this machine."""

    home: Path
    relays: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def sh(self, command: str) -> str:
        process = await asyncio.create_subprocess_shell(command, cwd=self.home)
        assert await process.wait() == 0
        return ""

    async def put(self, data: bytes, remote: str) -> None:
        (self.home / remote).write_bytes(data)

    async def request(self, command: RelayCommand, *, timeout: float) -> dict[str, Any]:
        folder = self.home / ".uvcc" / "relay" / command.run
        local = {**command.config, "listen": "127.0.0.1:0", "ready_file": "ready.json"}
        (folder / "config.json").write_text(json.dumps(local))
        (folder / "config.json").chmod(0o600)  # as the agent writes it
        command = [sys.executable, "-m", "uvcc_engine.relay", "--config", str(folder / "config.json")]
        self.relays.append(await asyncio.create_subprocess_exec(*command, cwd=folder))
        async with asyncio.timeout(PATIENCE_S):
            while not (folder / "ready.json").exists():
                await asyncio.sleep(0.02)
        return {"url": json.loads((folder / "ready.json").read_text())["url"]}


@pytest.fixture
async def ctx(tmp_path: Path) -> AsyncIterator[Rollout]:
    name, profile = load("demo", [])
    plan = make_plan("demo-1", name, profile)
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    members, hosts = {}, []
    for pod, request in plan.requests.items():
        home = tmp_path / pod
        home.mkdir()
        member = members[pod] = Member(pod, request)
        member.pod = Pod(request.name, request.party, request.replica, "x", pod, "u", "localhost", 22)
        hosts.append(Host(home))
        member.link = member.agent = hosts[-1]  # type: ignore[assignment]
    key = asyncssh.generate_private_key("ssh-ed25519")
    yield Rollout(plan, tmp_path, Bus(journal), None, key, members)  # type: ignore[arg-type]
    for host in hosts:
        for started in host.relays:
            started.terminate()
            await started.wait()
    journal.close()


def answer(url: str, ca: Path | None) -> bytes:
    trust = ssl.create_default_context(cafile=str(ca) if ca else None)
    with urllib.request.urlopen(f"{url}/healthz", timeout=PATIENCE_S, context=trust) as reply:
        return bytes(reply.read())


async def test_every_pod_of_the_replica_can_check_the_relay_and_nobody_else_trusts_it(ctx: Rollout) -> None:
    phase = ctx.plan.phases["full"]
    link = await relay.relay_link(ctx, phase)
    assert link.relay_url.startswith("https://localhost:")
    for name in phase.pods():
        home = ctx.run_dir / name
        ca = home / ".uvcc" / link.ca_file
        assert json.loads(await asyncio.to_thread(answer, link.relay_url, ca))["ok"]
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        await asyncio.to_thread(answer, link.relay_url, None)
    keys = [p for p in ctx.run_dir.rglob("key*.pem")]
    assert {p.parent.parts[len(ctx.run_dir.parts)] for p in keys} == {"relay", "p0r0"}  # here, and where it serves
    assert all(p.stat().st_mode & 0o077 == 0 for p in keys if p.parent.name == "relay")
