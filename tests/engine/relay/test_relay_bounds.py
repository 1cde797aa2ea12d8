"""What nobody can do to a relay: fill it, stall it, or make it log without end, with a token or without."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvloop
from relay_kit import PARTIES, Bench

from uvcc_engine.relay import binary, stream
from uvcc_engine.relay import hub as hub_module
from uvcc_engine.relay.config import Credential, from_json
from uvcc_engine.relay.queues import NoRoomError
from uvcc_engine.relay.relay_records import MAX_BODY, Records
from uvcc_engine.relay.server import serving

T = TypeVar("T")
TOKENS = [f"token-of-party-{p}-0123456789" for p in range(3)]
COMMON = {"stream_listen": "127.0.0.1:0", "strangers": 40, "login_s": 60.0}
LOOK_S = 0.02  # between two looks at what the relay counts
SHORT = {"login_s": 0.7, "request_s": 1.0, "stall_s": 0.7}  # for whoever is to be sent away


class Place:
    """A relay in a thread of this process."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.url = self.stream = ""
        credentials = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
        self._config = from_json({"db": "relay.db", "credentials": credentials, **COMMON, **more}, folder)
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with serving(self._config) as running:
            self.url, self.stream = running.url, running.stream
            self._loop, self._stop = asyncio.get_running_loop(), running.stop
            self._up.set()
            await running.finished()

    def __enter__(self) -> Place:
        self._thread.start()
        assert self._up.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(120)
        assert not self._thread.is_alive()

    def at(self, front: str) -> tuple[str, int]:
        host, _, port = (self.stream if front == "stream" else self.url.removeprefix("http://")).rpartition(":")
        return host, int(port)

    def client(self, party: int) -> httpx.Client:
        headers = {"authorization": f"Bearer {TOKENS[party]}"}
        # over plain HTTP: there is nothing to verify, and a store of certificates takes long to load
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False, verify=False)

    def figure(self, name: str) -> int:
        with self.client(2) as two:
            text = two.get("/metrics").text
        return int(float(next(line for line in text.splitlines() if line.startswith(f"uvcc_relay_{name} ")).split()[1]))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as found:
        yield found


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path, **SHORT) as found:
        yield found


def message(receiver: int, ident: str, payload: bytes = b"x", **more: Any) -> dict[str, Any]:
    return {"receiver": receiver, "msg_id": ident, "payload_b64": base64.b64encode(payload).decode(), **more}


def closes(sock: socket.socket, within_s: float = 120.0) -> bool:
    """Whether the other end closes the connection."""
    sock.settimeout(within_s)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while sock.recv(1 << 16):
            pass
    return True


def subscribe(place: Place, party: int, box: int = 0, window: int = 1 << 20) -> socket.socket:
    sock = socket.create_connection(place.at("stream"), 120)
    sock.sendall(stream.hello(TOKENS[party]))
    if not (said := sock.recv(4, socket.MSG_WAITALL)):
        sock.close()
        raise EOFError
    assert said == stream.MAGIC
    body = b"".join(binary.request_pieces(box, 1, 0, window, [], []))
    sock.sendall(struct.pack("<I", len(body)) + body)
    return sock


def insistent(ask: Callable[[], T]) -> T:
    """Ask as a worker does: who was too slow with its token to keep its place in a crowd comes again."""
    for _ in range(20):
        with contextlib.suppress(httpx.TransportError, OSError, EOFError):
            return ask()
    raise AssertionError("twenty connections with a token were turned away")


def send(place: Place, n: int) -> int:
    """One message over a connection of its own; its status."""
    with place.client(0) as zero:
        return zero.post("/enqueue", json=message(1, f"m{n}")).status_code


# -- without a token ---------------------------------------------------------------------------------------------------


