"""Direct link: one TCP connection per pair of parties, for parties that can reach each other.

The party that has the other's address dials; if both could, the higher one does. A connection counts once its first
sealed frame has been proven, so a stranger who connects cannot displace a peer.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from typing import Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreachableError
from uvcc_engine.plane.connection import Connection
from uvcc_engine.plane.links import Arrival, Notice
from uvcc_engine.plane.policy import Outgoing, Policy

_SSH_PORT: Final = 22
_REFILL_BYTES: Final = 256 << 10  # what is left of a full backlog when its filler is called back
_REDIAL_S: Final = (0.05, 1.0)
_STRANGERS: Final = 16
_STRANGER_S: Final = 15.0
_BRISK_S: Final = 200e-6  # an answer this soon: stay awake for the next one
_GLANCES: Final = 200  # about 200 us


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"not an address: {text!r}", "write it like 10.0.0.2:7000")
    if int(port) == _SSH_PORT:
        raise ConfigError(f"{text} is the SSH port", "give the plane a port of its own")
    return host.strip("[]"), int(port)


class DirectLink:
    """Implements ``links.Link`` over TCP."""

    kind = "direct"
    eager = True
    batch_bytes = 0

    def __init__(
        self,
        party: int,
        listen: str,
        peers: dict[int, str],
        clock: Callable[[], float] = time.monotonic,
        policy: Policy | None = None,
        *,
        spins: bool = True,
    ) -> None:
        """``peers``: host:port of the parties that can be dialled. ``spins``: ask a few times before sleeping, where
        answers come at once; not for processes that outnumber the processors. Raises UnreachableError if it cannot
        listen."""
        self.policy = policy or Policy()
        self._clock = clock
        self._dial = {p: a for p, a in peers.items() if p != party and a and (not listen or party > p)}
        self._active: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        self._next_dial = {p: (0.0, _REDIAL_S[0]) for p in self._dial}
        self._refused: dict[int, float] = {}
        self._met: set[int] = set()
        self._resets: list[int] = []
        self._notices: list[Notice] = []
        self._poll = select.epoll()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._nudge)  # not at close: another thread may still nudge
        self._nudged = False
        self._poll.register(self._nudge, select.EPOLLIN)
        self._spins = spins
        self._brisk = False  # the last wait was very short
        self._by_fd: dict[int, Connection] = {}
        self._dirty: set[Connection] = set()  # with something to write
        self._listener: socket.socket | None = None
        if listen:
            self._listener = _listen(listen)
            self._poll.register(self._listener.fileno(), select.EPOLLIN)

    @property
    def address(self) -> str:
        """The bound ``host:port`` ("" if not listening)."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def connected(self, dst: int) -> bool:
        """True while a proven connection to ``dst`` stands."""
        return dst in self._active

    def ready(self, dst: int) -> bool:
        found = self._active.get(dst)
        if found is None:
            return any(c.peer == dst and not c.connecting for c in self._strangers)
        return found.room

    def send(self, dst: int, out: Outgoing) -> None:
        found = self._active.get(dst)
        # until one has proven itself, the handshake goes to everybody who says to be this peer
        routes = [found] if found else [c for c in self._strangers if c.peer == dst and not c.connecting]
        for connection in routes:
            connection.out.add(out.buffers)
            self._dirty.add(connection)
            if not connection.room:
                self._flush(connection)

    def nudge(self) -> None:
        """See ``api.Nudged``."""
        os.eventfd_write(self._nudge, 1)

    def flush(self) -> None:
        for connection in tuple(self._dirty):
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            connection.out.flush(connection.sock)
        except OSError as error:
            self._drop(connection, error)
            return
        self._watch(connection)
        if not connection.out:
            self._dirty.discard(connection)

    def exchange(self, wait: float, src: int | None) -> list[Arrival]:
        if self._dirty:
            self.flush()
        first = self._active.get(src) if src is not None else None
        if first is not None and (arrivals := self._read(first)):
            return arrivals
        now = self._clock()
        end = now + wait
        full = [c for c in self._dirty if not c.room]
        while True:
            arrivals = self._look(end, now)
            now = self._clock()
            if arrivals or now >= end or self._resets or self._notices or self._nudged:
                self._nudged = False
                return arrivals
            if any(c.out.bytes <= _REFILL_BYTES for c in full):
                return []  # the next frames are sealed while these are still on their way

    def _look(self, end: float, now: float) -> list[Arrival]:
        """Wait for the sockets once and take what they have."""
        until = end
        if not self._dial.keys() <= self._active.keys():
            until = min(end, self._redial(now))
        if self._strangers:
            self._dismiss(now)
            until = min(until, now + 1.0)
        arrivals: list[Arrival] = []
        for fd, event in self._events(max(0.0, until - now)):
            found = self._by_fd.get(fd)
            if fd == self._nudge:
                os.eventfd_read(fd)
                self._nudged = True
            elif found is None:
                self._accept(now)
            elif found.connecting:
                self._connected(found, now)
            else:
                if event & select.EPOLLOUT:
                    self.flush()
                if event & ~select.EPOLLOUT:
                    arrivals += self._read(found)
        return arrivals

    def _events(self, wait: float) -> list[tuple[int, int]]:
        """What the poll has within ``wait`` seconds.

        While answers come at once it is asked a few times before it may sleep, for to be woken takes longer than such
        an answer; in between whoever else wants this processor gets it.
        """
        if self._brisk and wait > 0:
            for _ in range(_GLANCES):
                if found := self._poll.poll(0):
                    return found
                os.sched_yield()
        begun = self._clock()
        found = self._poll.poll(wait)
        self._brisk = self._spins and bool(found) and self._clock() - begun < _BRISK_S
        return found

    def _watch(self, connection: Connection) -> None:
        """Tell the poll what we want to know of a connection."""
        want = select.EPOLLIN | (select.EPOLLOUT if connection.out or connection.connecting else 0)
        if want != connection.mask and connection.sock.fileno() >= 0:
            change = self._poll.modify if connection.mask else self._poll.register
            change(connection.sock.fileno(), want)
            connection.mask = want

    def _adopt(self, connection: Connection) -> None:
        self._strangers.append(connection)
        self._by_fd[connection.sock.fileno()] = connection
        self._watch(connection)

    def _dismiss(self, now: float) -> None:
        for stranger in [c for c in self._strangers if now - c.since > _STRANGER_S]:
            self._drop(stranger, TimeoutError("did not prove itself"))

    def _read(self, connection: Connection) -> list[Arrival]:
        try:
            frames = connection.read()
        except OSError as error:
            self._drop(connection, error)
            return []
        except ProtocolError as error:
            party = connection.peer if connection.peer is not None else -1
            self._notices.append(Notice("protocol_error", {"party": party, "what": error.what}))
            self._drop(connection, error)
            return []
        if frames and connection.peer is None:
            connection.peer = frames[0][0].src
        return [Arrival(header, body, connection) for header, body in frames]

    # -- setting up and breaking down --------------------------------------------------------------------------------

    def _redial(self, now: float) -> float:
        """Dial whoever is due; returns when to look again."""
        again = float("inf")
        for peer, address in self._dial.items():
            if peer in self._active or any(c.peer == peer for c in self._strangers):
                continue
            at, gap = self._next_dial[peer]
            if now >= at:
                at = now + gap
                self._next_dial[peer] = (at, min(2 * gap, _REDIAL_S[1]))
                self._dial_one(peer, address, now)
            again = min(again, at)
        return again

    def _dial_one(self, peer: int, address: str, now: float) -> None:
        try:
            family, kind, proto, _, target = socket.getaddrinfo(*parse_address(address), type=socket.SOCK_STREAM)[0]
            connection = Connection(socket.socket(family, kind, proto), now, peer)
        except OSError as error:
            self._refuse(peer, now, error)
            return
        code = connection.sock.connect_ex(target)
        connection.connecting = True
        self._adopt(connection)
        if code not in (0, errno.EINPROGRESS):
            self._drop(connection, OSError(code, "cannot connect"))

    def _connected(self, connection: Connection, now: float) -> None:
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop(connection, OSError(code, "cannot connect"))
            return
        connection.connecting, connection.since = False, now
        self._watch(connection)
        if connection.peer is not None:
            self._resets.append(connection.peer)

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it went away before it was taken
        if len(self._strangers) >= _STRANGERS:
            self._drop(self._strangers[0], TimeoutError("too many unproven connections"))
        self._adopt(Connection(sock, now, None))

    def proven(self, src: int, path: object) -> None:
        assert isinstance(path, Connection)
        if self._active.get(src) is path or path not in self._strangers:
            return
        self._strangers.remove(path)
        before = self._active.pop(src, None)
        if before is not None:
            self._forget(before)
        path.peer = src
        self._active[src] = path
        self._met.add(src)
        self._refused.pop(src, None)
        if src in self._next_dial:
            self._next_dial[src] = (0.0, _REDIAL_S[0])
        else:
            self._resets.append(src)

    def _forget(self, connection: Connection) -> None:
        self._by_fd.pop(connection.sock.fileno(), None)
        self._dirty.discard(connection)
        connection.close()  # which takes it out of the poll

    def _drop(self, connection: Connection, error: Exception) -> None:
        self._forget(connection)
        if connection in self._strangers:
            self._strangers.remove(connection)
        peer = connection.peer
        if peer is None:
            return
        if self._active.get(peer) is connection:
            del self._active[peer]
            self._notices.append(Notice("link_down", {"peer": peer, "kind": self.kind, "why": str(error)}))
        self._refuse(peer, self._clock(), error)

    def _refuse(self, peer: int, now: float, error: Exception) -> None:
        """A process that closed is dead or starting anew; who listens sees no refusal, only that nobody comes back."""
        if isinstance(error, OSError) and peer in self._met:
            self._refused.setdefault(peer, now)

    # -- state -------------------------------------------------------------------------------------------------------

    def resets(self) -> list[int]:
        found, self._resets = self._resets, []
        return found

    def notices(self) -> list[Notice]:
        found, self._notices = self._notices, []
        return found

    def lost(self, dst: int) -> float:
        since = self._refused.get(dst)
        return 0.0 if since is None else self._clock() - since

    def away_s(self) -> float:
        return 0.0  # nothing stands between the parties

    def unconfirmed(self) -> bool:
        return bool(self._dirty)

    def pending(self) -> bool:
        return bool(self._dirty)

    def sever(self) -> None:
        """Fault injection: the network between the parties is gone, and stays gone."""
        self.close()
        self._poll = select.epoll()
        self._dial.clear()

    def close(self) -> None:
        for connection in (*self._active.values(), *self._strangers):
            self._forget(connection)
        self._active.clear()
        self._strangers.clear()
        self._poll.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _listen(listen: str) -> socket.socket:
    host, port = parse_address(listen)
    try:
        return socket.create_server((host, port), backlog=32, reuse_port=False)
    except OSError as error:
        raise UnreachableError(f"cannot listen on {listen}: {error.strerror}", "choose another port") from error
