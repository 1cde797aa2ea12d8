"""What the console reads (one snapshot source) and what it writes (events, through one journal thread).

A ``JournalSource`` follows a live or finished run; a ``ReplaySource`` plays the same journal against a clock of its
own, so that every panel works the same way live and recorded.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.folding.bulk_folding import Folding
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal import KEEP_AFTER, Journal, iter_events
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import LogEntry, Snapshot
from uvcc_console.haltd import order_socket
from uvcc_console.ui.feed.moments import moment
from uvcc_console.ui.feed.tape import Tape
from uvcc_console.ui.judging.past import without_advice

T = TypeVar("T")
WallTime = Callable[[], float]
BATCH = 256
OPENING_S = 0.3  # of processor time for what came after a kept snapshot, before anything is shown
BEHIND_S = 2.0  # from here on it is said, and ages are those of the picture


class SnapshotSource(Protocol):
    """Where a screen gets its picture from."""

    snapshot: Snapshot
    behind: bool  # whether the last poll left something to fold
    behind_s: float  # and how many seconds of the journal that is

    def poll(self) -> list[LogEntry] | None:
        """Bring ``snapshot`` up to date; the new log lines, or None after a jump in time (draw the log anew)."""

    def now(self) -> float:
        """The time that ages are measured against."""

    def close(self) -> None:
        """Close the files that are read."""


class JournalSource:
    """Follows a journal. ``budget_s`` of processor time bounds one poll, so that catching up never freezes the keys.

    Processor time, not wall time: on a crowded machine a poll takes longer, and gets as much done.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: WallTime = time.time,
        budget_s: float = 0.03,
        used: WallTime = time.thread_time,
    ) -> None:
        self._journal = Journal(path, readonly=True)
        self._clock = clock
        self._used = used
        self.budget_s = budget_s
        self.behind = False
        self.behind_s = 0.0
        # a long journal is not read from its beginning: what its conductor kept beside it is where the reading goes on
        kept = snapshot_cache.load(path.parent, self._journal.mark) if self._journal.last_seq() > KEEP_AFTER else None
        self.snapshot = kept or Snapshot()
        self._seq = self.snapshot.seq
        self._fresh = kept is None

    def poll(self) -> list[LogEntry] | None:
        """Fold what is new until the budget is used; ``behind`` tells whether something is left.

        The first time None where a kept snapshot has the log's newest lines already. That time takes longer: what came
        after the snapshot is a few thousand events, and the first picture is then of now.
        """
        limit = self._used() + (self.budget_s if self._fresh else max(self.budget_s, OPENING_S))
        lines: list[LogEntry] = []
        self.behind, found = False, True
        folding = Folding(self.snapshot)
        while found and not self.behind:
            found = False
            for seq, event in self._journal.since(self._seq, BATCH):
                found, self._seq = True, seq
                lines.extend(folding.add(event, seq))
                if self._used() > limit:
                    self.behind = True
                    break
        self.snapshot = folding.snapshot
        self.behind_s = self._left() if self.behind else 0.0
        fresh, self._fresh = self._fresh, True
        return lines if fresh else None

    def _left(self) -> float:
        """Seconds between the last event that was folded and the newest of the journal."""
        seq, ts = self._journal.newest()
        return max(0.0, ts - self.snapshot.updated) if seq > self._seq else 0.0

    def now(self) -> float:
        """The clock; while the picture is behind, the time of the picture: nothing in it is older than it was then."""
        return self.snapshot.updated if self.behind_s > BEHIND_S else self._clock()

    def close(self) -> None:
        self._journal.close()


