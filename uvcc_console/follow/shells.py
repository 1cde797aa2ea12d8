"""A POSIX shell at the folder's machine: this one, or one that SSH leads to as its user has it. Nothing else is needed.

Scripts come on the shell's standard input, so that whatever the account's login shell is, it is told one thing only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Final, Protocol

from uvcc_console.fleet import bounded
from uvcc_console.fleet.pins import HostKeyPins
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.user_ssh import place
from uvcc_console.follow.target import FollowTarget
from uvcc_engine.contract.errors import UnreachableError, UvccError

COMMAND: Final = "exec /bin/sh -s"
PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ShellAnswer:
    """How a script ended, and what it printed."""

    exit: int
    out: bytes


class Shell(Protocol):
    """``where`` is the machine, in words."""

    @property
    def where(self) -> str: ...

    @property
    def host_key(self) -> str: ...

    async def open(self) -> None:
        """Be ready for scripts. Raises UnreachableError, or HostKeyChanged."""

    async def run(self, script: str, *, limit: int = bounded.OUTPUT) -> ShellAnswer:
        """Run a script. Raises UnreachableError where it gave no answer, UvccError for more than ``limit`` bytes."""
        ...

    async def close(self) -> None: ...


class LocalShell:
    """The shell of this machine."""

    where = "this machine"
    host_key = ""

    async def open(self) -> None:
        """It is always there."""

    async def run(self, script: str, *, limit: int = bounded.OUTPUT) -> ShellAnswer:
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-s",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as e:
            raise UnreachableError(f"no shell can be started: {e}", "is /bin/sh there, and a process free?") from e
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(OSError):  # it ended before it had read all of it
                    process.stdin.write(script.encode())
                    process.stdin.write_eof()
                parts, size = [], 0
                while piece := await process.stdout.read(1 << 16):
                    size += len(piece)
                    if size > limit:
                        raise UvccError(f"{self.where} says more than {limit} bytes", "look at the folder by hand")
                    parts.append(piece)
                return ShellAnswer(await process.wait(), b"".join(parts))
        except TimeoutError:
            raise UnreachableError(f"{self.where} gave no answer in {PATIENCE_S:g} s", "is its disk stuck?") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def close(self) -> None:
        """Nothing is kept open."""


class SshShell:
    """The shell of a machine that the user can log in to; its host key is pinned as those of an inventory are."""

    def __init__(self, link: PodLink) -> None:
        self._link = link
        self._proved = False

    @property
    def where(self) -> str:
        return self._link.address

    @property
    def host_key(self) -> str:
        return self._link.host_key

    async def open(self) -> None:
        await self._link.connect()
        if not self._proved:
            await self._link.prove_shell()
            self._proved = True

    async def run(self, script: str, *, limit: int = bounded.OUTPUT) -> ShellAnswer:
        done = await self._link.run(COMMAND, stdin=script.encode(), timeout=PATIENCE_S, limit=limit)
        if done.exit is None:
            raise UnreachableError(f"{self.where}: the link was lost ({done.trouble})", "it is tried again")
        return ShellAnswer(done.exit, done.stdout)

    async def close(self) -> None:
        await self._link.close()


def shell_for(target: FollowTarget, *, key: str = "", jump: str = "") -> Shell:
    """The shell at a target. ``key`` is a file, ``jump`` as of ``ssh -J``. Raises ConfigError for a bad configuration.

    Address, user, port, keys and jump hosts follow from ``~/.ssh/config`` where nothing is given, as with ``ssh``.
    """
    if not target.host:
        return LocalShell()
    at = place(target.host, user=target.user, port=target.port, jump=jump, key=key)
    host = f"[{at.host}]" if ":" in at.host else at.host
    address = f"{at.user}@{host}:{at.port}"
    known = HostKeyPins.here()
    hint = f"another machine may answer there; if its key was changed on purpose: {known.forget_command(address)}"
    return SshShell(PodLink(target.host, address, at.keys, known=known, hint=hint, jump=at.jump))
