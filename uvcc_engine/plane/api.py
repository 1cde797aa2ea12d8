"""What the protocols see of the message plane, and what the plane sees of the transcript."""

from __future__ import annotations

from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class Tag(NamedTuple):
    """Names one logical message between two parties of a subsession; unique per (src, dst) by construction.

    ``epoch`` is the training step of the transcript; ``stream`` separates concurrent flows (0 = main; microbatches
    and phases get their own); ``op`` counts operations inside (epoch, stream), equal on both ends; ``kind`` is a
    ``uvcc_engine.transcript.kinds`` value.
    """

    epoch: int
    stream: int
    op: int
    kind: int


class Recorder(Protocol):
    """Takes note of every transcript message. Called by the plane in program order."""

    def record(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        """``direction`` 0 = sent to ``peer``, 1 = received from ``peer``. ProtocolError on a differing repeat."""


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
