"""The transcript leaf: a fixed little-endian record, its blinded digest and its hash (docs/architecture.md).

A record is 60 bytes: direction, kind, src, dst (u8 each), op u32, chunk u32, stream u64, payload bytes u64, digest 32.
The session id and the epoch are common to all leaves of an epoch and enter every leaf hash as its prefix, so a record
can be moved neither between epochs nor between subsessions. All after the direction byte is equal at both ends.

Digests of what is opened are SHA-256, so that an auditor checks them with what comes with Python. All others, which is
nearly every byte that is hashed, are BLAKE3 in its keyed mode (O'Connor, Aumasson, Neves and Wilcox-O'Hearn, 2020,
section 2.3), 3 to 15 times as fast.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple

from blake3 import blake3

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.transcript.formats import kinds

SENT: Final = 0
RECEIVED: Final = 1
RECORD: Final = struct.Struct("<BBBBIIQQ32s")
SIZE: Final = struct.Struct("<Q")
BLIND: Final = 32  # bytes of a blind, and of what blinds are made with
_HEAD: Final = struct.Struct("<BBBBIIQ")  # of a record, before size and digest
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


def epoch_key(key: bytes, sid_sub: bytes, epoch: int) -> bytes:
    """What blinds the leaves of one epoch: 32 bytes under a pair's (or a party's own) blinding key of 32 bytes."""
    return blake3(b"UVCC_BLIND_V2" + sid_sub + struct.pack("<I", epoch), key=key).digest()


def head_of(key: Key) -> bytes:
    """What a message's record begins with. Raises ConfigError for what is no leaf."""
    stream, op, chunk, direction, src, dst, kind = key
    try:
        return _HEAD.pack(direction, kind, src, dst, op, chunk, stream)
    except struct.error as e:
        raise ConfigError(f"not a leaf: {name_of(key)}: {e}", "op has 32 bits, stream 64") from e


def blind_at(key: bytes, head: bytes) -> bytes:
    """The blind of one message; ``key`` from :func:`epoch_key`, ``head`` from :func:`head_of`.

    All of the head after the direction enters it, which is equal at both ends.
    """
    return blake3(head[1:], key=key).digest()


def record_of(key: bytes, head: bytes, payload: Buffer) -> tuple[bytes, bytes]:
    """(record, blind) of one message; ``key`` from :func:`epoch_key`, ``head`` from :func:`head_of`."""
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    blind = blake3(head[1:], key=key).digest()
    closed = head[1] not in OPENED_KINDS  # a call less than by blinded_digest, for each message
    digest = blake3(payload, key=blind).digest() if closed else blinded_digest(head[1], blind, payload)
    return head + SIZE.pack(size) + digest, blind


def make_record(epoch: bytes, key: Key, payload: Buffer) -> tuple[bytes, bytes]:
    """(record, blind) of one message; ``epoch`` from :func:`epoch_key`. Raises ConfigError for what is no leaf."""
    return record_of(epoch, head_of(key), payload)


def closed_digest(blind: bytes, payload: Buffer) -> bytes:
    """The digest of a leaf whose payload is opened nowhere, as of all that is recorded of a link."""
    return blake3(payload, key=blind).digest()


def blinded_digest(kind: int, blind: bytes, payload: Buffer) -> bytes:
    """The digest of a leaf of this kind: without the blind nothing about a short payload can be guessed from it."""
    if kind not in OPENED_KINDS:
        return closed_digest(blind, payload)
    opened = hashlib.sha256(blind)
    opened.update(payload)
    return opened.digest()
