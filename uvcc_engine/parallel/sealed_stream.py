"""A connection between two ranks of one party whose bytes nobody on the way can read, change or make.

Who listens says 32 random bytes; who dials answers with a knock: its rank, the rank it wants, and a MAC over both and
those bytes under a key that only the two pods can compute (the plane's pair secret, bound to the job and the party). So
a knock counts for one connection only, and whoever cannot make one is dropped before anything else of it is read. Then
follows the plane's handshake (``plane.secure_session``), bound to this very knock, and records of AES-256-GCM whose
numbers are counted, so that none can be left out, repeated or moved.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Final

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.inbox import buffer
from uvcc_engine.plane.secure_session import Handshake, SecureSession
from uvcc_engine.transcript.signing.identity import PublicIdentity

CHALLENGE_BYTES: Final = 32
_KNOCK: Final = struct.Struct("<4sB3xII16s")  # magic, version, source rank, destination rank, nonce; the MAC follows
_MAGIC: Final = b"UVCP"
_VERSION: Final = 1
KNOCK_BYTES: Final = _KNOCK.size + 32
_RECORD: Final = struct.Struct("<IIQ")  # plain bytes, generation of the key, number; the seal covers it
RECORD_BYTES: Final = 1 << 20
_TOGETHER: Final = 32 << 10  # a message up to this size shares its record with its head
REKEY_RECORDS: Final = 1 << 20
_MOST_FRAME: Final = 8 << 10  # of a handshake
_NONCE_STREAM: Final = 1
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6))


class StrangerError(ConnectionError):
    """The other end is not the rank of this party that it should be, or does not take this one for one."""


class SealedStream:
    """An established connection to rank ``rank``: bytes in order. One thread may write while another reads."""

    def __init__(self, sock: socket.socket, session: SecureSession, rank: int) -> None:
        self.sock, self.rank, self.rekey_records = sock, rank, REKEY_RECORDS
        self._session = session
        self._sent = self._received = 0
        self._sealed = buffer(RECORD_BYTES + fr.TAG_BYTES)
        self._plain = memoryview(b"")  # opened and not asked for yet
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)

    def records(self, head: bytes, data: memoryview) -> Iterator[memoryview]:
        """``head`` and ``data`` as they go on the wire, in pieces of at most a MiB. Whoever makes them sends them."""
        if len(data) <= _TOGETHER:
            yield self._seal(head + bytes(data))
            return
        yield self._seal(head)
        for at in range(0, len(data), RECORD_BYTES):
            yield self._seal(data[at : at + RECORD_BYTES])

    @property
    def generation(self) -> int:
        """How often the key was changed that the next record is sealed with."""
        return self._session.generation

    def _seal(self, plain: bytes | memoryview) -> memoryview:
        if self._sent and self._sent % self.rekey_records == 0:
            self._session.rekey()
        generation, size = self._session.generation, _RECORD.size
        head = _RECORD.pack(len(plain), generation, self._sent)
        out = buffer(size + len(plain) + fr.TAG_BYTES)
        out[:size] = head
        self._session.seal_into(generation, fr.nonce(_NONCE_STREAM, self._sent), plain, head, out[size:])
        self._sent += 1
        return out

    def write(self, head: bytes, data: bytes) -> None:
        """Send, and wait until the socket has taken it. Raises OSError."""
        for record in self.records(head, memoryview(data)):
            self.sock.sendall(record)

    def fill(self, into: memoryview) -> None:
        """Read exactly ``len(into)`` bytes.

        Raises OSError, BlockingIOError or TimeoutError if they do not come in time, ConnectionError where the other
        end closed, StrangerError for a record that it did not make.
        """
        done = 0
        while done < len(into):
            if self._plain:
                take = min(len(self._plain), len(into) - done)
                into[done : done + take] = self._plain[:take]
                self._plain = self._plain[take:]
            else:
                take = self._open(into[done:])
            done += take

    def _open(self, into: memoryview) -> int:
        """Open the next record where it is wanted, or aside if it holds more; returns how many bytes are in place."""
        head = memoryview(bytearray(_RECORD.size))
        _receive(self.sock, head)
        size, generation, number = (int(n) for n in _RECORD.unpack(head))
        if size > RECORD_BYTES or number != self._received:
            raise StrangerError(f"record {self._received} of rank {self.rank} was changed on the way")
        sealed = self._sealed[: size + fr.TAG_BYTES]
        _receive(self.sock, sealed)
        about = fr.Header(fr.BULK, 1, 0, 0, self._session.id, _NONCE_STREAM, generation, number, size, 0, bytes(head))
        direct = size <= len(into)
        target = into[:size] if direct else buffer(size)
        try:
            self._session.open_into(about, fr.nonce(_NONCE_STREAM, number), sealed, target)
        except ProtocolError as error:
            raise StrangerError(f"record {number} of rank {self.rank} was changed on the way") from error
        self._received += 1
        if direct:
            return size
        self._plain = target
        return 0

    def close(self) -> None:
        """Wakes whoever reads, too."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more
        self.sock.close()


