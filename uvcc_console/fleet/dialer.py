"""The way into one pod: the right host key, the run's key, patience at a crowded door, and a name for every refusal."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import asyncssh

from uvcc_console.core.log import logger
from uvcc_console.fleet import pins, ssherrors, tunnels
from uvcc_console.fleet.pins import HostKeyPins, split_address
from uvcc_console.fleet.user_ssh import UserKeys
from uvcc_engine.contract.errors import UvccError

log = logger(__name__)

HANDSHAKES = 8  # OpenSSH's MaxStartups starts to refuse at 10 unauthenticated connections
CIPHERS = "^aes256-gcm@openssh.com,aes128-gcm@openssh.com"
"""These before asyncssh's others: a packet is one call of the library, not three, and few processors lack AES."""
_handshakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


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

    def __init__(self, door: Dialer) -> None:
        self._dialer = door

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        return self._dialer.judge(key)

    def connection_lost(self, exc: Exception | None) -> None:
        self._dialer.lost(exc)


def _handshake_slot() -> asyncio.Semaphore:
    return _handshakes.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(HANDSHAKES))


class Dialer:
    """Opens connections to one pod; see ``PodLink``, which keeps them."""

    def __init__(
        self,
        name: str,
        address: str,
        key: asyncssh.SSHKey | UserKeys,
        host_key: str,
        known: HostKeyPins | None,
        hint: str,
        accept: str,
        jump: str,
        timeouts: Timeouts,
        lost: Callable[[Exception | None], None],
    ) -> None:
        self.name = name
        self.address = address
        self.host_key = pins.plain(host_key) or (known.of(address) if known is not None else "")
        self.timeouts = timeouts
        self.lost = lost
        self.tunnel: asyncssh.SSHClientConnection | None = None
        self._key = key
        self._known, self._hint, self._accept, self._jump = known, hint, accept, jump
        self._refused: ssherrors.HostKeyChanged | None = None
        self._random = random.Random(name)

    def judge(self, key: asyncssh.SSHKey) -> bool:
        """Whether this is the right machine; called before anything is said to it."""
        shown = pins.plain(key)
        seen = pins.fingerprint(shown)
        if not self._accept and not self.host_key:
            self.host_key = self._pinned(shown)
        expected = self._accept or pins.fingerprint(self.host_key)
        if seen == self._accept:
            self.host_key = shown
        elif self._accept or shown != self.host_key:
            where = ssherrors.place_of(self.name, self.address)
            what = f"{where} shows another host key: expected {expected}, seen {seen}"
            hint = self._hint or "another machine may answer in its place: delete the pod, start anew"
            self._refused = ssherrors.HostKeyChanged(what, hint, expected=expected, seen=seen)
            log.error("%s", what, pod=self.name)
            return False
        return True

    def _pinned(self, shown: str) -> str:
        """The first contact is written down before anything is said to the machine."""
        if self._known is None:
            return shown
        try:
            return self._known.pin(self.address, shown)
        except UvccError as e:  # who could not write it down still may end what runs there; a claim needs the disk
            log.warning("its host key is not pinned on disk: %s", e, pod=self.name)
            return shown

    def check_refused(self) -> None:
        if self._refused is not None:
            raise self._refused

    async def open(self) -> asyncssh.SSHClientConnection:
        """A connection that has logged in. Raises UnreachableError with the reason, or HostKeyChanged."""
        self.check_refused()
        try:
            return await self._dial()
        except (OSError, asyncssh.Error, TimeoutError) as e:
            self.check_refused()
            if isinstance(e, asyncssh.ChannelOpenError) and self._by_jump_host:
                raise ssherrors.behind_jump_host(e, self._jump, self.name, self.address) from e
            methods = await self._methods() if isinstance(e, asyncssh.PermissionDenied) else []
            if methods and "publickey" not in methods:
                raise ssherrors.no_login_by_key(self.name, self.address, methods) from e
            if methods and isinstance(self._key, UserKeys):
                raise ssherrors.own_keys_refused(self.name, self.address, self._key.words) from e
            raise ssherrors.classify(e, self.name, self.address) from e

    async def _dial(self) -> asyncssh.SSHClientConnection:
        """Through the door. A server that has too many before it drops some at random: these come again."""
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + self.timeouts.connect, 0
        while True:
            try:
                return await self._handshake()
            except (asyncssh.ConnectionLost, ConnectionResetError) as e:
                self.check_refused()
                log.info("turned away at the door, try %d: %s", attempt + 1, e, pod=self.name)
                wait = self.backoff(attempt)
                if loop.time() + wait > end:
                    hop = e.hop if isinstance(e, ssherrors.JumpTurnedAwayError) else ""
                    raise ssherrors.closed_before_login(self.name, self.address, hop) from e
            attempt += 1
            await asyncio.sleep(wait)

    async def _handshake(self) -> asyncssh.SSHClientConnection:
        user, host, port = split_address(self.address)
        t = self.timeouts
        way = await self._way(host, port)
        credentials = await self._credentials()
        # not asyncssh's own connect_timeout: Python 3.11's wait_for loses a cancellation that comes with the
        # answer, and whoever waits for this would wait for ever
        async with _handshake_slot(), asyncio.timeout(t.connect):
            return await asyncssh.connect(
                host,
                port,
                username=user,
                **credentials,
                known_hosts=([], [], []),
                server_host_key_algs=pins.preference(self.host_key),
                encryption_algs=CIPHERS,
                client_factory=lambda: _Client(self),
                config=None,
                **way,
                preferred_auth="publickey",
                compression_algs=None,
                login_timeout=t.login,
                keepalive_interval=t.keepalive_s,
                keepalive_count_max=t.keepalive_count,
            )

    async def _credentials(self) -> dict[str, Any]:
        """The run's one key and nothing else; or all that a user has, to a host of their own."""
        if isinstance(self._key, UserKeys):
            return await asyncio.to_thread(self._key.options)  # it may ask the user
        return {"client_keys": [self._key], "agent_path": None}

    async def _methods(self) -> list[str]:
        """How the server lets anybody in at all; empty where it does not tell."""
        user, host, port = split_address(self.address)
        try:
            way = await self._way(host, port)
            async with _handshake_slot(), asyncio.timeout(self.timeouts.connect):
                return list(await asyncssh.get_server_auth_methods(host, port, user, config=None, **way))
        except (OSError, asyncssh.Error, TimeoutError):
            return []

    @property
    def _by_jump_host(self) -> bool:
        return bool(self._jump) and not tunnels.kind_of(self._jump)

    async def _way(self, host: str, port: int) -> dict[str, Any]:
        """How the connection is made: directly, through jump hosts, or over a tunnel of the pod's provider."""
        if self._jump and not self._by_jump_host:
            return {"sock": await tunnels.through(self._jump, host, port)}
        return {"tunnel": await self._through() if self._jump else None}

    async def _through(self) -> asyncssh.SSHClientConnection:
        """The connection to the jump host, through others before it where several are named, one after the other.

        It is the user's own: their configuration, their keys, their agent, their known_hosts. Raises UnreachableError
        or VerificationError naming the jump host, JumpTurnedAwayError where another try may get in.
        """
        if self.tunnel is not None and not self.tunnel.is_closed():
            return self.tunnel
        last: asyncssh.SSHClientConnection | None = None
        try:
            for hop in self._jump.split(","):
                last = await self._hop(hop.strip(), last)
        except BaseException:  # also who is told to stop leaves no connection to the jump hosts before
            if last is not None:
                last.close()
            raise
        assert last is not None
        self.tunnel = last
        return last

    async def _hop(self, hop: str, before: asyncssh.SSHClientConnection | None) -> asyncssh.SSHClientConnection:
        """The connection to one jump host, which takes the one before it along when it ends."""
        user, host, port = split_address(hop)
        given = hop.rpartition(":")[2].isdigit()
        t = self.timeouts
        try:
            async with _handshake_slot(), asyncio.timeout(t.connect + t.login):
                found = await asyncssh.connect(
                    host,
                    port if given else (),
                    username=user or (),
                    login_timeout=t.login,
                    keepalive_interval=t.keepalive_s,
                    keepalive_count_max=t.keepalive_count,
                    **({"tunnel": before} if before is not None else {}),
                )
        except (asyncssh.ConnectionLost, ConnectionResetError) as e:
            raise ssherrors.JumpTurnedAwayError(hop, e) from e
        except (OSError, asyncssh.Error, TimeoutError) as e:
            raise ssherrors.of_jump_host(e, hop, self.name, self.address) from e
        if before is not None:
            found.set_tunnel(before)
        return found

    def backoff(self, attempt: int) -> float:
        """Seconds before try ``attempt + 1``: doubling, capped, between half and the whole of it."""
        t = self.timeouts
        whole = min(t.backoff_first * float(1 << min(attempt, 16)), t.backoff_last)
        return whole * self._random.uniform(0.5, 1.0)
