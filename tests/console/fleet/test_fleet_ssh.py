"""PodLink against an SSH server in this process: pins, limits, and that a lost link is never success."""

from __future__ import annotations

import asyncio

import asyncssh
import pytest
from sshfake import SshFake

from uvcc_console.fleet.dialer import HANDSHAKES, Timeouts
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.fleet.sessions import LIMIT as SESSIONS
from uvcc_console.fleet.ssherrors import classify
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.machine.free_ports import ports


async def answer(process: asyncssh.SSHServerProcess) -> None:
    words = (process.command or "").split()
    if words[0] == "echo":
        process.stdout.write(" ".join(words[1:]).encode() + b"\n")
        process.exit(0)
    elif words[0] == "fail":
        process.stderr.write(b"first\nno such thing\n")
        process.exit(3)
    elif words[0] == "die":
        process.exit_with_signal("KILL")
    elif words[0] == "count":
        data = await process.stdin.read()
        process.stdout.write(str(len(data)).encode())
        process.exit(0)
    elif words[0] == "hang":
        await process.stdin.read()


async def test_a_command_gives_exit_output_and_signal(ssh_fake, link_to) -> None:
    link = link_to((await ssh_fake(answer)).address)
    done = await link.run("echo hello")
    assert (done.exit, done.text, done.signal) == (0, "hello", "")
    assert (await link.run("fail")).exit == 3
    assert (await link.run("die")).signal == "KILL"
    assert await link.sh("count", stdin=b"\0\xff" * 100_000) == "200000"
    with pytest.raises(UvccError, match="no such thing"):
        await link.sh("fail")


async def test_first_contact_pins_the_key_and_another_key_is_refused_for_good(ssh_fake, link_to) -> None:
    first = await ssh_fake(answer)
    link = link_to(first.address)
    await link.connect()
    assert link.host_key == " ".join(first.host_key.export_public_key().decode().split()[:2])
    await link.close()
    await first.stop()
    other = await ssh_fake(answer, port=first.port)
    with pytest.raises(VerificationError, match="another host key"):
        await link.run("echo hello")
    await other.stop()
    await ssh_fake(answer, port=first.port, host_key=first.host_key)
    with pytest.raises(VerificationError):  # not even when the old key comes back
        await link.run("echo hello")


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ("default", "aes256-gcm@openssh.com"),
        ("chacha20-poly1305@openssh.com,aes128-gcm@openssh.com", "aes128-gcm@openssh.com"),
        ("chacha20-poly1305@openssh.com,aes256-ctr", "chacha20-poly1305@openssh.com"),
        ("aes128-ctr", "aes128-ctr"),
    ],
)
async def test_the_cipher_that_costs_least_is_taken_where_a_server_has_it(
    ssh_fake, link_to, offered: str, taken: str
) -> None:
    host = await ssh_fake(answer, ciphers=offered)
    link = link_to(host.address)
    assert await link.sh("echo hi") == "hi"
    assert host.connections[0].get_extra_info("recv_cipher") == taken
    assert host.connections[0].get_extra_info("send_cipher") == taken


async def test_a_known_pin_is_checked_at_first_contact(ssh_fake, link_to) -> None:
    host = await ssh_fake(answer)
    pinned = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    with pytest.raises(VerificationError):
        await link_to(host.address, host_key=pinned).connect()
    own = host.host_key.export_public_key().decode()
    assert await link_to(host.address, host_key=own).sh("echo hi") == "hi"


async def test_a_link_lost_during_a_command_is_unknown(ssh_fake, link_to) -> None:
    started = asyncio.Event()

    async def hang(process: asyncssh.SSHServerProcess) -> None:
        started.set()
        await answer(process)

    host = await ssh_fake(hang)
    lost: list[str] = []
    link = link_to(host.address, on_lost=lost.append)
    running = asyncio.create_task(link.run("hang"))
    await started.wait()
    host.drop()
    done = await running
    assert done.exit is None
    assert lost
    assert not link.up
    with pytest.raises(UnreachableError, match="unknown"):
        task = asyncio.create_task(link.sh("hang"))
        started.clear()
        await started.wait()
        host.drop()
        await task


async def test_a_command_that_never_ends_is_unknown_after_its_time(ssh_fake, link_to) -> None:
    link = link_to((await ssh_fake(answer)).address)
    await link.connect()  # the time is the command's, not the login's
    assert (await link.run("hang", timeout=0.1)).exit is None
    assert await link.sh("echo still") == "still"


async def test_a_cancellation_is_not_lost_whenever_it_comes(ssh_fake, link_to) -> None:
    """Also not one that comes with the answer to the login: a command that never ends would then never be given up."""
    host = await ssh_fake(answer)
    for ticks in range(80):
        link = link_to(host.address)
        running = asyncio.create_task(link.run("hang", timeout=150.0))
        for _ in range(ticks):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=120.0)
        assert done, f"lost after {ticks} turns of the loop"
        await link.close()