def keep_alive(sock: socket.socket) -> None:
    """A machine that is gone without a word is noticed in under a minute; one that stands still is not missed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def dial(keys: PartyKeys, me: int, rank: int, address: tuple[str, int], about: bytes, limit_s: float) -> SealedStream:
    """Connect to ``rank`` at ``address`` and tell it, sealed, what the connection is for (``about``).

    Raises OSError if nobody is there, StrangerError if it is not that rank or does not know this one.
    """
    pod = keys.pod_of(rank)
    if pod is None:
        raise StrangerError(f"there is no rank {rank}")
    deadline = time.monotonic() + limit_s
    sock = socket.create_connection(address, limit_s)
    try:
        challenge = bytearray(CHALLENGE_BYTES)
        _receive(sock, memoryview(challenge), deadline)
        head = _KNOCK.pack(_MAGIC, _VERSION, me, rank, os.urandom(16))
        sock.sendall(head + _mac(keys, rank, bytes(challenge), head))
        session, _ = _agree(sock, keys, pod, bytes(challenge) + head, about, deadline, dials=True)
        sock.settimeout(None)
        return SealedStream(sock, session, rank)
    except ConnectionError as error:
        sock.close()
        if isinstance(error, StrangerError):
            raise
        raise StrangerError(f"rank {rank} at {address[0]}:{address[1]} does not take this rank's key") from error
    except BaseException:
        sock.close()
        raise


def knocker(keys: PartyKeys, me: int, challenge: bytes, knock: bytes) -> tuple[int, str]:
    """(which rank knocks, ""), or (-1, why nobody is let in). Costs a hash; a key of the rank once."""
    magic, version, source, destination, _ = _KNOCK.unpack_from(knock)
    if magic != _MAGIC or version != _VERSION:
        return -1, "not a knock"
    if keys.pod_of(source) is None or destination != me:
        return -1, "for another rank"
    if not hmac.compare_digest(_mac(keys, source, challenge, knock[: _KNOCK.size]), knock[_KNOCK.size :]):
        return -1, "not by a pod of this party"
    return source, ""


def welcome(
    sock: socket.socket, keys: PartyKeys, rank: int, challenge: bytes, knock: bytes, limit_s: float
) -> tuple[SealedStream, bytes]:
    """Prove each other after ``rank`` knocked; returns the connection and what it is for. Raises OSError."""
    pod = keys.pod_of(rank)
    assert pod is not None
    deadline = time.monotonic() + limit_s
    session, about = _agree(sock, keys, pod, challenge + knock[: _KNOCK.size], b"", deadline, dials=False)
    sock.settimeout(None)
    return SealedStream(sock, session, rank), about


def _agree(
    sock: socket.socket,
    keys: PartyKeys,
    pod: PublicIdentity,
    knock: bytes,
    about: bytes,
    deadline: float,
    *,
    dials: bool,
) -> tuple[SecureSession, bytes]:
    """The plane's handshake over a fresh connection: who dials is its lower side. Raises OSError."""
    link = hashlib.sha256(b"UVCC_PARTY_LINK_V1" + keys.world + knock).digest()
    me, other = (0, 1) if dials else (1, 0)
    shake = Handshake(me, other, link, keys.identity, pod, lambda: about, os.urandom)
    if dials:
        sock.sendall(b"".join(shake.outgoing()))
    try:
        while True:
            header, body = _frame(sock, deadline)
            if header.cls == fr.HELLO:
                sock.sendall(b"".join(shake.on_hello(body, time.monotonic())))
                continue
            greeting, frames = shake.on_auth(header, body)
            sock.sendall(b"".join(frames))
            if greeting is not None:
                return greeting.session, greeting.cursors
    except ProtocolError as error:
        raise StrangerError(error.what) from error


def _frame(sock: socket.socket, deadline: float) -> tuple[fr.Header, bytes]:
    raw = bytearray(fr.HEADER_BYTES)
    _receive(sock, memoryview(raw), deadline)
    header = fr.read_header(raw)
    if header.length > _MOST_FRAME or header.cls not in (fr.HELLO, fr.AUTH):
        raise StrangerError("a frame that is no part of a handshake")
    body = bytearray(header.length)
    _receive(sock, memoryview(body), deadline)
    fr.check_crc(header, body)
    return header, bytes(body)


def _receive(sock: socket.socket, into: memoryview, deadline: float | None = None) -> None:
    """All of ``into``. Raises OSError; with a ``deadline`` (monotonic) it sets the socket's timeout itself."""
    done = 0
    while done < len(into):
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other end does not answer")
            sock.settimeout(left)
        count = sock.recv_into(into[done:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the other end closed the connection")
        done += count


def _mac(keys: PartyKeys, other: int, challenge: bytes, head: bytes) -> bytes:
    return hmac.digest(keys.knock_key(other), b"UVCC_PARTY_KNOCK_V1" + challenge + head, hashlib.sha256)
