"""SSH as its user has it, to real servers in this process: configuration, agent, passphrase, certificate, jumps."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh
import pytest
import yaml

from uvcc_console.fleet.inventory import InventoryProvider, read_hosts
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.user_ssh import place
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError

QUICK = Timeouts(connect=60.0, login=60.0, operation=60.0, backoff_first=0.01, backoff_last=0.05)


class Box:
    """A host that lets in whom its authorized_keys names, and can be jumped over."""

    def __init__(self, *lines: str) -> None:
        self.authorized = asyncssh.import_authorized_keys("\n".join(lines))
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self.jumped = self.came = 0
        self.empty = asyncio.Event()
        """Whether everybody who came has gone."""
        self.port = 0

    async def __aenter__(self) -> Box:
        box = self
        inside: list[asyncssh.SSHServer] = []

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                box.came += 1
                inside.append(self)
                box.empty.clear()

            def connection_lost(self, exc: Exception | None) -> None:
                inside.remove(self)
                box.empty.set() if not inside else None

            def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
                box.jumped += 1
                return True

        async def serve(process: asyncssh.SSHServerProcess) -> None:
            process.stdout.write(b"here\n")
            process.exit(0)

        self.server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Server,
            server_host_keys=[self.key],
            authorized_client_keys=self.authorized,
            process_factory=serve,
            encoding=None,
        )
        self.port = self.server.get_port()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()
        await self.server.wait_closed()


@pytest.fixture
def home(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own ``~/.ssh``, empty, and no agent."""
    (short / ".ssh").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(short))
    monkeypatch.setattr(Path, "home", lambda: short)
    for name in ("SSH_AUTH_SOCK", "SSH_ASKPASS"):
        monkeypatch.delenv(name, raising=False)
    return short


@pytest.fixture
def mine() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


def public(key: asyncssh.SSHKey) -> str:
    return key.export_public_key().decode().strip()


def keep(path: Path, key: asyncssh.SSHKey, passphrase: str | None = None) -> Path:
    path.write_bytes(key.export_private_key("openssh", passphrase, rounds=1))
    path.chmod(0o600)
    return path


async def goes(home: Path, **entry: object) -> str:
    """What a host of an inventory answers to the user's own login."""
    (home / "hosts.yaml").write_text(yaml.safe_dump({"hosts": [entry]}))
    (host,) = read_hosts(home / "hosts.yaml")
    assert host.login is not None
    link = PodLink("p0r0", host.address, host.login, jump=host.jump, timeouts=QUICK)
    try:
        return await link.sh("true # anything")
    finally:
        await link.close()


@pytest.fixture
async def agent(home: Path, mine: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """An SSH agent on a socket (draft-miller-ssh-agent) that holds the user's key; what it was asked is returned."""
    asked: list[int] = []

    def text(data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + data

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(4):
            body = await reader.readexactly(struct.unpack(">I", head)[0])
            asked.append(body[0])
            if body[0] == 11:
                said = b"\x0c" + struct.pack(">I", 1) + text(mine.public_data) + text(b"mine")
            elif body[0] == 13:
                at = 5 + struct.unpack(">I", body[1:5])[0]
                data = body[at + 4 : at + 4 + struct.unpack(">I", body[at : at + 4])[0]]
                said = b"\x0e" + text(mine.sign(data, b"ssh-ed25519"))
            else:
                said = b"\x05"
            writer.write(text(said))
        writer.close()

    server = await asyncio.start_unix_server(serve, str(home / "agent"))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "agent"))
    yield asked
    server.close()


async def test_a_name_of_the_configuration_is_enough(home: Path, mine: asyncssh.SSHKey) -> None:
    async with Box(public(mine)) as box:
        key = keep(home / "other_key", mine)
        lines = ["Host node*", " HostName 127.0.0.1", f" Port {box.port}", " User somebody", f" IdentityFile {key}"]
        (home / ".ssh/config").write_text("\n".join(lines) + "\n")
        assert await goes(home, host="node7") == "here"
        (host,) = read_hosts(home / "hosts.yaml")
        assert host.address == f"somebody@127.0.0.1:{box.port}"
        at = place("node7", user="me", port=7, jump="door")
        assert (at.user, at.port, at.jump) == ("me", 7, "door")  # what the entry says counts first


