"""Payloads that were sent and whose leaves are not made yet: there is time for that while the caller waits.

What is kept here cannot change: who sent it may use its memory again. The leaves of small ones are made several at a
time, and those that are left as soon as a wait goes on. Large ones are handed to the thread that hashes beside the
caller, when it waits for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from uvcc_engine.transcript.leaves.leaf import SIZE, Buffer, Key, blind_at, record_of
from uvcc_engine.transcript.leaves.payload_digests import LARGE, Hasher, Job

MOST: Final = 1 << 25  # bytes that wait at a time
TOGETHER: Final = 16
"""Small ones of which the leaves are made at a time: the training leaves no code of this in the processor's caches, and
the first leaf after it takes three times as long as each that follows, but for its hash."""


class SentPayloads:
    """Of links only (``leaf.RECORDED_KINDS``), none of which is opened. Used by one thread."""

    def __init__(self, hasher: Hasher | None) -> None:
        self._hasher = hasher
        self._new: dict[Key, tuple[bytes, bytes, bytes | memoryview]] = {}  # its epoch's key, its record's head
        self._begun: dict[Key, tuple[bytes, Job]] = {}  # the head and the size of its record; who hashes it
        self.waiting = 0  # bytes, of which at most ``MOST`` are to wait
        self._large = False  # whether one is new that somebody else can hash
        self._asked = 0  # how many were new when it was asked what is due

    def due(self) -> bool:
        """Whether to make what can be made, asked whenever the caller waits: a large one is new, or ``TOGETHER`` small
        ones, or nothing more was sent since it was asked before: the wait goes on."""
        before, self._asked = self._asked, len(self._new)
        return self._large or self._asked >= TOGETHER or self._asked == before > 0

    def put(self, key: Key, epoch: bytes, head: bytes, payload: Buffer) -> bool:
        """Keep a payload, unless one waits under its key; ``epoch`` from :func:`leaf.epoch_key`, ``head`` from
        :func:`leaf.head_of`."""
        if key in self._new or key in self._begun:
            return False
        if isinstance(payload, bytes):
            held: bytes | memoryview = payload
        else:  # copied only where something could be done with its memory
            view = memoryview(payload).cast("B")
            held = view if type(view.obj) is bytes else bytes(view)
        self._new[key] = epoch, head, held
        size = len(held)
        self.waiting += size
        if size >= LARGE:
            self._large = True
        return True

    def made(self) -> Iterator[tuple[Key, bytes]]:
        """The records of the small ones; the large ones are begun."""
        self._large = False
        for key, (epoch, head, held) in list(self._new.items()):
            size = len(held)
            if size >= LARGE and self._hasher is not None:
                self._begun[key] = head + SIZE.pack(size), self._hasher.submit(blind_at(epoch, head), held)
            else:
                yield key, record_of(epoch, head, held)[0]
                self.waiting -= size
            del self._new[key]  # not before its record is taken, which a full disk may prevent

    def all(self) -> Iterator[tuple[Key, bytes]]:
        """The records of all of them."""
        yield from self.made()
        for key, (front, job) in list(self._begun.items()):
            yield key, front + job.wait()
            del self._begun[key]
        self.waiting = 0
