"""Three parties over real links: sealed, ordered, exactly once, and honest about a peer that is gone."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plane_kit import (
    Log,
    certificate,
    direct_links,
    kill,
    make_plane,
    relay_links,
    relay_thread,
    run_parties,
    standing_still,
)

from uvcc_engine.contract.errors import PeerLostError, ProtocolError, UnreachableError, UvccError
from uvcc_engine.plane import connect
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.links import connection
from uvcc_engine.plane.links.direct import DirectLink
from uvcc_engine.plane.links.knocking import KnockAuthenticator
from uvcc_engine.transcript.leaves.payload_digests import AHEAD


@pytest.fixture(
    params=[
        "direct",
        "relay",
        "stream",
        pytest.param("relay over TLS", marks=pytest.mark.ci(__file__)),
        "stream over TLS",
    ]
)
def links(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "direct":
        yield direct_links()
    elif request.param.endswith("TLS"):
        trusted = {"ca_file": str(certificate(tmp_path))}
        with relay_thread(tmp_path, stream_listen="127.0.0.1:0", tls_cert="cert.pem", tls_key="key.pem") as url:
            assert url.startswith("https://")
            yield [link | trusted for link in relay_links(tmp_path, url, request.param.split()[0])]
    else:
        with relay_thread(tmp_path, stream_listen="127.0.0.1:0") as url:
            yield relay_links(tmp_path, url, request.param)


def payload(src: int, dst: int, tag: Tag, size: int) -> bytes:
    seed = b"%d%d%d.%d.%d|" % (src, dst, tag.epoch, tag.stream, tag.op)
    return (seed * (size // len(seed) + 1))[:size]


SIZES = [0, 1, 7, 8, 1000, 32768, 32769, 1 << 20, (1 << 20) + 1, 3_500_001]


def test_every_message_arrives_once_and_is_recorded_in_program_order(links: Any) -> None:
    logs = [Log() for _ in range(3)]

    def body(party: int) -> list[tuple[int, int]]:
        plane = make_plane(party, links[party], logs[party])
        others = [p for p in range(3) if p != party]
        for op, size in enumerate(SIZES):
            for stream in (0, 5):
                tag = Tag(op // 4, stream, op, 1)
                for dst in others:
                    plane.send(dst, tag, payload(party, dst, tag, size))
                for src in others:
                    assert plane.recv(src, tag) == payload(src, party, tag, size)
        for dst in others:
            plane.send_control(dst, b"vote %d" % party)
        votes = [(src, int(plane.recv_control(src, 20).split()[1])) for src in others]
        plane.close()
        return votes

    results = run_parties(*(lambda p=p: body(p) for p in range(3)))
    assert results == [[(1, 1), (2, 2)], [(0, 0), (2, 2)], [(0, 0), (1, 1)]]
    for party, log in enumerate(logs):
        assert len(log.records) == 2 * 2 * 2 * len(SIZES)  # streams x peers x directions
        directions = [(d, peer, tag.op, tag.stream) for d, peer, tag, _ in log.records]
        others = [p for p in range(3) if p != party]
        due = [
            (d, peer, op, stream) for op in range(len(SIZES)) for stream in (0, 5) for d in (0, 1) for peer in others
        ]
        assert directions == due
        large = sorted((peer, tag, body) for d, peer, tag, body in log.records if d and len(body) >= AHEAD)
        assert sorted(log.foreseen) == large != []  # each once, when it had arrived, and nothing else
        assert sorted(f["peer"] for f in log.named("link_up")) == others
        assert not log.named("protocol_error")


class Patient(Log):
    """Its catching up goes on until the peer has what was sent before."""

    def __init__(self, there: threading.Event) -> None:
        super().__init__()
        self.there, self.found = there, list[bool]()
        self.armed, self.begun = False, threading.Event()

    def catch_up(self) -> None:
        if self.armed:
            self.begun.set()
            self.found.append(self.there.wait(120))
            self.armed = False


def test_what_can_be_late_is_done_when_the_messages_before_it_are_on_their_way(links: Any) -> None:
    there = threading.Event()
    patient = Patient(there)

    def body(party: int) -> bytes:
        plane = make_plane(party, links[party], patient if party == 0 else Log())
        for epoch in (0, 1):  # the first time the session is agreed on
            tag = Tag(epoch, 0, 0, 1)
            if party == 0:
                plane.send(1, tag, b"ask")
                patient.armed = epoch == 1
                found = bytes(plane.recv(1, tag))
            elif party == 1:
                found = bytes(plane.recv(0, tag))
                if epoch:
                    there.set()
                    patient.begun.wait(120)  # an answer that came before would leave nothing to wait for
                plane.send(0, tag, b"answer")
        plane.close()
        return found if party < 2 else b""

    assert run_parties(*(lambda p=p: body(p) for p in range(3))) == [b"answer", b"ask", b""]
    assert patient.found == [True]


def test_what_fails_meanwhile_ends_the_wait_and_all_that_comes_after_it(links: Any) -> None:
    """A full disk at the transcript is no trouble of the link."""

    class Full(Log):
        def catch_up(self) -> None:
            raise UvccError("cannot write open.bin: No space left on device")

    log = Full()
    plane = make_plane(0, links[0], log)
    for _ in range(2):
        with pytest.raises(UvccError, match=r"open\.bin"):
            plane.recv(1, Tag(0, 0, 0, 1))
    plane.close(graceful=False)
    assert not log.named("relay_down")


def test_a_peer_that_says_goodbye_is_lost_at_once_but_its_messages_are_not(links: Any) -> None:
    logs = [Log(), Log()]

    def quitter() -> None:
        plane = make_plane(0, links[0], logs[0])
        plane.send(1, Tag(0, 0, 0, 1), b"last words")
        assert plane.recv(1, Tag(0, 0, 0, 1)) == b"yes"
        plane.close()

    def other() -> None:
        plane = make_plane(1, links[1], logs[1])
        plane.send(0, Tag(0, 0, 0, 1), b"yes")
        assert plane.recv(0, Tag(0, 0, 0, 1)) == b"last words"
        with pytest.raises(PeerLostError) as lost:
            plane.recv(0, Tag(0, 0, 1, 1))
        assert lost.value.party == 0
        plane.close(graceful=False)

    run_parties(quitter, other)
    assert logs[1].named("peer_lost")[0]["party"] == 0


@pytest.mark.parametrize(
    ("waits", "dead", "awaited"), [(0, 1, 1), (1, 0, 0), (0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)]
)
def test_a_killed_party_ends_every_wait_whoever_dials_whom(waits: int, dead: int, awaited: int) -> None:
    """The higher party dials: some of these see a refusal, the others only that nobody comes back."""
    links = [link | {"refused_s": 0.3} for link in direct_links()]
    met = threading.Barrier(3)
    ended = threading.Event()
    tag = Tag(0, 0, 0, 1)

    def body(party: int) -> None:
        log = Log()
        plane = make_plane(party, links[party], log)
        others = [p for p in range(3) if p != party]
        for dst in others:
            plane.send(dst, tag, b"here")
        for src in others:
            assert plane.recv(src, tag) == b"here"
        plane.flush()
        met.wait(120)
        if party == dead:
            kill(plane)
            return
        if party == waits:
            with pytest.raises(PeerLostError, match="refuses connections") as lost:
                plane.recv(awaited, Tag(0, 0, 1, 1))
            assert lost.value.party == dead
            assert [event["party"] for event in log.named("peer_lost")] == [dead]
            ended.set()
        assert ended.wait(120)
        plane.close(graceful=False)

    run_parties(*(lambda p=p: body(p) for p in range(3)))


def test_silence_for_longer_than_agreed_is_a_lost_peer(links: Any) -> None:
    log = Log()
    plane = make_plane(1, dict(links[1], peer_timeout_s=0.3), log)
    with pytest.raises(PeerLostError) as lost:
        plane.recv(0, Tag(0, 0, 0, 1))
    assert lost.value.party == 0
    assert log.named("peer_lost")[0]["since_s"] >= 0.3
    assert plane.waiting_on is None
    plane.close(graceful=False)


def test_another_kind_in_the_place_of_a_message_names_the_peer(links: Any) -> None:
    logs = [Log(), Log()]
    met = threading.Barrier(2)

    def liar() -> None:
        plane = make_plane(0, links[0], logs[0])
        plane.send(1, Tag(0, 0, 0, 2), b"resharing instead of opening")
        plane.flush()
        met.wait(120)
        plane.close(graceful=False)

    def honest() -> None:
        plane = make_plane(1, links[1], logs[1])
        with pytest.raises(ProtocolError) as error:
            plane.recv(0, Tag(0, 0, 0, 1))
        assert error.value.party == 0
        met.wait(120)
        plane.close(graceful=False)

    run_parties(liar, honest)


def test_recv_control_times_out(links: Any) -> None:
    plane = make_plane(2, links[2], Log())
    with pytest.raises(TimeoutError):
        plane.recv_control(0, timeout=0.05)
    plane.close(graceful=False)


@pytest.mark.parametrize("kind", ["relay", "stream"])
def test_a_relay_whose_certificate_is_not_trusted_is_told_nothing(tmp_path: Path, kind: str) -> None:
    certificate(tmp_path)
    with relay_thread(tmp_path, stream_listen="127.0.0.1:0", tls_cert="cert.pem", tls_key="key.pem") as url:
        link, log = relay_links(tmp_path, url, kind)[0], Log()
        stream = connect.health(url, tmp_path / "cert.pem")["stream"]
        plane = make_plane(0, link | {"stream": stream, "relay_s": 0.3}, log)
        with pytest.raises(UnreachableError, match=r"the relay \S+ has not been reached"):
            plane.recv(1, Tag(0, 0, 0, 1))
        plane.close(graceful=False)
    assert "certificate" in log.named("relay_down")[0]["why"].lower()
    assert not log.named("link_up")


def test_whoever_looks_in_again_is_told_how_long_it_has_waited_in_all() -> None:
    links = [link | {"report_s": 0.4} for link in direct_links()]
    logs = [Log() for _ in range(3)]
    planes = [make_plane(p, links[p], logs[p]) for p in range(3)]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            planes[0].recv_control(1, 0.2)
    assert {e["peer"] for e in logs[0].named("waiting")} == {1}
    assert logs[0].named("waiting")[0]["since_s"] >= 0.4
    planes[1].send_control(0, b"here")
    assert planes[0].recv_control(1, 120.0) == b"here"
    told = len(logs[0].named("waiting"))
    planes[0]._waits = replace(planes[0]._waits, report_s=600.0)
    with pytest.raises(TimeoutError):
        planes[0].recv_control(1, 3.0)  # a new wait: not worth an event yet, though the old one had one due by now
    assert len(logs[0].named("waiting")) == told
    for plane in planes:
        plane.close(graceful=False)


def test_only_a_later_message_shows_that_a_peer_goes_on_without_the_one_that_is_due() -> None:
    """What came before it and was not taken yet shows nothing: its sender may itself wait for somebody."""
    links = [link | {"order_s": 0.2} for link in direct_links()]
    planes = [make_plane(p, links[p], Log()) for p in range(3)]
    first, due, later = (Tag(0, 0, op, 1) for op in range(3))
    planes[1].send(0, first, b"here")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(planes[0].wait_any, [[(1, first), (1, due)]])
        pause = threading.Event()
        while not waits.done() and (planes[0].waiting_on or {"since_s": 0.0})["since_s"] < 1.5:
            pause.wait(0.01)
        assert not waits.done()
        planes[1].send(0, later, b"too soon")
        with pytest.raises(ProtocolError, match=r"op=2.* goes on without .*op=1"):
            waits.result(120)
    for plane in planes:
        plane.close(graceful=False)


def test_last_words_behind_a_large_message_are_heard() -> None:
    """Who fails says why and leaves at once: the others are to hear it, however much of it was under way to them."""
    links, logs = direct_links(), [Log(), Log()]

    def failing() -> None:
        plane = make_plane(0, links[0], logs[0])
        assert plane.recv_control(1) == b"here"
        for op in range(2):
            plane.send(1, Tag(0, 0, op, 1), bytes(40 << 20))
        plane.send_control(1, b"the disk is full")
        plane.settle_control()
        plane.close(graceful=False)

    def other() -> None:
        plane = make_plane(1, links[1], logs[1])
        plane.send_control(0, b"here")
        assert plane.recv_control(0) == b"the disk is full"
        plane.close(graceful=False)

    run_parties(failing, other)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system gives no path up within milliseconds")
def test_a_peer_that_stands_still_before_a_full_window_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends, since nobody takes anything from it; the process may go on, and is heard again."""
    monkeypatch.setattr(connection, "DEAD_PATH_MS", 200)
    links, logs = [link | {"refused_s": 0.05} for link in direct_links()], [Log(), Log()]
    sent = threading.Event()
    tags = [Tag(0, 0, op, 1) for op in range(3)]

    def stopped() -> None:
        plane = make_plane(0, links[0], logs[0])
        plane.send(1, tags[0], b"here")
        assert plane.recv(1, tags[0]) == b"here"
        with standing_still(plane):
            sent.set()
            while not logs[1].named("link_down"):
                assert logs[1].seen.wait(120)
                logs[1].seen.clear()
            assert not threading.Event().wait(10 * 0.05)  # ten times as long as a refusal is suffered
        assert [len(plane.recv(1, tag)) for tag in tags[1:]] == [40 << 20] * 2
        plane.send(1, tags[1], b"heard")
        plane.close()

    def other() -> None:
        plane = make_plane(1, links[1], logs[1])
        plane.send(0, tags[0], b"here")
        assert plane.recv(0, tags[0]) == b"here"
        assert sent.wait(120)
        for tag in tags[1:]:
            plane.send(0, tag, bytes(40 << 20))
        assert plane.recv(0, tags[1]) == b"heard"
        plane.close()

    run_parties(stopped, other)
    assert not logs[1].named("peer_lost")


