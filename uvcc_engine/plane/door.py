"""The door of a listening port: a knock that only a peer can make, little room for strangers, few lines about them.

Whoever dials says first, in 64 bytes, who it is, under a MAC with a key that only the two pinned identities can compute
(HKDF of their static X25519 agreement, bound to the subsession). Checking it costs one hash, so a stranger's junk meets
neither a signature nor a key agreement, and no frame of it is read. A nonce in the knock makes each one count once: who
recorded one cannot use it again.

A peer may share its address with a stranger (one host, one gateway), so nobody is refused for an address: an address
has a share of the room, in which the oldest silent connection makes way for the newest.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.links import Notice

_KNOCK = struct.Struct("<4sBBBxQ16s")  # magic, version, source, destination, subsession, nonce; the MAC follows
_MAGIC: Final = b"UVCK"
_VERSION: Final = 1
_MAC_BYTES: Final = 32
KNOCK_BYTES: Final = _KNOCK.size + _MAC_BYTES
_NONCES_KEPT: Final = 4096  # per peer; only knocks of the peer itself enter
SILENT_S: Final = 5.0  # for the knock to be complete
ROOM: Final = 256  # silent connections in all
SHARE: Final = 128  # of them, of one address
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Door:
    """Makes this party's knocks and checks those of its peers in one subsession."""

    def __init__(self, party: int, sid_sub: bytes, key: Callable[[int], bytes]) -> None:
        """``key``: the 32 bytes shared with a peer, for this purpose alone; KeyError for who is no peer."""
        self._party, self._sid = party, fr.sid64(sid_sub)
        self._key_of = key
        self._keys: dict[int, bytes] = {}
        self._seen: dict[int, OrderedDict[bytes, None]] = {}

    def _key(self, peer: int) -> bytes | None:
        if peer not in self._keys:
            try:
                self._keys[peer] = self._key_of(peer)
            except KeyError:
                return None
        return self._keys[peer]

    def knock(self, peer: int) -> bytes:
        """What this party says first on a connection to ``peer``."""
        key = self._key(peer)
        assert key is not None
        head = _KNOCK.pack(_MAGIC, _VERSION, self._party, peer, self._sid, os.urandom(16))
        return head + _mac(key, head)

    def admit(self, knock: bytes) -> tuple[int, str]:
        """(who knocks, ""), or (-1, why nobody is let in). A knock is good once."""
        magic, version, src, dst, sid, nonce = _KNOCK.unpack_from(knock)
        if magic != _MAGIC or version != _VERSION:
            return -1, "not a knock"
        if dst != self._party or sid != self._sid or src == self._party:
            return -1, "for another worker"
        key = self._key(src)
        if key is None or not hmac.compare_digest(_mac(key, knock[: _KNOCK.size]), knock[_KNOCK.size :]):
            return -1, "not by a peer"
        seen = self._seen.setdefault(src, OrderedDict())
        if nonce in seen:
            return -1, "a knock that was used before"
        seen[nonce] = None
        if len(seen) > _NONCES_KEPT:
            seen.popitem(last=False)
        return src, ""


def _mac(key: bytes, head: bytes) -> bytes:
    return hmac.digest(key, b"UVCC_PLANE_KNOCK_V1" + head, hashlib.sha256)


class Stranger:
    """A connection that has not knocked yet: a socket and a few bytes."""

    __slots__ = ("address", "fd", "have", "since", "sock")

    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        sock.setblocking(False)
        self.sock, self.address, self.since = sock, address, now
        self.fd = sock.fileno()
        self.have = b""

    def read(self) -> bool:
        """Take what has come of the knock; True once it is whole. Raises OSError if the connection ended."""
        try:
            data = self.sock.recv(KNOCK_BYTES - len(self.have))
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("closed before it knocked")
        self.have += data
        return len(self.have) == KNOCK_BYTES

    def close(self) -> None:
        """Leaves nothing behind in the kernel either."""
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        except OSError:
            pass  # the other end was faster
        self.sock.close()


class _Visitor(Protocol):
    address: str
    since: float

    @property
    def fd(self) -> int: ...


_V = TypeVar("_V", bound=_Visitor)


class Lobby(Generic[_V]):
    """The strangers, as many as there is room for."""

    def __init__(self, room: int = ROOM, share: int = SHARE) -> None:
        self._room, self._share = room, share
        self._of: dict[str, OrderedDict[int, _V]] = {}  # by address, the oldest first
        self.by_fd: dict[int, _V] = {}

    def enter(self, visitor: _V) -> _V | None:
        """Let one in; returns who has to leave for it, if anybody."""
        mine = self._of.get(visitor.address) or OrderedDict[int, _V]()
        leaves = None
        if len(mine) >= self._share:
            leaves = next(iter(mine.values()))
        elif len(self.by_fd) >= self._room:
            leaves = next(iter(max(self._of.values(), key=len).values()))
        if leaves is not None:
            self.leave(leaves)
        self._of.setdefault(visitor.address, OrderedDict())[visitor.fd] = visitor
        self.by_fd[visitor.fd] = visitor
        return leaves

    def leave(self, visitor: _V) -> None:
        if self.by_fd.get(visitor.fd) is not visitor:
            return
        del self.by_fd[visitor.fd]
        mine = self._of[visitor.address]
        del mine[visitor.fd]
        if not mine:
            del self._of[visitor.address]

    def overdue(self, now: float, patience_s: float = SILENT_S) -> list[_V]:
        """Who has been here for too long."""
        return [v for v in self.by_fd.values() if now - v.since > patience_s]

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[_V]:
        return iter(tuple(self.by_fd.values()))


class Rejections:
    """Counts who was turned away and says so sparingly: at once for the first, then once a minute for all others."""

    EVERY_S: Final = 60.0
    LINES: Final = 4  # addresses named a minute
    KEPT: Final = 1024  # addresses told apart in that time

    def __init__(self) -> None:
        self._since: float | None = None
        self._counts: dict[str, Counter[str]] = {}
        self.total = 0

    def note(self, address: str, why: str, now: float) -> Notice | None:
        """Count one; the first after a quiet time is worth a line."""
        self.total += 1
        if self._since is None:
            self._since = now
            return Notice("connections_rejected", {"address": address, "count": 1, "why": why})
        if address not in self._counts and len(self._counts) >= self.KEPT:
            address = "others"
        self._counts.setdefault(address, Counter())[why] += 1
        return None

    def due(self, now: float) -> list[Notice]:
        """What there is to say, if the time has come (``now`` infinite: the end)."""
        if self._since is None or now - self._since < self.EVERY_S:
            return []
        counts, self._counts = self._counts, {}
        self._since = now if counts else None
        ranked = sorted(((sum(c.values()), address, c) for address, c in counts.items()), key=lambda r: (-r[0], r[1]))
        named = [_line(address, why) for _, address, why in ranked[: self.LINES]]
        if rest := ranked[self.LINES :]:
            named.append(_line(f"{len(rest)} other addresses", sum((why for _, _, why in rest), Counter())))
        return named


def _line(address: str, why: Counter[str]) -> Notice:
    reasons = ", ".join(f"{n} {what}" for what, n in why.most_common())
    fields = {"address": address, "count": sum(why.values()), "why": reasons, "within_s": int(Rejections.EVERY_S)}
    return Notice("connections_rejected", fields)
