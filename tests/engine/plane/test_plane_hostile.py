"""A relay that logs, alters, repeats, reorders, withholds and cross-delivers: it learns nothing and changes nothing."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plane_kit import IDENTITIES, PUBLIC, SID, Log, direct_links, make_plane, relay_links, relay_thread, run_parties

from uvcc_engine.contract.errors import PeerLostError, ProtocolError
from uvcc_engine.plane import connect
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.relay import binary
from uvcc_engine.relay.hub import Hub

SHARES = {(p, q): os.urandom(5000) for p in range(3) for q in range(3)}
LARGE = {(p, q): os.urandom((1 << 20) + 77) for p in range(3) for q in range(3)}
ROUNDS = 6


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timers: a withheld frame is repeated soon."""
    policy = connect.RELAY_POLICY
    timing = dataclasses.replace(policy.timing, rto_s=0.2, rto_cap_s=0.5)
    hasty = dataclasses.replace(policy, timing=timing, hello_s=0.1, ack_delay_s=0.05, ping_s=0.3)
    monkeypatch.setattr(connect, "RELAY_POLICY", hasty)


def exchange_all(folder: Path, url: str) -> list[Log]:
    """Three parties exchange known shares and check them."""
    logs = [Log() for _ in range(3)]
    links, all_have_all = relay_links(folder, url), threading.Barrier(3)

    def body(party: int) -> None:
        plane = make_plane(party, links[party] | {"close_s": 1.0}, logs[party])
        others = [p for p in range(3) if p != party]
        for op in range(ROUNDS):
            for p in others:
                plane.send(p, Tag(0, 0, op, 1), SHARES[party, p])
            for p in others:
                assert plane.recv(p, Tag(0, 0, op, 1)) == SHARES[p, party]
        for p in others:
            plane.send(p, Tag(1, 1, 0, 2), LARGE[party, p])
        for p in others:
            assert plane.recv(p, Tag(1, 1, 0, 2)) == LARGE[p, party]
        all_have_all.wait(120)  # before anybody closes, and gives up soon what the relay withholds
        plane.close()

    run_parties(*(lambda p=p: body(p) for p in range(3)))
    return logs


