"""One SSH connection per pod: pinned host key, limits and a timeout on everything; a lost link is "unknown"."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from uvcc_console.fleet import bounded
from uvcc_console.fleet.landing import Arriving, Landing
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.safepaths import Parts

HANDSHAKES = 8  # OpenSSH's MaxStartups starts to refuse at 10 unauthenticated connections
SESSIONS = 8  # of OpenSSH's MaxSessions 10: one is left for a halt, one for SFTP
_handshakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Completed:
    """A command's end. ``exit`` is None when the link died first: the command's fate is unknown, not success."""

    exit: int | None
    stdout: bytes
    stderr: bytes
    signal: str = ""

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace").strip()

    @property
    def trouble(self) -> str:
        """The last line of what it complained about."""
        lines = (self.stderr or self.stdout).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit {self.exit}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. A peer that froze is noticed after about ``keepalive_s * (keepalive_count + 1)``.

    ``stall``: so long a file may give nothing while the connection lives.
    """

    connect: float = 10.0
    login: float = 15.0
    operation: float = 30.0
    keepalive_s: float = 5.0
    keepalive_count: int = 3
    stall: float = 30.0
    backoff_first: float = 0.25
    backoff_last: float = 15.0


class _Client(asyncssh.SSHClient):
    """Checks the host key against the pod's pin; the first contact sets it."""

    def __init__(self, link: PodLink) -> None:
        self._link = link

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        return self._link._judge(key)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link._lost(exc)


def classify(error: BaseException, pod: str, address: str) -> UvccError:
    """What a failed SSH operation means to the operator."""
    where = f"pod {pod} at {address}"
    if isinstance(error, UvccError):
        return error
    if isinstance(error, asyncssh.PermissionDenied):
        return UnreachableError(f"{where} refuses the key of this run", "is the key installed, and the user right?")
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return VerificationError("host_key", f"{where} cannot prove its host key", "do not use this pod")
    if isinstance(error, asyncssh.ChannelOpenError):
        return UnreachableError(f"{where} opens no further session: {error.reason}", "the link may be down; retry")
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return UnreachableError(f"{where} gave no answer in time", "the pod may be frozen or its network cut")
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(f"{where} refuses connections", "it may be booting, or its SSH server is down")
    if isinstance(error, asyncssh.SFTPError):
        return UvccError(f"{where}: file transfer failed: {error.reason}", "is its disk full or its home read-only?")
    return UnreachableError(f"{where} is lost: {error}", "its state is unknown until the link is back")


def split_address(address: str) -> tuple[str, str, int]:
    """``user@host:port`` -> (user, host, port); the user may be missing, the port is then 22 if it is."""
    user, _, rest = address.rpartition("@")
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit():
        host, port = rest, "22"
    return user, host.strip("[]"), int(port)


def _handshake_slot() -> asyncio.Semaphore:
    return _handshakes.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(HANDSHAKES))


