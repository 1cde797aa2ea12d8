"""One SSH connection per pod: pinned host key, limits and a timeout on everything; a lost link is "unknown"."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from uvcc_console.fleet import bounded, ssherrors
from uvcc_console.fleet.dialer import Dialer
from uvcc_console.fleet.dialer import Timeouts as Timeouts
from uvcc_console.fleet.download_folder import DownloadFolder, PartialDownload
from uvcc_console.fleet.pins import HostKeyPins
from uvcc_console.fleet.sessions import FullError, Sessions
from uvcc_console.fleet.ssherrors import classify
from uvcc_console.fleet.user_ssh import UserKeys
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.parsing.safepaths import Parts

FURTHER = 3  # connections beside the first, where a server allows few sessions on each


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


class PodLink:
    """The console's SSH connection to one pod; reconnects when asked, never by guessing.

    ``host_key`` is the pinned key (``ssh-ed25519 AAAA...``), empty before the first contact, which sets it, here and
    in ``known``, the pins that other processes go by. A host that then shows another key is refused for good: every
    later use raises HostKeyChanged, with ``hint``. ``accept``: the fingerprint of the one new key that the operator has
    vouched for; nothing else is let pass with it.

    Every ``timeout`` is in seconds; 0 takes what ``timeouts`` says of an operation.
    """

    def __init__(
        self,
        name: str,
        address: str,
        key: asyncssh.SSHKey | UserKeys,
        *,
        host_key: str = "",
        known: HostKeyPins | None = None,
        hint: str = "",
        accept: str = "",
        jump: str = "",
        timeouts: Timeouts | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.timeouts = timeouts or Timeouts()
        self._dialer = Dialer(name, address, key, host_key, known, hint, accept, jump, self.timeouts, self._lost)
        self._on_lost = on_lost
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._sessions = Sessions(self._let_go_of_files)
        self._sftp: asyncssh.SFTPClient | None = None
        self._sftp_users = 0
        self._opening_sftp = asyncio.Lock()
        self._key = key
        self._way: dict[str, Any] = {"known": known, "hint": hint, "accept": accept, "jump": jump}
        self._more: PodLink | None = None
        self._depth = 0

    @property
    def host_key(self) -> str:
        """The pinned key (``ssh-ed25519 AAAA...``); empty before the first contact."""
        return self._dialer.host_key

    @property
    def up(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    def _lost(self, exc: Exception | None) -> None:
        self._connection = None
        self._sftp = None
        if self._on_lost is not None:
            self._on_lost(str(exc) if exc else "closed")

    async def connect(self) -> None:
        """Connect once if not connected. Raises UnreachableError, or HostKeyChanged."""
        async with self._connecting:
            self._dialer.check_refused()
            if not self.up:
                self._connection = await self._dialer.open()

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
        return self._dialer.backoff(attempt)

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
        process: asyncssh.SSHClientProcess[bytes] | None = None
        try:
            async with self._sessions.slots, asyncio.timeout(patience):
                process = await self._process(command)
                async with self._sessions.counted():
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
            if process is None and self._sessions.scarce:
                raise ssherrors.sessions_full(self.name, self.address) from None
            return Completed(None, b"", f"no answer in {patience:g} s".encode())
        except asyncssh.ConnectionLost as e:
            return Completed(None, b"", str(e).encode())
        except (OSError, asyncssh.Error) as e:
            raise classify(e, self.name, self.address) from e

    async def _process(self, command: str) -> asyncssh.SSHClientProcess[bytes]:
        """A command under way. Raises UnreachableError where the server has no session for it."""
        connection = await self._use()
        try:
            return await self._sessions.opened(
                lambda: connection.create_process(command, encoding=None), elsewhere=self._more is not None
            )
        except FullError:
            return await self._further()._process(command)

    def _further(self) -> PodLink:
        """Another connection beside this one: servers count sessions by the connection. UnreachableError at the last.

        It has the same pin, and is made only where the server allows fewer sessions than a pod's use takes.
        """
        if self._more is None:
            if self._depth >= FURTHER:
                raise ssherrors.sessions_full(self.name, self.address)
            self._more = PodLink(
                self.name, self.address, self._key, host_key=self.host_key, timeouts=self.timeouts, **self._way
            )
            self._more._depth = self._depth + 1
        return self._more

    async def prove_shell(self) -> None:
        """Raises UvccError where something else than a plain shell answers what is asked for."""
        word = secrets.token_hex(4)
        done = await self.run(f"echo {word}-$((6*7))-{word}")
        if done.exit is None:
            raise UnreachableError(f"pod {self.name}: the link was lost ({done.trouble})", "retry")
        if done.text == f"{word}-42-{word}":
            return
        if done.text.endswith(f"{word}-42-{word}"):
            raise ssherrors.noisy_start_files(self.name, self.address, done.text.splitlines()[0])
        raise ssherrors.no_shell(self.name, self.address, (done.text or done.trouble).splitlines()[0])

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
        opened = False
        try:
            async with asyncio.timeout(timeout):
                owner, sftp = await self._sftp_session()
                opened = True
                async with owner._sessions.counted():
                    owner._sftp_users += 1
                    try:
                        yield sftp
                    finally:
                        owner._sftp_users -= 1
                        if owner._sessions.scarce:
                            await owner._let_go_of_files()
        except (OSError, asyncssh.Error, TimeoutError) as e:
            if not isinstance(e, asyncssh.SFTPError) or isinstance(e, asyncssh.SFTPConnectionLost):
                self._forget_files()
            if isinstance(e, TimeoutError) and self.up and not opened and self._sessions.scarce:
                raise ssherrors.sessions_full(self.name, self.address) from None
            raise classify(e, self.name, self.address) from e

    async def _sftp_session(self) -> tuple[PodLink, asyncssh.SFTPClient]:
        """The session for files, and on which of our connections it is."""
        connection = await self._use()
        async with self._opening_sftp:  # one session, however many files are asked for at once
            if self._sftp is None:
                try:
                    opening = self._sessions.opened(connection.start_sftp_client, elsewhere=self._more is not None)
                    self._sftp = await opening
                except FullError:
                    return await self._further()._sftp_session()
            return self, self._sftp

    def _forget_files(self, sftp: asyncssh.SFTPClient | None = None) -> None:
        """The next file has a session of its own: this one, or any, is of no use any more."""
        if sftp is None or self._sftp is sftp:
            self._sftp = None
        if self._more is not None:
            self._more._forget_files(sftp)

    async def _let_go_of_files(self) -> bool:
        """End the SFTP session unless somebody uses it; whether there was one to end."""
        sftp = self._sftp
        if sftp is None or self._sftp_users:
            return False
        self._sftp = None
        sftp.exit()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await sftp.wait_closed()
        return True

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
        into: DownloadFolder,
        parts: Parts,
        *,
        limit: int,
        sha256: str = "",
        growing: bool = False,
        timeout: float = 6 * 3600.0,
    ) -> PartialDownload:
        """Fetch one regular file of at most ``limit`` bytes; the pod decides over its content and nothing else.

        A file that has more is refused while it comes, unless it is ``growing``: then its beginning is taken. Raises
        VerificationError for one that is too long, no file or not of this hash, and then nothing of it is here;
        UnreachableError for one that gives nothing for long.
        """
        async with self._streaming(timeout) as sftp:
            with into.file(parts, limit=limit) as download:
                await bounded.read_into(sftp, remote, download.write, limit, growing=growing, stall=self.timeouts.stall)
                if sha256 and download.sha256 != sha256:
                    told = f"{'/'.join(parts)} of pod {self.name} arrived as {download.sha256[:12]}"
                    raise VerificationError("fetch", f"{told}, there it is {sha256[:12]}")
                download.keep()
        return download

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
                self._forget_files(sftp)
                sftp.exit()
                what = f"{ssherrors.place_of(self.name, self.address)} {e}"
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
                return await self._process(command)
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
        if self._more is not None:
            self._more.abort()

    async def close(self) -> None:
        """Close the connection; the pod and what runs on it stay."""
        if self._more is not None:
            await self._more.close()
        connections = [c for c in (self._connection, self._dialer.tunnel) if c is not None]
        self._connection = self._dialer.tunnel = self._sftp = None
        for connection in connections:
            connection.close()
            try:
                async with asyncio.timeout(2.0):
                    await connection.wait_closed()
            except (TimeoutError, OSError, asyncssh.Error):
                connection.abort()