async def test_the_agent_s_key_opens_what_no_file_does(home: Path, mine: asyncssh.SSHKey, agent: list[int]) -> None:
    async with Box(public(mine)) as box:
        assert await goes(home, host="127.0.0.1", port=box.port, user="me") == "here"
    assert {11, 13} <= set(agent)


async def test_a_locked_key_that_the_agent_holds_is_opened_by_it(
    home: Path, mine: asyncssh.SSHKey, agent: list[int]
) -> None:
    key = keep(home / "locked", mine, "secret")
    async with Box(public(mine)) as box:
        assert await goes(home, host="127.0.0.1", port=box.port, user="me", key=str(key)) == "here"


async def test_a_locked_key_is_opened_with_the_user_s_own_program(
    home: Path, mine: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keep(home / "locked", mine, "open sesame")
    async with Box(public(mine)) as box:
        entry = {"host": "127.0.0.1", "port": box.port, "user": "me", "key": str(key)}
        with pytest.raises(UnreadableError) as error:
            await goes(home, **entry)
        assert "ssh-add" in error.value.hint
        assert "SSH_ASKPASS" in error.value.hint
        program = home / "ask"
        program.write_text("#!/bin/sh\necho 'open sesame'\n")
        program.chmod(0o700)
        monkeypatch.setenv("SSH_ASKPASS", str(program))
        assert await goes(home, **entry) == "here"


async def test_a_certificate_beside_the_key_is_shown(home: Path, mine: asyncssh.SSHKey) -> None:
    authority = asyncssh.generate_private_key("ssh-ed25519")
    keep(home / "id", mine)
    certificate = authority.generate_user_certificate(mine, "me", principals=["me"])
    async with Box(f"cert-authority {public(authority)}") as box:
        entry = {"host": "127.0.0.1", "port": box.port, "user": "me", "key": str(home / "id")}
        with pytest.raises(UnreachableError, match=r"refuses .*id"):
            await goes(home, **entry)
        certificate.write_certificate(str(home / "id-cert.pub"))
        assert await goes(home, **entry) == "here"


async def test_two_jumps_of_the_configuration(home: Path, mine: asyncssh.SSHKey) -> None:
    keep(home / ".ssh/id_ed25519", mine)
    async with Box(public(mine)) as first, Box(public(mine)) as second, Box(public(mine)) as box:
        known = "".join(f"[127.0.0.1]:{b.port} {public(b.key)}\n" for b in (first, second))
        (home / ".ssh/known_hosts").write_text(known)
        doors = "".join(
            f"Host {name}\n HostName 127.0.0.1\n Port {b.port}\n User me\n"
            for name, b in (("outer", first), ("inner", second))
        )
        inside = f"Host deep\n HostName 127.0.0.1\n Port {box.port}\n User me\n ProxyJump outer,inner\n"
        (home / ".ssh/config").write_text(doors + inside)
        assert await goes(home, host="deep") == "here"
        assert (first.jumped, second.jumped) == (1, 1)
        for host in (box, second, first):  # none is left at a jump host, of which each may let in but a few
            await host.empty.wait()
        (home / ".ssh/known_hosts").write_text(known.splitlines()[0])
        for _ in range(3):
            with pytest.raises(Exception, match=r"host key"):
                await goes(home, host="deep")
            await first.empty.wait()
        assert (first.came, box.came) == (4, 1)
        (home / ".ssh/known_hosts").write_text("")
        with pytest.raises(Exception, match=r"host key|lost"):  # a jump host nobody knows is not gone through
            await goes(home, host="deep")


def test_a_configuration_that_cannot_be_read_is_named(home: Path) -> None:
    (home / ".ssh/config").write_text("Host a\n Port nine\n")
    with pytest.raises(ConfigError, match="config"):
        place("a")


def test_a_key_that_is_named_and_missing_is_an_error(home: Path, run_dir: Path) -> None:
    (home / "hosts.yaml").write_text(yaml.safe_dump({"hosts": [{"host": "a.example", "key": str(home / "none")}]}))
    provider = InventoryProvider(read_hosts(home / "hosts.yaml"), run_dir)
    (host,) = provider._hosts.values()
    assert host.login is not None
    with pytest.raises(UnreadableError, match="none"):
        host.login.options()
