"""Digests of large payloads computed beside the caller: hashlib lets go of the interpreter while it hashes.

A caller that needs a digest at once computes what is left itself, so that a machine without a spare processor loses
nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.transcript.leaves.leaf import Buffer, blinded_digest

LARGE: Final = 1 << 17  # bytes of what was sent: below, to hand over costs as much as hashing
AHEAD: Final = 1 << 16  # the same for what has arrived, which somebody will wait for
CHUNK: Final = 1 << 20  # bytes of a message that one leaf covers: what one frame of the plane carries


def chunks(payload: Buffer) -> Iterator[tuple[int, Buffer]]:
    """A message in the parts that have a leaf of their own: (chunk, bytes)."""
    view = payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
    if len(view) <= CHUNK:
        yield 0, view
        return
    whole = memoryview(view)
    for chunk, at in enumerate(range(0, len(whole), CHUNK)):
        yield chunk, whole[at : at + CHUNK]


class Job:
    """One payload to hash, once, by whoever comes first. ``digest`` is there when ``run`` or ``wait`` returns."""

    __slots__ = ("_claim", "_done", "blind", "digest", "payload")

    def __init__(self, blind: bytes, payload: Buffer) -> None:
        self.blind, self.payload = blind, payload
        self.digest = b""
        self._claim, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Compute the digest and let go of the payload, unless somebody else does."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self.digest = blinded_digest(self.blind, self.payload)
        finally:
            self.payload = b""
            self._done.release()

    def wait(self) -> bytes:
        """The digest, computed here if nobody has begun. Raises UvccError if it could not be computed."""
        self.run()
        if not self.digest:
            with self._done:
                pass
        if not self.digest:
            raise UvccError("a payload could not be hashed", "the log holds the reason; resume from the checkpoint")
        return self.digest


class Hasher:
    """A thread that works through jobs in their order; it starts with the first one. Jobs come from any thread."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._there = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def submit(self, blind: bytes, payload: Buffer) -> Job:
        """Take a payload, which must not change until its job is done."""
        job = Job(blind, payload)
        self._jobs.append(job)
        if self._thread is None:
            self._start()
        self._there.release()
        return job

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="digests", daemon=True)
                self._thread.start()

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

    @property
    def cpu_s(self) -> float:
        """The processor time of the thread, in seconds; 0 where the system does not tell."""
        thread = self._thread
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread and thread.ident else 0.0

    def close(self) -> None:
        """End the thread. What is not finished stays so. Harmless twice."""
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self._there.release()
            self._thread.join()
            self._thread = None
        self._jobs.clear()
