"""Binary bodies of the relay's combined request and of its stream front. Little-endian; standard library only.

One request carries acknowledgements, messages to enqueue and how long to wait for messages in return; the reply carries
the fate of each enqueued message and what has been delivered. The relay never looks into a payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

Buffer = bytes | bytearray | memoryview

CONTENT_TYPE: Final = "application/vnd.uvcc.exchange"
PATH: Final = "/exchange"

# fate of an enqueued message
STORED: Final = 0
DUPLICATE: Final = 1  # the same message is or was here; nothing to do
QUOTA: Final = 2  # refused: the sender's quota is full; try again later
COLLISION: Final = 3  # refused: the id was used for another content
FORBIDDEN: Final = 4  # refused: this sender may not write to that receiver
FAILED: Final = 5  # refused: the store could not write
FATES: Final = ("enqueued", "dedup", "quota", "collision", "forbidden", "failed")

STORE: Final = 0  # slot of a message that is kept until it is delivered and acknowledged
EXPIRED: Final = 0xFF  # slot of a notice to a sender: the message with this id was never taken
# any other slot: only the newest message of its slot is kept, in memory, for a few seconds

RESYNC: Final = 1  # request flag: what was leased to this consumer did not reach it, deliver it again
DRAINING: Final = 1  # reply flag: the relay is about to stop

_REQUEST = struct.Struct("<4sBBHIIIIQQ")  # magic, version, flags, 0, acks, items, wait ms, max bytes, box, consumer
_ITEM = struct.Struct("<BBBxII")  # receiver, slot, id bytes, ttl s, payload bytes
_REPLY = struct.Struct("<4sBBHII")  # magic, version, flags, 0, fates, messages
_MESSAGE = struct.Struct("<QBBHI")  # delivery id, sender, slot, 0, payload bytes
_REQUEST_MAGIC: Final = b"UVX1"
_REPLY_MAGIC: Final = b"UVX2"
_VERSION: Final = 1
MAX_ITEMS: Final = 65_536  # of one request, and as many acknowledgements
MAX_ID: Final = 64


class Item(NamedTuple):
    """A message to enqueue. ``msg_id``: at most 64 bytes, unique per sender, receiver and box."""

    receiver: int
    slot: int
    ttl_s: int
    msg_id: bytes
    payload: Buffer


class Request(NamedTuple):
    """``box`` separates the subsessions of a group; ``consumer`` names the polling process."""

    flags: int
    box: int
    consumer: int
    wait_ms: int
    max_bytes: int
    acks: tuple[int, ...]
    items: list[Item]


class Message(NamedTuple):
    """A delivered message; ``delivery`` is what an acknowledgement names."""

    delivery: int
    sender: int
    slot: int
    payload: Buffer


class Reply(NamedTuple):
    flags: int
    fates: bytes
    messages: list[Message]


def request_pieces(
    box: int, consumer: int, wait_ms: int, max_bytes: int, acks: Sequence[int], items: Sequence[Item], flags: int = 0
) -> list[Buffer]:
    """The body of a request, in pieces so that large payloads are not copied."""
    head = _REQUEST.pack(_REQUEST_MAGIC, _VERSION, flags, 0, len(acks), len(items), wait_ms, max_bytes, box, consumer)
    out: list[Buffer] = [head + struct.pack(f"<{len(acks)}Q", *acks)]
    for item in items:
        out.append(_ITEM.pack(item.receiver, item.slot, len(item.msg_id), item.ttl_s, len(item.payload)) + item.msg_id)
        out.append(item.payload)
    return out


def read_request(body: Buffer) -> Request:
    """Raises ValueError if the body is not exactly one request."""
    try:
        magic, version, flags, _, acks, items, wait_ms, max_bytes, box, consumer = _REQUEST.unpack_from(body)
        if magic != _REQUEST_MAGIC or version != _VERSION:
            raise ValueError("not an exchange request of this version")
        if acks > MAX_ITEMS or items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} messages or acknowledgements in a request")
        at = _REQUEST.size
        acked = struct.unpack_from(f"<{acks}Q", body, at)
        at += 8 * acks
        found = []
        for _ in range(items):
            receiver, slot, id_bytes, ttl_s, length = _ITEM.unpack_from(body, at)
            if id_bytes > MAX_ID:
                raise ValueError(f"a message id of more than {MAX_ID} bytes")
            start = at + _ITEM.size + id_bytes
            at = start + length
            found.append(Item(receiver, slot, ttl_s, bytes(body[start - id_bytes : start]), body[start:at]))
    except struct.error as error:
        raise ValueError(f"a cut exchange request: {error}") from None
    if at != len(body):
        raise ValueError(f"an exchange request of {len(body)} bytes that says {at}")
    return Request(flags, box, consumer, wait_ms, max_bytes, acked, found)


def reply_pieces(flags: int, fates: bytes, messages: Iterable[Message]) -> list[Buffer]:
    """The body of a reply, in pieces."""
    out: list[Buffer] = [b""]
    count = 0
    for m in messages:
        out.append(_MESSAGE.pack(m.delivery, m.sender, m.slot, 0, len(m.payload)))
        out.append(m.payload)
        count += 1
    out[0] = _REPLY.pack(_REPLY_MAGIC, _VERSION, flags, 0, len(fates), count) + fates
    return out


def read_reply(body: Buffer) -> Reply:
    """Raises ValueError if the body is not exactly one reply."""
    view = memoryview(body)
    try:
        magic, version, flags, _, fates, count = _REPLY.unpack_from(view)
        if magic != _REPLY_MAGIC or version != _VERSION:
            raise ValueError("not an exchange reply of this version")
        at = _REPLY.size + fates
        found = []
        for _ in range(count):
            delivery, sender, slot, _, length = _MESSAGE.unpack_from(view, at)
            start = at + _MESSAGE.size
            at = start + length
            found.append(Message(delivery, sender, slot, view[start:at]))
    except struct.error as error:
        raise ValueError(f"a cut exchange reply: {error}") from None
    if at != len(view):
        raise ValueError(f"an exchange reply of {len(view)} bytes that says {at}")
    return Reply(flags, bytes(view[_REPLY.size : _REPLY.size + fates]), found)
