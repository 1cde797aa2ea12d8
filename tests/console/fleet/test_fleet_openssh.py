"""PodLink against the real OpenSSH server, where this machine has one: its limits are not ours to choose."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh
import pytest
from opensshd import Sshd, why_not

from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_engine.contract.errors import UnreachableError, VerificationError

QUICK = Timeouts(connect=60.0, login=60.0, operation=60.0, backoff_first=0.02)


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")


@pytest.fixture
async def sshd(tmp_path: Path, client_key: asyncssh.SSHKey) -> AsyncIterator[Sshd]:
    server = Sshd(tmp_path, client_key)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def link(sshd: Sshd, client_key: asyncssh.SSHKey) -> AsyncIterator[PodLink]:
    made = PodLink("p0r0", sshd.address, client_key, timeouts=QUICK)
    yield made
    await made.close()


async def test_commands_streams_and_files(link: PodLink, tmp_path: Path) -> None:
    noise = os.urandom(500_000)
    done = await link.run("cat; echo trouble >&2; exit 4", stdin=noise)
    assert (done.exit, done.stdout, done.trouble) == (4, noise, "trouble")
    target = tmp_path / "blob"
    await link.put(noise, str(target))
    assert target.read_bytes() == noise
    assert await link.read(str(target)) == noise


@pytest.mark.ci(__file__)
async def test_thirty_commands_at_once_stay_below_its_session_limit(link: PodLink) -> None:
    found = await asyncio.gather(*(link.run(f"sleep 0.05; echo {n}") for n in range(30)))
    assert [f.text for f in found] == [str(n) for n in range(30)]


async def test_forty_pods_at_once_stay_below_its_startup_limit(sshd: Sshd, client_key: asyncssh.SSHKey) -> None:
    links = [PodLink(f"p{n}", sshd.address, client_key, timeouts=QUICK) for n in range(40)]
    await asyncio.gather(*(x.connect_until(150.0) for x in links))  # the server counts a moment longer than we do
    assert all(x.up for x in links)
    for x in links:
        await x.close()


async def test_a_detached_process_survives_the_link(link: PodLink, tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    await link.sh(f"setsid -f sh -c 'echo $$ >{tmp_path}/pid; sleep 1; touch {mark}' </dev/null >/dev/null 2>&1")
    link.abort()
    async with asyncio.timeout(120):
        while not mark.exists():
            await asyncio.sleep(0.02)


async def test_a_lost_link_is_unknown(link: PodLink) -> None:
    running = asyncio.create_task(link.run("echo started; sleep 60"))
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        while not link.up:
            await asyncio.sleep(0.01)
    process = await link.open("cat")
    link.abort()
    assert (await running).exit is None
    await process.wait_closed()


async def test_another_host_key_is_refused(sshd: Sshd, link: PodLink) -> None:
    await link.connect()
    await link.close()
    await sshd.stop()
    sshd.new_host_key()
    await sshd.start()
    with pytest.raises(VerificationError, match="another host key"):
        await link.connect()


async def test_a_stranger_is_told_so(sshd: Sshd) -> None:
    stranger = PodLink("p0r0", sshd.address, asyncssh.generate_private_key("ssh-ed25519"), timeouts=QUICK)
    with pytest.raises(UnreachableError, match="refuses the key"):
        await stranger.connect()


async def test_only_regular_files_of_the_announced_size_are_fetched(link: PodLink, tmp_path: Path) -> None:
    """A server that is not ours: sizes and kinds of files are as it tells them, and are checked before and while."""
    there = tmp_path / "there"
    there.mkdir()
    noise = os.urandom(3_000_000)
    (there / "log").write_bytes(noise)
    os.mkfifo(there / "pipe")
    (there / "link").symlink_to("/dev/zero")
    with DownloadFolder(tmp_path / "here") as here:
        assert (await link.get(str(there / "log"), here, ("log",), limit=len(noise))).size == len(noise)
        assert (await link.get(str(there / "log"), here, ("head",), limit=1000, growing=True)).size == 1000
        for name in ("pipe", "link", "../there", "log"):
            with pytest.raises(VerificationError):
                await link.get(str(there / name), here, ("odd",), limit=1000)
    assert (tmp_path / "here/log").read_bytes() == noise
    assert (tmp_path / "here/head").read_bytes() == noise[:1000]
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["head", "log"]
    assert await link.tail(str(there / "log"), limit=70_000) == noise[-70_000:]
