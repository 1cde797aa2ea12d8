"""Channel and endpoint: timing, credit, acknowledgements, rekeying, restarts. The clock is the test's."""

from __future__ import annotations

import random

import pytest
from plane_kit import IDENTITIES, PUBLIC, SID

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane import acks
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.channel import Acknowledgement, RecvChannel, SendChannel, Timing
from uvcc_engine.plane.durable import PeerState
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.timing import LinkTiming

TIMING = Timing(rto_s=1.0, rto_cap_s=4.0, window=1000)


def sending(count: int, credit: int = 100) -> SendChannel:
    channel = SendChannel(0, TIMING)
    for _ in range(count):
        channel.add(channel.new_frame(0.0), (b"x",), credit)
    return channel


def ack(expected: int, *ranges: tuple[int, int], limit: int = 0) -> Acknowledgement:
    return Acknowledgement(0, expected, limit, ranges)


def test_retransmission_backs_off_up_to_the_cap() -> None:
    channel = sending(1)
    times, now = [], 0.0
    while now < 20:
        times += [now for _ in channel.transmit(now)]
        now += 0.5
    assert times == [0.0, 1.0, 3.0, 7.0, 11.0, 15.0, 19.0]
    channel.acknowledge(ack(1), now, 1)
    assert list(channel.transmit(100.0)) == []
    assert channel.idle


def test_the_first_retransmission_waits_for_what_a_round_trip_takes() -> None:
    channel = SendChannel(0, Timing(rto_s=4.0, rto_floor_s=0.5, rto_cap_s=60.0, window=1000))
    now, waits = 0.0, []
    for seq, trip in enumerate([0.2] * 20 + [3.0] * 12):
        channel.add(channel.new_frame(now), (b"x",), 1)
        list(channel.transmit(now))
        waits.append(channel.next_due - now)
        channel.acknowledge(ack(seq + 1), now + trip, 1)
        now += trip
    assert waits[0] == 4.0  # nothing is known yet
    assert waits[19] == pytest.approx(0.5)  # not before the floor, although 0.2 s would do
    assert waits[31] > 3.0  # a link that became slow is not flooded


def test_of_a_frame_sent_twice_no_round_trip_is_measured() -> None:
    channel = SendChannel(0, Timing(rto_s=4.0, rto_floor_s=0.5, rto_cap_s=60.0, window=1000))
    channel.add(channel.new_frame(0.0), (b"x",), 1)
    assert [len(list(channel.transmit(t))) for t in (0.0, 4.0)] == [1, 1]
    channel.acknowledge(ack(1), 4.1, 1)  # of which of the two?
    assert channel.trip.timeout_s == 4.0


class SlowLine:
    """A line that loses nothing and carries one frame after the other, ``gap_s`` each: what was handed to it waits in a
    socket's buffers, and each frame that comes out is acknowledged at once."""

    def __init__(self, channel: SendChannel, gap_s: float) -> None:
        self.channel, self._gap_s = channel, gap_s
        self.now, self.free_at = 0.0, 0.0
        self._under_way: list[tuple[float, int]] = []
        self._expected = 0

    def send(self, frames: int) -> int:
        """Hand over some more and wait until all are acknowledged; how many were sent again meanwhile."""
        before = self.channel.retransmits
        for _ in range(frames):
            self.channel.add(self.channel.new_frame(self.now), (b"x",), 0)
        while not self.channel.idle:
            for frame in self.channel.transmit(self.now):
                self.free_at = max(self.free_at, self.now) + self._gap_s
                self._under_way.append((self.free_at, frame.seq))
            came, _ = self._under_way[0]
            self.now = min(came, max(self.now, self.channel.next_due))
            if self.now == came:
                _, seq = self._under_way.pop(0)
                self._expected = max(self._expected, seq + 1)
                self.channel.acknowledge(ack(self._expected), self.now, 1)
        return self.channel.retransmits - before