async def test_it_reconnects_and_remembers_the_pin(ssh_fake, link_to) -> None:
    host: SshFake = await ssh_fake(answer)
    link = link_to(host.address)
    await link.connect()
    pin = link.host_key
    await host.stop()
    with pytest.raises(UnreachableError):
        await link.run("echo hello")
    tries: list[UvccError] = []
    waiting = asyncio.create_task(link.connect_until(150.0, on_try=tries.append))
    while not tries:
        await asyncio.sleep(0)
    await host.start()
    await waiting
    assert link.host_key == pin
    assert await link.sh("echo back") == "back"


async def test_giving_up_after_its_patience(link_to) -> None:
    link = link_to(f"x@127.0.0.1:{ports(1)[0]}")
    with pytest.raises(UnreachableError, match="refuses connections"):
        await link.connect_until(0.05)


async def test_a_wrong_key_is_told_as_such(ssh_fake, link_to) -> None:
    host = await ssh_fake(answer)
    host.client_key = asyncssh.generate_private_key("ssh-ed25519")
    await host.stop()
    await host.start()
    with pytest.raises(UnreachableError, match="refuses the key"):
        await link_to(host.address).connect()


async def test_at_most_eight_sessions_at_once(ssh_fake, link_to) -> None:
    running = 0
    most = 0
    gate = asyncio.Event()
    full = asyncio.Event()

    async def count(process: asyncssh.SSHServerProcess) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == SESSIONS:
            full.set()
        await gate.wait()
        running -= 1
        process.exit(0)

    link = link_to((await ssh_fake(count)).address)
    tasks = [asyncio.create_task(link.run(f"n {i}")) for i in range(3 * SESSIONS)]
    await full.wait()
    gate.set()
    assert [t.exit for t in await asyncio.gather(*tasks)] == [0] * 3 * SESSIONS
    assert most == SESSIONS


async def test_handshakes_are_limited_over_all_pods(link_to) -> None:
    """Silent hosts: each accepted connection is a handshake under way."""
    open_now, most = set(), 0
    full = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        open_now.add(writer)
        most = max(most, len(open_now))
        if most == HANDSHAKES:
            full.set()
        await reader.read()
        open_now.discard(writer)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tasks = [asyncio.create_task(link_to(f"x@127.0.0.1:{port}").connect()) for _ in range(2 * HANDSHAKES)]
    await full.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert most == HANDSHAKES
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.close()


async def test_files_arrive_whole_and_are_read_back(ssh_fake, link_to, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the SFTP server of this process serves its working folder
    link = link_to((await ssh_fake(answer)).address)
    data = bytes(range(256)) * 5000
    await link.put(data, "blob", mode=0o640)
    assert (tmp_path / "blob").read_bytes() == data
    assert (tmp_path / "blob").stat().st_mode & 0o777 == 0o640
    assert not (tmp_path / "blob.part").exists()
    assert await link.read("blob") == data
    with DownloadFolder(tmp_path / "here") as here:
        assert (await link.get("blob", here, ("copy",), limit=len(data))).size == len(data)
    assert (tmp_path / "here/copy").read_bytes() == data
    assert await link.tail("blob", limit=1000) == data[-1000:]
    with pytest.raises(UvccError, match="file transfer failed"):
        await link.read("nothing-there")
    await link.put(b"again", "blob")
    assert await link.read("blob") == b"again"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (asyncssh.PermissionDenied("no"), UnreachableError, "refuses the key"),
        (asyncssh.ChannelOpenError(2, "open failed"), UnreachableError, "no further session"),
        (ConnectionRefusedError(), UnreachableError, "refuses connections"),
        (TimeoutError(), UnreachableError, "no answer in time"),
        (asyncssh.ConnectionLost("gone"), UnreachableError, "is lost"),
        (ConnectionResetError("reset"), UnreachableError, "is lost"),
        (asyncssh.ProtocolError("Exceeded MaxStartups"), UnreachableError, "is lost"),
        (asyncssh.HostKeyNotVerifiable("no"), VerificationError, "host key"),
        (asyncssh.SFTPFailure("disk full"), UvccError, "file transfer failed"),
        (UvccError("as it is"), UvccError, "as it is"),
    ],
)
def test_every_failure_has_a_meaning_and_a_hint(error: Exception, kind: type, text: str) -> None:
    found = classify(error, "p0r0", "u@h:22")
    assert type(found) is kind
    assert text in str(found)
    assert found.hint or text == "as it is"