@pytest.mark.parametrize("host", ["nowhere.invalid", "no..where"])
def test_a_peer_whose_address_leads_nowhere_is_told_of_once(host: str) -> None:
    links, log = direct_links(), Log()
    nowhere = links[1] | {"peers": {"0": f"{host}:7000"}, "peer_timeout_s": 1.0}
    plane = make_plane(1, nowhere, log)
    with pytest.raises(PeerLostError, match="is silent"):
        plane.recv(0, Tag(0, 0, 0, 1))
    plane.close(graceful=False)
    (told,) = log.named("link_down")
    assert told["peer"] == 0
    assert told["why"].startswith(f"cannot dial {host}:7000: ")


def test_who_waits_for_a_peer_that_refuses_says_where_it_dialled_and_what_came_back() -> None:
    links, log = direct_links(), Log()
    at = links[1]["peers"]["0"]  # nobody listens there
    plane = make_plane(1, links[1] | {"peer_timeout_s": 1.5, "report_s": 0.2}, log)
    why = f"cannot reach {at}: Connection refused"
    with pytest.raises(PeerLostError, match=rf"party 0 is silent, for [0-9]+ s: {re.escape(why)}") as lost:
        plane.recv(0, Tag(0, 0, 0, 1))
    plane.close(graceful=False)
    assert "a firewall" in lost.value.hint
    assert log.named("waiting")[-1]["why"] == why


