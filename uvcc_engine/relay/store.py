"""What a relay needs of a store: what survives a restart, and nothing of how it is kept.

The one that comes with UVCC is SQLite with segment files (``db``). Another is a class with these methods, handed to
``running_hub``: a relay never looks into a payload, so whatever keeps bytes in order and durably will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from uvcc_engine.relay.binary import Buffer

MessageRow = tuple[int, int, bytes, int, int, float, int, Buffer]
SeenRow = tuple[int, bytes, int, int, float]
QueueRow = tuple[int, str, int, int, bytes]


class Write(NamedTuple):
    """One caller's part of a transaction: all of it becomes durable, or none.

    ``queues``: (number, group, sender, receiver, box); ``inserts``: (id, queue, msg_id, slot, crc, expires, size,
    payload); ``deletes``: ids; ``seen`` and ``forgotten``: ids of messages that must not be taken twice, until when
    (seconds of the wall clock), and those that are forgotten early; all before ``forget_before`` are, too. ``mark``: no
    record gets a number above it before this is durable; 0 leaves it. ``done`` is called once, on any thread, with None
    after the data is durable, or with the failure.
    """

    queues: list[QueueRow]
    inserts: list[MessageRow]
    deletes: list[tuple[int]]
    seen: list[SeenRow]
    forget_before: float
    done: Callable[[Exception | None], None]
    forgotten: Sequence[tuple[int, bytes]] = ()  # of what is remembered, by queue and id
    mark: int = 0


class Store(Protocol):
    """Used by one thread, that of the hub; only :meth:`put` hands work to another."""

    @property
    def commits(self) -> int:
        """Transactions so far."""
        ...

    @property
    def rows(self) -> int:
        """Messages stored so far."""
        ...

    def put(self, write: Write) -> None:
        """Take a write without waiting for it. Writes become durable in the order in which they were handed over."""
        ...

    def queues(self) -> Iterable[QueueRow]:
        """Every queue there is."""
        ...

    def pending(self) -> Iterable[tuple[int, int, bytes, int, int, float, int]]:
        """(id, queue, msg_id, slot, crc, expires, size) of every message, by ascending id."""
        ...

    def seen(self) -> Iterable[SeenRow]:
        """What is remembered of messages that were taken, the one that is forgotten first to begin with."""
        ...

    def next_start(self) -> int:
        """A number that grows with every start; ids of different starts never meet."""
        ...

    def high_mark(self) -> int:
        """The highest ``mark`` that was written; 0 in a new store."""
        ...

    def payload(self, ident: int) -> bytes | None:
        """The content of a message; None if it is gone."""
        ...

    def close(self) -> None:
        """Make durable what was handed over, and let go."""
        ...
