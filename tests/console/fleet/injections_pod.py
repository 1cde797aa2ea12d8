"""What a pod's SSH does wrong, by the names of the failure table, over real sockets; each says what the console did."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import pytest
from primeworld import World
from sshfake import SshFake

from uvcc_console.fleet import bootstrap
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.prime.access import SshTarget
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.plan.profile import load
from uvcc_console.rollout.stages.fleet.findings import Requirements, find_problems
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError

PATIENT = Timeouts(connect=60.0, login=60.0, operation=60.0, keepalive_s=0.0, backoff_first=0.01, backoff_last=0.02)
BLOB = bytes(range(256)) * 4000


@dataclass
class Site:
    """A world with a place for real hosts: ``host`` starts an SSH server, ``link`` is a console's way to one."""

    world: World
    folder: Path
    host: Callable[..., Awaitable[SshFake]]
    key: asyncssh.SSHKey

    def link(self, host: SshFake, timeouts: Timeouts = PATIENT, **options: str) -> PodLink:
        return PodLink("p0r0", host.address, self.key, timeouts=timeouts, **options)


Act = Callable[[Site], Awaitable[str]]


async def answer(process: asyncssh.SSHServerProcess) -> None:
    process.stdout.write(b"done\n")
    await process.stdout.drain()
    process.exit(0)


# -- before a pod is ready -------------------------------------------------------------------------------------------


def behind_the_market(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None) -> Act:
    """The first pod's SSH port behaves like this (None: nobody listens); every other pod is sound."""

    async def act(s: Site) -> str:
        w = s.world
        server = await asyncio.start_server(serve or _close, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if serve is None:
            server.close()
        w.of("hyperstack")[0]["sim"] = {"at": ("ubuntu", "127.0.0.1", port)}
        quick = Timeouts(connect=0.3, login=0.3, operation=0.3, keepalive_s=0.0)
        login = w.login
        tried: list[str] = []

        async def real(at: SshTarget, gpu: bool) -> str:
            if at.host != "127.0.0.1":
                return await login(at, gpu)
            if len(tried) >= 3:
                return tried[-1]  # it has not changed its ways; the hours of waiting need no sockets
            with w.clock.outside():
                link = PodLink("p", f"{at.user}@{at.host}:{at.port}", s.key, timeouts=quick)
                try:
                    await link.connect()
                    tried.append("")
                except UvccError as e:
                    tried.append(e.what)
                finally:
                    await link.close()
            return tried[-1]

        w.provider._readiness._login = real
        pods = await w.up()
        server.close()
        assert tried
        assert all(tried)  # each failed, each with its reason
        assert len(w.ours) == len(pods) == 3
        return "replaced the pod"

    return act


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"Exceeded MaxStartups\r\n" + bytes(range(256)) * 40)
    writer.close()


# -- while it is used ------------------------------------------------------------------------------------------------


async def host_key_change(s: Site) -> str:
    first = await s.host(answer)
    link = s.link(first)
    await link.connect()
    await first.stop()
    other = await s.host(answer, port=first.port)
    with pytest.raises(VerificationError, match="another host key"):
        await link.run("true")
    return "refused it, sent nothing" if other.commands == [] else "sent something"


async def dropped_mid_command(s: Site) -> str:
    async def cut(process: asyncssh.SSHServerProcess) -> None:
        process.stdout.write(b"half")
        await process.stdout.drain()
        process.channel.get_connection().abort()

    done = await s.link(await s.host(cut)).run("work")
    return "unknown" if done.exit is None else f"exit {done.exit}"


async def half_open(s: Site) -> str:
    """Nothing comes any more, yet the connection stands: the keepalive finds it."""

    async def hang(process: asyncssh.SSHServerProcess) -> None:
        transport = process.channel.get_connection()._transport
        transport.pause_reading()  # the host has frozen
        await asyncio.Event().wait()

    timeouts = Timeouts(connect=60.0, login=60.0, operation=150.0, keepalive_s=0.1, keepalive_count=2)
    link = s.link(await s.host(hang), timeouts)
    done = await link.run("work")
    return "unknown" if done.exit is None and not link.up else f"exit {done.exit}"


async def session_cap(s: Site) -> str:
    """Thirty commands at once at a host that takes ten sessions."""
    open_now, most = 0, 0

    async def count(process: asyncssh.SSHServerProcess) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await answer(process)
        open_now -= 1

    link = s.link(await s.host(count))
    done = await asyncio.gather(*(link.run("true") for _ in range(30)))
    assert all(d.exit == 0 for d in done)
    return "queued them" if most <= 10 else f"opened {most}"


