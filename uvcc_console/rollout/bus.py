"""The journal as an asyncio process uses it: batched appends, a snapshot that follows, waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.alerts import STEPPED_S
from uvcc_console.core.folding import bad_records
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal import KEEP_AFTER, Follower, Journal
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.rollout.outbox import EventOutbox
from uvcc_console.runs.disk_space import full_disk
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import clean

log = logger(__name__)
T = TypeVar("T")
POLL_S = 0.03
BATCH_S = 0.1
RETRY_S = 1.0
KEEP_S = 10.0
MAX_QUEUE = 20_000


def _offset() -> float:
    return time.time() - time.monotonic()


class Bus:
    """One process's end of the journal. ``commit`` is durable when it returns; ``record`` within ``BATCH_S``."""

    def __init__(
        self, journal: Journal, start: Snapshot | None = None, *, poll_s: float = POLL_S, batch_s: float = BATCH_S
    ) -> None:
        """``start``: what is known of the journal already, so that a day of events is not folded again."""
        self._journal = journal
        self._follower = Follower(journal, start)
        self._queue = EventOutbox()
        self._room = asyncio.Event()
        self._room.set()
        self._poll_s = poll_s
        self._batch_s = batch_s
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[ev.Event], None]] = []
        self._refused = False
        self._why, self._refused_from = "", 0.0
        self._refused_at = float("-inf")  # when it was last, by a counter that nobody sets
        self._offset, self._set_at = _offset(), float("-inf")  # of the wall clock from that counter; when it was set
        self._deaf: set[tuple[str, str]] = set()
        self._drain()

    @property
    def snapshot(self) -> Snapshot:
        """Everything known so far, own appends included."""
        return self._follower.snapshot

    @property
    def behind(self) -> int:
        """How many events the journal has not taken yet."""
        return len(self._queue)

    @property
    def settled_s(self) -> float:
        """For how many seconds by now the snapshot's times can be held against the clock.

        What was told while the journal refused events is not in it, and what was told before this machine's clock was
        set has times of the old one. 0 while the journal refuses.
        """
        self._look_at_clock()
        return 0.0 if self._refused else time.monotonic() - max(self._refused_at, self._set_at)

    def _look_at_clock(self) -> None:
        """Note and tell that the wall clock was set, or that this machine slept: ages mean nothing behind that."""
        was, self._offset = self._offset, _offset()
        by = self._offset - was
        if abs(by) <= STEPPED_S:
            return
        self._set_at = time.monotonic()
        text = f"this machine's clock went {'forward' if by > 0 else 'back'} by {abs(by):.0f} s at once"
        hint = "silence is counted anew from here; keep the time with NTP, and let this machine not sleep"
        log.warning("%s", text)
        self.record([ev.Alert(level="warn", name="clock", text=text, hint=hint)])

    def listen(self, listener: Callable[[ev.Event], None]) -> None:
        """Call ``listener`` with every event from now on, whoever wrote it, in journal order."""
        self._listeners.append(listener)

    def commit(self, *batch: ev.Event) -> None:
        """Append durably, after what was queued, and fold. Raises UvccError if the disk refuses."""
        queued = self._queue.take() if not batch else self._queue.take(len(self._queue))
        if queued or batch:
            try:
                self._journal.append(*queued, *batch)
            except UvccError:
                self._queue.put_back(queued)
                raise
        if len(self._queue) < MAX_QUEUE // 2:
            self._room.set()
        self._drain()

    def record(self, events: Sequence[ev.Event]) -> None:
        """Queue for the next batch, without waiting; nothing is dropped but what a newer one of its kind supersedes.

        Whoever can say more than the disk takes calls ``room`` before the next.
        """
        self._queue.put(events)
        if len(self._queue) >= MAX_QUEUE:
            self._room.clear()

    async def room(self) -> None:
        """Wait while the queue is full: what is not taken stays in the pods' files."""
        await self._room.wait()

    def _drain(self) -> None:
        while batch := self._follower.poll():
            for event in batch:
                for listener in self._listeners:
                    self._call(listener, event)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _call(self, listener: Callable[[ev.Event], None], event: ev.Event) -> None:
        """A listener that cannot take an event is told of by name, once; it hears the next one like the others."""
        try:
            listener(event)
        except Exception as e:  # the journal must go on being followed and written
            if bad_records.strict():
                raise
            name = getattr(listener, "__qualname__", type(listener).__name__)
            if (name, event.kind) in self._deaf:
                return
            self._deaf.add((name, event.kind))
            log.error("%s could not take a %s event", name, event.kind, exc_info=e)
            text = f"{name} could not take a {event.kind} event: {type(e).__name__}: {clean(str(e), 200)}"
            self.record([ev.Alert(level="error", name="listener", text=text, hint="uvcc logs has the details")])

    async def run(self) -> None:
        """Write the queue and follow the journal until cancelled. A disk that refuses is tried again each second."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        keeping = asyncio.create_task(self._keep())
        try:
            while True:
                self._look_at_clock()
                if self._queue and loop.time() >= due:
                    due = loop.time() + (self._batch_s if self._try_commit() else RETRY_S)
                else:
                    self._drain()
                await asyncio.sleep(self._poll_s)
        finally:
            keeping.cancel()
            while self._queue and self._try_commit():
                continue
            self._keep_last()

    async def _keep(self) -> None:
        """Leave a snapshot beside the journal now and then, for readers that are in a hurry."""
        kept_at = self.snapshot.seq
        while True:
            await asyncio.sleep(KEEP_S)
            s = self.snapshot
            if s.seq - kept_at < KEEP_AFTER:
                continue
            if await asyncio.to_thread(self._kept, s, self._journal.mark(s.seq)):
                kept_at = s.seq

    def _keep_last(self) -> None:
        """A run that is over is looked at many times more."""
        if self.snapshot.ended:
            self._kept(self.snapshot, self._journal.mark(self.snapshot.seq))

    def _kept(self, s: Snapshot, mark: str) -> bool:
        """Whether it lies beside the journal now; without it readers fold the journal, and the run goes on."""
        try:
            snapshot_cache.keep(self._journal.path.parent, s, mark)
        except Exception as e:
            log.error("no snapshot is kept beside the journal", exc_info=e)
            return False
        return True

    def _try_commit(self) -> bool:
        try:
            self.commit()
        except UvccError as e:
            if not self._refused:
                log.error("the journal refuses events, and is tried again each second: %s", e)
                self._why, self._refused_from = full_disk(self._journal.path.parent) or e.what, time.monotonic()
            self._refused = True
            return False
        if self._refused:
            self._refused, self._refused_at = False, time.monotonic()
            log.info("the journal takes events again")
            text = f"for {self._refused_at - self._refused_from:.0f} s nothing could be written down: {self._why}"
            hint = "nothing was lost; look at the disk of the data folder (uvcc paths), and leave more room there"
            self.record([ev.Alert(level="warn", name="journal_refused", text=text, hint=hint)])
        return True

    async def wait(self, condition: Callable[[Snapshot], T | None], timeout: float | None = None) -> T:
        """The first truthy value of ``condition`` over the snapshots from now on.

        Raises TimeoutError after ``timeout`` seconds, if there are any.
        """
        async with asyncio.timeout(timeout):
            while True:
                changed = self._changed
                found = condition(self.snapshot)
                if found:
                    return found
                await changed.wait()