class PodLink:
    """The console's SSH connection to one pod; reconnects when asked, never by guessing.

    ``host_key`` is the pinned key (``ssh-ed25519 AAAA...``), empty before the first contact, which sets it. A host
    that then shows another key is refused for good: every later use raises VerificationError.
    """

    def __init__(
        self,
        name: str,
        address: str,
        key: asyncssh.SSHKey,
        *,
        host_key: str = "",
        jump: str = "",
        timeouts: Timeouts | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.host_key = host_key
        self.timeouts = timeouts or Timeouts()
        self._key = key
        self._jump = jump
        self._on_lost = on_lost
        self._refused = ""
        self._connection: asyncssh.SSHClientConnection | None = None
        self._tunnel: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._sessions = asyncio.Semaphore(SESSIONS)
        self._sftp: asyncssh.SFTPClient | None = None
        self._opening_sftp = asyncio.Lock()
        self._random = random.Random(name)

    @property
    def up(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    def _judge(self, key: asyncssh.SSHKey) -> bool:
        shown = " ".join(key.export_public_key("openssh").decode().split()[:2])
        if not self.host_key:
            self.host_key = shown
        elif shown != " ".join(self.host_key.split()[:2]):
            self._refused = f"pod {self.name} at {self.address} shows another host key than at first contact"
            return False
        return True

    def _lost(self, exc: Exception | None) -> None:
        self._connection = None
        self._sftp = None
        if self._on_lost is not None:
            self._on_lost(str(exc) if exc else "closed")

    def _check_refused(self) -> None:
        if self._refused:
            raise VerificationError("host_key", self._refused, "it may be another machine: delete the pod, start anew")

    async def connect(self) -> None:
        """Connect once if not connected. Raises UnreachableError, or VerificationError for a changed host key."""
        async with self._connecting:
            self._check_refused()
            if self.up:
                return
            user, host, port = split_address(self.address)
            t = self.timeouts
            try:
                tunnel = await self._through() if self._jump else None
                # not asyncssh's own connect_timeout: Python 3.11's wait_for loses a cancellation that comes with the
                # answer, and whoever waits for this would wait for ever
                async with _handshake_slot(), asyncio.timeout(t.connect):
                    self._connection = await asyncssh.connect(
                        host,
                        port,
                        username=user,
                        client_keys=[self._key],
                        known_hosts=([], [], []),
                        client_factory=lambda: _Client(self),
                        config=None,
                        agent_path=None,
                        tunnel=tunnel,
                        preferred_auth="publickey",
                        compression_algs=None,
                        login_timeout=t.login,
                        keepalive_interval=t.keepalive_s,
                        keepalive_count_max=t.keepalive_count,
                    )
            except (OSError, asyncssh.Error, TimeoutError) as e:
                self._check_refused()
                raise classify(e, self.name, self.address) from e

    async def _through(self) -> asyncssh.SSHClientConnection:
        """The connection to the jump host. It is the user's own: their keys, their agent, their known_hosts."""
        if self._tunnel is not None and not self._tunnel.is_closed():
            return self._tunnel
        user, host, port = split_address(self._jump)
        t = self.timeouts
        async with _handshake_slot(), asyncio.timeout(t.connect + t.login):
            self._tunnel = await asyncssh.connect(
                host,
                port,
                username=user or (),
                config=None,
                login_timeout=t.login,
                keepalive_interval=t.keepalive_s,
                keepalive_count_max=t.keepalive_count,
            )
        return self._tunnel

    async def connect_until(self, patience_s: float, *, on_try: Callable[[UvccError], None] | None = None) -> None:
        """Connect, with jittered back-off while the pod is unreachable; gives up after ``patience_s`` seconds."""
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + patience_s, 0
        while True:
            try:
                return await self.connect()
            except UnreachableError as e:
                if on_try is not None:
                    on_try(e)
                wait = self.backoff(attempt)
                if loop.time() + wait > end:
                    raise
            attempt += 1
            await asyncio.sleep(wait)

    def backoff(self, attempt: int) -> float:
        """Seconds before try ``attempt + 1``: doubling, capped, between half and the whole of it."""
        t = self.timeouts
        whole = min(t.backoff_first * float(1 << min(attempt, 16)), t.backoff_last)
        return whole * self._random.uniform(0.5, 1.0)

    async def _use(self) -> asyncssh.SSHClientConnection:
        if not self.up:
            await self.connect()
        assert self._connection is not None
        return self._connection

    async def run(
        self, command: str, *, timeout: float = 0.0, stdin: bytes = b"", limit: int = bounded.OUTPUT
    ) -> Completed:
        """Run a command of the pod's /bin/sh. A time-out or lost link gives ``exit=None``, partial output kept.

        Raises UnreachableError when it could not even be started, UvccError when it says more than ``limit`` bytes.
        """
        patience = timeout or self.timeouts.operation
        try:
            async with self._sessions, asyncio.timeout(patience):
                connection = await self._use()
                process = await connection.create_process(command, encoding=None)
                try:
                    out, err = await bounded.output(process, stdin, limit)
                finally:
                    process.close()
                signal = process.exit_signal[0] if process.exit_signal else ""
                return Completed(process.exit_status, out, err, signal)
        except bounded.TooMuchError as e:
            raise UvccError(f"pod {self.name} {e}, as the output of a command", "look at that pod by hand") from None
        except TimeoutError:
            if not self.up:
                raise classify(TimeoutError(), self.name, self.address) from None
            return Completed(None, b"", f"no answer in {patience:g} s".encode())
        except asyncssh.ConnectionLost as e:
            return Completed(None, b"", str(e).encode())
        except (OSError, asyncssh.Error) as e:
            raise classify(e, self.name, self.address) from e

    async def sh(self, command: str, *, timeout: float = 0.0, stdin: bytes = b"", limit: int = bounded.OUTPUT) -> str:
        """Run a command that must succeed; its stripped output. Raises UvccError with what it said."""
        done = await self.run(command, timeout=timeout, stdin=stdin, limit=limit)
        if done.exit is None:
            raise UnreachableError(
                f"pod {self.name}: the link was lost during a command ({done.trouble})", "its outcome is unknown; retry"
            )
        if done.exit != 0:
            raise UvccError(f"pod {self.name}: {done.trouble}", f"command: {command.splitlines()[0][:120]}")
        return done.text

    @asynccontextmanager
    async def _files(self, timeout: float) -> AsyncIterator[asyncssh.SFTPClient]:
        try:
            async with asyncio.timeout(timeout):
                connection = await self._use()
                async with self._opening_sftp:  # one session, however many files are asked for at once
                    if self._sftp is None:
                        self._sftp = await connection.start_sftp_client()
                    sftp = self._sftp
                yield sftp
        except (OSError, asyncssh.Error, TimeoutError) as e:
            if not isinstance(e, asyncssh.SFTPError) or isinstance(e, asyncssh.SFTPConnectionLost):
                self._sftp = None
            raise classify(e, self.name, self.address) from e

    async def put(self, data: bytes | Path, remote: str, *, mode: int = 0o600, timeout: float = 300.0) -> None:
        """Write a file on the pod (path relative to its home): to a temporary name, then renamed over the target."""
        async with self._files(timeout) as sftp:
            temporary = f"{remote}.part"
            if isinstance(data, Path):
                await sftp.put(str(data), temporary)
            else:
                async with sftp.open(temporary, "wb") as f:
                    await f.write(data)
            await sftp.chmod(temporary, mode)
            await sftp.posix_rename(temporary, remote)

    async def get(
        self,
        remote: str,
        into: Landing,
        parts: Parts,
        *,
        limit: int,
        sha256: str = "",
        growing: bool = False,
        timeout: float = 6 * 3600.0,
    ) -> Arriving:
        """Fetch one regular file of at most ``limit`` bytes; the pod decides over its content and nothing else.

        A file that has more is refused while it comes, unless it is ``growing``: then its beginning is taken. Raises
        VerificationError for one that is too long, no file or not of this hash, and then nothing of it is here;
        UnreachableError for one that gives nothing for long.
        """
        async with self._streaming(timeout) as sftp:
            with into.file(parts, limit=limit) as arriving:
                await bounded.read_into(sftp, remote, arriving.write, limit, growing=growing, stall=self.timeouts.stall)
                if sha256 and arriving.sha256 != sha256:
                    told = f"{'/'.join(parts)} of pod {self.name} arrived as {arriving.sha256[:12]}"
                    raise VerificationError("fetch", f"{told}, there it is {sha256[:12]}")
                arriving.keep()
        return arriving

    async def read(self, remote: str, *, limit: int = bounded.OUTPUT, timeout: float = 0.0) -> bytes:
        """The content of a small file of the pod. Raises as :meth:`get` does."""
        found: list[bytes] = []
        async with self._streaming(timeout or self.timeouts.operation) as sftp:
            await bounded.read_into(sftp, remote, found.append, limit, growing=False, stall=self.timeouts.stall)
        return b"".join(found)

    async def tail(self, remote: str, *, limit: int, timeout: float = 0.0) -> bytes:
        """The last ``limit`` bytes of a file of the pod, or all of it."""
        found: list[bytes] = []
        async with self._streaming(timeout or self.timeouts.operation) as sftp:
            stall = self.timeouts.stall
            await bounded.read_into(sftp, remote, found.append, limit, last=True, growing=True, stall=stall)
        return b"".join(found)

    @asynccontextmanager
    async def _streaming(self, timeout: float) -> AsyncIterator[asyncssh.SFTPClient]:
        """Like ``_files``, for what the pod may draw out: what stalls takes its session with it, not the next file."""
        async with self._files(timeout) as sftp:
            try:
                yield sftp
            except bounded.StalledError as e:
                if self._sftp is sftp:
                    self._sftp = None
                sftp.exit()
                what = f"pod {self.name} at {self.address} {e}"
                raise UnreachableError(what, "a pipe or a device is no evidence: look at that pod by hand") from None
            except bounded.TooMuchError as e:
                raise VerificationError("fetch", f"pod {self.name} {e}") from None
            except ValueError as e:  # a packet that is none
                raise VerificationError("fetch", f"pod {self.name} does not speak SFTP: {e}") from e

    async def read_part(self, remote: str, offset: int, size: int, *, timeout: float = 0.0) -> bytes:
        """At most ``size`` bytes of a file of the pod from ``offset`` on; fewer only at its end."""
        async with self._files(timeout or self.timeouts.operation) as sftp, sftp.open(remote, "rb") as f:
            found: bytes | str = await f.read(size, offset)
            return (found if isinstance(found, bytes) else found.encode())[:size]

    async def open(self, command: str, *, timeout: float = 0.0) -> asyncssh.SSHClientProcess[bytes]:
        """Start a long-lived command with binary streams, outside the session limit. Raises UnreachableError."""
        try:
            async with asyncio.timeout(timeout or self.timeouts.operation):
                connection = await self._use()
                return await connection.create_process(command, encoding=None)
        except (OSError, asyncssh.Error, TimeoutError) as e:
            raise classify(e, self.name, self.address) from e

    async def forward(self, remote_host: str, remote_port: int) -> asyncssh.SSHListener:
        """A port of 127.0.0.1 that leads to ``remote_host:remote_port`` as seen from the pod."""
        try:
            async with asyncio.timeout(self.timeouts.operation):
                connection = await self._use()
                return await connection.forward_local_port("127.0.0.1", 0, remote_host, remote_port)
        except (OSError, asyncssh.Error, TimeoutError) as e:
            raise classify(e, self.name, self.address) from e

    def abort(self) -> None:
        """Drop the connection at once, without a word to the other side."""
        if self._connection is not None:
            self._connection.abort()

    async def close(self) -> None:
        """Close the connection; the pod and what runs on it stay."""
        connections = [c for c in (self._connection, self._tunnel) if c is not None]
        self._connection = self._tunnel = self._sftp = None
        for connection in connections:
            connection.close()
            try:
                async with asyncio.timeout(2.0):
                    await connection.wait_closed()
            except (TimeoutError, OSError, asyncssh.Error):
                connection.abort()
