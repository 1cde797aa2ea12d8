"""A pod that wants out: it lists what it likes and serves what it likes, over real SSH and real SFTP."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, cast

import asyncssh
from sshfake import SshFake

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Provider
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.plan.plan import Phase, make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout

RUN = "r.full"
THERE = f".uvcc/runs/{RUN}"


class Files(asyncssh.SFTPServer):
    """Serves ``root``. ``tricks`` by path below the run directory: how the server lies about it."""

    def __init__(self, channel: asyncssh.SSHServerChannel, root: Path, tricks: dict[str, str]) -> None:
        super().__init__(channel, chroot=str(root).encode())
        self._tricks = tricks
        self._tricked: dict[int, str] = {}

    def _trick(self, path: bytes) -> str:
        return self._tricks.get(path.decode(errors="replace").partition(f"{THERE}/")[2], "")

    def lstat(self, path: bytes) -> Any:
        if self._trick(path):
            return asyncssh.SFTPAttrs(permissions=0o100644, size=100)
        return super().lstat(path)

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> Any:
        if trick := self._trick(path):
            file = super().open(f"{THERE}/run.info".encode(), pflags, attrs)
            self._tricked[id(file)] = trick
            return file
        return super().open(path, pflags, attrs)

    def read(self, file_obj: object, offset: int, size: int) -> Any:
        trick = self._tricked.get(id(file_obj), "")
        if trick == "stalls":
            return asyncio.get_running_loop().create_future()
        if trick == "endless":
            return b"\0" * size
        if trick == "gives more":
            return b"\0" * (size + 1)
        if trick == "dribbles":
            return super().read(file_obj, offset, min(size, 7))
        return super().read(file_obj, offset, size)


class HostilePod:
    """``files`` lie on the pod; ``listed`` are the names and hashes it gives for its run directory, true or not."""

    def __init__(self, root: Path, client_key: asyncssh.SSHKey) -> None:
        self.root = root
        self.tricks: dict[str, str] = {}
        self.lines: list[str] = []
        self.flood = False
        (root / THERE).mkdir(parents=True)
        self.put("run.info", b"run: r\n")
        self.ssh = SshFake(client_key, self._answer, sftp=lambda c: Files(c, root, self.tricks))

    def put(self, name: str, data: bytes, *, mode: int = 0o644) -> None:
        """A file of the run directory that is offered as it is."""
        path = self.root / THERE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)
        self.list(name, data)

    def list(self, name: str, data: bytes = b"x" * 100, size: int | None = None) -> None:
        """Offer a name with the hash of ``data``."""
        self.lines.append(f"{len(data) if size is None else size}  ./{name}")
        self.lines.append(f"{hashlib.sha256(data).hexdigest()}  ./{name}")

    async def _answer(self, process: asyncssh.SSHServerProcess) -> None:
        command = process.command or ""
        if self.flood:
            try:
                while True:
                    process.stdout.write(b"A" * 65536)
                    await process.stdout.drain()
            except (asyncssh.Error, OSError):
                return
        if "sha256sum" in command and "find" not in command:  # of what was fetched
            for line in command.splitlines()[1:]:
                size, name = line.split()[2], line.split()[3]
                data = (self.root / THERE / name).read_bytes()[: int(size)]
                process.stdout.write(f"{hashlib.sha256(data).hexdigest()}  -\n".encode())
        elif "find" in command:
            process.stdout.write("\n".join(self.lines).encode() + b"\n")
        process.exit(0)


class World:
    """A rollout of one pod that is hostile, with a journal and a run folder like a real one's."""

    def __init__(self, folder: Path, link: PodLink, profile: dict[str, Any]) -> None:
        self.run_dir = folder / "data" / "r"
        self.run_dir.mkdir(parents=True)
        plan = make_plan("r", "t", parse(profile))
        self.journal = Journal(self.run_dir / "journal.sqlite", source="test")
        self.bus = Bus(self.journal, poll_s=0.001)
        members = {name: Member(name, request) for name, request in plan.requests.items()}
        self.ctx = Rollout(plan, self.run_dir, self.bus, cast(Provider, None), cast(Any, None), members)
        self.member = members["p0r0"]
        self.member.link = link
        self.said: list[ev.Event] = []
        self.bus.listen(self.said.append)

    @property
    def phase(self) -> Phase:
        return self.ctx.plan.phases["full"]

    @property
    def home(self) -> Path:
        return self.run_dir / "artifacts/full/p0r0"

    def warnings(self) -> str:
        return "\n".join(e.text for e in self.said if isinstance(e, ev.Alert))
