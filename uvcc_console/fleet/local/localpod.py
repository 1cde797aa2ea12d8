"""One local pod: a process with a real SSH server on 127.0.0.1, a home folder of its own and a limited life.

Everything started through it carries ``UVCC_POD=<home>`` in its environment and, where the kernel allows, falls back
to this process when orphaned, so that ending the pod ends it all, whatever session it moved to. The pod ends on
SIGTERM, when its time is over, or when its home or its run's folder disappears.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from uvcc_console.fleet import procs
from uvcc_console.fleet.podhome import USER, clean_up, remove_files
from uvcc_console.fleet.wheel import engine_package
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.compiled import BYTECODE_ENV, LOOPS_ENV, shared_loops
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV
from uvcc_engine.contract.machine.raising_parser import RaisingParser

NICE = 4
_CHUNK = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36
_SESSIONS = 10  # OpenSSH's MaxSessions, so that a console that needs more fails here as it would there


def environment(home: Path) -> dict[str, str]:
    """What a session sees: nothing of the operator's environment; ``python3`` is the pod's image.

    Tools of this pod alone lie in ``~/.local/bin``, as on other hosts. Its copy of the engine finds the loops and the
    bytecode that this machine has compiled already, and its agent the process that has imported torch.
    """
    path = f"{home / '.local/bin'}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    names = {"HOME": home, "USER": USER, "LOGNAME": USER, "SHELL": "/bin/sh", "PATH": path, "LANG": "C.UTF-8"}
    compiled = {LOOPS_ENV: shared_loops(engine_package()), BYTECODE_ENV: str(engine_package())}
    own = {"TMPDIR": str(home / ".tmp"), procs.MARK: str(home)} | compiled
    shared = {PRELOADED_ENV: os.environ[PRELOADED_ENV]} if os.environ.get(PRELOADED_ENV) else {}
    return {k: str(v) for k, v in names.items()} | own | shared


@dataclass
class _Sessions:
    """Processes this pod started itself; their exit status belongs to the event loop, not to the reaper."""

    home: Path
    pids: set[int] = field(default_factory=set)
    spawning: int = 0

    async def run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """Run one exec request as OpenSSH would: /bin/sh -c in a new session, three pipes, exit status or signal."""
        argv = ["/bin/sh", "-c", process.command] if process.command else ["/bin/sh"]
        self.spawning += 1
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self.home,
                env=environment(self.home),
                start_new_session=True,
            )
            self.pids.add(child.pid)
        except OSError as e:
            process.stderr.write(f"{e}\n".encode())
            process.exit(127)
            return
        finally:
            self.spawning -= 1
        assert child.stdout is not None
        assert child.stderr is not None
        feeding = asyncio.create_task(_feed(process, child))
        await asyncio.gather(_drain(child.stdout, process.stdout), _drain(child.stderr, process.stderr))
        code = await child.wait()
        self.pids.discard(child.pid)
        feeding.cancel()
        with contextlib.suppress(OSError):  # the client may have gone
            if code < 0:
                process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
            else:
                process.exit(code)

    def reap(self) -> None:
        """Collect orphans that ended; without it they would stay visible as zombies."""
        if self.spawning or not hasattr(os, "waitid"):  # without it (macOS) no orphan falls back to this process
            return
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in self.pids:
                    return  # the event loop is about to collect it
                os.waitpid(found.si_pid, os.WNOHANG)


def _files(channel: Any) -> asyncssh.SFTPServer:
    return asyncssh.SFTPServer(channel)


class _Session(asyncssh.SSHServerProcess[bytes]):
    """One exec or SFTP session, counted against its connection's limit."""

    def __init__(self, server: _Server) -> None:
        super().__init__(server.sessions.run, _files, 3, False)
        self._server = server
        server.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open -= 1
        super().connection_lost(exc)


