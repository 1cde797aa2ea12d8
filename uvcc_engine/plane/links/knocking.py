"""The door of a listening port: a knock that only a peer can make.

Whoever dials says first, in 64 bytes, who it is, under a MAC with a key that only the two pinned identities can compute
(HKDF of their static X25519 agreement, bound to the subsession). Checking it costs one hash, so a stranger's junk meets
neither a signature nor a key agreement, and no frame of it is read. A nonce in the knock makes each one count once: who
recorded one cannot use it again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from uvcc_engine.plane import frame as fr

_KNOCK = struct.Struct("<4sBBBxQ16s")  # magic, version, source, destination, subsession, nonce; the MAC follows
_MAGIC: Final = b"UVCK"
_VERSION: Final = 1
_MAC_BYTES: Final = 32
KNOCK_BYTES: Final = _KNOCK.size + _MAC_BYTES
NONCES_KEPT: Final = 4096  # per peer; only knocks of the peer itself enter
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class KnockAuthenticator:
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
        if len(seen) > NONCES_KEPT:
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
