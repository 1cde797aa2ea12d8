"""SSH as its user has it, held to OpenSSH's own server, agent and ssh-keygen; and a FIDO key, by an agent that has one.

No FIDO token is here. In one test ``ssh-keygen``, ``ssh-agent`` and ``ssh-add`` speak to the token in software that
OpenSSH's own tests use (Debian's package openssh-tests), as they would to one of hardware. In the others the agent of
the test keeps such a key. That the signatures are what a token's are says OpenSSH's server, which checks them.
"""

# ruff: noqa: F811
from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncssh
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from opensshd import Sshd, why_not
from test_user_ssh import goes, home  # noqa: F401  (a fixture)

from uvcc_console.fleet.user_ssh import UserKeys
from uvcc_engine.contract.errors import UnreachableError, UnreadableError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")
_TOOLS = ("ssh-agent", "ssh-add", "ssh-keygen")
with_tools = pytest.mark.skipif(any(shutil.which(t) is None for t in _TOOLS), reason="no OpenSSH client here")
SK = b"sk-ssh-ed25519@openssh.com"
SK_DUMMY = Path(os.environ.get("UVCC_TEST_SK_DUMMY", "/usr/lib/openssh/regress/misc/sk-dummy/sk-dummy.so"))
with_sk = pytest.mark.skipif(not SK_DUMMY.exists(), reason="no security key in software here")
APPLICATION = b"ssh:"


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def keygen(*args: str) -> None:
    subprocess.run(["ssh-keygen", "-q", *args], check=True, capture_output=True, timeout=500)


class FidoKey:
    """``flags``: what the token says of the touch, 1 where somebody touched it."""

    def __init__(self, flags: int = 1) -> None:
        self.key, self.flags, self.counter = Ed25519PrivateKey.generate(), flags, 7
        self.public = text(SK) + text(self.key.public_key().public_bytes_raw()) + text(APPLICATION)

    @property
    def line(self) -> str:
        return f"{SK.decode()} {base64.b64encode(self.public).decode()} a-token\n"

    def sign(self, data: bytes) -> bytes:
        """What PROTOCOL.u2f has a token sign, and what an agent gives for it."""
        self.counter += 1
        tail = struct.pack(">BI", self.flags, self.counter)
        signed = hashlib.sha256(APPLICATION).digest() + tail + hashlib.sha256(data).digest()
        return text(SK) + text(self.key.sign(signed)) + tail

    def file(self) -> bytes:
        """The private file that ``ssh-keygen -t ed25519-sk`` writes: a handle, of no use without the token."""
        inner = struct.pack(">II", 5, 5) + self.public + struct.pack(">B", 1) + text(b"handle") + text(b"") + text(b"c")
        inner += bytes(range(1, 1 + -len(inner) % 8))
        body = b"openssh-key-v1\0" + text(b"none") + text(b"none") + text(b"") + struct.pack(">I", 1)
        encoded = base64.encodebytes(body + text(self.public) + text(inner))
        return b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + encoded + b"-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
async def token(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FidoKey]:
    """A key on a token that an agent speaks for."""
    made = FidoKey()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(4):
            body = await reader.readexactly(struct.unpack(">I", head)[0])
            said = b"\x05"
            if body[0] == 11:
                said = b"\x0c" + struct.pack(">I", 1) + text(made.public) + text(b"a token")
            elif body[0] == 13:
                at = 5 + struct.unpack(">I", body[1:5])[0]
                data = body[at + 4 : at + 4 + struct.unpack(">I", body[at : at + 4])[0]]
                said = b"\x0e" + text(made.sign(data))
            writer.write(text(said))
        writer.close()

    server = await asyncio.start_unix_server(serve, str(home / "token"))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "token"))
    yield made
    server.close()


@pytest.fixture
def servers() -> Iterator[list[Sshd]]:
    made: list[Sshd] = []
    yield made
    for server in made:
        server.down()


@pytest.fixture
def agent(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OpenSSH's own agent, ended by its number. It may load the token in software, and no other library."""
    started = ["ssh-agent", "-s", "-P", str(SK_DUMMY.resolve()), "-a", str(home / "agent")]
    said = subprocess.run(started, check=True, capture_output=True, text=True, timeout=500).stdout
    pid = int(said.partition("SSH_AGENT_PID=")[2].partition(";")[0])
    monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "agent"))
    yield
    os.kill(pid, signal.SIGTERM)


def server(servers: list[Sshd], folder: Path, authorized: str, *more: str) -> Sshd:
    made = Sshd(folder / f"s{len(servers)}", asyncssh.generate_private_key("ssh-ed25519"), *more)
    made.authorized.write_text(authorized)
    servers.append(made)
    return made.up()


async def test_a_key_on_a_token_opens_a_real_server_through_the_agent(
    home: Path,
    token: FidoKey,
    servers: list[Sshd],
) -> None:
    there = server(servers, home, token.line)
    assert await goes(home, host="127.0.0.1", port=there.port, user=there.user) == ""
    assert token.counter == 8
    token.flags = 0  # nobody touched it: the server wants that, and no signature of it counts
    with pytest.raises(UnreachableError, match="refuses"):
        await goes(home, host="127.0.0.1", port=there.port, user=there.user)


