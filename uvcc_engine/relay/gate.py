"""Who is connected to the relay: room for few who have not shown a token, a share for each who has, refusals counted.

A connection belongs to nobody until its first token was known. Such ones have ``login_s`` seconds and little room, in
which the oldest of the busiest address makes way: a stranger cannot fill it for who comes with a token. What belongs to
a credential (group and number) is bounded per credential, so none can fill the relay for the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from uvcc_engine.relay.config import Credential, RelayConfig
from uvcc_engine.relay.lobby import Lobby, Rejections
from uvcc_engine.relay.refusals import Refusal
from uvcc_engine.relay.relay_roles import called

log = logging.getLogger("uvcc.relay")
STALLED: Final = 8  # connections of one credential that do not read what they asked for
_REST_S: Final = 0.1
_Key = tuple[str, int]


class Visitor:
    """One connection. ``who`` is None until it has shown a token."""

    __slots__ = ("_close", "_gate", "_stall", "address", "fd", "gone", "held", "reading", "since", "up", "who")

    def __init__(self, gate: Gate, address: str, number: int, now: float) -> None:
        self._gate = gate
        self._close: Callable[[], object] = lambda: None
        self.up = False  # it has a transport of its own
        self.gone = False
        self.address, self.fd, self.since = address, number, now
        self.who: Credential | None = None
        self.held = 0  # bytes of a request that is still arriving
        self.reading = True  # what it is sent
        self._stall: asyncio.TimerHandle | None = None

    def ends_by(self, close: Callable[[], object], *, up: bool = True) -> None:
        """What closes it at once. ``up``: it has a transport by now, and is not being brought up any more."""
        self._close, self.up = close, up

    def end(self) -> None:
        self._close()

    def login(self, who: Credential) -> bool:
        """It has shown a token; False if that has as many connections as it may have."""
        return self.who is not None or self._gate.login(self, who)

    def hold(self, count: int) -> bool:
        """``count`` more bytes of a request will be kept; False if its credential has too many of them."""
        return self._gate.hold(self, count)

    def release(self) -> None:
        """The request is complete."""
        self._gate.hold(self, -self.held)

    def paused(self) -> None:
        """It does not take what it is sent; if it goes on like this it is closed."""
        self.reading = False
        self._gate.stalls(self, 1)
        self._stall = asyncio.get_running_loop().call_later(self._gate.stall_s, self.refuse, Refusal.NOT_READ)

    def resumed(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if not self.reading:
            self.reading = True
            self._gate.stalls(self, -1)

    def refuse(self, why: Refusal) -> None:
        """Close it, and count why."""
        self._gate.refused(self.address, why)
        self._close()

    def left(self) -> None:
        """The connection is closed, or given up before it was there: a protocol that still begins must end it."""
        self.gone = True
        self._gate.left(self)


async def admit(
    gate: Gate,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    within_s: float,
    make: Callable[[Visitor], asyncio.Protocol | asyncio.BufferedProtocol],
) -> None:
    """Accept connections until cancelled. Each is counted before its TLS handshake, which may take ``within_s``."""
    loop = asyncio.get_running_loop()
    coming: set[asyncio.Task[None]] = set()
    listener.setblocking(False)

    async def bring_up(visitor: Visitor, sock: socket.socket) -> None:
        more: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": within_s} if tls is not None else {}
        protocol = make(visitor)
        try:
            await loop.connect_accepted_socket(lambda: protocol, sock, **more)
        except OSError:
            gate.refused(visitor.address, Refusal.NO_TLS)
            sock.close()
            visitor.left()
        except asyncio.CancelledError:  # it made way for another, or the relay stops
            sock.close()
            if visitor.up:  # a loop that was about to hand it over closes it without a word to its protocol
                visitor.end()
                protocol.connection_lost(None)
            visitor.left()

    try:
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # none left of what a connection needs, or it went away before it was taken
                gate.refused("", Refusal.NOT_ACCEPTED, detail=f": {error.strerror}")
                await asyncio.sleep(_REST_S)
                continue
            visitor = gate.arrive(str(address[0]) if isinstance(address, tuple) else "")
            task = loop.create_task(bring_up(visitor, sock))
            visitor.ends_by(task.cancel, up=False)
            coming.add(task)
            task.add_done_callback(coming.discard)
    finally:
        listener.close()
        for task in coming:
            task.cancel()


class Gate:
    """All connections of a relay, of both fronts. One thread (the event loop's) uses it."""

    def __init__(self, config: RelayConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self.stall_s = config.stall_s
        self._numbers = itertools.count()
        self._strangers: Lobby[Visitor] = Lobby(config.strangers, max(1, config.strangers // 2))
        self._connections: Counter[_Key] = Counter()
        self._held: Counter[_Key] = Counter()
        self._stalled: Counter[_Key] = Counter()
        self._rejections = Rejections()

    def arrive(self, address: str) -> Visitor:
        """Count a new connection."""
        visitor = Visitor(self, address, next(self._numbers), self._clock())
        if (leaves := self._strangers.enter(visitor)) is not None:
            leaves.refuse(Refusal.SILENT)
        return visitor

    def login(self, visitor: Visitor, who: Credential) -> bool:
        key = who.group, who.number
        if self._connections[key] >= self._config.connections:
            detail = f": {self._config.connections} of {who.role} {called(who.number)}"
            self.refused(visitor.address, Refusal.CONNECTIONS, detail=detail)
            return False
        self._strangers.leave(visitor)
        self._connections[key] += 1
        visitor.who = who
        if not visitor.reading:
            self._stalled[key] += 1
        return True

    def hold(self, visitor: Visitor, count: int) -> bool:
        if visitor.who is None:
            return count <= 0
        key = visitor.who.group, visitor.who.number
        if self._held[key] + count > self._config.arriving_bytes:
            return False
        self._held[key] += count
        visitor.held += count
        return True

    def stalls(self, visitor: Visitor, change: int) -> None:
        if visitor.who is not None:
            self._stalled[visitor.who.group, visitor.who.number] += change

    def may_take(self, who: Credential) -> bool:
        """False while too many connections of this credential do not read what they were sent."""
        return self._stalled[who.group, who.number] < STALLED

    def left(self, visitor: Visitor) -> None:
        visitor.resumed()
        visitor.release()
        self._strangers.leave(visitor)
        if visitor.who is not None:
            self._connections[visitor.who.group, visitor.who.number] -= 1
            visitor.who = None

    def refused(self, address: str, why: Refusal, *, detail: str = "") -> None:
        """Count a refusal; a few lines a minute say what was refused and to whom, the first with its ``detail``."""
        if (notice := self._rejections.note(address, why, self._clock())) is not None:
            log.warning("refused %s: %s%s", notice.fields["address"], notice.fields["why"], detail)

    def tick(self, now: float) -> None:
        """Call about once a second: ends who has shown no token for too long, and says what was counted."""
        for visitor in self._strangers.overdue(now, self._config.login_s):
            self._strangers.leave(visitor)
            visitor.refuse(Refusal.SILENT)
        for notice in self._rejections.due(now):
            fields = notice.fields
            log.warning("refused %s %s times within a minute: %s", fields["address"], fields["count"], fields["why"])

    def clear(self) -> None:
        """The relay stops: it does not wait for who has shown no token."""
        for visitor in self._strangers:
            visitor.end()

    def state(self) -> dict[str, Any]:
        """Figures for /metrics."""
        return {
            "refused_connections_total": self._rejections.total,
            "connections": sum(self._connections.values()),
            "strangers": len(self._strangers),
            "arriving_bytes": sum(self._held.values()),
        }
