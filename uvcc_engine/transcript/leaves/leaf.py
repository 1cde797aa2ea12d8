"""The transcript leaf: a fixed little-endian record, its blinded digest and its hash (docs/architecture.md).

A record is 60 bytes: direction, kind, src, dst (u8 each), op u32, chunk u32, stream u64, payload bytes u64, digest 32.
The session id and the epoch are common to all leaves of an epoch and enter every leaf hash as its prefix, so a record
can be moved neither between epochs nor between subsessions. All after the direction byte is equal at both ends.
"""

from __future__ import annotations

import hashlib
import struct
from hashlib import sha256
from typing import Final, NamedTuple

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.transcript.formats import kinds

SENT: Final = 0
RECEIVED: Final = 1
RECORD: Final = struct.Struct("<BBBBIIQQ32s")
SIZE: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<BBBBIIQ")  # of a record, before size and digest
_BLOCK: Final = 64  # bytes, of SHA-256
_INNER: Final = bytes(x ^ 0x36 for x in range(256))
_OUTER: Final = bytes(x ^ 0x5C for x in range(256))
_NOTHING: Final = sha256()  # only copied
_PREFIX: Final = b"UVCC_LEAF_V1"
WIRE_KINDS: Final = frozenset((kinds.OPEN, kinds.RESHARE, kinds.DEALER, kinds.PROOF, kinds.COIN, kinds.AUDIT))
RECORDED_KINDS: Final = WIRE_KINDS | {kinds.FINDING}
"""What is recorded of a link: of a finished epoch ``WIRE_KINDS`` only, since a second round ends its attempt."""
LOCAL_KINDS: Final = frozenset((kinds.INPUT, kinds.RESULT, kinds.CHECKPOINT, kinds.POLICY, kinds.PIPELINE, kinds.START))
OPENED_KINDS: Final = LOCAL_KINDS - {kinds.PIPELINE}

Key = tuple[int, int, int, int, int, int, int]
Buffer = bytes | bytearray | memoryview


class Leaf(NamedTuple):
    """One leaf without its session and epoch; field order is the record's."""

    direction: int
    kind: int
    src: int
    dst: int
    op: int
    chunk: int
    stream: int
    size: int
    digest: bytes

    @classmethod
    def unpack(cls, record: bytes) -> Leaf:
        return cls(*RECORD.unpack(record))

    def pack(self) -> bytes:
        return RECORD.pack(*self)

    @property
    def key(self) -> Key:
        """Canonical order inside (epoch, sid_sub): stream, op, chunk, direction; the rest makes it unique."""
        return (self.stream, self.op, self.chunk, self.direction, self.src, self.dst, self.kind)

    @property
    def name(self) -> str:
        """For people: which message this is."""
        return name_of(self.key)


def name_of(key: Key) -> str:
    """A leaf key for people."""
    stream, op, chunk, direction, src, dst, kind = key
    what = kinds.NAMES.get(kind, f"kind {kind}")
    if src == dst:
        return f"{what} of P{src} (stream {stream}, op {op})"
    way = "received" if direction else "sent"
    part = f", chunk {chunk}" if chunk else ""
    return f"{what} P{src}->P{dst} {way} (stream {stream}, op {op}{part})"


def epoch_prefix(sid_sub: bytes, epoch: int) -> bytes:
    """What every leaf of one epoch is hashed behind: RFC 6962 leaf tag, version, session, epoch."""
    return b"\x00" + _PREFIX + sid_sub + struct.pack("<I", epoch)


def leaf_hash(prefix: bytes, record: bytes) -> bytes:
    """RFC 6962 leaf hash; ``prefix`` from :func:`epoch_prefix`."""
    return hashlib.sha256(prefix + record).digest()


class BlindState(NamedTuple):
    """The two hashes of an HMAC under a blinding key, as they are before what is authenticated; both are only copied.

    ``inner`` has also taken session and epoch.
    """

    inner: hashlib._Hash
    outer: hashlib._Hash


def blind_state(key: bytes, sid_sub: bytes, epoch: int) -> BlindState:
    """The state under a pair's (or a party's own) blinding key; :func:`blind_at` says of it the blind of each leaf."""
    short = key if len(key) <= _BLOCK else sha256(key).digest()
    padded = short.ljust(_BLOCK, b"\0")
    said = b"UVCC_BLIND_V1" + sid_sub + struct.pack("<I", epoch)
    return BlindState(sha256(padded.translate(_INNER) + said), sha256(padded.translate(_OUTER)))


def head_of(key: Key) -> bytes:
    """What a message's record begins with. Raises ConfigError for what is no leaf."""
    stream, op, chunk, direction, src, dst, kind = key
    try:
        return _HEAD.pack(direction, kind, src, dst, op, chunk, stream)
    except struct.error as e:
        raise ConfigError(f"not a leaf: {name_of(key)}: {e}", "op has 32 bits, stream 64") from e


def blind_at(state: BlindState, head: bytes) -> bytes:
    """The blind of one message; ``state`` from :func:`blind_state`, ``head`` from :func:`head_of`.

    HMAC-SHA256 of all of the head after the direction, which is equal at both ends. The two hashes are computed by
    themselves, and from copies: between two messages a training step has pushed all code out of the processor's caches,
    and a call of ``hmac.digest`` takes three times as long then. To make a hash object takes longer than to copy one.
    """
    inner, outer = state.inner.copy(), state.outer.copy()
    inner.update(head[1:])
    outer.update(inner.digest())
    return outer.digest()


def record_of(state: BlindState, head: bytes, payload: Buffer) -> tuple[bytes, bytes]:
    """(record, blind) of one message; ``state`` from :func:`blind_state`, ``head`` from :func:`head_of`."""
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    inner, outer, digest = state.inner.copy(), state.outer.copy(), _NOTHING.copy()
    inner.update(head[1:])
    outer.update(inner.digest())
    blind = outer.digest()
    digest.update(blind)
    digest.update(payload)
    return head + SIZE.pack(size) + digest.digest(), blind


def make_record(state: BlindState, key: Key, payload: Buffer) -> tuple[bytes, bytes]:
    """(record, blind) of one message; ``state`` from :func:`blind_state`. Raises ConfigError for what is no leaf."""
    return record_of(state, head_of(key), payload)


def blinded_digest(blind: bytes, payload: Buffer) -> bytes:
    """SHA-256(blind || payload): without the blind nothing about a short payload can be guessed from it."""
    state = _NOTHING.copy()
    state.update(blind)
    state.update(payload)
    return state.digest()
