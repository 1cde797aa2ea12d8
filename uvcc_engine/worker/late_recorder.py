"""What the plane records into before a worker knows at which epoch its transcript goes on."""

from __future__ import annotations

from uvcc_engine.plane.api import Buffer, Recorder, Tag


class LateRecorder:
    """Passes transcript messages on to a recorder that exists only once the parties agreed where to resume."""

    def __init__(self) -> None:
        self.inner: Recorder | None = None

    def record(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        """See ``plane.api.Recorder``."""
        assert self.inner is not None, "a transcript message before the parties agreed on the first step"
        self.inner.record(direction, peer, tag, payload)

    def catch_up(self) -> None:
        """See ``plane.api.Recorder``."""
        if self.inner is not None:
            self.inner.catch_up()

    def hash_ahead(self, peer: int, tag: Tag, payload: memoryview) -> None:
        """See ``plane.api.Recorder``."""
        if self.inner is not None:
            self.inner.hash_ahead(peer, tag, payload)
