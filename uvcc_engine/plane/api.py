"""What the protocols see of the message plane, and what the plane sees of the transcript."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


class Tag(NamedTuple):
    """Names one logical message between two parties of a subsession; unique per (src, dst) by construction.

    ``epoch`` is the training step of the transcript; ``stream`` separates concurrent flows (0 = main; microbatches
    and phases get their own); ``op`` counts operations inside (epoch, stream), equal on both ends; ``kind`` is a
    ``uvcc_engine.transcript.formats.kinds`` value.
    """

    epoch: int
    stream: int
    op: int
    kind: int


class Recorder(Protocol):
    """Takes note of every transcript message. Called by the plane in program order."""

    def record(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        """``direction`` 0 = sent to ``peer``, 1 = received from ``peer``. ProtocolError on a differing repeat.

        What was received is noted when this returns; what was sent may be noted in :meth:`catch_up`.
        """

    def catch_up(self) -> None:
        """The caller is about to wait for a peer, with its own messages on their way: time for what can be late."""

    def hash_ahead(self, peer: int, tag: Tag, payload: memoryview) -> None:
        """A large message has arrived that will be recorded when it is read: work may begin on it. For any thread."""


class Plane(Protocol):
    """Ordered, exactly-once, sealed messages between the three parties of one subsession. Blocking; one user thread."""

    party: int

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        """Queue a message; returns at once unless credit is exhausted. The caller may not change ``payload`` later."""

    def recv(self, src: int, tag: Tag) -> memoryview:
        """Wait for the message ``tag`` from ``src``.

        Raises ProtocolError (the peer broke a rule; names it) or PeerLostError (no sign of life for too long).
        """

    def send_control(self, dst: int, body: bytes) -> None:
        """A message outside the transcript (votes, roots): same sealing and order, own stream, never recorded."""

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        """The next control message of ``src``, in order. Raises TimeoutError after ``timeout`` seconds."""

    def close(self, *, graceful: bool = True) -> None:
        """Flush what is unacknowledged (bounded wait), say goodbye, release sockets and threads."""


@runtime_checkable
class WatchedPlane(Plane, Protocol):
    """A plane that can say what has arrived: several protocols take turns on it."""

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        """Whether all of these messages (from whom, which) can be received without waiting."""

    def wait_any(self, wants: Sequence[Sequence[tuple[int, Tag]]], other: Callable[[], bool] | None = None) -> None:
        """Wait until all messages of one of the sets are there, or ``other`` is true (it is asked again and again).

        Raises as ``recv``.
        """


@runtime_checkable
class Wakeable(Protocol):
    """A plane or a link that another thread can bring back from a wait: from ``wait_any``, to ask ``other`` again."""

    def wake(self) -> None:
        """End the wait, now or when it begins. Any thread may call it."""