class Dropping(asyncssh.SFTPServer):
    """Cuts the connection in the middle of a file."""

    def write(self, file_obj: object, offset: int, data: bytes) -> int:
        super().write(file_obj, offset, data[: len(data) // 2])
        self.channel.get_connection().abort()
        return len(data)


class Full(asyncssh.SFTPServer):
    """Has room for half of it."""

    def write(self, file_obj: object, offset: int, data: bytes) -> int:
        super().write(file_obj, offset, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


class ReadOnly(asyncssh.SFTPServer):
    """A home that nothing can be written to."""

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        raise OSError(errno.EROFS, "Read-only file system")


def transfer(sftp: object) -> Act:
    async def act(s: Site) -> str:
        os.chdir(s.folder)  # the SFTP server of this process serves its working folder
        (s.folder / "blob").write_bytes(b"old")
        with pytest.raises(UvccError) as caught:
            await s.link(await s.host(answer, sftp=sftp)).put(BLOB, "blob")
        assert caught.value.hint
        return "an error, the old file whole" if (s.folder / "blob").read_bytes() == b"old" else "half a file"

    return act


async def exec_latency(s: Site) -> str:
    async def never(process: asyncssh.SSHServerProcess) -> None:
        await process.stdin.read()

    timeouts = Timeouts(connect=60.0, login=60.0, operation=0.2, keepalive_s=0.0)
    link = s.link(await s.host(never), timeouts)
    done = await link.run("slow")
    return "unknown" if done.exit is None else f"exit {done.exit}"


async def exit_status_missing(s: Site) -> str:
    async def silent_end(process: asyncssh.SSHServerProcess) -> None:
        process.stdout.write(b"all fine")
        await process.stdout.drain()
        process.close()

    link = s.link(await s.host(silent_end))
    try:
        await link.sh("work")
    except UnreachableError:
        return "unknown"
    return "success"


async def clock_skew(s: Site) -> str:
    sound = {"versions": {}, "skew_s": 0.0, "disk": {"free_mib": 9000.0}, "memory": {}}
    _, profile = load("demo")
    found = find_problems({"p0r0": sound, "p1r0": sound | {"skew_s": 3600.0}}, Requirements(profile.gates))
    assert [f.pod for f in found] == ["p1r0"]
    return "stopped in preflight"


async def no_python(s: Site) -> str:
    async def bare(process: asyncssh.SSHServerProcess) -> None:
        process.exit(0)  # the list of usable Pythons is empty; tmux, setsid and systemd are never asked for

    with pytest.raises(UvccError, match="no Python") as caught:
        await bootstrap.usable_pythons(s.link(await s.host(bare)))
    return "stopped in bootstrap" if caught.value.hint else "no way out"


async def rebooted(s: Site) -> str:
    client = AgentClient(s.link(await s.host(answer)))
    client.hello = {"boot_id": "one"}
    assert client.rebooted() == ""
    client.hello = {"boot_id": "two"}
    return "told: what ran there is gone" if "rebooted" in client.rebooted() else "missed it"


BOOT: list[tuple[str, Act, str]] = [
    ("refused", behind_the_market(None), "replaced the pod"),
    ("accept+close", behind_the_market(_close), "replaced the pod"),
    ("silent banner", behind_the_market(_silent), "replaced the pod"),
    ("garbage banner/MaxStartups", behind_the_market(_garbage), "replaced the pod"),
]
USE: list[tuple[str, Act, str]] = [
    ("host key change", host_key_change, "refused it, sent nothing"),
    ("ip_reuse by another pod", host_key_change, "refused it, sent nothing"),
    ("auto_restart (new host key)", host_key_change, "refused it, sent nothing"),
    ("reboot (new boot_id)", rebooted, "told: what ran there is gone"),
    ("drop after n bytes", dropped_mid_command, "unknown"),
    ("half-open (blackhole)", half_open, "unknown"),
    ("session cap", session_cap, "queued them"),
    ("SFTP subsystem missing", transfer(False), "an error, the old file whole"),
    ("SFTP drops mid-file", transfer(Dropping), "an error, the old file whole"),
    ("SFTP ENOSPC", transfer(Full), "an error, the old file whole"),
    ("read-only home", transfer(ReadOnly), "an error, the old file whole"),
    ("exec latency", exec_latency, "unknown"),
    ("exit_status missing", exit_status_missing, "unknown"),
    ("clock skew +-h", clock_skew, "stopped in preflight"),
    ("no python/tmux/setsid/systemd", no_python, "stopped in bootstrap"),
]
