"""Everything one party keeps about one peer: session, channels, liveness. No I/O and no clock of its own.

Feed it frames with :meth:`Endpoint.receive`, take what has to be sent from :meth:`Endpoint.transmit`, read messages
from the inbox. Failures that anybody on the path can cause (damaged, forged, stale or replayed frames) are counted and
reported as attributed errors, and the frame is dropped: the sender repeats it. What only the peer itself can have done
(content under its seal that breaks a rule) raises ProtocolError naming it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane import acks
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.plane.channel import Acknowledgement, OutFrame, RecvChannel, SendChannel
from uvcc_engine.plane.durable import PeerState
from uvcc_engine.plane.inbox import Inbox
from uvcc_engine.plane.roundtrip import RoundTrip
from uvcc_engine.plane.seals import open_bulk, open_packed, seal
from uvcc_engine.plane.secure_session import Greeting, Handshake, SecureSession, SigningIdentity
from uvcc_engine.plane.timing import Counters, LinkTiming, Outgoing, passing
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.signing.identity import PublicIdentity

_OF_A_PROOF: Final = frozenset({kinds.PROOF, kinds.COIN, kinds.AUDIT, kinds.FINDING})
MOST_STREAMS: Final = 16_384  # an acknowledgement of all must fit into a frame


class Endpoint:
    """This party's end of all channels with ``peer`` in one subsession."""

    def __init__(
        self,
        me: int,
        peer: int,
        sid_sub: bytes,
        identity: SigningIdentity,
        peer_identity: PublicIdentity,
        now: float,
        policy: LinkTiming | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        state: PeerState | None = None,
    ) -> None:
        """``state``: what an earlier process committed; given, messages are kept until the peer has committed them."""
        self.me, self.peer = me, peer
        self.durable = state is not None
        self.state = state or PeerState()
        self.policy = policy or LinkTiming()
        self.sid = fr.sid64(sid_sub)
        self.counters = Counters()
        self.inbox = Inbox(peer, self.state.taken)
        self.errors: list[ProtocolError] = []  # attributed, survivable; the owner reports and clears them
        self.last_heard = now
        self._proved_last = -1, -1  # epoch and stream of the peer's last part of a proof
        self.heard = False
        self.bye = False
        self.session: SecureSession | None = None
        self.sending: dict[int, SendChannel] = {}
        self._trip = RoundTrip(self.policy.timing.rto_s, self.policy.timing.rto_floor_s)
        self.receiving: dict[int, RecvChannel[list[fr.FramePart]]] = {}
        self._handshake = Handshake(me, peer, sid_sub, identity, peer_identity, self._cursors, entropy)
        self._label_out = fr.Labeler(sid_sub, me, peer)
        self._label_in = fr.Labeler(sid_sub, peer, me)
        self._urgent: list[bytes] = []
        self._hello_due, self._hello_gap = now, self.policy.hello_s
        self._open: dict[int, OutFrame] = {}  # packed frames that still take messages
        self._ack_seq = self._ack_seen = 0
        self._ack_since: float | None = None  # when the oldest frame arrived that we have not acknowledged
        self._ack_now = False
        self._ping_due = now + self.policy.ping_s
        self._say_bye = False
        self._peer_sent: dict[int, int] = {}
        self._peer_has: dict[int, int] = {}  # whole messages per stream that the peer had when this session began

    # -- sending -----------------------------------------------------------------------------------------------------

    def queue(self, tag: Tag, payload: Buffer, now: float) -> None:
        """Put a message into the channel of its stream. ``payload`` must not change until it is acknowledged."""
        index = self.state.numbered.get(tag.stream, 0)
        self.state.numbered[tag.stream] = index + 1
        if index < self._peer_has.get(tag.stream, 0):
            return  # made again after our restart; the peer took it before
        if self.durable:
            self.state.keep(index, tag, payload)
        self._enqueue(tag, payload, now)

    def _enqueue(self, tag: Tag, payload: Buffer, now: float) -> None:
        channel = self.sending.get(tag.stream)
        if channel is None:
            channel = self.sending[tag.stream] = SendChannel(tag.stream, self.policy.timing, trip=self._trip)
        view = payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
        total = len(view)
        if total <= fr.PACK_LIMIT:
            head = fr.pack_part(self._label_out(tag), tag, 0, 1, total, total)
            pad = fr.padding(total)
            frame = self._open.get(tag.stream)
            if frame is None:
                frame = self._open[tag.stream] = channel.new_frame(now)
            channel.add(frame, (head, view, pad), fr.PART_BYTES + total + len(pad))
            if frame.credit >= self.policy.pack_bytes:
                del self._open[tag.stream]
            return
        self._open.pop(tag.stream, None)
        chunks = fr.chunk_count(total)
        for index in range(chunks):
            piece = memoryview(view)[index * fr.CHUNK : (index + 1) * fr.CHUNK] if chunks > 1 else view
            head = fr.pack_part(self._label_out(tag, index, chunks), tag, index, chunks, len(piece), total)
            channel.add(channel.new_frame(now, bulk=True), (head, piece), fr.PART_BYTES + len(piece))

    @property
    def pressing(self) -> bool:
        """True if :meth:`transmit` has something now, whatever the time."""
        if self.session is None:
            return bool(self._urgent)
        return self._ack_now or bool(self._urgent) or any(c.waiting and not c.blocked for c in self.sending.values())

    def transmit(self, now: float) -> Iterator[Outgoing]:
        """Everything that has to go on the wire now. Take each item before asking for the next."""
        while self._urgent:
            yield passing(self._urgent.pop(0))
        session = self.session
        if session is None:
            if now >= self._hello_due:
                for raw in self._handshake.outgoing():
                    yield passing(raw)
                self._hello_due = now + self._hello_gap
                self._hello_gap = min(2 * self._hello_gap, self.policy.hello_cap_s)
            return
        if self._ack_due(now):
            yield self._acknowledge(session, now)
        for channel in self.sending.values():
            if channel.waiting or now >= channel.next_due:
                for frame in channel.transmit(now):
                    self._open.pop(channel.stream, None)
                    yield self._seal(session, channel.stream, frame)

    def _seal(self, session: SecureSession, stream: int, frame: OutFrame) -> Outgoing:
        if frame.session != session.id:
            self._rekey_if_due(session)
            frame.session, frame.generation = session.id, session.generation
            session.sealed_frames += 1
        out = seal(session, (self.me, self.peer, self.sid), stream, frame)
        self.counters.frames_out += 1
        self.counters.bytes_out += out.size
        return out

    def _rekey_if_due(self, session: SecureSession) -> None:
        if session.sealed_frames < self.policy.rekey_frames:
            return
        newest = session.generation
        kept = (f for c in self.sending.values() for f in c.inflight.values() if f.session == session.id)
        if all(f.generation == newest for f in kept):  # the key before the newest is about to be forgotten
            session.rekey()

    # -- acknowledgements and signs of life --------------------------------------------------------------------------

    def _ack_due(self, now: float) -> bool:
        if self._ack_now or now >= self._ping_due:
            return True
        return self._ack_since is not None and now >= self._ack_since + self.policy.ack_delay_s

    def _acknowledge(self, session: SecureSession, now: float) -> Outgoing:
        entries = []
        for stream in sorted(self.receiving.keys() | self.sending.keys()):
            received, sent = self.receiving.get(stream), self.sending.get(stream)
            ack = received.acknowledgement() if received else Acknowledgement(stream, 0, 0, ())
            entries.append(acks.StreamCursors(ack, sent.next_seq if sent else 0, self.state.taken.get(stream, 0)))
        plain = acks.encode(acks.BYE if self._say_bye else 0, entries)
        self._ack_seq += 1
        generation, length = session.generation, len(plain) + fr.TAG_BYTES
        aad = fr.pack_header(
            fr.ACK, self.me, self.peer, self.sid, session.id, fr.ACK_STREAM, generation, self._ack_seq, length
        )
        body = session.seal(generation, fr.nonce(fr.ACK_STREAM, self._ack_seq), plain, aad)
        self._ack_since, self._ack_now, self._say_bye = None, False, False
        self._ping_due = now + self.policy.ping_s
        return passing(fr.finish(aad, body) + body)

    def _on_ack(self, session: SecureSession, header: fr.Header, body: Buffer, now: float) -> bool:
        plain = session.open(header, fr.nonce(header.stream, header.seq), body)
        if header.seq <= self._ack_seen:
            self.counters.stale += 1  # a replay, or overtaken by a newer one that says more
            return False
        self._ack_seen = header.seq
        flags, entries = acks.decode(plain, self.peer)
        for ack, numbered, committed in entries:
            stream = ack.stream
            if stream not in self._peer_sent and len(self._peer_sent) >= MOST_STREAMS:
                raise ProtocolError(f"more than {MOST_STREAMS} streams", party=self.peer)
            self._peer_sent[stream] = max(numbered, self._peer_sent.get(stream, 0))
            if (kept := self.state.kept.get(stream)) is not None:
                kept.forget_below(committed)
            if (channel := self.sending.get(stream)) is not None:
                channel.acknowledge(ack, now, self.peer)
        self.bye = self.bye or bool(flags & acks.BYE)
        return True

    def goodbye(self) -> None:
        """The next transmission says that nothing more will come."""
        self._say_bye = self._ack_now = True

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, header: fr.Header, body: Buffer, now: float) -> bool:
        """Take a frame from the link; True if the peer has proven that it sent it (perhaps long ago).

        Survivable failures go to ``errors``. Raises ProtocolError for what only the peer can have done.
        """
        self.counters.frames_in += 1
        self.counters.bytes_in += header.length + fr.HEADER_BYTES
        if header.src != self.peer or header.dst != self.me or header.sid64 != self.sid:
            return self._reject(ProtocolError(f"a frame of an unknown sender (party {header.src})", party=header.src))
        try:
            fr.check_crc(header, body)
            if header.cls in (fr.HELLO, fr.AUTH):
                return self._on_handshake(header, body, now)
            session = self.session
            if session is None or header.session != session.id:
                self.counters.stale += 1  # of another session: sealed under keys that are gone
                return False
            act = self._on_ack if header.cls == fr.ACK else self._on_data
            if act(session, header, memoryview(body), now):  # a replay is no sign of life
                self.last_heard, self.heard = now, True
            return True
        except fr.UnprovenError as error:
            return self._reject(error)

    def _reject(self, error: ProtocolError) -> bool:
        self.counters.rejected += 1
        self.errors.append(error)
        return False

    def _on_handshake(self, header: fr.Header, body: Buffer, now: float) -> bool:
        if header.cls == fr.HELLO:
            self._urgent += self._handshake.on_hello(body, now)
            return False
        greeting, frames = self._handshake.on_auth(header, body)
        self._urgent += frames
        if greeting is None:
            return False
        self._establish(greeting, now)
        self.last_heard, self.heard = now, True
        return True

    def _on_data(self, session: SecureSession, header: fr.Header, body: memoryview, now: float) -> bool:
        stream, seq = header.stream, header.seq
        channel = self.receiving.get(stream) or RecvChannel(stream, self.policy.timing)
        if header.cls == fr.DATA:
            digest, parts = open_packed(session, header, body, self._label_in)
        else:
            fresh = not channel.has(seq)  # a repeat must not be opened over what has been received
            digest, parts = open_bulk(session, header, body, self._label_in, self.inbox.room if fresh else None)
        if len(self.receiving) >= MOST_STREAMS and stream not in self.receiving:
            raise ProtocolError(f"more than {MOST_STREAMS} streams", party=self.peer)
        self.receiving[stream] = channel
        if self._ack_since is None:
            self._ack_since = now
        fresh = channel.is_new(seq, digest, self.peer)
        if fresh:
            for ready in channel.accept(seq, digest, parts, sum(p.credit for p in parts), self.peer):
                for part in ready:
                    self.inbox.put(part)
            channel.partial = self.inbox.partial_bytes(stream)
        self._ack_now = self._ack_now or channel.unacknowledged >= self.policy.ack_frames or channel.grants
        return fresh

    # -- session changes ---------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Everything that the reader has taken is safe with it: the peer need not keep it. Then save ``state``."""
        self.state.taken = self.inbox.taken()
        self._ack_now = True

    def _cursors(self) -> bytes:
        streams = sorted(self.receiving.keys() | self.inbox.counts.keys())
        channels = [(s, self.receiving.get(s)) for s in streams]
        return acks.encode_cursors((s, c.expected if c else 0, self.inbox.counts.get(s, 0)) for s, c in channels)

    def _establish(self, greeting: Greeting, now: float) -> None:
        """Start using a session: everything that the peer does not have yet is sealed and sent again."""
        known = acks.decode_cursors(greeting.cursors, self.peer)
        if greeting.restarted or self.session is None:
            self._begin_anew({stream: has for stream, (_, has) in known.items()}, now)
        else:
            for stream, channel in self.sending.items():
                expected = known.get(stream, (0, 0))[0]
                channel.acknowledge(Acknowledgement(stream, expected, 0, ()), now, self.peer)
                channel.resend_all(now)
            for received in self.receiving.values():
                received.forget_digests()
        self.session = greeting.session
        self._ack_seq = self._ack_seen = 0
        self._hello_gap = self.policy.hello_s
        self.bye = False

    def _begin_anew(self, peer_has: dict[int, int], now: float) -> None:
        """The peer's process is new to us: its channels begin at 0, and so do ours; messages count on."""
        streams = peer_has.keys() | self.state.numbered.keys()
        for stream in streams:
            channel = self.sending.get(stream)
            lowest = self.state.lowest(stream) if self.durable else channel.lowest if channel else 0
            if peer_has.get(stream, 0) < lowest:
                raise self._forgetful(f"stream {stream}: it has {peer_has.get(stream, 0)} of {lowest}")
        if not self.durable:
            if any(c.expected for c in self.receiving.values()) or any(peer_has.values()):
                raise self._forgetful("this plane keeps nothing across restarts")
            for channel in self.sending.values():
                channel.resend_all(now)
            return
        self._peer_has = peer_has
        self._peer_sent = {}
        self.counters.retransmits, self.counters.duplicates = self.retransmits, self.duplicates
        self.sending, self.receiving, self._open = {}, {}, {}
        self.inbox.drop_partial()
        for stream, kept in self.state.kept.items():
            kept.forget_below(peer_has.get(stream, 0))
            for tag, payload in kept.messages:
                self._enqueue(tag, payload, now)

    def _forgetful(self, why: str) -> ProtocolError:
        return ProtocolError(
            f"party {self.peer} or this one came back without what it had acknowledged ({why})",
            "resume all parties from their last common checkpoint",
            party=self.peer,
        )

    def link_reset(self, now: float) -> None:
        """The link was broken and is up again: what was under way may be lost."""
        for channel in self.sending.values():
            channel.resend_all(now)
        self._hello_due, self._hello_gap = now, self.policy.hello_s
        self._ping_due = now

    # -- what the owner asks -----------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """The earliest time at which :meth:`transmit` has something to do by itself."""
        if self.session is None:
            return self._hello_due
        due = self._ping_due
        if self._ack_since is not None:
            due = min(due, self._ack_since + self.policy.ack_delay_s)
        return min(due, min((c.next_due for c in self.sending.values()), default=due))

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not been transmitted yet."""
        return sum(c.queued_bytes for c in self.sending.values())

    @property
    def retransmits(self) -> int:
        """Frames sent again so far, those of channels that a restart of the peer ended included."""
        return self.counters.retransmits + sum(c.retransmits for c in self.sending.values())

    @property
    def duplicates(self) -> int:
        """Frames that came again and were discarded."""
        return self.counters.duplicates + sum(c.duplicates for c in self.receiving.values())

    def totals(self) -> dict[str, int]:
        """What happened with this peer so far; only ever grows while this process lives.

        But for ``round_trip_us``, the mean wait for an acknowledgement as it is now, which is absent before the first.
        """
        found = {name: int(getattr(self.counters, name)) for name in Counters.__slots__}
        messages = sum(n for stream, n in self.inbox.counts.items() if stream != fr.CONTROL_STREAM)
        trip = {} if self._trip.mean_s is None else {"round_trip_us": round(1e6 * self._trip.mean_s)}
        counted = {"messages": messages, "retransmits": self.retransmits, "duplicates": self.duplicates}
        return found | counted | trip

    def stats(self, now: float) -> dict[str, Any]:
        """Figures per channel, and the silence of the peer in seconds."""
        channels = {}
        for stream, c in self.sending.items():
            oldest = min((f.queued_at for f in (*c.inflight.values(), *c.waiting)), default=now)
            channels[str(stream)] = {
                "queued": len(c.waiting),
                "in_flight": len(c.inflight),
                "oldest_s": round(now - oldest, 3),
                "retransmits": c.retransmits,
                "bytes": c.sent_bytes,
            }
        return {"silent_s": round(now - self.last_heard, 3), "channels": channels} | self.totals()

    @property
    def blocked(self) -> bool:
        """True while a channel waits for credit with a full window queued behind it."""
        return any(c.blocked and c.queued_bytes > self.policy.timing.window for c in self.sending.values())

    @property
    def idle(self) -> bool:
        """True if the peer has acknowledged everything."""
        return all(c.idle for c in self.sending.values())

    def untold(self, *, stored: bool) -> bool:
        """True if a peer that is there lacks a control message; where what was sent is ``stored`` it will have that."""
        channel = self.sending.get(fr.CONTROL_STREAM)
        if channel is None or self.session is None or self.bye:
            return False
        return bool(channel.waiting) or not (channel.idle or stored)

    def drained(self) -> bool:
        """True if everything that the peer says it sent has arrived."""
        return all((self.receiving[s].expected if s in self.receiving else 0) >= n for s, n in self._peer_sent.items())

    def take(self, tag: Tag) -> memoryview | None:
        """The message ``tag`` if it is there. Raises ProtocolError if another one came in its place."""
        found = self.inbox.take(tag)
        if found is None:
            return None
        message, credit = found
        self._taken(tag.stream, credit)
        if tag.kind in _OF_A_PROOF:
            self._proved_last = tag.epoch, tag.stream
        return message

    def withheld(self, tag: Tag) -> str:
        """What it means that a living peer keeps back its part of a proof; empty where ``tag`` is no such part."""
        if tag.kind == kinds.OPEN and self._proved_last == (tag.epoch, tag.stream):  # its verdict goes with it
            return "of this step it may know what the policy reveals, nobody else does"
        return "nothing of this step was revealed" if tag.kind in _OF_A_PROOF else ""

    def take_control(self) -> memoryview | None:
        """The next control message if there is one."""
        found = self.inbox.take_control()
        if found is None:
            return None
        self._taken(fr.CONTROL_STREAM, found[1])
        return found[0]

    def _taken(self, stream: int, credit: int) -> None:
        channel = self.receiving.get(stream)
        if channel is not None:  # else it arrived in channels that ended with the peer's process
            channel.take(credit)
            self._ack_now = self._ack_now or channel.grants