@pytest.mark.ci(__file__)
@pytest.mark.timeout(900)  # the flood takes what processors there are
def test_a_flood_of_strangers_keeps_nobody_with_a_token_out(impatient: Place, caplog: pytest.LogCaptureFixture) -> None:
    place = impatient
    fronts = [":".join(map(str, place.at(front))) for front in ("http", "stream")]
    with caplog.at_level(logging.WARNING):
        flood = subprocess.Popen([sys.executable, str(Path(__file__).with_name("relay_flood.py")), *fronts])
        try:
            crowd = refused = n = 0
            while n < 12 or refused < 400:
                assert insistent(lambda n=n: send(place, n)) == 200
                if n % 4 == 0:
                    crowd = max(crowd, insistent(lambda: place.figure("strangers")))
                    refused = insistent(lambda: place.figure("refused_connections_total"))
                    insistent(lambda n=n: subscribe(place, 1, box=n)).close()
                n += 1
        finally:
            flood.kill()
            flood.wait()
    assert crowd <= COMMON["strangers"]
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert 1 <= len(lines) <= 12, [r.getMessage() for r in lines][:20]


@pytest.mark.parametrize("front", ["http", "stream"])
@pytest.mark.parametrize("first", [b"", b"U", b"POST /exchange HTTP/1.1\r\nho"])
def test_who_shows_no_token_is_gone_soon(impatient: Place, front: str, first: bytes) -> None:
    with socket.create_connection(impatient.at(front), 120) as sock:
        sock.sendall(first)
        assert closes(sock)
    assert insistent(lambda: impatient.figure("strangers")) <= 1


def test_a_silent_tls_handshake_is_counted_and_ended(tmp_path: Path) -> None:
    from test_relay_server import certificate

    certificate(tmp_path)
    with Place(tmp_path, tls_cert="cert.pem", tls_key="key.pem", strangers=6, **SHORT) as place:
        kept = []
        for _ in range(30):
            kept.append(socket.create_connection(place.at("stream"), 120))
        assert all(closes(sock) for sock in kept)
        for sock in kept:
            sock.close()


# -- with a token ------------------------------------------------------------------------------------------------------


def test_a_credential_has_its_share_of_connections_and_the_others_theirs(tmp_path: Path) -> None:
    with Place(tmp_path, connections=5) as place:
        mine = [subscribe(place, 0, box=n) for n in range(5)]
        with socket.create_connection(place.at("stream"), 120) as sixth:
            sixth.sendall(stream.hello(TOKENS[0]))
            assert closes(sixth)
        with place.client(0) as zero:
            assert zero.post("/poll", json={"wait_s": 0}).status_code == 429
        with place.client(1) as one:
            assert one.post("/poll", json={"wait_s": 0}).status_code == 200
        for sock in mine:
            sock.close()
        while place.figure("connections") > 1:
            time.sleep(LOOK_S)
        with place.client(0) as zero:
            assert zero.post("/poll", json={"wait_s": 0}).status_code == 200


