"""Digests of large payloads computed beside the caller: BLAKE3 lets go of the interpreter while it hashes.

A caller that needs a digest at once computes what is left itself, so that a machine without a spare processor loses
nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Final

from uvcc_engine.transcript.leaves.leaf import Buffer, closed_digest

CHUNK: Final = 1 << 20  # bytes of a message that one leaf covers: what one frame of the plane carries
LARGE: Final = CHUNK  # of what was sent: below, to hand over and to wake a thread costs more than hashing
AHEAD: Final = CHUNK  # the same for what has arrived, which somebody will wait for


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
    """One payload of a link to hash, once, by whoever comes first. ``digest`` is there when ``wait`` returns."""

    __slots__ = ("_hashing", "blind", "digest", "payload")

    def __init__(self, blind: bytes, payload: Buffer) -> None:
        self.blind, self.payload = blind, payload
        self.digest = b""
        self._hashing = threading.Lock()

    def run(self) -> None:
        """Compute the digest, unless somebody else does or did."""
        if self._hashing.acquire(blocking=False):
            try:
                self._compute()
            finally:
                self._hashing.release()

    def wait(self) -> bytes:
        """The digest, computed here if nobody has begun."""
        with self._hashing:
            self._compute()
        return self.digest

    def _compute(self) -> None:
        if not self.digest:
            self.digest = closed_digest(self.blind, self.payload)
            self.payload = b""  # whose memory may be used again


class Hasher:
    """A thread that works through jobs in their order; it starts with the first one. Jobs come from any thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # in C: its locks cost a fifteenth of a semaphore's
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def submit(self, blind: bytes, payload: Buffer) -> Job:
        """Take a payload, which must not change until its job is done."""
        job = Job(blind, payload)
        if self._thread is None:
            self._start()
        self._jobs.put(job)
        return job

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="digests", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
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
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._jobs = SimpleQueue()
