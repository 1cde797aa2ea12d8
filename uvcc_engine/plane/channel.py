"""Exactly-once channel: one direction of one stream between two parties. No I/O, no clock of its own.

A frame has the sequence number of its channel. The sender keeps it until it is acknowledged (cumulatively or
selectively), sends it again with capped exponential back-off, and never sends more bytes than the receiver granted.
The receiver delivers each number once and in order; a number that comes again must carry the same content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.roundtrip import RoundTrip

MAX_AHEAD: Final = 1 << 16  # frames that may arrive in front of a missing one
MAX_RANGES: Final = 64  # selective ranges of one acknowledgement
_REMEMBERED: Final = 4096  # digests kept of delivered frames, to tell a repeat from another content
LOST: Final = float("-inf")  # when a frame is due of which it is known that it did not arrive
_GAP: Final = 3  # frames acknowledged behind a missing one before it counts as lost

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and bytes. ``window`` is the credit of a channel in bytes beyond what its reader has taken.

    A frame is sent again after ``rto_s`` until round trips have been measured, then after what they take, but not
    before ``rto_floor_s`` (0: ``rto_s``).
    """

    rto_s: float = 0.5
    rto_floor_s: float = 0.0
    rto_cap_s: float = 30.0
    window: int = 64 << 20


class OutFrame:
    """A frame that the sender keeps: its plain pieces, so that every transmission seals the same bytes."""

    __slots__ = ("bulk", "credit", "due", "generation", "pieces", "queued_at", "sent_at", "seq", "session", "tries")

    def __init__(self, seq: int, now: float, *, bulk: bool = False) -> None:
        self.seq = seq
        self.bulk = bulk
        self.pieces: list[Buffer] = []
        self.credit = 0
        self.queued_at = now
        self.sent_at = 0.0
        self.due = 0.0
        self.tries = 0
        self.session = 0
        self.generation = 0


class Acknowledgement(NamedTuple):
    """State of one channel as its receiver tells it. All of ``ranges`` lie beyond ``expected``; ends are exclusive."""

    stream: int
    expected: int  # every sequence number below it has been received
    limit: int  # credit: the sender may have sent this many bytes in total
    ranges: tuple[tuple[int, int], ...]


class SendChannel:
    """Sending side of a channel."""

    def __init__(self, stream: int, timing: Timing, *, next_seq: int = 0, trip: RoundTrip | None = None) -> None:
        self.stream = stream
        self.timing = timing
        self.trip = trip or RoundTrip(timing.rto_s, timing.rto_floor_s)  # shared by the channels to one peer
        self.next_seq = next_seq
        self.waiting: deque[OutFrame] = deque()
        self.inflight: dict[int, OutFrame] = {}
        self.limit = timing.window
        self.sent_bytes = 0
        self.queued_bytes = 0
        self.retransmits = 0
        self._next_due = float("inf")
        self._moved_at = float("-inf")  # when the lowest number that is not acknowledged last grew

    def new_frame(self, now: float, *, bulk: bool = False) -> OutFrame:
        """Append an empty frame; the caller fills it before the next transmission."""
        frame = OutFrame(self.next_seq, now, bulk=bulk)
        self.next_seq += 1
        self.waiting.append(frame)
        return frame

    def add(self, frame: OutFrame, pieces: tuple[Buffer, ...], credit: int) -> None:
        """Put pieces into a frame that has not been transmitted yet."""
        frame.pieces.extend(pieces)
        frame.credit += credit
        self.queued_bytes += credit

    def transmit(self, now: float) -> Iterator[OutFrame]:
        """Frames to put on the wire now: lost ones first, then new ones within the credit."""
        if now >= self._next_due:
            for frame in list(self.inflight.values()):
                if frame.due <= now and not self._may_still_come(frame, now):
                    self.retransmits += 1
                    self._sent(frame, now)
                    yield frame
            self._next_due = min((f.due for f in self.inflight.values()), default=float("inf"))
        while self.waiting and self.sent_bytes + self.waiting[0].credit <= self.limit:
            frame = self.waiting.popleft()
            self.sent_bytes += frame.credit
            self.queued_bytes -= frame.credit
            self.inflight[frame.seq] = frame
            self._sent(frame, now)
            self._next_due = min(self._next_due, frame.due)
            yield frame

    def _sent(self, frame: OutFrame, now: float) -> None:
        frame.due = now + self._patience_s(frame.tries)
        frame.sent_at = now
        frame.tries += 1

    def _patience_s(self, tries: int) -> float:
        doubled = self.trip.timeout_s * (1 << min(max(tries, self.trip.doublings), 20))
        return min(
            doubled, self.timing.rto_cap_s
        )  # whatever was measured: that may be of an acknowledgement that was lost

    def _may_still_come(self, frame: OutFrame, now: float) -> bool:
        """Whether a frame whose time is over has more of it by now: it begins anew whenever the lowest frame of all is
        acknowledged (RFC 6298, 5.3), for on a slow line the others lie behind that one.

        Where it has not, all others have twice the time, too, until one is measured again (RFC 6298, 5.5): of a line
        that is slower than was thought nothing would ever be measured, since each frame was sent twice.
        """
        if frame.due == LOST:
            return False
        frame.due = max(frame.sent_at, self._moved_at) + self._patience_s(frame.tries - 1)
        if frame.due > now:
            return True
        self.trip.doublings = max(self.trip.doublings + 1, frame.tries)
        return False

    def acknowledge(self, ack: Acknowledgement, now: float, party: int) -> None:
        """Take an acknowledgement of ``party``. Raises ProtocolError if it covers what was never sent."""
        top = ack.ranges[-1][1] if ack.ranges else ack.expected
        if max(ack.expected, top) > self.next_seq - len(self.waiting):
            raise ProtocolError(f"acknowledged frame {top - 1} of stream {self.stream}, never sent", party=party)
        newest = None
        while self.inflight and (first := next(iter(self.inflight))) < ack.expected:
            newest, self._moved_at = self.inflight.pop(first), now
        for start, end in ack.ranges:
            for seq in range(start, end) if end - start < len(self.inflight) else list(self.inflight):
                if start <= seq < end:
                    newest = self.inflight.pop(seq, None) or newest
        if newest is not None and newest.tries == 1:  # of one sent twice nobody knows which was acknowledged
            self.trip.measured(now - newest.sent_at)
        if ack.ranges:
            self._fast_retransmit(ack.ranges[-1][1], now)
        self.limit = max(self.limit, ack.limit)
        if not self.inflight:
            self._next_due = float("inf")

    def _fast_retransmit(self, top: int, now: float) -> None:
        for seq, frame in self.inflight.items():
            if seq + _GAP >= top:
                return
            if frame.tries == 1:
                frame.due, self._next_due = LOST, now

    def resend_all(self, now: float) -> None:
        """The link lost what was under way: everything unacknowledged is due at once."""
        for frame in self.inflight.values():
            frame.due, frame.tries = LOST, 0
        if self.inflight:
            self._next_due = now

    @property
    def next_due(self) -> float:
        """When :meth:`transmit` has to run again for a retransmission."""
        return self._next_due

    @property
    def lowest(self) -> int:
        """The lowest number that is not acknowledged."""
        return next(iter(self.inflight), self.next_seq - len(self.waiting))

    @property
    def blocked(self) -> bool:
        """True while the next frame has to wait for credit."""
        return bool(self.waiting) and self.sent_bytes + self.waiting[0].credit > self.limit

    @property
    def idle(self) -> bool:
        """True if everything has been acknowledged."""
        return not self.inflight and not self.waiting