def test_boxes_are_counted_per_credential(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Place(tmp_path, boxes=10) as place, place.client(0) as zero, place.client(1) as one:
        assert one.post("/poll", json={"wait_s": 0, "box": 1}).status_code == 200
        codes = [zero.post("/enqueue", json=message(1, "m", box=b) | {"box": b}).status_code for b in range(1, 21)]
        assert codes.count(200) == 5  # a queue and a mailbox each, but the mailbox of box 1 was there
        assert set(codes[6:]) == {429}
        assert [zero.post("/poll", json={"wait_s": 0, "box": b}).status_code for b in (100, 101)] == [429, 429]
        assert one.post("/enqueue", json=message(2, "m")).status_code == 200
        assert one.post("/poll", json={"wait_s": 0, "box": 1}).json()["messages"]
        with socket.create_connection(place.at("stream"), 120) as sock:
            body = b"".join(binary.request_pieces(999, 1, 0, 1 << 20, [], []))
            sock.sendall(stream.hello(TOKENS[0]) + struct.pack("<I", len(body)) + body)
            assert closes(sock)
        assert not [r for r in caplog.records if r.exc_info], "an error while the refused reader was let go"


@pytest.fixture
def steady(tmp_path: Path) -> Iterator[Place]:
    """It ends what stops for seconds, which nobody does who sends each half second, on a busy machine either."""
    with Place(tmp_path, stall_s=4.0, request_s=5.0) as found:
        yield found


def test_a_request_that_stops_is_ended_and_one_that_goes_on_slowly_is_not(steady: Place) -> None:
    place = steady
    body = b"".join(binary.request_pieces(0, 1, 0, 1 << 20, [], [binary.Item(1, 0, 0, b"id", bytes(90_000))]))
    framed = struct.pack("<I", len(body)) + body
    stopped, slow = subscribe(place, 0, box=1), subscribe(place, 0, box=2)
    half = socket.create_connection(place.at("http"), 120)
    head = f"POST /exchange HTTP/1.1\r\nauthorization: Bearer {TOKENS[0]}\r\ncontent-length: 900000\r\n\r\n"
    half.sendall(head.encode() + bytes(100_000))
    stopped.sendall(framed[:70_000])
    for at in range(0, len(framed), len(framed) // 8):
        slow.sendall(framed[at : at + len(framed) // 8])
        threading.Event().wait(0.6)  # more than stall_s in all
    (length,) = struct.unpack("<I", slow.recv(4, socket.MSG_WAITALL))
    assert binary.read_reply(slow.recv(length, socket.MSG_WAITALL)).fates == b"\0"
    assert closes(stopped)
    assert closes(half)
    for sock in (stopped, slow, half):
        sock.close()
    assert insistent(lambda: place.figure("arriving_bytes")) == 0


def test_unfinished_requests_are_bounded_per_credential(tmp_path: Path) -> None:
    with Place(tmp_path, arriving_bytes=4 << 20, stall_s=600.0, request_s=600.0) as place:
        many = [subscribe(place, 0, box=n) for n in range(8)]
        for sock in many:
            sock.sendall(struct.pack("<I", 1 << 20) + bytes(200_000))
        while place.figure("refused_connections_total") < 4:
            time.sleep(LOOK_S)
        assert place.figure("arriving_bytes") == 4 << 20
        with place.client(1) as one:
            assert one.post("/enqueue", json=message(2, "m", bytes(3 << 20))).status_code == 200
        for sock in many:
            sock.close()


def test_who_does_not_read_is_ended_and_the_relay_does_not_swell(tmp_path: Path) -> None:
    with Place(tmp_path, max_body=32 << 20, stall_s=4.0) as place, place.client(0) as zero:
        blob = bytes(1 << 20)
        for n in range(48):
            items = [binary.Item(1, 0, 0, b"%d" % n, blob)]
            body = b"".join(binary.request_pieces(0, 1, 0, 0, [], items))
            assert zero.post("/exchange", content=body).status_code == 200
        lazy = []
        for n in range(12):  # each takes everything anew, and reads nothing
            sock = socket.create_connection(place.at("http"), 120)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = b"".join(binary.request_pieces(0, n + 2, 0, 0xFFFF_FFFF, [], []))
            head = (
                f"POST /exchange HTTP/1.1\r\nauthorization: Bearer {TOKENS[1]}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            lazy.append(sock)
        while place.figure("refused_connections_total") < 8:  # they stalled, and were ended
            time.sleep(LOOK_S)
        with place.client(2) as two:
            assert two.post("/poll", json={"wait_s": 0}).status_code == 200
        for sock in lazy:
            sock.close()
        with place.client(1) as one:
            assert one.post("/poll", json={"wait_s": 0, "max_bytes": 1}).json()["messages"]


def test_a_stream_client_that_reads_no_replies_is_not_read_either(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PUSH_BYTES", 1 << 16)
    made = stream.StreamProtocol.connection_made

    def with_little_room(self: stream.StreamProtocol, transport: asyncio.BaseTransport) -> None:
        """Replies soon fill what the system keeps of them, which may be megabytes."""
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        made(self, transport)

    monkeypatch.setattr(stream.StreamProtocol, "connection_made", with_little_room)
    with socket.create_connection(place.at("stream"), 120) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(stream.hello(TOKENS[0]))
        body = b"".join(binary.request_pieces(0, 1, 0, 0, [], [binary.Item(9, 0, 0, b"i", b"")]))  # forbidden
        framed = (struct.pack("<I", len(body)) + body) * 2000  # is answered at once, with half as many bytes
        sock.settimeout(2.0)  # to run out
        with pytest.raises(OSError, match=r"timed out|reset|Broken"):
            for _ in range(4000):
                sock.sendall(framed)


HOSTILE: list[tuple[str, Any]] = [
    ("/enqueue", message(1, "m") | {"receiver": True}),
    ("/enqueue", message(1, "m") | {"receiver": 1e400}),
    ("/enqueue", message(1, "m") | {"receiver": "1"}),
    ("/enqueue", message(1, "m") | {"box": 1 << 64}),
    ("/enqueue", message(1, "m") | {"box": -1}),
    ("/enqueue", message(1, "m") | {"ttl_s": -5}),
    ("/enqueue", message(1, "m") | {"ttl_s": float("nan")}),
    ("/enqueue", message(1, "m" * 65)),
    ("/enqueue", message(1, "m") | {"msg_id": 7}),
    ("/enqueue", message(1, "m") | {"msg_id": "\ud800"}),
    ("/enqueue", message(1, "m") | {"payload_b64": None}),
    ("/enqueue", {"messages": {"a": 1}}),
    ("/enqueue", {"messages": [1, 2]}),
    ("/enqueue", {"messages": "abc"}),
    ("/enqueue", {"messages": [{}] * 70_000}),
    ("/poll", {"wait_s": float("nan")}),
    ("/poll", {"wait_s": "1"}),
    ("/poll", {"wait_s": None}),
    ("/poll", {"max_bytes": -1}),
    ("/poll", {"box": {}}),
    ("/ack", {"deliveries": "123"}),
    ("/ack", {"deliveries": [None]}),
    ("/ack", {}),
    ("/records", {"after": "x"}),
    ("/records", {"after": 1e300}),
    ("/records", {"wait_s": float("inf")}),
    ("/records", {"want": 3}),
    ("/records", {"put": "x"}),
    ("/records", {"put": {"name": "a b", "body": "x"}}),
    ("/records", {"put": {"name": "a\x1b[2J", "body": "x"}}),
    ("/records", {"put": {"name": "ü", "body": "x"}}),
    ("/records", {"put": {"name": "n" * 161, "body": "x"}}),
    ("/records", {"put": {"name": "n", "body": "ä" * MAX_BODY}}),
    ("/records", {"put": {"name": "n"}}),
]


def test_hostile_json_is_refused_by_name_and_never_an_error_of_the_relay(place: Place) -> None:
    with place.client(0) as zero:
        for path, body in HOSTILE:
            reply = zero.post(path, content=json.dumps(body).encode())
            assert (path, str(body)[:90], reply.status_code) == (path, str(body)[:90], 400)
            assert reply.json()["error"]
        for raw in (b"[" * 200_000, b'{"a":' * 100_000, b"{}x", b"\xff", b"", b'{"wait_s":' + b"9" * 5000 + b"}"):
            assert zero.post("/poll", content=raw).status_code == 400
        assert zero.get("/poll").status_code == 405
        assert zero.post("/enqueue", json=message(1, "m")).status_code == 200
        assert zero.post("/exchange", headers={"x": "y" * 40_000}).status_code in (400, 401)


# -- the hub's own bounds ----------------------------------------------------------------------------------------------


def test_messages_faster_than_the_disk_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, waiting_bytes=1000)
    bench.writer.held = []
    assert bench.send(0, 1, b"a" * 600) == b"pending"
    assert bench.send(0, 1, b"b" * 600) == bytes([binary.QUOTA])
    assert bench.send(2, 1, b"c" * 600) == b"pending"  # another party has its own share
    bench.writer.release()
    assert bench.send(0, 1, b"b" * 600) == bytes([binary.STORED])
    assert bench.send(0, 1, bytes(bench.settings.get("max_message", 16 << 20) + 1)) == bytes([binary.FORBIDDEN])


def test_slots_are_bounded_and_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_PASSING", 1000)
    monkeypatch.setattr(hub_module, "MAX_SLOT", 400)
    bench = Bench(tmp_path)
    fates = [bench.send(0, 1, bytes(300), ids=[b""], slot=s) for s in range(1, 6)]
    assert fates == [bytes([f]) for f in (binary.STORED,) * 3 + (binary.QUOTA,) * 2]
    assert bench.send(0, 1, bytes(401), ids=[b""], slot=9) == bytes([binary.QUOTA])
    assert bench.send(2, 1, bytes(300), ids=[b""], slot=1) == bytes([binary.STORED])
    bench.now += hub_module.PASSING_S + 1
    bench.hub.tick()
    assert bench.hub.usage["g", 0].passing == bench.hub.usage["g", 2].passing == 0
    assert bench.send(0, 1, bytes(300), ids=[b""], slot=5) == bytes([binary.STORED])
    assert len(bench.take(1)) == 1
    assert bench.hub.usage["g", 0].passing == 0
    assert bench.send(0, 1, b"notice", ids=[b""], slot=binary.EXPIRED) == bytes([binary.FORBIDDEN])


def test_ids_remembered_are_bounded_in_all_and_on_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dedup_total=300)
    for n in range(400):
        bench.send(0, 1, b"%d" % n)
        bench.ack(1, bench.take(1))
    bench.hub.tick()
    assert bench.hub.usage["g", 0].seen <= 301
    assert sum(1 for _ in bench.reader.seen()) <= 301
    bench.reopen()
    assert bench.hub.usage["g", 0].seen <= 301
    assert bench.send(0, 1, b"399") == bytes([binary.DUPLICATE])


def test_what_was_taken_is_not_kept_until_it_would_have_expired(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for n in range(200):
        bench.send(0, 1, *(b"%d-%d" % (n, k) for k in range(100)))
        bench.ack(1, bench.take(1))
    assert len(bench.hub._expiry) < 3 * hub_module.GONE_KEPT
    bench.send(0, 1, b"late", ttl=5)
    bench.now += 6
    bench.hub.tick()
    assert bench.hub.totals.expired == 1
    assert bench.take(0)[0].slot == binary.EXPIRED


def test_a_hub_with_many_boxes_opens_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, boxes=20)
    fates = [bench.send(0, 1, b"x", box=b)[0] for b in range(15)]
    assert fates.count(binary.STORED) == 10
    bench.settings["boxes"] = 4
    bench.reopen()
    assert sum(len(bench.take(1, box=b)) for b in range(10)) == 10
    with pytest.raises(NoRoomError):
        bench.hub.enter(PARTIES[0], 77)
    bench.hub.enter(Credential(2, "g", frozenset({0})), 78)


async def test_only_readers_of_a_name_are_woken() -> None:
    records = Records(lambda: 1.0)
    looks = [0]
    since = records.since

    def counted(*args: Any) -> Any:
        looks[0] += 1
        return since(*args)

    records.since = counted  # type: ignore[method-assign]
    reading = asyncio.create_task(records.wait("g", -1, "order/", 30.0))
    await asyncio.sleep(0)
    for n in range(500):
        records.put("g", 0, f"beat/{n}", "x")
        await asyncio.sleep(0)
    assert looks[0] == 1
    records.put("g", 0, "order/n", "x")
    assert [r.name for r in await reading] == ["order/n"]
    assert not records._waiting["g"]
