"""The transcript leaf: a fixed little-endian record, its blinded digest and its hash (docs/architecture.md).

A record is 60 bytes: direction, kind, src, dst (u8 each), op u32, chunk u32, stream u64, payload bytes u64, digest 32.
The session id and the epoch are common to all leaves of an epoch and enter every leaf hash as its prefix, so a record
can be moved neither between epochs nor between subsessions. All after the direction byte is equal at both ends.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.transcript.formats import kinds

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.hmac import HMAC

SENT: Final = 0
RECEIVED: Final = 1
RECORD: Final = struct.Struct("<BBBBIIQQ32s")
_POSITION: Final = struct.Struct("<BBBIIQ")  # what names a message at both of its ends: the key without the direction
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


def blind_state(key: bytes, sid_sub: bytes, epoch: int) -> HMAC:
    """HMAC-SHA256 under a pair's (or a party's own) blinding key, fed with session and epoch.

    :func:`blind_at` goes on from it for each leaf. A copy of it takes a quarter of the time of one of the standard
    library's.
    """
    from cryptography.hazmat.primitives.hashes import SHA256  # a verb that only reads has no use for it
    from cryptography.hazmat.primitives.hmac import HMAC

    state = HMAC(key, SHA256())
    state.update(b"UVCC_BLIND_V1" + sid_sub + struct.pack("<I", epoch))
    return state


def blind_at(state: HMAC, key: Key) -> bytes:
    """The blind of one message; ``state`` from :func:`blind_state`. Raises ConfigError for what is no leaf."""
    stream, op, chunk, _, src, dst, kind = key
    one = state.copy()
    try:
        one.update(_POSITION.pack(kind, src, dst, op, chunk, stream))
    except struct.error as e:
        raise ConfigError(f"not a leaf: {name_of(key)}: {e}", "op has 32 bits, stream 64") from e
    return one.finalize()


def make_record(state: HMAC, key: Key, payload: Buffer) -> tuple[bytes, bytes]:
    """(record, blind) of one message; ``state`` from :func:`blind_state`. Raises ConfigError for what is no leaf."""
    stream, op, chunk, direction, src, dst, kind = key
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    blind = blind_at(state, key)
    try:
        return RECORD.pack(direction, kind, src, dst, op, chunk, stream, size, blinded_digest(blind, payload)), blind
    except struct.error as e:
        raise ConfigError(f"not a leaf: {name_of(key)}: {e}", "op has 32 bits, stream 64") from e


def blinded_digest(blind: bytes, payload: Buffer) -> bytes:
    """SHA-256(blind || payload): without the blind nothing about a short payload can be guessed from it."""
    state = hashlib.sha256(blind)
    state.update(payload)
    return state.digest()
