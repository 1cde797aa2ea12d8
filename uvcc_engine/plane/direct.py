"""Direct link: one TCP connection per pair of parties, for parties that can reach each other.

The party that has the other's address dials; if both could, the higher one does. A connection counts once its first
sealed frame has been proven, so a stranger who connects cannot displace a peer.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreachableError
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.endpoint import Outgoing, Policy
from uvcc_engine.plane.inbox import buffer
from uvcc_engine.plane.links import Arrival, Notice

_READ: Final = 1 << 17
_SOCKET_BUFFER: Final = 4 << 20
_BACKLOG_BYTES: Final = 8 << 20  # frames taken but not written yet, per peer
_IOV: Final = 64
_REDIAL_S: Final = (0.05, 1.0)
_STRANGERS: Final = 16
_STRANGER_S: Final = 15.0
_DEAD_PATH_MS: Final = 10_000


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"not an address: {text!r}", "write it like 10.0.0.2:7000")
    return host.strip("[]"), int(port)


class _Connection:
    """A socket with frames going out and frames coming in."""

    def __init__(self, sock: socket.socket, now: float, peer: int | None) -> None:
        self.sock = sock
        self.peer = peer
        self.since = now
        self.connecting = False
        self.out: deque[Buffer] = deque()
        self.out_bytes = 0
        self._buffer = bytearray(_READ)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._header: fr.Header | None = None
        self._body: memoryview | None = None  # of a frame larger than what is buffered
        self._filled = 0
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PATH_MS)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)

    def flush(self) -> None:
        """Write what the socket takes. Raises OSError if the connection is broken."""
        while self.out:
            try:
                sent = self.sock.sendmsg([self.out[i] for i in range(min(len(self.out), _IOV))])
            except BlockingIOError:
                return
            self.out_bytes -= sent
            while sent:
                first = self.out[0]
                if sent < len(first):
                    self.out[0] = memoryview(first)[sent:]
                    return
                sent -= len(first)
                self.out.popleft()

    def read(self) -> list[tuple[fr.Header, Buffer]]:
        """Whole frames that can be had without waiting.

        Raises OSError if the connection is broken or closed, ProtocolError if it does not carry frames.
        """
        found: list[tuple[fr.Header, Buffer]] = []
        while not found:
            try:
                if self._body is not None:
                    count = self.sock.recv_into(self._body[self._filled :])
                    self._filled += count
                else:
                    count = self.sock.recv_into(self._view[self._end :])
                    self._end += count
            except BlockingIOError:
                break
            if count == 0:
                raise ConnectionResetError("closed by the other end")
            self._parse(found)
        return found

    def _parse(self, found: list[tuple[fr.Header, Buffer]]) -> None:
        if self._body is not None and self._header is not None:
            if self._filled < len(self._body):
                return
            found.append((self._header, self._body))
            self._header = self._body = None
        while True:
            if self._header is None:
                if self._end - self._start < fr.HEADER_BYTES:
                    break
                self._header = fr.read_header(self._view[self._start : self._start + fr.HEADER_BYTES])
                self._start += fr.HEADER_BYTES
            header, have = self._header, self._end - self._start
            if have >= header.length:
                found.append((header, bytes(self._view[self._start : self._start + header.length])))
                self._start += header.length
                self._header = None
                continue
            if header.length > _READ // 2:
                self._body = buffer(header.length)
                self._body[:have] = self._view[self._start : self._end]
                self._filled, self._start = have, self._end
            break
        left = self._end - self._start
        if self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left

    def close(self) -> None:
        self.sock.close()


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
    ) -> None:
        """``peers``: host:port of the parties that can be dialled. Raises UnreachableError if it cannot listen."""
        self.policy = policy or Policy()
        self._clock = clock
        self._dial = {p: a for p, a in peers.items() if p != party and a and (not listen or party > p)}
        self._active: dict[int, _Connection] = {}
        self._strangers: list[_Connection] = []
        self._next_dial = {p: (0.0, _REDIAL_S[0]) for p in self._dial}
        self._refused: dict[int, float] = {}
        self._met: set[int] = set()
        self._resets: list[int] = []
        self._notices: list[Notice] = []
        self._listener: socket.socket | None = None
        if listen:
            self._listener = _listen(listen)

    @property
    def address(self) -> str:
        """The bound ``host:port`` ("" if not listening)."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def ready(self, dst: int) -> bool:
        connection = self._route(dst)
        return connection is not None and connection.out_bytes < _BACKLOG_BYTES

    def _route(self, dst: int) -> _Connection | None:
        found = self._active.get(dst)
        if found is None:
            found = next((c for c in reversed(self._strangers) if c.peer == dst), None)
        return None if found is None or found.connecting else found

    def send(self, dst: int, out: Outgoing) -> None:
        connection = self._route(dst)
        if connection is not None:
            connection.out.extend(out.buffers)
            connection.out_bytes += out.size

    def flush(self) -> None:
        for connection in (*self._active.values(), *self._strangers):
            if connection.out and not connection.connecting:
                try:
                    connection.flush()
                except OSError as error:
                    self._drop(connection, error)

    def exchange(self, wait: float, src: int | None) -> list[Arrival]:
        self.flush()
        first = self._active.get(src) if src is not None else None
        arrivals = self._read(first) if first is not None else []
        if arrivals:
            return arrivals
        now = self._clock()
        self._redial(now)
        for connection in self._poll(wait, now):
            arrivals += self._read(connection)
        return arrivals

    def _poll(self, wait: float, now: float) -> list[_Connection]:
        poller = select.poll()
        by_fd: dict[int, _Connection] = {}
        for connection in (*self._active.values(), *self._strangers):
            fd = connection.sock.fileno()
            by_fd[fd] = connection
            poller.register(fd, select.POLLIN | (select.POLLOUT if connection.out or connection.connecting else 0))
        if self._listener is not None:
            poller.register(self._listener.fileno(), select.POLLIN)
        due = min((at for at, _ in self._next_dial.values()), default=now + wait)
        timeout = max(0.0, min(wait, due - now)) if self._dialling() else wait
        readable = []
        for fd, event in poller.poll(timeout * 1000):
            found = by_fd.get(fd)
            if found is None:
                self._accept(now)
            elif found.connecting:
                self._connected(found, now)
            else:
                if event & select.POLLOUT:
                    self.flush()
                if event & ~select.POLLOUT:
                    readable.append(found)
        for stranger in [c for c in self._strangers if now - c.since > _STRANGER_S]:
            self._drop(stranger, TimeoutError("did not prove itself"))
        return readable

    def _read(self, connection: _Connection) -> list[Arrival]:
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

    def _dialling(self) -> bool:
        return any(p not in self._active for p in self._dial)

    def _redial(self, now: float) -> None:
        for peer, address in self._dial.items():
            at, gap = self._next_dial[peer]
            if now < at or peer in self._active or any(c.peer == peer for c in self._strangers):
                continue
            self._next_dial[peer] = (now + gap, min(2 * gap, _REDIAL_S[1]))
            try:
                family, kind, proto, _, target = socket.getaddrinfo(*parse_address(address), type=socket.SOCK_STREAM)[0]
                connection = _Connection(socket.socket(family, kind, proto), now, peer)
            except OSError as error:
                self._refuse(peer, now, error)
                continue
            code = connection.sock.connect_ex(target)
            connection.connecting = True
            self._strangers.append(connection)
            if code not in (0, errno.EINPROGRESS):
                self._drop(connection, OSError(code, "cannot connect"))

    def _connected(self, connection: _Connection, now: float) -> None:
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop(connection, OSError(code, "cannot connect"))
            return
        connection.connecting, connection.since = False, now
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
        self._strangers.append(_Connection(sock, now, None))

    def proven(self, src: int, path: object) -> None:
        assert isinstance(path, _Connection)
        if self._active.get(src) is path or path not in self._strangers:
            return
        self._strangers.remove(path)
        before = self._active.pop(src, None)
        if before is not None:
            before.close()
        path.peer = src
        self._active[src] = path
        self._met.add(src)
        self._refused.pop(src, None)
        if src in self._next_dial:
            self._next_dial[src] = (0.0, _REDIAL_S[0])
        else:
            self._resets.append(src)

    def _drop(self, connection: _Connection, error: Exception) -> None:
        connection.close()
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
        if isinstance(error, OSError) and peer in self._met and peer in self._dial:
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

    def pending(self) -> bool:
        return any(c.out for c in self._active.values())

    def close(self) -> None:
        for connection in (*self._active.values(), *self._strangers):
            connection.close()
        self._active.clear()
        self._strangers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _listen(listen: str) -> socket.socket:
    host, port = parse_address(listen)
    try:
        return socket.create_server((host, port), backlog=32, reuse_port=False)
    except OSError as error:
        raise UnreachableError(f"cannot listen on {listen}: {error.strerror}", "choose another port") from error