@pytest.mark.parametrize("gap_s", [0.1, 0.25, 0.8, 3.0])
def test_a_slow_line_is_not_filled_with_what_it_carries_already(gap_s: float) -> None:
    """Frames of 1 MiB lie in a socket's buffers for seconds where a line takes a tenth of one for each: all were sent
    twice and thrice, so that a large message took three times as long, and none was ever measured."""
    line = SlowLine(SendChannel(0, Timing()), gap_s)
    again = [line.send(8) for _ in range(12)]
    assert sum(again[:2]) <= 12  # nothing is known yet: each may be sent again once, or nearly
    assert sum(again[2:]) <= 10  # one of eight
    assert line.channel.trip.timeout_s > 4 * gap_s


def test_what_is_overdue_doubles_the_time_of_all_until_one_is_measured() -> None:
    channel = sending(2)
    assert [f.seq for f in channel.transmit(0.0)] == [0, 1]
    assert [f.seq for f in channel.transmit(1.0)] == [0]  # and the second has longer by now
    assert [f.seq for f in channel.transmit(2.0)] == [1]
    channel.add(channel.new_frame(2.0), (b"x",), 1)
    assert [f.seq for f in channel.transmit(2.5)] == [2]
    channel.acknowledge(ack(3), 3.0, 1)
    assert channel.trip.mean_s == 0.5
    channel.add(channel.new_frame(3.0), (b"x",), 1)
    assert [f.seq for f in channel.transmit(3.0)] == [3]
    assert channel.next_due == 3.0 + channel.trip.timeout_s


def test_nothing_that_was_measured_makes_the_wait_longer_than_its_cap() -> None:
    """A lost acknowledgement counts as a long round trip: each one made the next wait, and so itself, longer."""
    channel = SendChannel(0, Timing(rto_s=0.2, rto_cap_s=0.5))
    channel.trip.measured(40.0)
    channel.add(channel.new_frame(0.0), (b"x",), 1)
    assert [len(list(channel.transmit(at))) for at in (0.0, 0.4, 0.5, 0.9, 1.0)] == [1, 0, 1, 0, 1]


def test_a_frame_that_was_lost_does_not_wait_for_those_behind_it() -> None:
    """Only when all in front of it has come does its time begin anew."""
    channel = sending(9, credit=1)
    assert len(list(channel.transmit(0.0))) == 9
    channel.acknowledge(ack(1), 0.25, 1)
    assert channel.trip.timeout_s == 1.0
    assert list(channel.transmit(1.0)) == []
    channel.acknowledge(ack(1, (2, 4)), 1.0, 1)
    due = 0.25 + channel.trip.timeout_s
    assert list(channel.transmit(due - 0.01)) == []
    assert [f.seq for f in channel.transmit(due)] == [1]


def test_what_is_known_to_be_lost_is_not_waited_for_again() -> None:
    """Neither behind a gap of acknowledgements nor after its connection broke, however long a round trip takes."""
    channel = sending(5, credit=1)
    channel.trip.measured(30.0)
    assert len(list(channel.transmit(0.0))) == 5
    channel.acknowledge(ack(0, (1, 5)), 1.0, 1)
    assert [f.seq for f in channel.transmit(1.0)] == [0]
    channel.resend_all(1.5)
    assert [f.seq for f in channel.transmit(1.5)] == [0]
    assert channel.trip.doublings == 0


def test_credit_stops_the_sender_and_a_grant_lets_it_go_on() -> None:
    channel = sending(12)
    assert [f.seq for f in channel.transmit(0.0)] == list(range(10))
    assert channel.blocked
    channel.acknowledge(ack(10), 0.1, 1)
    assert list(channel.transmit(0.1)) == []  # acknowledged, but its reader has taken nothing
    channel.acknowledge(ack(10, limit=1100), 0.2, 1)
    assert [f.seq for f in channel.transmit(0.2)] == [10]
    channel.acknowledge(ack(10, limit=500), 0.3, 1)
    assert channel.limit == 1100  # an older grant takes nothing back


