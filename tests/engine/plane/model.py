"""Two endpoints, a network that does what it likes, and a reader that may be killed: the plane's model for Hypothesis.

Invariant: what the reader has delivered is always a prefix of what was sent. At the end the network heals, and then
everything must arrive. The reader keeps its effect (what it has delivered) with its cursors in one commit; a kill
throws away everything after the last commit.
"""

from __future__ import annotations

import hashlib
import random
from copy import deepcopy

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plane_kit import IDENTITIES, PUBLIC, SID

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.channel import Timing
from uvcc_engine.plane.durable import PeerState
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.timing import LinkTiming

POLICY = LinkTiming(
    Timing(rto_s=0.5, rto_floor_s=0.1, rto_cap_s=4.0, window=2048),
    ack_delay_s=0.05,
    ack_frames=4,
    rekey_frames=5,
    pack_bytes=300,
)
SIZES = st.sampled_from([0, 8, 100, 700])


class Lossy(RuleBasedStateMachine):
    """Party 0 sends to party 1 over two streams; packets travel in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.entropy = random.Random(7).randbytes
        self.sent: dict[int, list[bytes]] = {0: [], 3: []}
        self.effect: dict[int, list[bytes]] = {0: [], 3: []}
        self.saved: tuple[dict[int, list[bytes]], PeerState] = (deepcopy(self.effect), PeerState())
        self.wires: dict[int, list[bytes]] = {0: [], 1: []}  # packets on their way to a party
        self.sender = self.endpoint(0, PeerState())
        self.reader = self.endpoint(1, PeerState())

    def endpoint(self, party: int, state: PeerState) -> Endpoint:
        other = 1 - party
        return Endpoint(
            party, other, SID, IDENTITIES[party], PUBLIC[other], self.now, POLICY, self.entropy, deepcopy(state)
        )

    @initialize()
    def connect(self) -> None:
        for _ in range(4):
            self.flush()

    # -- what may happen ---------------------------------------------------------------------------------------------

    @rule(stream=st.sampled_from([0, 3]), size=SIZES, count=st.integers(1, 4), packed=st.booleans())
    def send(self, stream: int, size: int, count: int, packed: bool) -> None:
        for _ in range(count):
            op = len(self.sent[stream])
            body = hashlib.shake_128(b"%d.%d" % (stream, op)).digest(size)
            self.sent[stream].append(body)
            self.sender.queue(Tag(0, stream, op, 1), body, self.now)
            if not packed:
                self.transmit()
        self.transmit()

    @rule(seconds=st.sampled_from([0.06, 0.3, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.transmit()

    @rule(party=st.sampled_from([0, 1]), at=st.integers(0, 50))
    def deliver(self, party: int, at: int) -> None:
        if self.wires[party]:
            self.take_in(party, self.wires[party].pop(at % len(self.wires[party])))

    @rule(party=st.sampled_from([0, 1]))
    def deliver_all(self, party: int) -> None:
        packets, self.wires[party] = self.wires[party], []
        for packet in packets:
            self.take_in(party, packet)

    @rule(party=st.sampled_from([0, 1]), at=st.integers(0, 50))
    def duplicate(self, party: int, at: int) -> None:
        if self.wires[party]:
            self.wires[party].append(self.wires[party][at % len(self.wires[party])])

    @rule(party=st.sampled_from([0, 1]), at=st.integers(0, 50))
    def drop(self, party: int, at: int) -> None:
        if self.wires[party]:
            del self.wires[party][at % len(self.wires[party])]

    @rule(at=st.integers(0, 50), seconds=st.sampled_from([0.0, 0.06]))
    def lose_one_of_a_batch(self, at: int, seconds: float) -> None:
        self.drop(1, at)
        self.flush()
        self.now += seconds
        self.flush()

    @rule(party=st.sampled_from([0, 1]))
    def partition(self, party: int) -> None:
        self.wires[party].clear()

    @rule(party=st.sampled_from([0, 1]), at=st.integers(0, 50), byte=st.integers(0, 2000), repair=st.booleans())
    def corrupt(self, party: int, at: int, byte: int, repair: bool) -> None:
        """Change a byte; a clever network repairs the checksum as well."""
        if not self.wires[party]:
            return
        at %= len(self.wires[party])
        packet = bytearray(self.wires[party][at])
        packet[8 + byte % (len(packet) - 8)] ^= 0x11
        if repair:
            head = bytes(packet[:44])
            packet[:48] = fr.finish(head, bytes(packet[48:]))
        self.wires[party][at] = bytes(packet)

    @rule(commit=st.booleans())
    def deliver_and_read(self, commit: bool) -> None:
        self.flush()
        self.read()
        if commit:
            self.commit()
            self.flush()

    @rule()
    def read(self) -> None:
        for stream, effect in self.effect.items():
            while (message := self.reader.take(Tag(0, stream, len(effect), 1))) is not None:
                effect.append(bytes(message))

    @rule()
    def commit(self) -> None:
        self.reader.commit()
        self.saved = (deepcopy(self.effect), deepcopy(self.reader.state))

    @rule()
    def kill_reader(self) -> None:
        effect, state = self.saved
        self.effect = deepcopy(effect)
        self.reader = self.endpoint(1, state)

    # -- machinery ---------------------------------------------------------------------------------------------------

    def transmit(self) -> None:
        for party, endpoint in ((0, self.sender), (1, self.reader)):
            self.wires[1 - party] += [b"".join(out.buffers) for out in endpoint.transmit(self.now)]

    def take_in(self, party: int, packet: bytes) -> None:
        try:
            header = fr.read_header(packet[: fr.HEADER_BYTES])
        except ProtocolError:
            return  # a link drops what is no frame
        if header.length == len(packet) - fr.HEADER_BYTES:
            (self.sender, self.reader)[party].receive(header, packet[fr.HEADER_BYTES :], self.now)

    def flush(self) -> None:
        self.transmit()
        for party in (0, 1):
            self.deliver_all(party)

    @invariant()
    def delivered_is_a_prefix_of_sent(self) -> None:
        for stream, effect in self.effect.items():
            assert effect == self.sent[stream][: len(effect)]

    def teardown(self) -> None:
        """The network heals: everything arrives, and the sender learns of it."""
        for _ in range(60):
            self.now += 1.0
            self.transmit()
            while self.wires[0] or self.wires[1]:
                self.flush()
                self.read()
            self.commit()
        self.delivered_is_a_prefix_of_sent()
        assert self.effect == self.sent
        assert self.sender.idle
        assert not any(kept.messages for kept in self.sender.state.kept.values())
