"""A jump host that keeps somebody out is told as itself, with its cure, and never as the pod behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncssh
import pytest

from uvcc_console.fleet.dialer import Timeouts
from uvcc_console.fleet.ssh import PodLink
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.machine.free_ports import ports

LinkTo = Callable[..., PodLink]
POD = "me@10.255.255.1:22"
"""Behind the jump host: nobody goes there from here."""


class Gate:
    """A jump host that its user knows and may use; ``passes``: whether it forwards."""

    def __init__(self, home: Path) -> None:
        self.ssh = home / ".ssh"
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self.users = asyncssh.generate_private_key("ssh-ed25519")
        self.port = 0

    async def open(self) -> asyncssh.SSHAcceptor:
        class Door(asyncssh.SSHServer):
            def connection_requested(self, *args: object) -> bool:
                raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "No route to host")

        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Door,
            server_host_keys=[self.key],
            authorized_client_keys=asyncssh.import_authorized_keys(self.users.export_public_key().decode()),
        )
        self.port = server.get_port()
        self.ssh.mkdir(mode=0o700)
        self.users.write_private_key(str(self.ssh / "id_ed25519"))
        self.know(self.key)
        return server

    def know(self, key: asyncssh.SSHKey) -> None:
        (self.ssh / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key.export_public_key().decode()}")

    @property
    def way(self) -> str:
        return f"me@127.0.0.1:{self.port}"


@pytest.fixture
async def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = Gate(tmp_path)
    server = await made.open()
    yield made
    server.close()
    await server.wait_closed()


async def refusal(link_to: LinkTo, way: str, kind: type[UvccError], **more: object) -> UvccError:
    link = link_to(POD, jump=way, **more)
    try:
        with pytest.raises(kind) as refused:
            await link.connect()
    finally:
        await link.close()
    return refused.value


async def test_a_name_that_nobody_knows_is_the_jump_hosts(link_to: LinkTo, gate: Gate) -> None:
    said = await refusal(link_to, "me@no-such-gate.invalid", UnreachableError)
    assert said.what.startswith(
        f"jump host me@no-such-gate.invalid, on the way to pod p0r0 at {POD}, cannot be reached"
    )
    assert "getent hosts no-such-gate.invalid" in said.what


async def test_a_jump_host_that_refuses_connections(link_to: LinkTo, gate: Gate) -> None:
    (free,) = ports(1)
    said = await refusal(link_to, f"me@127.0.0.1:{free}", UnreachableError)
    assert said.what == f"jump host me@127.0.0.1:{free}, on the way to pod p0r0 at {POD}, refuses connections"
    assert said.hint == f"is its SSH server up, and on port {free}?"
    behind = await refusal(link_to, f"{gate.way},me@second.example", UnreachableError)  # of two the one that fails
    assert behind.what.startswith("jump host me@second.example, on the way to pod p0r0")


async def test_a_jump_host_of_another_key_or_none(link_to: LinkTo, gate: Gate) -> None:
    for key in (asyncssh.generate_private_key("ssh-ed25519"), None):
        if key is None:
            (gate.ssh / "known_hosts").write_text("")
        else:
            gate.know(key)
        said = await refusal(link_to, gate.way, VerificationError)
        assert f"jump host {gate.way}, on the way to pod p0r0 at {POD}, shows a host key that is not" in said.what
        assert f"ssh -p {gate.port} me@127.0.0.1" in said.hint


async def test_a_jump_host_that_takes_none_of_the_users_keys(link_to: LinkTo, gate: Gate) -> None:
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(gate.ssh / "id_ed25519"))
    said = await refusal(link_to, gate.way, UnreachableError)
    assert said.what == f"jump host {gate.way}, on the way to pod p0r0 at {POD}, refuses your keys"
    assert f"ssh -p {gate.port} me@127.0.0.1 must get in" in said.hint


async def test_a_pod_that_its_jump_host_does_not_reach(link_to: LinkTo, gate: Gate) -> None:
    said = await refusal(link_to, gate.way, UnreachableError)
    assert said.what == f"jump host {gate.way} does not get through to pod p0r0 at {POD}: No route to host"


async def test_a_jump_host_that_turns_away_at_the_door(link_to: LinkTo, gate: Gate) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    way = f"me@127.0.0.1:{server.sockets[0].getsockname()[1]}"
    quick = Timeouts(connect=0.3, backoff_first=0.01, backoff_last=0.02)  # meant to run out: nobody lets in
    said = await refusal(link_to, way, UnreachableError, timeouts=quick)
    assert said.what.startswith(f"jump host {way}, on the way to pod p0r0 at {POD}, closes connections before a login")
    server.close()
