"""Messages that have arrived from one peer and wait for their reader; chunks become messages here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag
from uvcc_engine.transcript.leaves.payload_digests import AHEAD

_EPOCHS_REMEMBERED: Final = 2
_MOST_PARTIAL: Final = 1024  # messages of which chunks are missing


def buffer(size: int) -> memoryview:
    """``size`` bytes of writable memory that is not cleared first."""
    return np.empty(size, np.uint8).data


class _Partial:
    """A message of which chunks are missing."""

    __slots__ = ("credit", "missing", "view")

    def __init__(self, total: int, chunks: int) -> None:
        self.view = buffer(total)
        self.missing = set(range(chunks))
        self.credit = 0


class Inbox:
    """Messages by tag. A tag may arrive once only, a chunk once only."""

    def __init__(self, peer: int, counts: dict[int, int] | None = None) -> None:
        """``counts``: messages per stream that an earlier process has taken."""
        self._peer = peer
        self.on_message: Callable[[Tag, memoryview], None] | None = None  # told of large ones but control
        self._ready: dict[int, dict[Tag, tuple[memoryview, int, int]]] = {}  # payload, credit, index
        self.counts = dict(counts or {})  # whole messages that have arrived, per stream
        self._partial: dict[Tag, _Partial] = {}
        self._seen: dict[int, dict[int, set[Tag]]] = {}  # stream -> epoch -> tags

    def room(self, tag: Tag, chunk: int, chunks: int, total: int) -> memoryview:
        """Where the payload of a bulk part belongs. Raises ProtocolError if it has been filled already."""
        if chunks == 1:
            return buffer(total)
        partial = self._partial.get(tag)
        if partial is None:
            if len(self._partial) >= _MOST_PARTIAL:
                raise ProtocolError(f"{len(self._partial)} messages are begun and not complete", party=self._peer)
            try:
                partial = self._partial[tag] = _Partial(total, chunks)
            except MemoryError:
                raise ProtocolError(
                    f"{tag} is announced with {total} bytes, which do not fit", party=self._peer
                ) from None
        if chunk not in partial.missing or len(partial.view) != total:
            raise ProtocolError(f"chunk {chunk} of {tag} came twice or does not fit", party=self._peer)
        return partial.view[chunk * fr.CHUNK : (chunk + 1) * fr.CHUNK]

    def put(self, part: fr.FramePart) -> None:
        """Take a part in channel order. Raises ProtocolError if its tag has been used before."""
        tag, credit = part.tag, part.credit
        message = part.payload
        if part.chunks > 1:
            partial = self._partial[tag]
            partial.missing.discard(part.chunk)
            partial.credit += credit
            if partial.missing:
                return
            del self._partial[tag]
            message, credit = partial.view, partial.credit
        self._check_fresh(tag)
        index = self.counts.get(tag.stream, 0)
        self._ready.setdefault(tag.stream, {})[tag] = (message, credit, index)
        self.counts[tag.stream] = index + 1
        if self.on_message is not None and len(message) >= AHEAD and tag.stream != fr.CONTROL_STREAM:
            self.on_message(tag, message)

    def _check_fresh(self, tag: Tag) -> None:
        if tag.stream == fr.CONTROL_STREAM:
            due = self.counts.get(tag.stream, 0) & 0xFFFF_FFFF
            if tag.op != due:
                raise ProtocolError(f"control message {tag.op} where {due} was due", party=self._peer)
            return
        epochs = self._seen.setdefault(tag.stream, {})
        tags = epochs.get(tag.epoch)
        if tags is None:
            tags = epochs[tag.epoch] = set()
            while len(epochs) > _EPOCHS_REMEMBERED:
                del epochs[min(epochs)]
        if tag in tags:
            raise ProtocolError(f"{tag} was sent twice", party=self._peer)
        tags.add(tag)

    def taken(self) -> dict[int, int]:
        """Per stream: every message below this index has been taken by its reader."""
        return {
            stream: min((index for _, _, index in self._ready.get(stream, {}).values()), default=count)
            for stream, count in self.counts.items()
        }

    def drop_partial(self) -> None:
        """The peer's process is another one: it will send unfinished messages again from their beginning."""
        self._partial.clear()

    def partial_bytes(self, stream: int) -> int:
        """Credit bytes of incomplete messages of a stream."""
        if not self._partial:
            return 0
        return sum(p.credit for tag, p in self._partial.items() if tag.stream == stream)

    def take(self, tag: Tag) -> tuple[memoryview, int] | None:
        """The message ``tag`` and its credit bytes, or None if it has not arrived.

        Raises ProtocolError if a message of another kind stands in its place.
        """
        ready = self._ready.get(tag.stream)
        if not ready:
            return None
        found = ready.pop(tag, None)
        if found is None:
            for other in ready:
                if other.epoch == tag.epoch and other.op == tag.op:
                    raise ProtocolError(f"sent {other} where {tag} was due", party=self._peer)
            return None
        return found[:2]

    def holds(self, tag: Tag) -> bool:
        """Whether :meth:`take` of this tag has something to say: the message, or that another came in its place."""
        ready = self._ready.get(tag.stream)
        if not ready:
            return False
        return tag in ready or any(other.epoch == tag.epoch and other.op == tag.op for other in ready)

    def beyond(self, tag: Tag) -> Tag | None:
        """A message that its sender can only have sent after ``tag``: a later one of the same stream."""
        after = (t for t in self._ready.get(tag.stream, ()) if (t.epoch, t.op) > (tag.epoch, tag.op))
        return next(after, None)

    def take_control(self) -> tuple[memoryview, int] | None:
        """The next control message and its credit bytes."""
        ready = self._ready.get(fr.CONTROL_STREAM)
        return ready.pop(next(iter(ready)))[:2] if ready else None
