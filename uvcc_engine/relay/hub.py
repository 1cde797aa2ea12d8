"""The relay's queues in memory: who may take what, leases, deduplication, quotas, expiry. Durable through ``db``.

Everything here runs on one thread (the event loop's); the clock is injected. A message becomes visible to its receiver
after its commit, and a waiting receiver is woken by that commit, so nobody polls the database.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from uvcc_engine.relay import binary
from uvcc_engine.relay.checksum import crc32c
from uvcc_engine.relay.config import Credential, RelayConfig
from uvcc_engine.relay.queues import Book, Held, Mailbox, NoRoomError, Queue, Totals, Usage, Waiter
from uvcc_engine.relay.relay_roles import called
from uvcc_engine.relay.segments import LARGE
from uvcc_engine.relay.store import MessageRow, SeenRow, Store, Write

log = logging.getLogger(__name__)
PASSING_S: Final = 10.0  # life of a message in a slot
NOTICE_TTL_S: Final = 86_400
MAX_SLOT: Final = 256 << 10  # bytes of one message in a slot
MAX_PASSING: Final = 64 << 20  # bytes of all that one person of a group has in slots
_SEEN_LEAST: Final = 64  # ids that every queue may remember, however many there are in all
GONE_KEPT: Final = 4096
_ID_BITS: Final = 40

Schedule = Callable[[Callable[[], None]], None]


class Hub:
    """All queues of a relay, over a store; ``schedule`` calls back on this thread."""

    def __init__(
        self,
        config: RelayConfig,
        store: Store,
        schedule: Schedule,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._store = store
        self._schedule = schedule
        self._clock = clock
        self.totals = Totals()
        self._book = Book(config.boxes)
        self.draining = False
        self._deletes: list[tuple[int]] = []
        self._seen_rows: list[SeenRow] = []
        self._forgotten: list[tuple[int, bytes]] = []
        self._expiry: list[tuple[float, int, Held]] = []
        self._gone = 0  # of them, messages that were taken meanwhile
        self._in_memory = 0
        self._next = store.next_start() << _ID_BITS
        self._load()

    # -- enqueue -----------------------------------------------------------------------------------------------------

    def enqueue(self, who: Credential, box: int, items: Sequence[binary.Item], done: Callable[[bytes], None]) -> None:
        """Store messages; ``done`` gets one fate per item once those that are stored are durable."""
        now = self._clock()
        fates = bytearray(len(items))
        barrier = False  # a repeat of a message that is not durable yet: its answer has to wait as well
        rows: list[MessageRow] = []
        held: list[Held] = []
        for n, item in enumerate(items):
            stored = item.slot == binary.STORE
            if item.receiver not in who.send_to or item.slot == binary.EXPIRED or (not item.msg_id and stored):
                fates[n] = binary.FORBIDDEN
                continue
            try:
                if not stored:
                    fates[n] = self._pass_on(who, box, item, now)
                    continue
                queue = self._book.queue(who.group, who.number, item.receiver, box)
            except NoRoomError:
                self.totals.refused += 1
                fates[n] = binary.QUOTA
                continue
            payload = item.payload if len(item.payload) >= LARGE else bytes(item.payload)
            crc, size = crc32c(payload), len(payload)
            fates[n] = self._admit(queue, item.msg_id, crc, size, now)
            if fates[n] != binary.STORED:
                barrier = barrier or (fates[n] == binary.DUPLICATE and not queue.is_durable(item.msg_id))
                continue
            ttl = min(item.ttl_s or self._config.ttl_s, self._config.max_ttl_s)
            message = self._hold(queue, item.msg_id, binary.STORE, crc, now + ttl, size)
            message.payload = payload
            held.append(message)
            rows.append((message.id, queue.number, item.msg_id, binary.STORE, crc, message.expires, size, payload))
        if not rows and not barrier:
            done(bytes(fates))
            return
        self._commit(rows, lambda failure: self._stored(held, fates, failure, done))

    def _admit(self, queue: Queue, msg_id: bytes, crc: int, size: int, now: float) -> int:
        known = queue.open.get(msg_id)
        before = (known.crc, known.size) if known is not None else queue.seen.get(msg_id, (None,))[:2]
        if before[0] is not None:
            same = before == (crc, size)
            self.totals.deduplicated += same
            self.totals.refused += not same
            return binary.DUPLICATE if same else binary.COLLISION
        usage, config = self._book.used(queue.group, queue.sender), self._config
        if size > config.max_message:
            self.totals.refused += 1
            return binary.FORBIDDEN
        full = usage.messages >= config.quota_messages or usage.bytes + size > config.quota_bytes
        if full or usage.waiting + size > config.waiting_bytes:  # the latter: faster than the disk
            self.totals.refused += 1
            return binary.QUOTA
        return binary.STORED

    def _hold(self, queue: Queue, msg_id: bytes, slot: int, crc: int, expires: float, size: int) -> Held:
        self._next += 1
        message = Held(self._next, queue, msg_id, slot, crc, expires, size)
        self._book.hold(message)
        self._book.used(queue.group, queue.sender).waiting += size
        return message

    def _commit(self, rows: list[MessageRow], then: Callable[[Exception | None], None]) -> None:
        deletes, self._deletes = self._deletes, []
        seen, self._seen_rows = self._seen_rows, []
        queues, self._book.new = self._book.new, []
        forgotten, self._forgotten = self._forgotten, []

        def done(failure: Exception | None) -> None:  # on the writer's thread
            self._schedule(lambda: after(failure))

        def after(failure: Exception | None) -> None:
            if failure is not None:  # nothing of it was written: the bookkeeping goes with the next transaction
                self._deletes[:0], self._seen_rows[:0], self._book.new[:0] = deletes, seen, queues
                self._forgotten[:0] = forgotten
            then(failure)

        self._store.put(Write(queues, rows, deletes, seen, 0.0, done, forgotten))

    def _stored(
        self, held: list[Held], fates: bytearray, failure: Exception | None, done: Callable[[bytes], None]
    ) -> None:
        for message in held:
            self._book.used(message.queue.group, message.queue.sender).waiting -= message.size
        if failure is not None:
            for message in held:
                self._book.release(message)
            for n, fate in enumerate(fates):
                fates[n] = binary.FAILED if fate == binary.STORED else fate
            done(bytes(fates))
            return
        for message in held:
            self._arrive(message)
        self.totals.enqueued += len(held)
        done(bytes(fates))

    def _arrive(self, message: Held) -> None:
        """A durable message becomes visible to its receiver."""
        mailbox, message.durable = message.queue.mailbox, True
        heapq.heappush(self._expiry, (message.expires, message.id, message))
        if message.payload is not None:
            self.totals.bytes_in += message.size
            if self._in_memory + message.size > self._config.memory_bytes:
                message.payload = None  # read again from disk when it is taken
            else:
                self._in_memory += message.size
        mailbox.ready.append(message)
        if mailbox.waiter is not None:
            mailbox.waiter.wake()

    def _pass_on(self, who: Credential, box: int, item: binary.Item, now: float) -> int:
        """Put a message into its slot; returns its fate. Raises NoRoomError."""
        mailbox = self._book.mailbox(who.group, item.receiver, box, who.number)
        usage, size = self._book.used(who.group, who.number), len(item.payload)
        self._empty_slot(mailbox, (who.number, item.slot))
        if size > MAX_SLOT or usage.passing + size > MAX_PASSING:
            raise NoRoomError("too much in slots")
        mailbox.slots[who.number, item.slot] = (now + PASSING_S, bytes(item.payload))
        usage.passing += size
        if mailbox.waiter is not None:
            mailbox.waiter.wake()
        return binary.STORED

    def _empty_slot(self, mailbox: Mailbox, slot: tuple[int, int]) -> None:
        _, payload = mailbox.slots.pop(slot, (0.0, b""))
        self._book.used(mailbox.group, slot[0]).passing -= len(payload)

    def enter(self, who: Credential, box: int) -> None:
        """``who`` reads this box from now on. Raises NoRoomError for one box too many."""
        self._book.mailbox(who.group, who.number, box, who.number)

    # -- take and acknowledge ----------------------------------------------------------------------------------------

    def take(self, who: Credential, box: int, max_bytes: int, *, consumer: int = 0) -> list[binary.Message]:
        """Lease what is there for ``who``, oldest first: at least one message, further ones up to ``max_bytes``."""
        mailbox = self._book.mailbox(who.group, who.number, box, who.number)
        now = self._clock()
        self._end_leases(mailbox, now, everything=consumer != mailbox.consumer)
        mailbox.consumer = consumer
        found: list[binary.Message] = []
        for (sender, slot), (until, payload) in mailbox.slots.items():
            if until > now:
                found.append(binary.Message(0, sender, slot, payload))
        for key in tuple(mailbox.slots):
            self._empty_slot(mailbox, key)
        size = 0
        while mailbox.ready and (not size or size + mailbox.ready[0].size <= max_bytes):
            message = mailbox.ready.popleft()
            payload_or_none = message.payload if message.payload is not None else self._kept(message)
            if payload_or_none is None:
                self._remove(message)  # not remembered: whoever sends it again is believed
                continue
            message.lease = now + self._config.lease_s
            mailbox.leased[message.id] = message
            size += message.size + 1
            found.append(binary.Message(message.id, message.queue.sender, message.slot, payload_or_none))
        self.totals.delivered += len(found)
        self.totals.bytes_out += size
        return found

    def _kept(self, message: Held) -> binary.Buffer | None:
        """What the store has of a message; None if that is gone, or is not what was stored."""
        payload = self._store.payload(message.id)
        if payload is None or crc32c(payload) != message.crc:
            log.error("a message from %s is lost: the store has it no more", called(message.queue.sender))
            return None
        return payload

    def has_for(self, who: Credential, box: int) -> bool:
        """True if :meth:`take` would find something."""
        mailbox = self._book.mailbox(who.group, who.number, box, who.number)
        self._end_leases(mailbox, self._clock(), everything=False)
        return bool(mailbox.ready or mailbox.slots)

    def release_leases(self, who: Credential, box: int) -> None:
        """What was leased did not reach its consumer: it can be taken again."""
        mailbox = self._book.known(who.group, who.number, box)
        if mailbox is not None:
            self._end_leases(mailbox, self._clock(), everything=True)

    def _end_leases(self, mailbox: Mailbox, now: float, *, everything: bool) -> None:
        back = []
        for message in mailbox.leased.values():
            if not everything and message.lease > now:
                break  # leases end in the order in which they were given
            back.append(message)
        for message in back:
            del mailbox.leased[message.id]
        if back:
            self.totals.redelivered += len(back)
            mailbox.ready = deque(sorted((*back, *mailbox.ready), key=lambda m: m.id))

    def acknowledge(self, who: Credential, box: int, deliveries: Sequence[int]) -> list[bool]:
        """Forget delivered messages; False for an id that is not leased to ``who`` (any more)."""
        mailbox = self._book.mailbox(who.group, who.number, box, who.number)
        now = self._clock()
        fates = []
        for ident in deliveries:
            message = mailbox.leased.pop(ident, None)
            fates.append(message is not None)
            if message is not None:
                self._remember(message, now)
                self._remove(message)
        self.totals.acknowledged += sum(fates)
        return fates

    def _remember(self, message: Held, now: float) -> None:
        queue, until = message.queue, now + self._config.dedup_s
        usage = self._book.used(queue.group, queue.sender)
        usage.seen += message.msg_id not in queue.seen
        queue.seen[message.msg_id] = (message.crc, message.size, until)
        crowded = usage.seen > self._config.dedup_total and len(queue.seen) > _SEEN_LEAST
        if crowded or len(queue.seen) > self._config.dedup_keep:
            oldest = next(iter(queue.seen))
            del queue.seen[oldest]
            usage.seen -= 1
            self._forgotten.append((queue.number, oldest))
        self._seen_rows.append((queue.number, message.msg_id, message.crc, message.size, until))

    def _remove(self, message: Held) -> None:
        self._deletes.append((message.id,))
        if message.payload is not None:
            self._in_memory -= message.size
        self._book.release(message)
        message.lease = -1.0  # marks it as gone for the expiry heap
        self._gone += 1
        if self._gone > GONE_KEPT and 2 * self._gone > len(self._expiry):
            self._expiry = [entry for entry in self._expiry if entry[2].lease >= 0]
            heapq.heapify(self._expiry)
            self._gone = 0

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Call about once a second: expire, forget, wake who can have a message whose lease ended, flush."""
        now = self._clock()
        rows: list[MessageRow] = []
        notices: list[Held] = []
        while self._expiry and self._expiry[0][0] <= now:
            _, _, message = heapq.heappop(self._expiry)
            if message.lease < 0:
                self._gone -= 1
                continue
            self._expire(message, now, rows, notices)
        for queue in self._book.by_number.values():
            while queue.seen and queue.seen[next(iter(queue.seen))][2] <= now:
                del queue.seen[next(iter(queue.seen))]
                self._book.used(queue.group, queue.sender).seen -= 1
        for mailbox in self._book.mailboxes.values():
            self._end_leases(mailbox, now, everything=False)
            for key in [k for k, (until, _) in mailbox.slots.items() if until <= now]:
                self._empty_slot(mailbox, key)
            if mailbox.ready and mailbox.waiter is not None:
                mailbox.waiter.wake()
        if rows or self._deletes or self._seen_rows:
            self._commit(rows, lambda failure: self._noticed(notices, failure))

    def _noticed(self, notices: list[Held], failure: Exception | None) -> None:
        for notice in notices:
            self._book.used(notice.queue.group, notice.queue.sender).waiting -= notice.size
            if failure is None:
                self._arrive(notice)
            else:
                self._book.release(notice)

    def _expire(self, message: Held, now: float, rows: list[MessageRow], notices: list[Held]) -> None:
        queue, mailbox = message.queue, message.queue.mailbox
        mailbox.leased.pop(message.id, None)
        if message in mailbox.ready:
            mailbox.ready.remove(message)
        self._remove(message)
        self._gone -= 1  # it has left the heap
        self.totals.expired += 1
        if message.slot == binary.EXPIRED:
            return
        # the sender learns of it: a notice in the sender's own mailbox, from itself
        try:
            own = self._book.queue(queue.group, queue.sender, queue.sender, mailbox.box)
        except NoRoomError:
            return
        payload = bytes([mailbox.receiver]) + message.msg_id
        notice_id = b"expired:" + self._next.to_bytes(8, "big")
        crc = crc32c(payload)
        notice = self._hold(own, notice_id, binary.EXPIRED, crc, now + NOTICE_TTL_S, len(payload))
        notice.payload = payload
        rows.append((notice.id, own.number, notice_id, binary.EXPIRED, crc, notice.expires, len(payload), payload))
        notices.append(notice)

    def forget(self) -> None:
        """Call about once a minute: drop remembered ids whose time is over."""
        self._store.put(Write([], [], [], [], self._clock(), lambda failure: None))

    def drain(self) -> None:
        """Stop is near: every waiting consumer returns at once."""
        self.draining = True
        for mailbox in self._book.mailboxes.values():
            if mailbox.waiter is not None:
                mailbox.waiter.wake()

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        for number, group, sender, receiver, box in self._store.queues():
            self._book.add(number, group, sender, receiver, int.from_bytes(box, "big"))
            self._book.used(group, sender).boxes += 1
        for ident, number, msg_id, slot, crc, expires, size in self._store.pending():
            queue = self._book.by_number[number]
            message = Held(ident, queue, msg_id, slot, crc, expires, size)
            self._book.hold(message)
            self._arrive(message)
        for number, msg_id, crc, size, until in self._store.seen():
            queue = self._book.by_number[number]
            queue.seen[msg_id] = (crc, size, until)
            self._book.used(queue.group, queue.sender).seen += 1

    def await_mail(self, who: Credential, box: int, waiter: Waiter) -> None:
        """Wake ``waiter`` when there is something for ``who``; whoever waited before does no longer."""
        mailbox = self._book.mailbox(who.group, who.number, box, who.number)
        before, mailbox.waiter = mailbox.waiter, waiter
        if before is not None and before is not waiter:
            before.superseded()

    def stop_awaiting(self, who: Credential, box: int, waiter: Waiter) -> None:
        """Undo :meth:`await_mail`, also of a reader that was refused its box."""
        mailbox = self._book.known(who.group, who.number, box)
        if mailbox is not None and mailbox.waiter is waiter:
            mailbox.waiter = None

    @property
    def usage(self) -> dict[tuple[str, int], Usage]:
        """What each person of a group has queued."""
        return self._book.usage

    def state(self) -> dict[str, Any]:
        """Figures for /metrics."""
        ready = sum(len(m.ready) for m in self._book.mailboxes.values())
        leased = sum(len(m.leased) for m in self._book.mailboxes.values())
        waiting = sum(m.waiter is not None for m in self._book.mailboxes.values())
        return {"ready": ready, "leased": leased, "waiting": waiting, "bytes_in_memory": self._in_memory}