class _Server(asyncssh.SSHServer):
    """One client's connection."""

    def __init__(self, sessions: _Sessions, authorized: Path) -> None:
        self.sessions = sessions
        self.open = 0
        self._keys = (authorized, sessions.home / ".ssh" / "authorized_keys")
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def begin_auth(self, username: str) -> bool:
        """Whose keys are good is decided anew at each login: the pod's own list and that of the login's home."""
        assert self._connection is not None
        self._connection.set_authorized_keys([str(path) for path in self._keys if path.exists()])
        return True

    def session_requested(self) -> asyncssh.SSHServerSession[bytes] | bool:
        return _Session(self) if self.open < _SESSIONS else False

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        """Like a pod, it forwards to what listens on itself (TensorBoard), and nowhere else."""
        return dest_host in ("127.0.0.1", "localhost")


async def _feed(process: asyncssh.SSHServerProcess[bytes], child: asyncio.subprocess.Process) -> None:
    """Client -> child's stdin; end of file closes it; signals go to the child's process group."""
    assert child.stdin is not None
    while True:
        try:
            data = await process.stdin.read(_CHUNK)
        except asyncssh.SignalReceived as e:
            with contextlib.suppress(ProcessLookupError, ValueError, AttributeError):
                os.killpg(child.pid, getattr(signal, f"SIG{e.signal}"))
            continue
        except (asyncssh.BreakReceived, asyncssh.TerminalSizeChanged):
            continue
        except (asyncssh.Error, OSError):
            data = b""
        if not data:
            child.stdin.close()
            return
        with contextlib.suppress(ConnectionError):  # the child closed its stdin: like a shell, drop the rest
            child.stdin.write(data)
            await child.stdin.drain()


async def _drain(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
    """Child -> client until end of file. A client that left does not stop the child: its output is dropped."""
    gone = False
    while data := await source.read(_CHUNK):
        if gone:
            continue
        try:
            sink.write(data)
            await sink.drain()
        except (asyncssh.Error, OSError):
            gone = True
    if not gone:
        with contextlib.suppress(asyncssh.Error, OSError):
            await sink.drain()


def _stand_back() -> None:
    """The console that drives this pod goes first on the machine that they share; see rollout.priority."""
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), NICE))


def _become_subreaper() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _write_ready(path: Path, port: int, host_key: str) -> None:
    me = procs.identify(os.getpid())
    assert me is not None
    ready = {"pid": me.pid, "starttime": me.starttime, "boot_id": procs.boot_id(), "port": port, "host_key": host_key}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(ready))
    temporary.rename(path)


async def serve(home: Path, authorized: Path, ready: Path, *, ttl_s: float, watch: list[Path]) -> None:
    """Serve until told to end, until ``ttl_s`` is over, or until one of ``watch`` is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    sessions = _Sessions(home)
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[host_key],
        server_factory=lambda: _Server(sessions, authorized),
        encoding=None,
        compression_algs=None,
        agent_forwarding=False,
        x11_forwarding=False,
        allow_pty=False,
        line_editor=False,
    )
    _write_ready(ready, server.get_port(), host_key.export_public_key("openssh").decode().strip())
    end = time.monotonic() + ttl_s
    while not stop.is_set() and time.monotonic() < end and all(p.exists() for p in watch):
        sessions.reap()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)
    server.close()


def main(argv: Sequence[str]) -> int:
    parser = RaisingParser(prog="python -m uvcc_console.fleet.local.localpod", description="one local pod")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--authorized-keys", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--ttl", type=float, default=3600.0, help="seconds until the pod ends by itself")
    parser.add_argument("--watch", type=Path, action="append", default=[], help="end when this path is gone")
    args = parser.parse_args(argv)
    home: Path = args.home
    (home / ".tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
    _stand_back()
    os.chdir(home)  # SFTP paths are relative to the home, as on any host
    _become_subreaper()
    try:
        asyncio.run(serve(home, args.authorized_keys, args.ready_file, ttl_s=args.ttl, watch=[home, *args.watch]))
    finally:
        os.chdir("/")
        left = clean_up(home, own_pid=os.getpid())
    if not left:
        remove_files(home)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