def test_selective_acknowledgement_resends_the_gap_early_and_only_it() -> None:
    channel = sending(6)
    assert len(list(channel.transmit(0.0))) == 6
    channel.acknowledge(ack(1, (2, 6)), 0.1, 1)
    assert [f.seq for f in channel.transmit(0.1)] == [1]
    assert list(channel.transmit(0.2)) == []


@pytest.mark.parametrize("wrong", [ack(4), ack(0, (2, 9))])
def test_an_acknowledgement_of_what_was_never_sent_names_the_peer(wrong: Acknowledgement) -> None:
    channel = sending(3)
    list(channel.transmit(0.0))
    with pytest.raises(ProtocolError) as error:
        channel.acknowledge(wrong, 0.0, 2)
    assert error.value.party == 2


def test_a_receiver_delivers_in_order_and_tells_gaps() -> None:
    channel: RecvChannel[int] = RecvChannel(0, TIMING)
    order = [2, 0, 4, 1, 5]
    delivered = [channel.accept(seq, b"%d" % seq, seq, 10, 1) for seq in order if channel.is_new(seq, b"%d" % seq, 1)]
    assert delivered == [[], [0], [], [1, 2], []]
    assert channel.acknowledgement() == Acknowledgement(0, 3, 1000, ((4, 6),))
    assert not channel.is_new(1, b"1", 1)
    assert not channel.is_new(5, b"5", 1)
    for seq in (1, 5):
        with pytest.raises(ProtocolError) as error:
            channel.is_new(seq, b"another", 1)
        assert error.value.party == 1


def test_a_sender_beyond_its_credit_is_named() -> None:
    channel: RecvChannel[int] = RecvChannel(0, TIMING)
    channel.accept(0, b"", 0, 900, 1)
    with pytest.raises(ProtocolError, match="credit"):
        channel.accept(1, b"", 1, 200, 1)


def test_taking_messages_grants_credit() -> None:
    channel: RecvChannel[int] = RecvChannel(0, TIMING)
    channel.accept(0, b"", 0, 900, 1)
    assert not channel.grants
    channel.take(900)
    assert channel.grants
    assert channel.acknowledgement().limit == 1900


def test_acknowledgements_on_the_wire_are_strict() -> None:
    entries = [acks.StreamCursors(ack(3, (5, 7), (9, 10), limit=77), 4, 2)]
    assert acks.decode(acks.encode(acks.BYE, entries), 1) == (acks.BYE, entries)
    for ranges in (((3, 4),), ((5, 5),), ((5, 7), (6, 8))):
        with pytest.raises(ProtocolError) as error:
            acks.decode(acks.encode(0, [acks.StreamCursors(ack(3, *ranges), 0, 0)]), 1)
        assert error.value.party == 1
    with pytest.raises(ProtocolError):
        acks.decode(acks.encode(0, entries)[:-1], 1)


class Pair:
    """Two endpoints on a perfect wire; ``states`` makes them durable."""

    def __init__(self, policy: LinkTiming | None = None, states: tuple[PeerState, PeerState] | None = None) -> None:
        self.policy = policy or LinkTiming()
        self.now = 0.0
        self.ends = [self.end(p, states[p] if states else None) for p in (0, 1)]
        self.seen: list[tuple[fr.Header, bytes]] = []
        for _ in range(3):
            self.move()
            self.now += 1.0

    def end(self, party: int, state: PeerState | None) -> Endpoint:
        other = 1 - party
        entropy = random.Random(party + 7 * int(self.now)).randbytes
        return Endpoint(party, other, SID, IDENTITIES[party], PUBLIC[other], self.now, self.policy, entropy, state)

    def move(self) -> None:
        for src, dst in ((0, 1), (1, 0)):
            for out in self.ends[src].transmit(self.now):
                raw = b"".join(out.buffers)
                self.seen.append((fr.read_header(raw[:48]), raw[48:]))
                self.ends[dst].receive(*self.seen[-1], self.now)