async def test_the_file_of_a_token_s_key_leaves_the_signing_to_the_agent(
    home: Path,
    token: FidoKey,
    servers: list[Sshd],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = home / "id_ed25519_sk"
    key.write_bytes(token.file())
    key.chmod(0o600)
    there = server(servers, home, token.line)
    assert await goes(home, host="127.0.0.1", port=there.port, user=there.user, key=str(key)) == ""
    monkeypatch.delenv("SSH_AUTH_SOCK")
    with pytest.raises(UnreadableError) as error:
        await goes(home, host="127.0.0.1", port=there.port, user=there.user, key=str(key))
    assert "FIDO token" in error.value.what
    assert f"ssh-add {key}" in error.value.hint
    assert UserKeys((str(key),)).options()["client_keys"] == []  # one of the usual files is passed over


@with_tools
@with_sk
async def test_a_key_that_ssh_keygen_made_on_a_token_is_used_through_openssh_s_own_agent(
    home: Path,
    agent: None,
    servers: list[Sshd],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything but the token's metal: enrolled, held by the agent, asked of it by the console, checked by sshd."""
    middleware = {"SSH_SK_PROVIDER": str(SK_DUMMY.resolve())}
    monkeypatch.setenv("SSH_SK_PROVIDER", middleware["SSH_SK_PROVIDER"])
    key = home / ".ssh" / "id_ed25519_sk"
    keygen("-t", "ed25519-sk", "-N", "", "-C", "a-token", "-f", str(key))
    line = (home / ".ssh" / "id_ed25519_sk.pub").read_text()
    assert line.startswith(f"{SK.decode()} ")
    there = server(servers, home, line, "LogLevel VERBOSE")
    entry = {"host": "127.0.0.1", "port": there.port, "user": there.user}
    with pytest.raises(UnreachableError, match="refuses"):  # the agent does not hold it yet
        await goes(home, **entry, key=str(key))
    subprocess.run(["ssh-add", str(key)], check=True, capture_output=True, timeout=500)
    assert await goes(home, **entry, key=str(key)) == ""  # named by its file
    assert await goes(home, **entry) == ""  # one of the usual files
    key.unlink()
    assert await goes(home, **entry) == ""  # known by the agent alone
    assert f"Accepted publickey for {there.user}" in (log := (there.folder / "log").read_text())
    assert "ED25519-SK" in log
    subprocess.run(["ssh-add", "-D"], check=True, capture_output=True, timeout=500)
    with pytest.raises(UnreachableError, match="refuses"):
        await goes(home, **entry)


@with_tools
async def test_a_passphrase_is_opened_by_ssh_add_or_by_the_user_s_program(
    home: Path,
    agent: None,
    servers: list[Sshd],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keygen("-t", "ed25519", "-N", "open sesame", "-f", str(home / "locked"))
    there = server(servers, home, (home / "locked.pub").read_text())
    entry = {"host": "127.0.0.1", "port": there.port, "user": there.user, "key": str(home / "locked")}
    ask = home / "ask"
    ask.write_text("#!/bin/sh\necho 'open sesame'\n")
    ask.chmod(0o700)
    with pytest.raises(UnreachableError, match="refuses"):  # the agent is there, and has it not yet
        await goes(home, **entry)
    env = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    subprocess.run(["ssh-add", str(home / "locked")], env=env, check=True, capture_output=True, timeout=500)
    assert await goes(home, **entry) == ""
    monkeypatch.delenv("SSH_AUTH_SOCK")
    monkeypatch.setenv("SSH_ASKPASS", str(ask))
    assert await goes(home, **entry) == ""


@with_tools
async def test_a_certificate_by_ssh_keygen_and_a_jump_of_the_configuration(
    home: Path,
    servers: list[Sshd],
) -> None:
    """The inner server trusts the authority alone, and is reached over the outer one by ``~/.ssh/config``."""
    keygen("-t", "ed25519", "-N", "", "-f", str(home / "ca"))
    keygen("-t", "ed25519", "-N", "", "-f", str(home / ".ssh" / "id_ed25519"))
    public = (home / ".ssh" / "id_ed25519.pub").read_text()
    outer = server(servers, home, public, "AllowTcpForwarding yes")
    inner = server(servers, home, "", f"TrustedUserCAKeys {home / 'ca.pub'}")
    known = f"[127.0.0.1]:{outer.port} {outer.host_key}\n"
    (home / ".ssh" / "known_hosts").write_text(known)
    lines = [f"Host door\n HostName 127.0.0.1\n Port {outer.port}\n User {outer.user}"]
    lines += [f"Host deep\n HostName 127.0.0.1\n Port {inner.port}\n User {inner.user}\n ProxyJump door"]
    (home / ".ssh" / "config").write_text("\n".join(lines) + "\n")
    with pytest.raises(UnreachableError, match="refuses"):
        await goes(home, host="deep")
    keygen("-s", str(home / "ca"), "-I", "me", "-n", inner.user, str(home / ".ssh" / "id_ed25519.pub"))
    assert await goes(home, host="deep") == ""
    outer.down()
    with pytest.raises(UnreachableError):  # there is no other way to it
        await goes(home, host="deep")
