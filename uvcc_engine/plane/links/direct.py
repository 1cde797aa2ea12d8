"""Direct link: one TCP connection per pair of parties, for parties that can reach each other.

The party that has the other's address dials; if both could, the higher one does. Who dials knocks first (see ``door``),
so a stranger's bytes are never read as frames. A connection counts once its first sealed frame has been proven, so
nobody who recorded a knock can displace a peer either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
import weakref
from collections.abc import Callable
from typing import Final

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane.links.addresses import listening, parse_address
from uvcc_engine.plane.links.connection import Connection
from uvcc_engine.plane.links.knocking import KnockAuthenticator, Stranger
from uvcc_engine.plane.links.link import Arrival, no_work
from uvcc_engine.plane.timing import LinkTiming, Outgoing
from uvcc_engine.relay.lobby import Lobby, Rejections

_REFILL_BYTES: Final = 256 << 10  # what is left of a full backlog when its filler is called back
_REDIAL_S: Final = (0.05, 1.0)
_GUESTS: Final = 4  # connections of one peer that have knocked and not proven themselves
_GUEST_S: Final = 15.0
_SLOW_S: Final = 3.0  # for a host to answer a connection: it is repeated after one second, and again after two
_ACCEPTS: Final = 64  # at a time, so that a flood does not keep the peers waiting
_BRISK_S: Final = 200e-6  # an answer this soon: stay awake for the next one
_GLANCES: Final = 200  # about 200 us
_NUDGES: Final = 1 << 16  # as many as a pipe holds
_NO_ANSWER: Final = "no answer"  # as of a firewall that drops what it does not let through
_yield: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: time.sleep(0))


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
        policy: LinkTiming | None = None,
        *,
        spins: bool = True,
        door: KnockAuthenticator | None = None,
    ) -> None:
        """``peers``: host:port of the parties that can be dialled. ``spins``: ask a few times before sleeping, where
        answers come at once; not for processes that outnumber the processors. ``door``: who is let in; without one
        nobody is, and nobody can be dialled. Raises UnreachableError if it cannot listen."""
        self.policy = policy or LinkTiming()
        self._clock = clock
        self._door = door
        dialled = peers if door is not None else {}
        self._dial = {p: a for p, a in dialled.items() if p != party and a and (not listen or party > p)}
        self._active: dict[int, Connection] = {}
        self._guests: list[Connection] = []  # dialled, or let in; not proven
        self._lobby: Lobby[Stranger] = Lobby()
        self._rejections = Rejections()
        self._next_dial = {p: (0.0, _REDIAL_S[0]) for p in self._dial}
        self._refused: dict[int, float] = {}
        self._unresolved: set[int] = set()  # peers whose address leads nowhere, as was told
        self._failed: dict[int, str] = {}  # why the last try to reach a peer came to nothing
        self._met: set[int] = set()
        self._resets: list[int] = []
        self._notices: list[Notice] = []
        self._poll = selectors.DefaultSelector()
        self._wake, self._nudger = os.pipe()  # an eventfd would do with one, but only Linux has it
        for end in (self._wake, self._nudger):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)  # not at close: another thread may still wake
        self._nudged = False
        self._poll.register(self._wake, selectors.EVENT_READ)
        self._spins = spins
        self._brisk = False  # the last wait was very short
        self._by_fd: dict[int, Connection] = {}
        self._dirty: set[Connection] = set()  # with something to write
        self._listener: socket.socket | None = None
        if listen:
            self._listener = listening(listen)
            self._poll.register(self._listener.fileno(), selectors.EVENT_READ)

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
            return any(c.peer == dst and not c.connecting for c in self._guests)
        return found.room

    def send(self, dst: int, out: Outgoing) -> None:
        found = self._active.get(dst)
        # until one has proven itself, the handshake goes to everybody who says to be this peer
        routes = [found] if found else [c for c in self._guests if c.peer == dst and not c.connecting]
        for connection in routes:
            connection.out.add(out.buffers)
            self._dirty.add(connection)
            if not connection.room:
                self._flush(connection)

    def wake(self) -> None:
        """See ``api.Nudged``."""
        with contextlib.suppress(BlockingIOError):  # full of nudges that were not looked at yet
            os.write(self._nudger, b"!")

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

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        if self._dirty:
            self.flush()
        first = self._active.get(src) if src is not None else None
        if first is not None and (arrivals := self._read(first)):
            return arrivals
        end = self._clock() + wait
        meanwhile()
        now = self._clock()
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
        if self._guests or self._lobby:
            self._dismiss(now)
            until = min(until, now + 1.0)
        self._notices += self._rejections.due(now)
        arrivals: list[Arrival] = []
        for fd, event in self._events(max(0.0, until - now)):
            found = self._by_fd.get(fd)
            if fd == self._wake:
                os.read(fd, _NUDGES)
                self._nudged = True
            elif found is None:
                stranger = self._lobby.by_fd.get(fd)
                self._greet(stranger, now) if stranger is not None else self._accept(fd, now)
            elif found.connecting:
                self._connected(found, now)
            else:
                if event & selectors.EVENT_WRITE:
                    self.flush()
                if event & selectors.EVENT_READ:
                    arrivals += self._read(found)
        return arrivals

    def _events(self, wait: float) -> list[tuple[int, int]]:
        """What the poll has within ``wait`` seconds.

        While answers come at once it is asked a few times before it may sleep, for to be woken takes longer than such
        an answer; in between whoever else wants this processor gets it.
        """
        if self._brisk and wait > 0:
            for _ in range(_GLANCES):
                if found := self._poll.select(0):
                    return [(key.fd, event) for key, event in found]
                _yield()
        begun = self._clock()
        found = self._poll.select(wait)
        self._brisk = self._spins and bool(found) and self._clock() - begun < _BRISK_S
        return [(key.fd, event) for key, event in found]

    def _watch(self, connection: Connection) -> None:
        """Tell the poll what we want to know of a connection."""
        writes = connection.out or connection.connecting
        want = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        if want != connection.mask and connection.sock.fileno() >= 0:
            change = self._poll.modify if connection.mask else self._poll.register
            change(connection.sock.fileno(), want)
            connection.mask = want

    def _adopt(self, connection: Connection) -> None:
        """Look at a new connection from now on. The poll knows no socket of this number: every one leaves the poll
        before it is closed, and only then can the system give its number to another."""
        self._guests.append(connection)
        self._by_fd[connection.sock.fileno()] = connection
        self._watch(connection)

    def _dismiss(self, now: float) -> None:
        for guest in [c for c in self._guests if now - c.since > _GUEST_S]:
            self._drop(guest, TimeoutError(_NO_ANSWER if guest.connecting else "did not prove itself"))
        for stranger in self._lobby.overdue(now):
            self._turn_away(stranger, "silent", now)

    def _read(self, connection: Connection) -> list[Arrival]:
        try:
            frames = connection.read()
        except OSError as error:
            self._drop(connection, error)
            return []
        except ProtocolError as error:
            if self._active.get(connection.peer) is connection:
                self._notices.append(Notice("protocol_error", {"party": connection.peer, "what": error.what}))
            else:  # whoever answers at the peer's address is not the peer yet
                self._reject(connection.address, error.what, self._clock())
            self._drop(connection, error)
            return []
        return [Arrival(header, body, connection) for header, body in frames]

    # -- setting up and breaking down --------------------------------------------------------------------------------

    def _redial(self, now: float) -> float:
        """Dial whoever is due; returns when to look again."""
        again = float("inf")
        for peer, address in self._dial.items():
            if peer in self._active or any(c.peer == peer for c in self._guests):
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
            connection = Connection(socket.socket(family, kind, proto), now, peer, address)
        except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
            why = f"cannot dial {address}: {getattr(error, 'strerror', None) or error}"
            self._failed[peer] = why
            if peer not in self._unresolved:
                self._unresolved.add(peer)
                self._notices.append(Notice("link_down", {"peer": peer, "kind": self.kind, "why": why}))
            return
        self._unresolved.discard(peer)
        code = connection.sock.connect_ex(target)
        connection.connecting = True
        self._adopt(connection)
        if code not in (0, errno.EINPROGRESS):
            self._drop(connection, OSError(code, os.strerror(code)))

    def _connected(self, connection: Connection, now: float) -> None:
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop(connection, OSError(code, os.strerror(code)))
            return
        assert self._door is not None
        connection.connecting, connection.since = False, now
        connection.out.add([self._door.knock(connection.peer)])
        self._dirty.add(connection)
        self._resets.append(connection.peer)
        self._flush(connection)

    def _accept(self, fd: int, now: float) -> None:
        """Take who waits at the listening socket. What many of them have to say is there already."""
        if self._listener is None or fd != self._listener.fileno():
            return  # of a connection that was closed while the events of this look were handled
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    for stranger in self._lobby:
                        self._turn_away(stranger, "no room", now)
                    return
                continue  # it went away before it was taken
            stranger = Stranger(sock, str(address[0]), now)
            if (leaves := self._lobby.enter(stranger)) is not None:
                self._turn_away(leaves, "silent", now)
            self._poll.register(stranger.fd, selectors.EVENT_READ)
            self._greet(stranger, now)

    def _greet(self, stranger: Stranger, now: float) -> None:
        """Read a stranger's knock and let the peer in that it proves."""
        try:
            if not stranger.read():
                return
        except OSError:
            self._turn_away(stranger, "left without a knock", now)
            return
        peer, why = self._door.admit(stranger.have) if self._door is not None else (-1, "nobody is expected")
        if why:
            self._turn_away(stranger, why, now)
            return
        try:
            guest = Connection(stranger.sock, now, peer, stranger.address)
        except OSError:  # macOS sets no options of a socket whose other end has gone
            self._turn_away(stranger, "left behind its knock", now)
            return
        self._lobby.leave(stranger)
        self._poll.unregister(stranger.fd)
        mine = [c for c in self._guests if c.peer == peer and not c.connecting]
        if len(mine) >= _GUESTS:
            self._drop(mine[0], TimeoutError("too many unproven connections"))
        self._adopt(guest)

    def _turn_away(self, stranger: Stranger, why: str, now: float) -> None:
        self._lobby.leave(stranger)
        self._poll.unregister(stranger.fd)
        stranger.close()
        self._reject(stranger.address, why, now)

    def _reject(self, address: str, why: str, now: float) -> None:
        if (notice := self._rejections.note(address, why, now)) is not None:
            self._notices.append(notice)

    def proven(self, src: int, path: object) -> None:
        assert isinstance(path, Connection)
        if self._active.get(src) is path or path not in self._guests or path.peer != src:
            return
        self._guests.remove(path)
        before = self._active.pop(src, None)
        if before is not None:
            self._forget(before)
        self._active[src] = path
        self._met.add(src)
        self._refused.pop(src, None)
        self._failed.pop(src, None)
        if src in self._next_dial:
            self._next_dial[src] = (0.0, _REDIAL_S[0])
        else:
            self._resets.append(src)

    def _forget(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        self._by_fd.pop(fd, None)
        self._dirty.discard(connection)
        if connection.mask:
            connection.mask = 0
            self._poll.unregister(fd)
        connection.close()

    def _drop(self, connection: Connection, error: Exception) -> None:
        self._forget(connection)
        if connection in self._guests:
            self._guests.remove(connection)
        peer = connection.peer
        if peer in self._dial:
            said = getattr(error, "strerror", None) or str(error)
            self._failed[peer] = f"cannot reach {connection.address}: {said}" if connection.connecting else said
        if self._active.get(peer) is connection:
            del self._active[peer]
            self._notices.append(Notice("link_down", {"peer": peer, "kind": self.kind, "why": str(error)}))
        self._refuse(peer, self._clock(), error)

    def _refuse(self, peer: int, now: float, error: Exception) -> None:
        """A process that closed is dead or starting anew; who listens sees no refusal, only that nobody comes back.

        A connection that timed out says nothing of the process: it may stand still, and is then waited for as one that
        is silent.
        """
        if isinstance(error, ConnectionError) and peer in self._met:
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

    def trouble(self, dst: int) -> str:
        """Who dials knows how far it came; who is dialled, that nobody came."""
        if dst in self._active:
            return ""
        if dst not in self._dial:
            awaited = self._listener is not None and dst not in self._met
            return f"it has not connected to port {self.address.rpartition(':')[2]} here" if awaited else ""
        trying = next((c for c in self._guests if c.peer == dst and c.connecting), None)
        slow = trying is not None and self._clock() - trying.since > _SLOW_S
        return f"cannot reach {self._dial[dst]}: {_NO_ANSWER}" if slow else self._failed.get(dst, "")

    def unconfirmed(self) -> bool:
        return bool(self._dirty)

    def pending(self) -> bool:
        return bool(self._dirty)

    def sever(self) -> None:
        """Fault injection: the network between the parties is gone, and stays gone."""
        self.close()
        self._poll = selectors.DefaultSelector()
        self._dial.clear()

    def close(self) -> None:
        for connection in (*self._active.values(), *self._guests):
            self._forget(connection)
        for stranger in self._lobby:
            self._lobby.leave(stranger)
            stranger.close()
        self._active.clear()
        self._guests.clear()
        self._notices += self._rejections.due(float("inf"))
        self._poll.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