def test_who_is_dialled_and_waits_says_that_nobody_came_to_its_port() -> None:
    links, log = direct_links(), Log()
    port = links[0]["listen"].rpartition(":")[2]
    plane = make_plane(0, links[0] | {"peer_timeout_s": 1.0, "report_s": 0.2}, log)
    with pytest.raises(PeerLostError, match=f"it has not connected to port {port} here"):
        plane.recv(1, Tag(0, 0, 0, 1))
    plane.close(graceful=False)


def test_a_wait_for_a_peer_that_was_met_blames_no_way_to_it() -> None:
    links, log = direct_links(), Log()
    there = threading.Event()

    def leaves() -> None:
        plane = make_plane(1, links[1], Log())
        plane.send(0, Tag(0, 0, 0, 1), b"here")
        assert there.wait(120)
        kill(plane)

    def waits() -> None:
        plane = make_plane(0, links[0] | {"refused_s": 0.3, "report_s": 0.1}, log)
        assert plane.recv(1, Tag(0, 0, 0, 1)) == b"here"
        there.set()
        with pytest.raises(PeerLostError, match=r"refuses connections \(last sign of life"):
            plane.recv(1, Tag(0, 0, 1, 1))
        plane.close(graceful=False)

    run_parties(leaves, waits)
    assert all("why" not in waited for waited in log.named("waiting"))


def test_an_address_that_does_not_answer_at_all_is_named_before_the_system_gives_up() -> None:
    """What a firewall that drops looks like: a listener whose queue is full answers no connection either."""
    now = [100.0]
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as held:
        at = full.getsockname()
        while True:
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(at)
            if not select.select([], [filler], [], 0.2)[1]:
                break  # this one is not answered, nor is any later one
        door = KnockAuthenticator(1, bytes(32), lambda peer: bytes(32))
        link = DirectLink(1, "", {0: f"127.0.0.1:{at[1]}"}, clock=lambda: now[0], door=door)
        try:
            link.exchange(0.0, None)
            assert link.trouble(0) == ""  # it was dialled this moment
            now[0] += 4.0
            assert link.trouble(0) == f"cannot reach 127.0.0.1:{at[1]}: no answer"
            now[0] += 20.0
            link.exchange(0.0, None)  # given up, and dialled anew
            assert link.trouble(0) == f"cannot reach 127.0.0.1:{at[1]}: no answer"
        finally:
            link.close()