async def test_backoff_doubles_jitters_and_is_capped(link_to) -> None:
    link = link_to("x@127.0.0.1:1")
    t = link.timeouts
    for attempt in range(30):
        whole = min(t.backoff_first * 2**attempt, t.backoff_last)
        assert whole / 2 <= link.backoff(attempt) <= whole


async def test_through_a_jump_host_with_the_users_own_keys(link_to, client_key, tmp_path, monkeypatch) -> None:
    """The gate asks for the user's key and is known from the user's known_hosts; the pod asks for the run's."""
    users = asyncssh.generate_private_key("ssh-ed25519")
    target = await SshFake(client_key, answer).start()
    gate_key = asyncssh.generate_private_key("ssh-ed25519")

    class Gate(asyncssh.SSHServer):
        def connection_requested(self, *args: object) -> bool:
            return True

    gate = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=Gate,
        server_host_keys=[gate_key],
        authorized_client_keys=asyncssh.import_authorized_keys(users.export_public_key().decode()),
    )
    keyring = tmp_path / ".ssh"
    keyring.mkdir(mode=0o700)
    users.write_private_key(str(keyring / "id_ed25519"))
    public = gate_key.export_public_key().decode()
    (keyring / "known_hosts").write_text(f"[127.0.0.1]:{gate.get_port()} {public}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    link = link_to(target.address, jump=f"me@127.0.0.1:{gate.get_port()}")
    assert await link.sh("echo through") == "through"
    await link.close()
    (keyring / "known_hosts").write_text("")
    with pytest.raises(VerificationError):  # an unknown gate is not trusted on first sight: it is no pod of ours
        await link_to(target.address, jump=f"me@127.0.0.1:{gate.get_port()}").connect()
    gate.close()
    await target.stop()


async def _accept_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(range(256)) * 40)
    await writer.drain()
    writer.close()


async def _max_startups(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"Exceeded MaxStartups\r\n")
    await writer.drain()
    writer.close()


async def _banner_then_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2p1\r\n")
    await reader.read()
    writer.close()


async def _endless_banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            writer.write(b"x" * 4096)
            await writer.drain()
    except ConnectionError:
        writer.close()


@pytest.mark.parametrize(
    "behave", [_accept_and_close, _silent, _garbage, _max_startups, _banner_then_nothing, _endless_banner]
)
async def test_whatever_listens_there_it_is_unreachable_and_in_time(link_to, behave) -> None:
    server = await asyncio.start_server(behave, "127.0.0.1", 0)
    quick = Timeouts(connect=0.3, login=0.3, operation=1.0, backoff_first=0.01, backoff_last=0.02)
    link = link_to(f"x@127.0.0.1:{server.sockets[0].getsockname()[1]}", timeouts=quick)
    async with asyncio.timeout(120.0):
        with pytest.raises(UnreachableError) as caught:
            await link.connect()
    assert caught.value.hint
    assert link.host_key == ""  # nothing was pinned
    server.close()


async def test_a_key_that_is_installed_late_is_waited_for(ssh_fake, link_to, client_key) -> None:
    host = await ssh_fake(answer)
    host.client_key = asyncssh.generate_private_key("ssh-ed25519")
    await host.stop()
    await host.start()
    link = link_to(host.address)
    tries: list[UvccError] = []
    waiting = asyncio.create_task(link.connect_until(150.0, on_try=tries.append))
    while len(tries) < 2:
        await asyncio.sleep(0.005)
    await host.stop()
    host.client_key = client_key
    await host.start()
    await waiting
    assert await link.sh("echo in") == "in"


async def test_many_files_at_once_share_one_session(ssh_fake, link_to, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the SFTP server of this process serves its working folder
    link = link_to((await ssh_fake(answer)).address)
    opened = []
    start = asyncssh.SSHClientConnection.start_sftp_client

    async def counted(connection: asyncssh.SSHClientConnection) -> asyncssh.SFTPClient:
        opened.append(connection)
        return await start(connection)

    monkeypatch.setattr(asyncssh.SSHClientConnection, "start_sftp_client", counted)
    await asyncio.gather(*(link.put(str(n).encode(), f"blob{n}") for n in range(SESSIONS)))
    assert sorted(p.read_bytes() for p in tmp_path.glob("blob*")) == sorted(str(n).encode() for n in range(SESSIONS))
    assert len(opened) == 1


def test_a_host_that_is_called_by_its_address_is_named_once() -> None:
    """An inventory's host before a pod has a claim on it."""
    found = classify(ConnectionRefusedError(), "u@h:22", "u@h:22")
    assert str(found).startswith("host u@h:22 refuses connections (")
    assert classify(ConnectionRefusedError(), "p0r0", "u@h:22").what == "pod p0r0 at u@h:22 refuses connections"
