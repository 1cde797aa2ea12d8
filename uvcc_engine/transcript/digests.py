"""Digests of large payloads computed beside the caller: hashlib lets go of the interpreter while it hashes.

A caller that needs a digest at once computes what is left itself, so that a machine without a spare processor loses
nothing.
"""

from __future__ import annotations

import hmac
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.transcript.leaf import RECORD, Buffer, Key, blinded_digest, name_of, position

LARGE: Final = 1 << 17  # bytes: below, handing over costs as much as hashing
MOST: Final = 1 << 25  # bytes that wait at a time
CHUNK: Final = 1 << 20  # bytes of a message that one leaf covers: what one frame of the plane carries


def pieces(payload: Buffer) -> Iterator[tuple[int, Buffer]]:
    """A message in the parts that have a leaf of their own: (chunk, bytes)."""
    view = payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
    if len(view) <= CHUNK:
        yield 0, view
        return
    whole = memoryview(view)
    for chunk, at in enumerate(range(0, len(whole), CHUNK)):
        yield chunk, whole[at : at + CHUNK]


def blind_of(state: hmac.HMAC, key: Key) -> bytes:
    """The blind of a message that is hashed later; ``state`` from ``leaf.blind_state``. Raises ConfigError."""
    stream, op, chunk, _, src, dst, kind = key
    state = state.copy()
    try:
        state.update(position(kind, src, dst, op, chunk, stream))
    except struct.error as e:
        raise ConfigError(f"not a leaf: {name_of(key)}: {e}", "op has 32 bits, stream 64") from e
    return state.digest()


def packed(key: Key, size: int, digest: bytes) -> bytes:
    """The record of a message whose digest is known."""
    stream, op, chunk, direction, src, dst, kind = key
    return RECORD.pack(direction, kind, src, dst, op, chunk, stream, size, digest)


class Job:
    """One payload to hash. ``digest`` is there once ``done`` can be acquired."""

    __slots__ = ("blind", "digest", "done", "payload")

    def __init__(self, blind: bytes, payload: Buffer) -> None:
        self.blind, self.payload = blind, payload
        self.digest = b""
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        """Compute the digest and let go of the payload."""
        try:
            self.digest = blinded_digest(self.blind, self.payload)
        finally:
            self.payload = b""
            self.done.release()


class Hasher:
    """A thread that works through jobs in their order; it starts with the first one. Used by one thread."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._there = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, blind: bytes, payload: Buffer) -> Job:
        """Take a payload, which must not change until its job is finished."""
        job = Job(blind, payload)
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="digests", daemon=True)
            self._thread.start()
        self._there.release()
        return job

    def finish(self, jobs: Iterable[Job]) -> None:
        """Return when all of ``jobs`` are done; those that nobody has begun are computed here."""
        for job in jobs:
            while not job.digest and (other := self._next()) is not None:
                other.run()
            if not job.digest:
                with job.done:
                    pass
            if not job.digest:
                raise UvccError("a payload could not be hashed", "the log holds the reason; resume from the checkpoint")

    def _next(self) -> Job | None:
        try:
            return self._jobs.popleft()
        except IndexError:
            return None

    def _work(self) -> None:
        while True:
            self._there.acquire()
            if self._closed:
                return
            if (job := self._next()) is not None:
                job.run()

    def close(self) -> None:
        """End the thread. What is not finished stays so. Harmless twice."""
        self._closed = True
        if self._thread is not None:
            self._there.release()
            self._thread.join()
            self._thread = None