def test_a_relay_that_logs_everything_holds_no_plaintext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[bytes] = []
    enqueue = Hub.enqueue

    def log(self: Hub, who: Any, box: int, items: Any, done: Any) -> None:
        logged.extend(bytes(i.payload) + i.msg_id for i in items)
        enqueue(self, who, box, items, done)

    monkeypatch.setattr(Hub, "enqueue", log)
    with relay_thread(tmp_path) as url:
        exchange_all(tmp_path, url)
    everything = b"".join(logged)
    assert len(everything) > 6 * (1 << 20)
    secrets = [*SHARES.values(), *LARGE.values()]
    pieces = [s[at : at + 8] for s in secrets for at in range(0, len(s) - 8, len(s) // 6)]
    assert not [p for p in pieces if p in everything]
    assert logged[0][8:16] in everything  # the search itself finds what is there
    on_disk = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert not [p for p in pieces if p in on_disk]


Misdeed = Callable[[random.Random, list[binary.Message], list[binary.Message]], list[binary.Message]]


def alters(rng: random.Random, found: list[binary.Message], past: list[binary.Message]) -> list[binary.Message]:
    def altered(m: binary.Message) -> binary.Message:
        if rng.random() > 0.1:
            return m
        body = bytearray(m.payload)
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5 and len(body) > 48:  # a clever one repairs the checksum
            body[:48] = fr.finish(bytes(body[:44]), bytes(body[48:]))
        return m._replace(payload=bytes(body))

    return [altered(m) for m in found]


def replays(rng: random.Random, found: list[binary.Message], past: list[binary.Message]) -> list[binary.Message]:
    return found + [rng.choice(past)._replace(delivery=0) for _ in range(2) if past]


def reorders(rng: random.Random, found: list[binary.Message], past: list[binary.Message]) -> list[binary.Message]:
    rng.shuffle(found)
    return found


def withholds(rng: random.Random, found: list[binary.Message], past: list[binary.Message]) -> list[binary.Message]:
    return [m for m in found if rng.random() > 0.2]


@pytest.mark.parametrize("misdeed", [alters, replays, reorders, withholds], ids=lambda m: m.__name__)
def test_what_a_relay_does_to_frames_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None, misdeed: Misdeed
) -> None:
    rng, past, take = random.Random(5), list[binary.Message](), Hub.take

    def hostile(self: Hub, who: Any, box: int, max_bytes: int, **more: Any) -> list[binary.Message]:
        found = take(self, who, box, max_bytes, **more)
        past.extend(found)
        return misdeed(rng, found, past)

    monkeypatch.setattr(Hub, "take", hostile)
    with relay_thread(tmp_path) as url:
        logs = exchange_all(tmp_path, url)
    if misdeed is alters:
        rejected = [e for log in logs for e in log.named("protocol_error")]
        assert rejected
        assert all(e["dropped"] for e in rejected)


def test_frames_of_other_parties_and_subsessions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, elsewhere = Hub.take, list[binary.Message]()

    def crossing(self: Hub, who: Any, box: int, max_bytes: int, **more: Any) -> list[binary.Message]:
        found = take(self, who, box, max_bytes, **more)
        crossed = [m._replace(delivery=0) for m in elsewhere[-4:]]
        elsewhere.extend(found)
        return found + crossed

    monkeypatch.setattr(Hub, "take", crossing)
    with relay_thread(tmp_path) as url:
        logs = exchange_all(tmp_path, url)
    said = {e["what"] for log in logs for e in log.named("protocol_error")}
    assert any("unknown sender" in w for w in said)


def handshake(*endpoints: Endpoint) -> None:
    for now in range(1, 6):
        for a, b in ((0, 1), (1, 0)):
            for out in endpoints[a].transmit(float(now)):
                raw = b"".join(out.buffers)
                endpoints[b].receive(fr.read_header(raw[:48]), raw[48:], float(now))


def test_an_identity_that_is_not_pinned_gets_no_session() -> None:
    honest = Endpoint(0, 1, SID, IDENTITIES[0], PUBLIC[1], 0.0)
    impostor = Endpoint(1, 0, SID, IDENTITIES[2], PUBLIC[0], 0.0)
    handshake(honest, impostor)
    assert honest.session is None
    assert impostor.session is None
    assert any(e.party == 1 and "not by the pinned identity" in e.what for e in honest.errors)


def test_another_subsession_gets_no_session() -> None:
    one = Endpoint(0, 1, SID, IDENTITIES[0], PUBLIC[1], 0.0)
    other = Endpoint(1, 0, bytes(32), IDENTITIES[1], PUBLIC[0], 0.0)
    handshake(one, other)
    assert one.session is None
    assert all("unknown sender" in e.what for e in one.errors)


def test_sessions_of_the_same_identities_share_no_key() -> None:
    """Forward secrecy: the static keys alone do not open what was recorded."""
    recorded: list[bytes] = []
    for _ in range(2):
        a, b = (Endpoint(p, 1 - p, SID, IDENTITIES[p], PUBLIC[1 - p], 0.0) for p in (0, 1))
        handshake(a, b)
        assert a.session is not None
        a.queue(Tag(0, 0, 0, 1), b"the same share", 9.0)
        recorded += [b"".join(o.buffers) for o in a.transmit(9.0)][-1:]
    assert len(set(recorded)) == 2
    header = fr.read_header(recorded[0][:48])
    assert b.session is not None
    moved = header._replace(session=b.session.id)
    with pytest.raises(ProtocolError, match="seal"):
        b.session.open(moved, fr.nonce(0, header.seq), recorded[0][48:])


def test_strangers_on_a_direct_port_change_nothing() -> None:
    import socket

    links, logs = direct_links(), [Log(), Log()]
    host, port = links[0]["listen"].split(":")
    up = threading.Barrier(2)

    def zero() -> None:
        plane = make_plane(0, links[0], logs[0])
        strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
        for n, s in enumerate(strangers):
            body = bytes(95)
            aad = fr.pack_header(fr.HELLO, 1, 0, fr.sid64(SID), 0, 0, 0, 0, len(body))
            s.sendall(b"GET /" * 40 if n % 2 else fr.finish(aad, body) + body)
        assert plane.recv(1, Tag(0, 0, 0, 1)) == b"real"
        up.wait(120)
        plane.close()
        for s in strangers:
            s.close()

    def one() -> None:
        plane = make_plane(1, links[1], logs[1])
        plane.send(0, Tag(0, 0, 0, 1), b"real")
        plane.flush()
        up.wait(120)
        plane.close()

    run_parties(zero, one)
    assert logs[0].named("connections_rejected")
    assert [e["peer"] for e in logs[0].named("link_up")] == [1]


def test_a_peer_that_never_proves_itself_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that answers but delivers only noise does not keep a run waiting for ever."""
    monkeypatch.setattr(Hub, "take", lambda self, who, box, size, **more: [binary.Message(0, 0, 1, os.urandom(100))])
    with relay_thread(tmp_path) as url:
        link = relay_links(tmp_path, url)[1]
        plane = make_plane(1, link | {"peer_timeout_s": 0.3}, Log())
        with pytest.raises(PeerLostError) as lost:
            plane.recv(0, Tag(0, 0, 0, 1))
        assert lost.value.party == 0
        plane.close(graceful=False)
