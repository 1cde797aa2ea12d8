"""Payloads that were sent and whose leaves are not made yet: there is time for that while the caller waits.

What is kept here cannot change: who sent it may use its memory again. Large ones are handed to the thread that hashes
beside the caller, when it waits for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from uvcc_engine.transcript.leaves.leaf import SIZE, BlindState, Buffer, Key, blind_at, record_of
from uvcc_engine.transcript.leaves.payload_digests import LARGE, Hasher, Job

MOST: Final = 1 << 25  # bytes that wait at a time


class SentPayloads:
    """Used by one thread."""

    def __init__(self, hasher: Hasher | None) -> None:
        self._hasher = hasher
        self._new: dict[Key, tuple[BlindState, bytes, bytes | memoryview]] = {}  # with the head of its record
        self._begun: dict[Key, tuple[bytes, Job]] = {}  # the head and the size of its record; who hashes it
        self._bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._new or key in self._begun

    @property
    def full(self) -> bool:
        """Whether what waits has to be made before more is put here."""
        return self._bytes > MOST

    def put(self, key: Key, state: BlindState, head: bytes, payload: Buffer) -> None:
        """Keep a payload; ``head`` from :func:`leaf.head_of`."""
        held = _unchanging(payload)
        self._new[key] = state, head, held
        self._bytes += len(held)

    def made(self) -> Iterator[tuple[Key, bytes]]:
        """The records of the small ones; the large ones are begun."""
        for key, (state, head, held) in list(self._new.items()):
            size = len(held)
            if size >= LARGE and self._hasher is not None:
                self._begun[key] = head + SIZE.pack(size), self._hasher.submit(blind_at(state, head), held)
            else:
                yield key, record_of(state, head, held)[0]
                self._bytes -= size
            del self._new[key]  # not before its record is taken, which a full disk may prevent

    def all(self) -> Iterator[tuple[Key, bytes]]:
        """The records of all of them."""
        yield from self.made()
        for key, (front, job) in list(self._begun.items()):
            yield key, front + job.wait()
            del self._begun[key]
        self._bytes = 0


def _unchanging(payload: Buffer) -> bytes | memoryview:
    """What a payload holds now, whatever is done with its memory; copied only where that could be something."""
    if isinstance(payload, bytes):
        return payload
    view = memoryview(payload).cast("B")
    return view if type(view.obj) is bytes else bytes(view)