class ReplaySource:
    """Plays a recorded journal at ``speed`` times real time; ``seek`` jumps to a moment, paused or not.

    Events are folded when they are first reached, ``budget_s`` a poll at most, with a snapshot kept every ``KEYFRAME``
    events: opening a day-long recording costs no more than reading it, and going back is cheap.
    """

    KEYFRAME = 500

    def __init__(self, path: Path, *, clock: WallTime = time.time, speed: float = 1.0, budget_s: float = 0.03) -> None:
        self._events = [(seq, without_advice(event)) for seq, event in iter_events(path)]
        self._times = [event.ts for _, event in self._events]
        for i in range(1, len(self._times)):  # several writers may be a few ms apart; replay needs one order
            self._times[i] = max(self._times[i], self._times[i - 1])
        self._clock = clock
        self.budget_s = budget_s
        self._frames: list[Snapshot] = [Snapshot()]
        self.start = self._times[0] if self._times else 0.0
        self.end = self._times[-1] if self._times else 0.0
        self._marks = self._find_marks()
        self.speed = speed
        self.playing = True
        self._position = self.start
        self._anchor = clock()
        self._index = 0
        self._jumped = False
        self.behind = False
        self.behind_s = 0.0  # a recording waits for whoever reads it
        self.snapshot = Snapshot()

    def _advance(self) -> None:
        now = self._clock()
        if self.playing:
            self._position = min(self.end, self._position + (now - self._anchor) * self.speed)
        self._anchor = now

    def seek(self, ts: float) -> None:
        """Go to a moment of the recording; what lies between is folded by the next polls."""
        self._advance()
        self._position = min(max(ts, self.start), self.end)
        frame = min(bisect_right(self._times, self._position) // self.KEYFRAME, len(self._frames) - 1)
        known = frame * self.KEYFRAME
        if self._times and (self._position < self._times[max(0, self._index - 1)] or known > self._index):
            self._index, self.snapshot = known, self._frames[frame]
            self._jumped = True

    def find(self, text: str, *, utc: bool = False) -> float:
        """The moment that is named. Raises ConfigError."""
        return moment(text, self._events, self.start, self.end, self.now(), utc=utc)

    def next_mark(self, direction: int) -> float | None:
        """The mark after this moment, or before it; None where there is none."""
        at, times = self.now(), [ts for ts, _ in self._marks]
        if direction > 0:
            return next((ts for ts in times if ts > at + 0.05), None)
        return next((ts for ts in reversed(times) if ts < at - 0.05), None)

    def toggle(self) -> None:
        """Pause or go on; at the end, start over."""
        self._advance()
        if not self.playing and self._position >= self.end:
            self.seek(self.start)
        self.playing = not self.playing

    def faster(self, factor: float) -> None:
        """Change the speed within 1/4 .. 4096 times real time."""
        self._advance()
        self.speed = min(4096.0, max(0.25, self.speed * factor))

    def poll(self) -> list[LogEntry] | None:
        self._advance()
        jumped, self._jumped = self._jumped, False
        lines: list[LogEntry] = []
        upto = bisect_right(self._times, self._position)
        deadline = time.perf_counter() + self.budget_s
        self.behind = False
        folding = Folding(self.snapshot)
        while self._index < upto:
            seq, event = self._events[self._index]
            lines.extend(folding.add(event, seq))
            self._index += 1
            if self._index == len(self._frames) * self.KEYFRAME:
                self._frames.append(folding.snapshot)
            if time.perf_counter() > deadline:
                self.behind = self._index < upto
                break
        self.snapshot = folding.snapshot
        if self._position >= self.end and not self.behind:
            self.playing = False
        return None if jumped else lines

    def now(self) -> float:
        return self._position

    def _find_marks(self) -> tuple[tuple[float, str], ...]:
        """Moments worth a mark: stages, halts, forks and errors, each with a role."""
        out: list[tuple[float, str]] = []
        for ts, (_, event) in zip(self._times, self._events, strict=True):
            if isinstance(event, ev.ForkDetected) or (isinstance(event, ev.StageChanged) and event.status == "failed"):
                out.append((ts, "bad"))
            elif isinstance(event, ev.HaltRequested) and event.mode != "release" and not event.drill:
                out.append((ts, "warn"))
            elif isinstance(event, ev.StageChanged) and event.status == "running":
                out.append((ts, "muted"))
        return tuple(out)

    @property
    def tape(self) -> Tape:
        """Where it stands, for the time line."""
        return Tape(self.start, self.end, self._position, self.speed, self.playing, self._marks)

    def close(self) -> None:
        self._events = []


class JournalWriter:
    """Appends events from one thread, in the order they were asked for; the disk never blocks the keys."""

    def __init__(self, path: Path, source: str, *, clock: WallTime = time.time) -> None:
        self._path = path
        self._source = source
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._halts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="halt")
        self._journal: Journal | None = None

    def _append(self, batch: tuple[ev.Event, ...]) -> int:
        if self._journal is None:
            self._journal = Journal(self._path, source=self._source, clock=self._clock)
        return self._journal.append(*batch)

    def append(self, event: ev.Event, then: Callable[[int], T]) -> Future[T]:
        """Write durably, and then do ``then`` with its sequence number: both, though nobody waits for it any more.

        The future ends with UvccError if the disk refuses.
        """
        return self._thread.submit(lambda: then(self._append((event,))))

    def order(self, request: ev.HaltRequested, then: Callable[[int], T]) -> Future[T]:
        """A halt goes to the run's sidecar by its door, so that neither disk nor lock can delay it: ``then`` gets 0.

        Where no sidecar listens it is appended like everything else. From any thread; in the order of the calls.
        """
        return self._halts.submit(lambda: then(self._order(request)))

    def _order(self, request: ev.HaltRequested) -> int:
        if order_socket.ask(self._path.parent, request):
            return 0  # the sidecar has acted on it and writes it down itself
        return self._thread.submit(self._append, (request,)).result()

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def close(self) -> None:
        """Finish what was asked for, then let go of the file."""
        self._halts.shutdown(wait=True)
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)


def open_source(
    run_dir: Path, *, replay: bool, clock: WallTime, budget_s: float
) -> tuple[JournalSource | ReplaySource, JournalWriter | None]:
    """What to read and where to write for one run; a replay writes nothing. Raises UnreadableError."""
    path = run_dir / JOURNAL
    if replay:
        return ReplaySource(path, clock=clock, budget_s=budget_s), None
    return JournalSource(path, clock=clock, budget_s=budget_s), JournalWriter(path, "tui", clock=clock)
