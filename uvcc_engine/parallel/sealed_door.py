"""The one port that a rank listens on for its sister ranks: who proves itself is let in, everybody else is turned away.

A stranger gets 32 random bytes and, for a few seconds, one of a bounded number of places in a lobby; nothing of it is
parsed but a knock of fixed length (see ``sealed_stream``). A connection that was proven is handed to whoever it is for:
the party's store, or a group that waits for its members.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.parallel import sealed_stream
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.sealed_stream import CHALLENGE_BYTES, KNOCK_BYTES, SealedStream
from uvcc_engine.relay.lobby import Lobby, Rejections

OnEvent = Callable[[str, dict[str, Any]], None]
STORE: Final = b"store"
_GROUP: Final = struct.Struct("<5s8s")
_GROUP_WORD: Final = b"group"
_PROOF_S: Final = 10.0
_PROVING: Final = 256  # connections that knocked and still prove themselves: only sister ranks can be among them
_LOOK_S: Final = 1.0
_NO_LINGER: Final = struct.pack("ii", 1, 0)


def of_group(meeting: bytes) -> bytes:
    """What a connection for the group that meets as ``meeting`` (8 bytes) says it is for."""
    return _GROUP.pack(_GROUP_WORD, meeting)


class _Knocking:
    """A connection that has not knocked yet."""

    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        sock.setblocking(False)
        self.sock, self.address, self.since = sock, address, now
        self.fd = sock.fileno()
        self.challenge, self.have = os.urandom(CHALLENGE_BYTES), b""

    def turn_away(self) -> None:
        """Leaves nothing behind in the kernel either."""
        with contextlib.suppress(OSError):  # the other end was faster
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.sock.close()


class Door:
    """Listens for the ranks of this party until it is closed. Its events may come from another thread."""

    def __init__(self, listener: socket.socket, keys: PartyKeys, rank: int, on_event: OnEvent) -> None:
        """``rank``: of this process. The door owns ``listener``."""
        self.port = int(listener.getsockname()[1])
        self._listener, self._keys, self._rank, self._on_event = listener, keys, rank, on_event
        self._lobby: Lobby[_Knocking] = Lobby()
        self._rejections = Rejections()
        self._arrived: dict[tuple[bytes, int], SealedStream] = {}
        self._news = threading.Condition()
        self._store: Callable[[SealedStream], None] | None = None
        self._proving = threading.BoundedSemaphore(_PROVING)
        self._closed = False
        self._wake, self._nudge = socket.socketpair()
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="party door", daemon=True)
        self._thread.start()

    def serve_store(self, serve: Callable[[SealedStream], None]) -> None:
        """Hand connections for the store to ``serve``, each in a thread of its own."""
        self._store = serve

    def take(self, meeting: bytes, rank: int, limit_s: float) -> SealedStream:
        """The connection of ``rank`` for a group. Raises OSError if it does not come in time, or the door is closed."""
        with self._news:
            if not self._news.wait_for(lambda: (meeting, rank) in self._arrived or self._closed, limit_s):
                raise TimeoutError(f"rank {rank} does not come")
            if self._closed:
                raise ConnectionError("the door of this rank is closed")
            return self._arrived.pop((meeting, rank))

    def close(self) -> None:
        """Turn away whoever waits. Harmless twice."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            left, self._arrived = list(self._arrived.values()), {}
            self._news.notify_all()
        self._nudge.close()
        self._thread.join(_PROOF_S)
        for stream in left:
            stream.close()

    # -- its own thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with selectors.DefaultSelector() as poll, self._listener, self._wake:
            poll.register(self._listener, selectors.EVENT_READ)
            poll.register(self._wake, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in poll.select(_LOOK_S):
                    if key.fileobj is self._listener:
                        self._accept(poll)
                    elif (one := self._lobby.by_fd.get(key.fd)) is not None:
                        self._read(poll, one)
                now = time.monotonic()
                for one in self._lobby.overdue(now):
                    self._turn_away(poll, one, "silent")
                self._say(self._rejections.due(now))
            for one in self._lobby:
                one.turn_away()
        self._say(self._rejections.due(float("inf")))

    def _accept(self, poll: selectors.BaseSelector) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                for one in self._lobby:
                    self._turn_away(poll, one, "no room")
            return
        one = _Knocking(sock, str(address[0]), time.monotonic())
        if (leaves := self._lobby.enter(one)) is not None:
            poll.unregister(leaves.sock)
            leaves.turn_away()
            self._reject(leaves.address, "silent")
        poll.register(sock, selectors.EVENT_READ)
        try:
            sock.send(one.challenge)
        except OSError:
            self._turn_away(poll, one, "left without a knock")

    def _read(self, poll: selectors.BaseSelector, one: _Knocking) -> None:
        try:
            data = one.sock.recv(KNOCK_BYTES - len(one.have))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        one.have += data
        if not data:
            self._turn_away(poll, one, "left without a knock")
        elif len(one.have) == KNOCK_BYTES:
            rank, why = sealed_stream.knocker(self._keys, self._rank, one.challenge, one.have)
            if not why and not self._proving.acquire(blocking=False):
                why = "no room"
            if why:
                self._turn_away(poll, one, why)
                return
            self._lobby.leave(one)
            poll.unregister(one.sock)
            threading.Thread(target=self._prove, args=(one, rank), name="party proof", daemon=True).start()

    def _prove(self, one: _Knocking, rank: int) -> None:
        """In a thread of its own, for it waits for the other side; only sister ranks come so far."""
        try:
            args = (self._keys, rank, one.challenge, one.have, _PROOF_S)
            stream, about = sealed_stream.welcome(one.sock, *args)
        except OSError as error:
            one.turn_away()
            self._reject(one.address, f"rank {rank} did not prove itself: {error}")
            return
        finally:
            self._proving.release()
        if about == STORE and self._store is not None:
            self._store(stream)
        elif len(about) == _GROUP.size and about.startswith(_GROUP_WORD):
            self._hand_over(_GROUP.unpack(about)[1], rank, stream)
        else:
            stream.close()
            self._reject(one.address, f"rank {rank} wants nothing that is here")

    def _hand_over(self, meeting: bytes, rank: int, stream: SealedStream) -> None:
        with self._news:
            old = self._arrived.pop((meeting, rank), None)
            if not self._closed:
                self._arrived[meeting, rank] = stream
                self._news.notify_all()
        if self._closed:
            stream.close()
        if old is not None:
            old.close()

    def _turn_away(self, poll: selectors.BaseSelector, one: _Knocking, why: str) -> None:
        self._lobby.leave(one)
        poll.unregister(one.sock)
        one.turn_away()
        self._reject(one.address, why)

    def _reject(self, address: str, why: str) -> None:
        with self._news:
            notice = self._rejections.note(address, why, time.monotonic())
        self._say([notice] if notice is not None else [])

    def _say(self, notices: list[Notice]) -> None:
        for notice in notices:
            self._on_event(notice.event, dict(notice.fields))