def test_the_same_tag_twice_names_the_peer() -> None:
    pair = Pair()
    for _ in range(2):
        pair.ends[0].queue(Tag(0, 0, 0, 1), b"x", pair.now)
    with pytest.raises(ProtocolError, match="twice") as error:
        pair.move()
    assert error.value.party == 0


def test_keys_move_on_and_old_frames_stay_shut() -> None:
    pair = Pair(LinkTiming(rekey_frames=4))
    for op in range(40):
        pair.ends[0].queue(Tag(0, 0, op, 1), b"share", pair.now)
        pair.move()
        pair.now += 0.1
        pair.move()
        assert pair.ends[1].take(Tag(0, 0, op, 1)) == b"share"
    data = [(h, body) for h, body in pair.seen if h.cls == fr.DATA]
    assert data[-1][0].generation >= 8
    session = pair.ends[1].session
    assert session is not None
    session.open(data[-1][0], fr.nonce(0, data[-1][0].seq), data[-1][1])
    with pytest.raises(fr.UnprovenError):  # that key is gone, even for who holds all of today's state
        session.open(data[0][0], fr.nonce(0, data[0][0].seq), data[0][1])


def test_repeats_under_a_seal_change_nothing_but_another_content_is_named() -> None:
    pair = Pair()
    pair.ends[0].queue(Tag(0, 0, 0, 1), b"first", pair.now)
    pair.move()
    header, body = next((h, b) for h, b in pair.seen if h.cls == fr.DATA)
    heard = pair.ends[1].last_heard
    pair.ends[1].receive(header, body, pair.now + 50)
    assert pair.ends[1].last_heard == heard  # a replay is no sign of life
    assert pair.ends[1].take(Tag(0, 0, 0, 1)) == b"first"
    session = pair.ends[0].session
    assert session is not None
    other = session.seal(0, fr.nonce(0, 0), b"\0" * (len(body) - 16), header.aad)
    forged = fr.read_header(fr.finish(header.aad, other))
    with pytest.raises(ProtocolError) as error:
        pair.ends[1].receive(forged, other, pair.now)
    assert error.value.party == 0


def test_a_peer_that_lost_its_state_is_named() -> None:
    pair = Pair()
    pair.ends[0].queue(Tag(0, 0, 0, 1), b"x", pair.now)
    pair.move()
    pair.now += 1
    pair.move()
    pair.ends[1] = pair.end(1, None)
    with pytest.raises(ProtocolError, match="came back without"):
        for _ in range(6):
            pair.now += 1
            pair.move()


def test_a_peer_that_never_received_anything_may_restart() -> None:
    pair = Pair()
    pair.ends[1] = pair.end(1, None)
    pair.ends[0].queue(Tag(0, 0, 0, 1), b"x", pair.now)
    for _ in range(6):
        pair.now += 1
        pair.move()
    assert pair.ends[1].take(Tag(0, 0, 0, 1)) == b"x"


def test_a_sender_that_goes_back_sends_nothing_twice() -> None:
    pair = Pair(states=(PeerState(), PeerState()))
    for op in range(3):
        pair.ends[0].queue(Tag(0, 0, op, 1), b"%d" % op, pair.now)
    pair.move()
    pair.ends[0] = pair.end(0, PeerState())  # as if nothing had been committed: it starts again from the beginning
    for op in range(5):
        pair.ends[0].queue(Tag(0, 0, op, 1), b"%d" % op, pair.now)
        for _ in range(3):
            pair.now += 1
            pair.move()
    assert [bytes(pair.ends[1].take(Tag(0, 0, op, 1)) or b"") for op in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    pair.ends[1].commit()
    pair.move()
    assert not pair.ends[0].state.kept[0].messages
