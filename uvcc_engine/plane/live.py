"""The plane that protocols use: endpoints and a link, driven by the calling thread, kept alive by a quiet one.

A caller that waits drives the link itself, so a message wakes the thread that wants it and no other. While the caller
computes, a background thread looks in every few milliseconds: it sends what is left over, answers signs of life and
takes what has arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreachableError, UvccError
from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer, Recorder, Tag, Wakeable
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.event_limiter import EventLimiter, OnEvent
from uvcc_engine.plane.links.faults import FaultyLink
from uvcc_engine.plane.links.link import Link, no_work
from uvcc_engine.plane.waits import HaltPatience, Waits, away_hint, lost, stopped_for

_LONGEST_WAIT: Final = 1.0
_NOISE: Final = frozenset({"protocol_error", "relay_refused", "relay_expired", "relay_down", "relay_up", "link_down"})


class LivePlane:
    """Implements ``plane.api.Plane``. Made by :func:`uvcc_engine.plane.connect.open_plane`."""

    def __init__(
        self,
        party: int,
        endpoints: dict[int, Endpoint],
        link: Link,
        recorder: Recorder | None,
        on_event: OnEvent,
        waits: Waits,
        clock: Callable[[], float] = time.monotonic,
        *,
        save: Callable[[bytes], None] | None = None,
        restored: bytes | None = None,
    ) -> None:
        self.party = party
        self.waited_s = 0.0  # how long the user thread has waited for messages, in all
        self._waited_for: dict[int, float] = {}  # the same by whom it waited for
        self.restored = restored  # the effect of the last commit of an earlier process; None if there was none
        self._save = save
        self._endpoints = endpoints
        self._link = link
        self._recorder = recorder
        self._catch_up: Callable[[], None] = recorder.catch_up if recorder is not None else no_work
        if recorder is not None:
            for peer, endpoint in endpoints.items():
                endpoint.inbox.on_message = partial(recorder.hash_ahead, peer)
        self._on_event = on_event
        self._quiet = EventLimiter(on_event)
        self._waits = waits
        self.patience = HaltPatience(waits.halting_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failed: ProtocolError | None = None  # what a peer did; everything but farewells ends with it
        self._broken: UvccError | None = None  # the link itself
        self._unrecorded: Exception | None = None  # why messages that were sent have no leaf
        self._up: dict[int, int] = {}
        self._wait: tuple[int, float, Tag | None] | None = None
        self._given_up: dict[tuple[int, Tag | None], float] = {}  # waits that came to nothing, and since when
        self._next_report = 0.0
        self._retransmits_told = 0
        self._last_exchange = clock()
        self._away, self._away_from, self._away_why = 0.0, "the relay", ""  # when the relay was last away
        self._background = threading.Thread(target=self._look_in, name="plane", daemon=True)
        self._background.start()

    # -- Plane -------------------------------------------------------------------------------------------------------

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        """See ``Plane.send``."""
        if not (0 <= tag.stream < fr.CONTROL_STREAM and 0 <= tag.kind <= fr.MAX_KIND):
            raise ConfigError(f"{tag} is not a message tag", "streams are below 2^32-2, kinds below 256")
        if self._recorder is not None:
            self._recorder.record(0, dst, tag, payload)
        if self._failed is not None:
            raise self._failed
        self._queue(dst, tag, payload)

    def recv(self, src: int, tag: Tag) -> memoryview:
        """See ``Plane.recv``."""
        endpoint = self._endpoints[src]
        with self._lock:
            self._raise_failure()
            message = endpoint.take(tag)
            if message is None:
                message = self._await(endpoint, tag, lambda: endpoint.take(tag), None)
                assert message is not None
        if self._recorder is not None:
            self._recorder.record(1, src, tag, message)
        return message

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        """See ``Plane.arrived``."""
        with self._lock:
            self._raise_failure()
            return self._holds(wants)

    def _holds(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        return all(self._endpoints[src].inbox.holds(tag) for src, tag in wants)

    def wait_any(self, wants: Sequence[Sequence[tuple[int, Tag]]], other: Callable[[], bool] | None = None) -> None:
        """See ``Plane.wait_any``."""
        found = memoryview(b"")

        def ready() -> memoryview | None:
            return found if any(map(self._holds, wants)) or (other is not None and other()) else None

        def ready_or(due: tuple[int, Tag]) -> memoryview | None:
            return found if self._holds([due]) else ready()

        with self._lock:
            self._raise_failure()
            nudged = other is None or isinstance(self._link, Wakeable)
            longest = _LONGEST_WAIT if nudged else self._waits.look_s
            while ready() is None:
                due = next(want for want in wants[0] if not self._holds([want]))
                self._await(self._endpoints[due[0]], due[1], partial(ready_or, due), None, longest)

    def wake(self) -> None:
        """See ``api.Wakeable``; over a link that cannot be nudged ``other`` is asked every ``look_s``."""
        if isinstance(self._link, Wakeable):
            self._link.wake()

    def send_control(self, dst: int, body: bytes) -> None:
        """See ``Plane.send_control``. Still works towards the others after one peer broke the protocol."""
        if self._failed is not None and self._failed.party == dst:
            raise self._failed
        op = self._endpoints[dst].state.numbered.get(fr.CONTROL_STREAM, 0) & 0xFFFF_FFFF
        self._queue(dst, Tag(0, fr.CONTROL_STREAM, op, 0), body)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        """See ``Plane.recv_control``."""
        endpoint = self._endpoints[src]
        with self._lock:
            self._raise_failure()
            message = endpoint.take_control()
            if message is not None:
                self._given_up.pop((src, None), None)
            else:
                message = self._await(endpoint, None, endpoint.take_control, timeout)
        if message is None:
            raise TimeoutError(f"no control message from party {src} within {timeout} s")
        return bytes(message)

    def flush(self) -> None:
        """Put everything queued on the wire now instead of at the next receive."""
        with self._lock:
            self._drive(0.0, None)

    def commit(self, effect: bytes = b"") -> None:
        """Make durable, at once: ``effect`` and that every message taken so far led to it.

        A process that opens the plane again finds ``effect`` as ``restored`` and goes on from there: it gets every
        message after this commit, none before it. Needs ``link.durable``; raises ConfigError without it, UvccError if
        the disk refuses.
        """
        if self._save is None:
            raise ConfigError("this plane keeps nothing across restarts", "open it with link.durable and a state_dir")
        with self._lock:
            before = {p: dict(e.state.taken) for p, e in self._endpoints.items()}
            for endpoint in self._endpoints.values():
                endpoint.commit()
            try:
                self._save(effect)
            except UvccError:
                for peer, taken in before.items():
                    self._endpoints[peer].state.taken = taken
                raise

    def close(self, *, graceful: bool = True) -> None:
        """See ``Plane.close``. Safe to call twice."""
        if self._closed.is_set():
            return
        with self._lock:
            try:
                if graceful and self._failed is None:
                    self._drain(self._clock() + self._waits.close_s)
                for endpoint in self._endpoints.values():
                    endpoint.goodbye()
                self._drive(0.0, None)
            except UvccError as error:
                self._on_event("link_down", {"kind": self._link.kind, "why": error.what})
            self._broken = ConfigError("the plane is closed", "nothing can be sent or received any more")
            self._closed.set()
            self._link.close()
            self._pass_on(self._link.notices(), self._clock())
            self._quiet.look(float("inf"))
        if threading.current_thread() is not self._background:
            self._background.join()

    def settle_control(self) -> None:
        """Before a close that is not graceful: stay until what was said is with whoever listens, within ``close_s``."""
        with self._lock, suppress(UvccError, OSError):
            deadline, link, broke = self._clock() + self._waits.close_s, self._link, self._failed and self._failed.party
            while not self._closed.is_set() and self._clock() < deadline:
                listening = [e for p, e in self._endpoints.items() if p != broke and not link.lost(p)]
                if not any(e.untold(stored=not link.eager and not link.unconfirmed()) for e in listening):
                    return
                self._drive(0.1, None)

    def _drain(self, deadline: float) -> None:
        while self._failed is None and self._clock() < deadline:
            if all(e.idle or e.bye or e.session is None for e in self._endpoints.values()):
                return
            self._drive(0.1, None)

    # -- observation -------------------------------------------------------------------------------------------------

    @property
    def waiting_on(self) -> dict[str, Any] | None:
        """Whom the user thread waits for and since when: ``{peer, since_s, tag}``; None if it does not wait."""
        wait = self._wait
        if wait is None:
            return None
        peer, since, tag = wait
        return {"peer": peer, "since_s": round(self._clock() - since, 3), "tag": list(tag) if tag else "control"}

    @property
    def sent_bytes(self) -> int:
        """What went out to both peers so far, frames and repeats included."""
        return sum(endpoint.counters.bytes_out for endpoint in self._endpoints.values())

    def totals(self) -> dict[int, dict[str, int]]:
        """By peer: frames, bytes, messages, retransmissions, duplicates discarded, frames rejected and stale, and in
        ``waited_ms`` how long the user thread has waited for its messages; ``round_trip_us`` is no total."""
        waited = self._waited_for
        return {
            peer: endpoint.totals() | {"waited_ms": round(1000 * waited.get(peer, 0.0))}
            for peer, endpoint in self._endpoints.items()
        }

    @property
    def injected(self) -> dict[str, int] | None:
        """How often each fault was injected into what arrived here; None where none are."""
        return dict(self._link.faults.injected) if isinstance(self._link, FaultyLink) else None

    def stats(self) -> dict[str, Any]:
        """Per peer and channel: queued, in flight, age of the oldest, retransmissions, bytes."""
        now = self._clock()
        return {str(peer): endpoint.stats(now) for peer, endpoint in self._endpoints.items()}

    # -- driving -----------------------------------------------------------------------------------------------------

    def _queue(self, dst: int, tag: Tag, payload: Buffer) -> None:
        endpoint = self._endpoints[dst]
        with self._lock:
            if self._broken is not None:
                raise self._broken
            endpoint.queue(tag, payload, self._clock())
            if self._link.eager:
                if self._link.ready(dst):
                    self._transmit(endpoint, self._clock())
                    self._link.flush()
            elif endpoint.queued_bytes > self._link.batch_bytes:
                self._drive(0.0, None)
            if endpoint.blocked:
                self._await(endpoint, None, lambda: None if endpoint.blocked else memoryview(b""), None)

    def _await(
        self,
        endpoint: Endpoint,
        tag: Tag | None,
        get: Callable[[], memoryview | None],
        timeout: float | None,
        longest: float = _LONGEST_WAIT,
    ) -> memoryview | None:
        """Drive the link until ``get`` has something, time is up (None), or waiting is pointless (raises)."""
        now = began = self._clock()
        start = self._given_up.pop((endpoint.peer, tag), began)  # a caller that looks in again has waited since then
        if start == began:
            self._next_report = began + self._waits.report_s
        self._wait = (endpoint.peer, start, tag)
        deadline = float("inf") if timeout is None else began + timeout
        try:
            while True:
                self._drive(min(longest, max(0.0, deadline - now)), endpoint.peer, self._meanwhile)
                self._raise_failure()
                found = get()
                if found is not None:
                    return found
                looked, now = now, self._clock()
                start += stopped_for(now - looked, _LONGEST_WAIT)
                self._judge(endpoint, tag, start, now)
                self._judge_others(endpoint.peer)
                if now >= deadline:
                    self._given_up[endpoint.peer, tag] = start
                    return None
        finally:
            self._wait = None
            waited = self._clock() - began
            self.waited_s += waited
            self._waited_for[endpoint.peer] = self._waited_for.get(endpoint.peer, 0.0) + waited

    def _raise_failure(self) -> None:
        for failure in (self._broken, self._failed, self._unrecorded):
            if failure is not None:
                raise failure

    def _meanwhile(self) -> None:
        """What the user thread does while it waits, once its messages are on their way."""
        try:
            self._catch_up()
        except (UvccError, OSError, ValueError) as error:  # no link may take it for trouble of its own
            self._unrecorded = error

    def _transmit(self, endpoint: Endpoint, now: float) -> None:
        link, dst = self._link, endpoint.peer
        for out in endpoint.transmit(now):
            link.send(dst, out)
            if not link.ready(dst):
                return

    def _drive(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> None:
        """One round with the link: send what is due, take what has come within ``wait`` seconds."""
        link, now = self._link, self._clock()
        until = now + wait
        for peer, endpoint in self._endpoints.items():
            if (endpoint.pressing or endpoint.next_due() <= now) and link.ready(peer):
                self._transmit(endpoint, now)
            if wait and link.ready(peer):
                until = min(until, endpoint.next_due())
        arrivals = link.exchange(max(0.0, until - now), src, meanwhile)
        now = self._last_exchange = self._clock()
        for header, body, path in arrivals:
            self._take_in(header, body, path, now)
        for peer in link.resets():
            self._endpoints[peer].link_reset(now)
        self._pass_on(link.notices(), now)
        self._quiet.look(now)

    def _pass_on(self, notices: Iterable[Notice], now: float) -> None:
        """Tell of what happened at the link; what others than the peers can cause again and again, sparingly."""
        for event, fields in notices:
            if event == "relay_down":
                self._away_from, self._away_why = f"the relay {fields.get('url', '')}", f": {fields.get('why', '')}"
            if event in _NOISE:
                party = fields.get("party")
                self._quiet.say((event, party if party in self._endpoints else None), event, dict(fields), now)
            else:
                self._on_event(event, dict(fields))

    def _take_in(self, header: fr.Header, body: Buffer, path: object, now: float) -> None:
        endpoint = self._endpoints.get(header.src)
        if endpoint is None:
            fields = {"party": header.src, "what": "a frame of an unknown sender", "dropped": True}
            self._quiet.say("unknown", "protocol_error", fields, now)
            return
        if self._failed is not None and self._failed.party == header.src:
            return  # nothing that it says counts any more
        try:
            if endpoint.receive(header, body, now):
                self._link.proven(header.src, path)
        except ProtocolError as error:
            self._fail(error)
        if endpoint.errors:
            self._report_errors(endpoint, now)
        if endpoint.session is not None and self._up.get(endpoint.peer) != endpoint.session.id:
            self._up[endpoint.peer] = endpoint.session.id
            self._on_event("link_up", {"kind": self._link.kind, "peer": endpoint.peer})

    def _report_errors(self, endpoint: Endpoint, now: float) -> None:
        for error in endpoint.errors:
            fields = {"party": error.party, "what": error.what, "dropped": True}
            self._quiet.say(("dropped", endpoint.peer), "protocol_error", fields, now)
        endpoint.errors.clear()

    def _fail(self, error: ProtocolError) -> None:
        if self._failed is None:
            self._failed = error
            self._on_event("protocol_error", {"party": error.party, "what": error.what})

    def _judge(self, endpoint: Endpoint, tag: Tag | None, start: float, now: float) -> None:
        """Is it still sensible to wait? Raises PeerLostError or ProtocolError if not; reports long waits."""
        peer, waits = endpoint.peer, self._waits
        if away := self._link.away_s():
            self._away = now
        silent = now - max(endpoint.last_heard, self._away)  # nobody can be heard while the relay is away
        no_more = self.patience.over(max(away, silent), now)
        if away > waits.away_s or (away and no_more):
            why = ", and the run is to halt" if no_more else ""
            hint = away_hint(self._link.kind)
            what = f"{self._away_from} has not been reached for {away:.0f} s{why}{self._away_why}"
            raise UnreachableError(what, hint)
        gone, refused = endpoint.bye and endpoint.drained(), self._link.lost(peer)
        patience = waits.peer_s if endpoint.heard else max(waits.first_s, waits.peer_s)
        if gone or no_more or silent > patience or refused > waits.refused_s:
            why = "ended its session" if gone else "refuses connections" if refused > waits.refused_s else "is silent"
            why += ", and the run is to halt" if no_more else ""
            self._lose(peer, why, refused if refused > waits.refused_s else silent, silent)
        if tag is not None and now - start > waits.order_s and (other := endpoint.inbox.beyond(tag)):
            raise ProtocolError(f"party {peer} sent {other} and goes on without {tag}", party=peer)
        if tag is not None and now - start > waits.proof_s and (hint := endpoint.withheld(tag)):
            what = f"party {peer} is alive and withholds its part of a proof for {now - start:.0f} s ({tag})"
            raise ProtocolError(what, hint, party=peer)
        if now >= self._next_report:
            self._next_report = now + 6 * waits.report_s
            waited = {"peer": peer, "since_s": round(now - start, 1), "silent_s": round(silent, 1)}
            more = {"retransmits": endpoint.retransmits, "why": self._link.trouble(peer)}
            self._on_event("waiting", waited | {name: value for name, value in more.items() if value != ""})

    def _judge_others(self, awaited: int) -> None:
        """Who is awaited may itself wait for a third that is gone, and only we may be the one who dials that one."""
        for peer, endpoint in self._endpoints.items():
            refused = self._link.lost(peer)
            if peer != awaited and not endpoint.bye and refused > self._waits.refused_s:
                self._lose(peer, "refuses connections", refused, self._clock() - endpoint.last_heard)

    def _lose(self, peer: int, why: str, since: float, silent: float) -> NoReturn:
        self._on_event("peer_lost", {"party": peer, "since_s": round(since, 1), "why": why})
        raise lost(peer, why, silent, "" if self._endpoints[peer].heard else self._link.trouble(peer))

    def _look_in(self) -> None:
        """Body of the background thread."""
        link, pause = self._link, 0.01
        while not self._closed.wait(pause):
            if not self._lock.acquire(blocking=False):
                pause = self._waits.idle_s  # the user thread drives
                continue
            try:
                if not self._closed.is_set() and self._broken is None:
                    pause = self._background_round(link, pause)
            except UvccError as error:
                self._broken = error  # the user thread learns of it at its next call
            finally:
                self._lock.release()

    def _background_round(self, link: Link, pause: float) -> float:
        """One look; returns when to look again. It looks less and less often while there is nothing to do."""
        now = self._clock()
        if link.eager:
            before = sum(e.counters.frames_in for e in self._endpoints.values())
            self._drive(0.0, None)
            busy = link.pending() or before != sum(e.counters.frames_in for e in self._endpoints.values())
            return 0.001 if busy else min(max(2 * pause, 0.01), self._waits.idle_s)
        due = min(e.next_due() for e in self._endpoints.values()) <= now
        if due or now - self._last_exchange > 0.25 or any(e.queued_bytes for e in self._endpoints.values()):
            self._drive(0.0, None)
        return self._waits.look_s
