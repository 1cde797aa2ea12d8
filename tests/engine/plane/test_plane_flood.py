"""Strangers at a direct port: their junk costs no signature, no memory, few lines, and no peer its way in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from plane_kit import IDENTITIES, PUBLIC, SID, Log, direct_links, free_port, make_plane, run_parties

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane import secure_session
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.links import knocking as door_module
from uvcc_engine.plane.links.direct import DirectLink
from uvcc_engine.plane.links.knocking import KNOCK_BYTES, KnockAuthenticator, Stranger
from uvcc_engine.relay import lobby as lobby_module
from uvcc_engine.relay.lobby import Lobby, Rejections


def door(me: int, sid: bytes = SID) -> KnockAuthenticator:
    return KnockAuthenticator(me, sid, lambda p: IDENTITIES[me].pair_secret(PUBLIC[p], sid, "plane-knock"))


class Costs:
    """Counts what is computed for others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signatures = self.agreements = 0
        verify, agree = secure_session.verify_signature, secure_session.Handshake._agree

        def verifying(*args: Any) -> bool:
            self.signatures += 1
            return verify(*args)

        def agreeing(*args: Any) -> None:
            self.agreements += 1
            agree(*args)

        monkeypatch.setattr(secure_session, "verify_signature", verifying)
        monkeypatch.setattr(secure_session.Handshake, "_agree", agreeing)


def a_hello(src: int, dst: int) -> bytes:
    endpoint = Endpoint(src, dst, SID, IDENTITIES[src], PUBLIC[dst], 0.0)
    return b"".join(b"".join(o.buffers) for o in endpoint.transmit(1.0))


