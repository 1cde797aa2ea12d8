"""What the relay keeps in memory: messages on their way, queues per sender and receiver, mailboxes, usage.

One thread uses it. Durability is the hub's and the writer's; here is only the bookkeeping.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from uvcc_engine.relay import binary
from uvcc_engine.relay.relay_roles import called
from uvcc_engine.relay.store import QueueRow


class Waiter(Protocol):
    """A consumer that waits for its mailbox."""

    def wake(self) -> None:
        """There is something to take, or the relay drains. May come more than once."""

    def superseded(self) -> None:
        """Another consumer reads the mailbox from now on."""


class Held:
    """A message on its way."""

    __slots__ = ("crc", "durable", "expires", "id", "lease", "msg_id", "payload", "queue", "size", "slot")

    def __init__(self, ident: int, queue: Queue, msg_id: bytes, slot: int, crc: int, expires: float, size: int) -> None:
        self.id = ident
        self.queue = queue
        self.msg_id = msg_id
        self.slot = slot
        self.crc = crc
        self.expires = expires
        self.size = size
        self.lease = 0.0
        self.durable = False
        self.payload: binary.Buffer | None = None


@dataclass(slots=True, eq=False)
class Queue:
    """What one sender has for one receiver in one box, and which ids it has used."""

    number: int
    group: str
    sender: int
    mailbox: Mailbox
    open: dict[bytes, Held] = field(default_factory=dict)
    seen: dict[bytes, tuple[int, int, float]] = field(default_factory=dict)  # msg_id -> crc, size, until

    def is_durable(self, msg_id: bytes) -> bool:
        return msg_id in self.seen or self.open[msg_id].durable


@dataclass(slots=True, eq=False)
class Mailbox:
    """Everything for one receiver in one box of a group."""

    group: str
    receiver: int
    box: int
    ready: deque[Held] = field(default_factory=deque)
    leased: dict[int, Held] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[float, bytes]] = field(default_factory=dict)  # (sender, slot) -> until, payload
    consumer: int = 0
    waiter: Waiter | None = None  # the consumer that waits


@dataclass(slots=True)
class Usage:
    """What one person of a group has here. ``waiting``: bytes that are not durable yet; ``passing``: bytes in slots."""

    messages: int = 0
    bytes: int = 0
    waiting: int = 0
    passing: int = 0
    boxes: int = 0
    seen: int = 0


class NoRoomError(Exception):
    """A credential has as much of something as it may have."""


@dataclass(slots=True)
class Totals:
    """Counters for /metrics."""

    enqueued: int = 0
    deduplicated: int = 0
    refused: int = 0
    delivered: int = 0
    acknowledged: int = 0
    expired: int = 0
    redelivered: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Book:
    """Every mailbox and queue of a relay, and what each person of a group has in them."""

    def __init__(self, boxes: int = 1 << 30) -> None:
        """``boxes``: mailboxes and queues that one person of a group may bring about."""
        self._boxes = boxes
        self.usage: dict[tuple[str, int], Usage] = {}
        self.mailboxes: dict[tuple[str, int, int], Mailbox] = {}
        self.by_number: dict[int, Queue] = {}
        self.new: list[QueueRow] = []  # queues that are not in the database yet
        self._queues: dict[tuple[str, int, int, int], Queue] = {}

    def mailbox(self, group: str, receiver: int, box: int, maker: int) -> Mailbox:
        """The mailbox, made on account of number ``maker`` if it is new. Raises NoRoomError."""
        found = self.mailboxes.get((group, receiver, box))
        if found is None:
            self._count(group, maker)
            found = self._new_mailbox(group, receiver, box)
        return found

    def known(self, group: str, receiver: int, box: int) -> Mailbox | None:
        """The mailbox if there is one; whoever only cleans up makes none."""
        return self.mailboxes.get((group, receiver, box))

    def _new_mailbox(self, group: str, receiver: int, box: int) -> Mailbox:
        found = self.mailboxes[group, receiver, box] = Mailbox(group, receiver, box)
        return found

    def _count(self, group: str, number: int) -> None:
        usage = self.used(group, number)
        if usage.boxes >= self._boxes:
            raise NoRoomError(f"{called(number)} has used {self._boxes} boxes")
        usage.boxes += 1

    def queue(self, group: str, sender: int, receiver: int, box: int) -> Queue:
        """The queue of these four, made (and noted as new) when it is first asked for. Raises NoRoomError."""
        found = self._queues.get((group, sender, receiver, box))
        if found is None:
            self.mailbox(group, receiver, box, sender)
            self._count(group, sender)
            number = len(self.by_number) + 1
            found = self.add(number, group, sender, receiver, box)
            self.new.append((number, group, sender, receiver, box.to_bytes(8, "big")))
        return found

    def add(self, number: int, group: str, sender: int, receiver: int, box: int) -> Queue:
        """A queue that the database knows, however many there are."""
        mailbox = self.mailboxes.get((group, receiver, box)) or self._new_mailbox(group, receiver, box)
        queue = Queue(number, group, sender, mailbox)
        self._queues[group, sender, receiver, box] = self.by_number[number] = queue
        return queue

    def used(self, group: str, number: int) -> Usage:
        found = self.usage.get((group, number))
        if found is None:
            found = self.usage[group, number] = Usage()
        return found

    def hold(self, message: Held) -> None:
        """A message enters its queue and counts against its sender's quota."""
        queue = message.queue
        queue.open[message.msg_id] = message
        usage = self.used(queue.group, queue.sender)
        usage.messages += 1
        usage.bytes += message.size

    def release(self, message: Held) -> None:
        """Undo :meth:`hold`."""
        queue = message.queue
        if queue.open.get(message.msg_id) is message:
            del queue.open[message.msg_id]
        usage = self.used(queue.group, queue.sender)
        usage.messages -= 1
        usage.bytes -= message.size
        message.payload = None
