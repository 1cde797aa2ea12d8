"""Real OpenSSH servers on 127.0.0.1, each a host with a home of its own, also where they all run as one user."""

from __future__ import annotations

import asyncio
import getpass
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncssh

from uvcc_console.fleet.pins import fingerprint, plain
from uvcc_engine.contract.machine.free_ports import ports

SSHD = os.environ.get("UVCC_TEST_SSHD") or shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_SFTP = next((p for p in ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server") if os.path.exists(p)), "")
# the server's user has one home, a host of ours another: what is asked for runs there
_AT_HOME = f"""#!/bin/sh
cd "$HOME" || exit 1
case "$SSH_ORIGINAL_COMMAND" in
  internal-sftp) exec {_SFTP} ;;
  *) exec /bin/sh -c "$SSH_ORIGINAL_COMMAND" ;;
esac
"""


def why_not() -> str:
    """Why no server can be run here; empty where one can."""
    if not SSHD:
        return "no sshd on this machine"
    if os.getuid() == 0:
        try:
            pwd.getpwnam("sshd")
        except KeyError:
            return "sshd run by root needs a user named sshd"
        try:  # its privilege separation directory; the service's start script makes it where there is a service
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        except OSError:
            return "sshd run by root needs /run/sshd"
    return ""


class Sshd:
    """One server with its own host key. With a ``home`` it is a host like any other, else the user's own."""

    def __init__(self, folder: Path, client: asyncssh.SSHKey, *more: str, home: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.more, self.home = folder, list(more), home
        self.user = getpass.getuser()
        (self.port,) = ports(1)
        self.authorized = (home / ".ssh/authorized_keys") if home is not None else folder / "authorized"
        self.authorized.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.authorized.write_bytes(client.export_public_key())
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.user}@127.0.0.1:{self.port}"

    @property
    def host_key(self) -> str:
        return plain(asyncssh.read_private_key(str(self.folder / "host")))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.host_key)

    def entry(self, key: Path, **more: Any) -> dict[str, Any]:
        """The host as an inventory names it."""
        return {"host": "127.0.0.1", "user": self.user, "port": self.port, "key": str(key), **more}

    def new_host_key(self, kind: str = "ssh-ed25519", name: str = "host") -> None:
        key = self.folder / name
        key.unlink(missing_ok=True)
        key.write_bytes(asyncssh.generate_private_key(kind).export_private_key("openssh"))
        key.chmod(0o600)

    def up(self) -> Sshd:
        """Start it and wait until it listens."""
        if not (self.folder / "host").exists():
            self.new_host_key()
        lines = [
            *self.more,  # the first word counts
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.folder}/host",
            f"AuthorizedKeysFile {self.authorized}",
            "PidFile none",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "Subsystem sftp internal-sftp",
        ]
        if self.home is not None:
            script = self.folder / "at_home"
            script.write_text(_AT_HOME)
            script.chmod(0o755)
            path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
            lines += [f"ForceCommand {script}", f"SetEnv HOME={self.home} PATH={path} OMP_NUM_THREADS=1"]
        (self.folder / "config").write_text("\n".join(lines) + "\n")
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        with log.open("ab") as f:
            command = [str(SSHD), "-D", "-e", "-f", str(self.folder / "config")]
            self.process = subprocess.Popen(command, stderr=f, start_new_session=True)
        end = time.monotonic() + 300.0
        while b"listening on" not in log.read_bytes():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        return self

    def down(self) -> None:
        """End the server and the connections that it has let in, and nothing else."""
        if self.process is None:
            return
        family = [self.process.pid, *_children(self.process.pid)]
        self.process.kill()
        self.process.wait(120)
        for pid in family[1:]:
            _kill(pid, signal.SIGKILL)
        self.process = None

    def freeze(self, number: int = signal.SIGSTOP) -> None:
        """Stop the server and its connections where they are; ``SIGCONT`` lets them go on."""
        assert self.process is not None
        for pid in (self.process.pid, *_children(self.process.pid)):
            _kill(pid, number)

    async def start(self) -> None:
        await asyncio.to_thread(self.up)

    async def stop(self) -> None:
        await asyncio.to_thread(self.down)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _children(pid: int) -> list[int]:
    """Processes of the server itself below it: its connections, not what they run."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text() if entry.isdigit() else ""
        except OSError:
            continue
        if stat and int(stat.rpartition(")")[2].split()[1]) == pid and "(sshd" in stat:
            found += [int(entry), *_children(int(entry))]
    return found