@pytest.mark.parametrize("connections", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_thousands_of_strangers_cost_a_few_lines_and_no_signature(
    connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer comes when the flood is under way, from one of the addresses that it comes from."""
    costs, links, logs = Costs(monkeypatch), direct_links(), [Log(), Log()]
    host, port = links[0]["listen"].split(":")
    knocks: list[bytes] = []
    made = KnockAuthenticator.knock

    def recorded(self: KnockAuthenticator, peer: int) -> bytes:
        knocks.append(made(self, peer))
        return knocks[-1]

    monkeypatch.setattr(KnockAuthenticator, "knock", recorded)
    zero, first = make_plane(0, links[0], logs[0]), make_plane(1, links[1], Log())
    first.send(0, Tag(0, 0, 0, 1), b"a session to record")
    assert zero.recv(1, Tag(0, 0, 0, 1)) == b"a session to record"
    first.close()
    zero.close()
    listen = f"{host}:{free_port()}"  # the same parties again, in the place where the stranger has listened
    port = listen.rpartition(":")[2]
    link = [links[0] | {"listen": listen}, links[1] | {"peers": {"0": listen}}]
    before = (costs.signatures, costs.agreements)
    zero = make_plane(0, link[0], logs[0])
    one: list[Any] = []
    arguments = [sys.executable, str(Path(__file__).with_name("stranger.py")), host, port, str(connections)]
    arguments += [knocks[0].hex(), a_hello(1, 0).hex()]
    flood = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    rejections = zero._link._rejections  # type: ignore[attr-defined]
    begun, met = time.monotonic(), 0.0
    crowd = files = 0
    op = 0
    try:
        while flood.poll() is None or op < 20:
            assert time.monotonic() - begun < 500
            if not one and rejections.total > connections // 40:
                met = time.monotonic()
                one.append(make_plane(1, link[1], logs[1]))
            if one:
                one[0].send(0, Tag(0, 1, op, 1), b"real %d" % op)
                assert zero.recv(1, Tag(0, 1, op, 1)) == b"real %d" % op
                met = met if op else time.monotonic() - met
                op += 1
            else:
                zero.flush()
            crowd = max(crowd, len(zero._link._lobby))  # type: ignore[attr-defined]
            files = max(files, psutil.Process().num_fds())
        counted = json.loads(flood.communicate()[0])
    finally:
        flood.kill()
        flood.wait()
        for plane in (*one, zero):
            plane.close(graceful=False)
    assert counted["connections"] > 0.9 * connections
    assert op >= 20
    assert met < 120  # also on a machine that is busy otherwise
    assert crowd <= lobby_module.ROOM
    assert files < lobby_module.ROOM + 100
    assert len(logs[0].events) + len(logs[1].events) <= 30, logs[0].events
    told = logs[0].named("connections_rejected")
    assert 1 <= len(told) <= 12
    # the knock that was recorded from the process before counts once more, and its HELLO is an old one
    assert costs.signatures - before[0] <= 4
    assert costs.agreements - before[1] <= 4
    assert rejections.total > 0.5 * connections
    assert sum(t["count"] for t in told) == rejections.total


def test_a_silent_stranger_is_gone_after_seconds_and_leaves_nothing() -> None:
    now = [100.0]
    link = DirectLink(0, "127.0.0.1:0", {}, clock=lambda: now[0], door=door(0), spins=False)
    host, port = link.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(10)]
    silent[0].sendall(b"UVCK")
    while len(link._lobby) < 10:
        link.exchange(0.0, None)
    now[0] += lobby_module.SILENT_S + 0.1
    link.exchange(0.0, None)
    assert len(link._lobby) == 0
    for sock in silent:
        sock.settimeout(5)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        sock.close()
    link.close()
    told = [n.fields for n in link.notices()]
    assert [t["count"] for t in told] == [1, 9]


def test_only_a_fresh_knock_of_a_peer_for_this_worker_is_let_in() -> None:
    mine, theirs = door(0), door(1)
    knock = theirs.knock(0)
    assert len(knock) == KNOCK_BYTES
    assert mine.admit(knock) == (1, "")
    assert mine.admit(knock) == (-1, "a knock that was used before")
    assert mine.admit(theirs.knock(0)) == (1, "")
    assert door(2).admit(theirs.knock(0))[1] == "for another worker"
    assert mine.admit(door(1, bytes(32)).knock(0))[1] == "for another worker"
    assert mine.admit(mine.knock(1))[1] == "for another worker"
    stolen = KnockAuthenticator(1, SID, lambda p: IDENTITIES[2].pair_secret(PUBLIC[p], SID, "plane-knock"))
    assert mine.admit(stolen.knock(0))[1] == "not by a peer"
    for at in range(KNOCK_BYTES):
        if at == 7:
            continue  # a pad byte under the MAC: altered, it is refused by that
        altered = bytearray(theirs.knock(0))
        altered[at] ^= 1
        assert mine.admit(bytes(altered))[0] == -1
    knocks = [theirs.knock(0) for _ in range(door_module.NONCES_KEPT + 10)]
    assert all(mine.admit(k)[0] == 1 for k in knocks)
    assert len(mine._seen[1]) == door_module.NONCES_KEPT


def test_the_lobby_makes_room_where_the_crowd_is() -> None:
    lobby: Lobby[Stranger] = Lobby(room=6, share=4)
    pairs: list[tuple[socket.socket, socket.socket]] = []

    def come(address: str) -> Stranger | None:
        pairs.append(socket.socketpair())
        return lobby.enter(Stranger(pairs[-1][0], address, 0.0))

    assert [come("a") for _ in range(4)] == [None] * 4
    assert (left := come("a")) is not None
    assert left.address == "a"
    assert come("b") is come("b") is None
    left = come("c")
    assert left is not None
    assert left.address == "a"  # it has the most
    assert len(lobby) == 6
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_rejections_of_a_minute_are_a_few_lines_that_count_everything() -> None:
    rejections = Rejections()
    lines = [n for k in range(5000) if (n := rejections.note(f"10.0.{k % 250}.{k % 7}", "silent", 1.0)) is not None]
    assert len(lines) == 1
    assert rejections.due(30.0) == []
    lines += rejections.due(61.1)
    assert len(lines) == 1 + Rejections.LINES + 1
    assert sum(int(str(n.fields["count"])) for n in lines) == 5000
    assert rejections.due(121.2) == []  # quiet again
    assert rejections.note("10.0.0.1", "silent", 130.0) is not None
    for k in range(3 * Rejections.KEPT):
        rejections.note(f"a{k}", "silent", 131.0)
    assert len(rejections._counts) <= Rejections.KEPT + 1


def test_replayed_greetings_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay, or who recorded the wire, has true HELLOs of earlier processes: each costs one agreement at most."""
    costs = Costs(monkeypatch)
    old = [a_hello(0, 1) for _ in range(40)]
    target = Endpoint(1, 0, SID, IDENTITIES[1], PUBLIC[0], 0.0)
    computed: list[int] = []
    opened = secure_session.Handshake._open

    def opening(self: Any, kind: int, answers: bytes) -> Any:
        computed.append(kind)
        return opened(self, kind, answers)

    monkeypatch.setattr(secure_session.Handshake, "_open", opening)
    honest = Endpoint(0, 1, SID, IDENTITIES[0], PUBLIC[1], 0.0)
    for now in range(100, 140):
        for raw in old:
            target.receive(fr.read_header(raw[:48]), raw[48:], float(now))
        for a, b in ((honest, target), (target, honest)):
            for out in a.transmit(float(now)):
                raw = b"".join(out.buffers)
                b.receive(fr.read_header(raw[:48]), raw[48:], float(now))
    assert honest.session is not None
    assert target.session is not None
    assert len(computed) <= 16 + 40 + 1
    assert costs.agreements == sum(k == 2 for k in computed) + 1 <= len(old) + 2  # the honest two do one each


def test_a_hello_of_a_stranger_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(monkeypatch)
    target = Endpoint(1, 0, SID, IDENTITIES[1], PUBLIC[0], 0.0)
    raw = a_hello(0, 1)
    for at in range(48, len(raw)):
        body = bytearray(raw[48:])
        body[at - 48] ^= 1
        head = fr.finish(raw[:44], bytes(body))
        target.receive(fr.read_header(head), bytes(body), 1.0)
    assert costs.agreements == costs.signatures == 0
    assert target.counters.rejected == len(raw) - 48


def test_a_relay_that_delivers_junk_costs_a_few_lines() -> None:
    """Dropped frames of one kind are said a few times and then counted."""
    links, log = direct_links(), Log()
    plane = make_plane(0, links[0], log)
    endpoint = plane._endpoints[1]
    with plane._lock:
        for n in range(5000):
            body = os.urandom(95)
            aad = fr.pack_header(fr.HELLO, 1 if n % 3 else n % 256, 0, endpoint.sid, 0, 0, 0, 0, len(body))
            plane._take_in(fr.read_header(fr.finish(aad, body)), body, None, 1.0)
    plane.close(graceful=False)
    told = log.named("protocol_error")
    assert len(told) <= 30
    assert sum(t.get("count", 1) for t in told) == 5000


def test_whoever_answers_at_a_peers_address_is_not_called_that_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        at = f"127.0.0.1:{impostor.getsockname()[1]}"
        log, ending = Log(), threading.Event()

        def answer() -> None:
            sock, _ = impostor.accept()
            assert len(sock.recv(KNOCK_BYTES)) == KNOCK_BYTES
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
            ending.wait(120)
            sock.close()

        def dial() -> None:
            plane = make_plane(1, {"kind": "direct", "peers": {"0": at}}, log)
            while not log.named("connections_rejected"):
                plane.flush()
            ending.set()
            plane.close(graceful=False)

        run_parties(answer, dial)
    assert log.named("connections_rejected")[0]["address"] == at
    assert not log.named("protocol_error")