class RecvChannel(Generic[Content]):
    """Receiving side of a channel; ``Content`` is whatever the caller made of a frame."""

    def __init__(self, stream: int, timing: Timing, *, expected: int = 0) -> None:
        self.stream = stream
        self.expected = expected
        self.window = timing.window
        self.received = 0  # credit bytes of all accepted frames
        self.taken = 0  # credit bytes that the reader has consumed
        self.partial = 0  # credit bytes of a message that is not complete yet
        self.limit = timing.window
        self.duplicates = 0
        self.unacknowledged = 0  # frames accepted since the last acknowledgement
        self._ahead: dict[int, tuple[bytes, Content]] = {}
        self._digests: dict[int, bytes] = {}

    def has(self, seq: int) -> bool:
        """True if this number has been accepted."""
        return seq < self.expected or seq in self._ahead

    def is_new(self, seq: int, digest: bytes, party: int) -> bool:
        """False for a repeat. Raises ProtocolError if the number was used before for another content."""
        if not self.has(seq):
            if seq >= self.expected + MAX_AHEAD:
                raise ProtocolError(f"frame {seq} of stream {self.stream} is too far ahead", party=party)
            return True
        known = self._ahead[seq][0] if seq in self._ahead else self._digests.get(seq)
        if known and known != digest:
            raise ProtocolError(f"frame {seq} of stream {self.stream} came twice with different content", party=party)
        self.duplicates += 1
        self.unacknowledged += 1  # the acknowledgement was lost: say it again
        return False

    def accept(self, seq: int, digest: bytes, content: Content, credit: int, party: int) -> list[Content]:
        """Store a new frame; returns what can now be delivered, in order.

        Raises ProtocolError if the sender exceeded its credit.
        """
        self.received += credit
        if self.received > self.limit:
            raise ProtocolError(f"stream {self.stream} exceeded its credit of {self.limit} bytes", party=party)
        self.unacknowledged += 1
        if seq != self.expected:
            self._ahead[seq] = (digest, content)
            return []
        ready = [content]
        self._deliver(digest)
        while self.expected in self._ahead:
            digest, content = self._ahead.pop(self.expected)
            self._deliver(digest)
            ready.append(content)
        return ready

    def _deliver(self, digest: bytes) -> None:
        self._digests[self.expected] = digest
        if len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]
        self.expected += 1

    def take(self, credit: int) -> None:
        """The reader consumed ``credit`` bytes."""
        self.taken += credit

    def acknowledgement(self) -> Acknowledgement:
        """What to tell the sender now."""
        self.limit = max(self.limit, self.taken + self.partial + self.window)
        self.unacknowledged = 0
        ranges: list[tuple[int, int]] = []
        for seq in sorted(self._ahead):
            if ranges and ranges[-1][1] == seq:
                ranges[-1] = (ranges[-1][0], seq + 1)
            elif len(ranges) < MAX_RANGES:
                ranges.append((seq, seq + 1))
            else:
                break
        return Acknowledgement(self.stream, self.expected, self.limit, tuple(ranges))

    def forget_digests(self) -> None:
        """A new session seals the same content differently: repeats from now on are dropped unread."""
        self._digests.clear()
        self._ahead = {seq: (b"", content) for seq, (_, content) in self._ahead.items()}

    @property
    def grants(self) -> bool:
        """True if much new credit has built up that the sender does not know of."""
        return self.taken + self.partial + self.window - self.limit > self.window // 4
