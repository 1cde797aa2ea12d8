"""Everything that a stranger, a relay, a broker or a peer can put before a parser: only the documented errors come out.

Seeded. ``UVCC_FUZZ_INPUTS`` sets the inputs of each target (2,000 unless set; ``UVCC_FUZZ_SEED`` for another run of
them), so a million is a matter of a few runs. No input may take long, and memory does not grow with their number.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import queue
import random
import resource
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from plane_kit import IDENTITIES, PUBLIC, SID

from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError
from uvcc_engine.contract.peer_protocol import peer_messages, relay_words
from uvcc_engine.contract.peer_protocol.peer_messages import AttachedNote, Resume, Topic, Vote
from uvcc_engine.plane import acks
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.channel import Acknowledgement
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.links import nats_link
from uvcc_engine.plane.links.knocking import KnockAuthenticator
from uvcc_engine.plane.links.relay_client import RELAY_POLICY, RelayBase
from uvcc_engine.plane.links.stream_link import RelayReplies
from uvcc_engine.relay import binary, json_requests, stream
from uvcc_engine.relay.app import RelayApp, RelayFront
from uvcc_engine.relay.config import Credential, RelayConfig
from uvcc_engine.relay.gate import Gate
from uvcc_engine.relay.server import running_hub
from uvcc_engine.transcript.signed import boxes, orders
from uvcc_engine.worker.consensus import StepConsensus

INPUTS = int(os.environ.get("UVCC_FUZZ_INPUTS", "2000"))
SEED = int(os.environ.get("UVCC_FUZZ_SEED", "1"))
SLOWEST_S = 10.0  # of processor time
GROWTH = 96 << 20
pytestmark = [pytest.mark.timeout(INPUTS // 10)] if INPUTS > 6000 else []
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, (1 << 63) - 1, (1 << 64) - 1)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    1.0,
    1e308,
    10**30,
    "",
    "x",
    "\x1b[2J",
    "ä" * 9,
    [],
    {},
    [[]],
    "9" * 40,
)


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with a few faults, or noise."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(300))
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 33))
            case 4:
                size = rng.choice((1, 2, 4, 8))
                data[at : at + size] = (rng.choice(NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            case 5:
                other = rng.choice(seeds)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                data += data[:at]
    return bytes(data[: 1 << 18])


def odd_json(rng: random.Random, value: Any) -> Any:
    """A document with some parts exchanged for odd ones."""
    if isinstance(value, dict) and rng.random() < 0.8:
        found = {k: odd_json(rng, v) if rng.random() < 0.4 else v for k, v in value.items() if rng.random() > 0.08}
        return found | ({rng.choice(("box", "put", "wait_s", "x")): rng.choice(ODD)} if rng.random() < 0.1 else {})
    if isinstance(value, list) and rng.random() < 0.6:
        return [odd_json(rng, v) for v in value] * rng.choice((0, 1, 1, 3))
    return rng.choice(ODD) if rng.random() < 0.7 else value


def json_bytes(rng: random.Random, documents: list[Any]) -> bytes:
    if rng.random() < 0.25:
        return mutated(rng, [json.dumps(d).encode() for d in documents])
    if rng.random() < 0.02:
        return rng.choice((b"[", b'{"a":')) * rng.randrange(1, 60_000)
    return json.dumps(odd_json(rng, rng.choice(documents))).encode()


def attack(
    target: Callable[[bytes], object], inputs: Callable[[random.Random], bytes], *allowed: type[Exception]
) -> None:
    """Put inputs before a target; anything but the documented errors fails, with the input that caused it."""
    rng = random.Random(SEED)
    before = 0
    for n in range(INPUTS):
        if n == INPUTS // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = inputs(rng)
        began = time.thread_time()
        try:
            target(data)
        except allowed:
            pass
        except Exception as error:
            raise AssertionError(f"input {n} of seed {SEED}: {error!r} from {data[:200].hex()}") from error
        assert time.thread_time() - began < SLOWEST_S, data[:200].hex()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < GROWTH, f"{grown >> 20} MiB more"


# -- plane -------------------------------------------------------------------------------------------------------------


def pair() -> tuple[Endpoint, Endpoint]:
    """Two endpoints with a session between them."""
    found = tuple(Endpoint(p, 1 - p, SID, IDENTITIES[p], PUBLIC[1 - p], 0.0) for p in (0, 1))
    for now in range(1, 6):
        ingesting(found, float(now))
    assert found[0].session is not None
    assert found[1].session is not None
    return found[0], found[1]


def ingesting(ends: tuple[Endpoint, ...], now: float) -> list[bytes]:
    raws = []
    for a, b in ((0, 1), (1, 0)):
        for out in ends[a].transmit(now):
            raw = b"".join(out.buffers)
            raws.append(raw)
            ends[b].receive(fr.read_header(raw[:48]), raw[48:], now)
    return raws


def traffic() -> tuple[Endpoint, list[bytes]]:
    """An endpoint in the middle of a conversation, and frames of that conversation."""
    ends = pair()
    raws: list[bytes] = []
    for n in range(6):
        ends[0].queue(Tag(0, n % 2, n, 1), os.urandom(60), 9.0)
        ends[0].queue(Tag(1, 5, n, 1), os.urandom(40_000), 9.0)
        raws += ingesting(ends, 10.0 + 3 * n)
    fresh = Endpoint(0, 1, SID, IDENTITIES[0], PUBLIC[1], 0.0)
    raws += [b"".join(o.buffers) for o in fresh.transmit(1.0)]
    return ends[1], raws


def test_frames_of_strangers_and_relays_raise_nothing() -> None:
    target, raws = traffic()
    now = [100.0]

    def receive(data: bytes) -> None:
        now[0] += 0.01
        header = fr.read_header(data[:48].ljust(48, b"\0"))
        session = target.session
        if session is not None and header.cls in (fr.DATA, fr.BULK, fr.ACK):
            header = header._replace(session=session.id)
        body = data[48:]
        if now[0] % 0.02 < 0.01:  # a clever one repairs the checksum
            header = header._replace(crc=fr.crc32c(body, fr.crc32c(header.aad)))
        target.receive(header, body, now[0])
        target.errors.clear()
        for _ in target.transmit(now[0]):
            pass

    def parsed(data: bytes) -> None:
        try:
            fr.read_header(data[:48].ljust(48, b"\0"))
        except ProtocolError:
            return
        receive(data)

    attack(parsed, lambda rng: mutated(rng, raws))
    assert target.session is not None


def test_what_a_peer_seals_raises_protocol_errors_only() -> None:
    label = fr.Labeler(SID, 0, 1)
    tags = [Tag(0, 3, n, 1) for n in range(4)]
    packed = [
        b"".join(fr.pack_part(label(t), t, 0, 1, 12, 12) + b"x" * 12 + bytes(4) for t in tags[:k]) for k in (1, 2, 4)
    ]
    entries = [acks.StreamCursors(Acknowledgement(s, 5, 900, ((7, 9), (12, 13))), 20, 4) for s in range(3)]
    cursors = [acks.encode_cursors([(1, 2, 3), (4, 5, 6)])]
    attack(lambda d: list(fr.read_packed(memoryview(d), 3, 0, label)), lambda rng: mutated(rng, packed), ProtocolError)
    attack(lambda d: acks.decode(d, 1), lambda rng: mutated(rng, [acks.encode(1, entries)]), ProtocolError)
    attack(lambda d: acks.decode_cursors(d, 1), lambda rng: mutated(rng, cursors), ProtocolError)


def test_a_peer_that_seals_what_it_likes_is_named_and_nothing_else_happens() -> None:
    label = fr.Labeler(SID, 0, 1)
    seeds = [acks.encode(0, [acks.StreamCursors(Acknowledgement(s, 0, 1 << 40, ()), 1, 0) for s in (0, 5)])]
    for n in range(3):
        tag = Tag(0, n, n, 1)
        seeds.append(fr.pack_part(label(tag), tag, 0, 1, 12, 12) + b"y" * 16)
    ends, named = pair(), set[int]()
    seq = [0]

    def seal(data: bytes) -> None:
        nonlocal ends
        seq[0] += 1
        me, you = ends
        session = me.session
        assert session is not None
        cls, number = (fr.ACK, fr.ACK_STREAM) if len(data) % 2 else (fr.DATA, len(data) % 7)
        at = seq[0] if cls == fr.ACK else seq[0] % 50
        plain = data[: fr.PACK_FRAME]
        aad = fr.pack_header(cls, 0, 1, me.sid, session.id, number, session.generation, at, len(plain) + fr.TAG_BYTES)
        body = session.seal(session.generation, fr.nonce(number, at), plain, aad)
        try:
            you.receive(fr.read_header(fr.finish(aad, body)), body, 100.0)
        except ProtocolError as error:
            named.add(error.party)
            if seq[0] % 40 == 0:
                ends = pair()

    attack(seal, lambda rng: mutated(rng, seeds))
    assert named == {0}


def test_greetings_and_knocks_raise_the_documented_errors_only() -> None:
    doors = [
        KnockAuthenticator(p, SID, lambda q, p=p: IDENTITIES[p].pair_secret(PUBLIC[q], SID, "plane-knock"))
        for p in (0, 1)
    ]
    knocks = [doors[1].knock(0) for _ in range(4)]
    attack(lambda d: doors[0].admit(d.ljust(64, b"\0")[:64]), lambda rng: mutated(rng, knocks))
    target = Endpoint(1, 0, SID, IDENTITIES[1], PUBLIC[0], 0.0)
    other = Endpoint(0, 1, SID, IDENTITIES[0], PUBLIC[1], 0.0)
    hellos = [b"".join(o.buffers)[48:] for o in other.transmit(1.0)]
    mac, now = target._handshake._mac, [0.0]

    def greet(data: bytes) -> None:
        now[0] += 2.0
        if int(now[0]) % 4 == 0:  # as only the peer itself could
            data = data[:-32] + mac(data[:-32])
        target._handshake.on_hello(data, now[0])

    attack(greet, lambda rng: mutated(rng, hellos), fr.UnprovenError)
    header = fr.read_header(fr.pack_header(fr.AUTH, 0, 1, target.sid, 5, 0, 0, 0, 90) + bytes(4))
    attack(lambda d: target._handshake.on_auth(header, d), lambda rng: mutated(rng, hellos), fr.UnprovenError)


def test_what_a_relay_or_a_broker_answers_raises_the_documented_errors_only() -> None:
    frames = traffic()[1][:4]
    messages = [binary.Message(n, n % 3, binary.EXPIRED if n % 4 == 0 else 0, f) for n, f in enumerate([*frames, b""])]
    replies = [b"".join(binary.reply_pieces(0, b"\0\1", messages)), b"".join(binary.reply_pieces(1, b"", []))]
    base = RelayBase(url="", box=0, policy=RELAY_POLICY)

    def reply(data: bytes) -> None:
        found = binary.read_reply(data)
        base._refused([binary.Item(1, 0, 0, b"i", b"")] * 2, found.fates) if found.fates != b"\4" else None
        base._arrivals(found.messages)
        base._acks.clear()
        base._notices.clear()

    attack(reply, lambda rng: mutated(rng, replies), ValueError, ConfigError)
    framed = [struct.pack("<I", len(r)) + r for r in replies]

    def split(data: bytes) -> None:
        replies_, data = RelayReplies(), data[: 1 << 17]
        replies_.buffer[: len(data)] = data
        replies_.have = len(data)
        replies_.split([])

    attack(split, lambda rng: b"".join(mutated(rng, framed) for _ in range(3)), ValueError)
    link = nats_link.NatsLink.__new__(nats_link.NatsLink)
    link._pieces, link._notices = {}, []
    pieces = [nats_link.PIECE.pack(1, 2, 3, 4, n, 3) + frames[0][n * 30 : n * 30 + 30] for n in range(3)]

    def arrive(data: bytes) -> None:
        link._arrivals(nats_link.sender_in(data[:20].decode("latin-1")), data)
        assert len(link._pieces) <= nats_link.UNFINISHED
        link._notices.clear()

    attack(arrive, lambda rng: mutated(rng, pieces))
    answers = [{"seq": 3, "records": [{"party": 1, "name": "order/x", "seq": 3, "body": "b"}]}]
    attack(relay_words.answer, lambda rng: json_bytes(rng, answers))


# -- control messages and records --------------------------------------------------------------------------------------


class Said:
    """A plane on which party 1 says one thing and party 2 what is right."""

    party = 0

    def __init__(self) -> None:
        self.mail: dict[int, queue.SimpleQueue[bytes]] = {1: queue.SimpleQueue(), 2: queue.SimpleQueue()}

    def send_control(self, dst: int, body: bytes) -> None:
        pass

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        return self.mail[src].get_nowait() if not self.mail[src].empty() else b"{}"


def test_control_messages_raise_errors_that_name_their_sender() -> None:
    common = {"run": "r", "step": 3, "note": "", "nonce": "", "saved": -1, "stated": "", "vote": 0, "turn": 0}
    documents: list[Any] = [{"topic": t, **common, "steps": [1, 2]} for t in ("vote", "hold", "resume", "stopped")]
    plane = Said()
    table = StepConsensus(plane, "r")  # type: ignore[arg-type]
    named: set[int | None] = set()
    longest = [0]

    def hear(data: bytes) -> None:
        topic = ("vote", "resume", "root")[len(data) % 3]
        plane.mail[1].put(data)
        plane.mail[2].put(json.dumps({"topic": topic, **common, "steps": [2]}).encode())
        try:
            if topic == "vote":
                table.close_step(3, Vote())
            elif topic == "resume":
                table.agree_step(Resume((2,)))
            else:
                table.exchange(AttachedNote(Topic.ROOT, 3), {})
        except (ProtocolError, PeerLostError) as error:
            named.add(error.party)
            longest[0] = max(longest[0], len(str(error)) if str(error).isprintable() else 1 << 30)
        finally:
            plane.mail = {1: queue.SimpleQueue(), 2: queue.SimpleQueue()}

    attack(hear, lambda rng: json_bytes(rng, documents))
    assert named <= {0, 1, 2}
    assert longest[0] < 1200
    attack(peer_messages.note_text, lambda rng: mutated(rng, [b"text"]))
    attack(peer_messages.parse, lambda rng: json_bytes(rng, documents))
    assert len(table.statements) <= 128


def test_records_that_are_none_are_nothing() -> None:
    key = Ed25519PrivateKey.generate()
    reader = boxes.reader_of(key)
    sealed = [
        boxes.seal_to("x" * 50, boxes.read_keys([boxes.public_of(reader)])).encode(),
        boxes.seal_with("x" * 50, bytes(32)).encode(),
        orders.sealed({"run": "r"}, lambda p: "s").encode(),
    ]

    def look(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        orders.opened(boxes.unseal(text, reader), orders.BEAT_NAMESPACE, ["ssh-ed25519 AAAA"])
        orders.opened(boxes.unseal_with(text, bytes(32)), orders.ORDER_NAMESPACE, [])

    attack(look, lambda rng: mutated(rng, sealed))


# -- relay -------------------------------------------------------------------------------------------------------------

TOKEN = "a token of sixteen letters"
WHO = Credential(0, "g", frozenset({1, 2}))


def settings(folder: Path) -> RelayConfig:
    key = hashlib.sha256(TOKEN.encode()).digest()
    return RelayConfig(db=folder / "relay.db", credentials={key: WHO}, boxes=500, waiting_bytes=1 << 20)


REQUESTS = [
    b"".join(binary.request_pieces(7, 1, 0, 1 << 16, [1, 2], [binary.Item(1, 0, 60, b"id-1", b"payload")])),
    b"".join(
        binary.request_pieces(
            7, 1, 0, 0, [], [binary.Item(2, 1, 0, b"", b"slot"), binary.Item(1, 0, 0, b"x" * 64, b"")]
        )
    ),
    b"".join(binary.request_pieces(8, 2, 0, 1 << 16, [], [], flags=binary.RESYNC)),
]


def test_binary_requests_raise_value_errors_only() -> None:
    attack(binary.read_request, lambda rng: mutated(rng, REQUESTS), ValueError)


class Pipe:
    """A transport that counts what it is given."""

    def __init__(self) -> None:
        self.closed = False

    def writelines(self, pieces: list[Any]) -> None:
        for piece in pieces:
            memoryview(piece)

    def close(self) -> None:
        self.closed = True

    abort = close

    def set_write_buffer_limits(self, high: int) -> None:
        pass


async def _attack_fronts(folder: Path) -> None:
    """Stream frames in odd pieces, and JSON requests, before a hub with a real store."""
    config = settings(folder)
    async with running_hub(config) as (hub, _):
        gate = Gate(config, time.monotonic)
        front = RelayFront(hub, config, gate)
        app = RelayApp(front, config, lambda: "")
        rng, before = random.Random(SEED), 0
        framed = [struct.pack("<I", len(r)) + r for r in REQUESTS]
        documents: list[tuple[str, Any]] = [
            ("/enqueue", {"messages": [{"msg_id": "m", "receiver": 1, "payload_b64": "eA==", "ttl_s": 3}], "box": 3}),
            ("/enqueue", {"msg_id": "m", "receiver": 2, "payload_b64": "eA==", "sender": 0, "group_id": "g"}),
            ("/poll", {"wait_s": 0, "max_bytes": 9, "box": 1, "receiver": 0}),
            ("/ack", {"deliveries": [1, 2], "box": 1}),
            ("/records", {"put": {"name": "beat/x", "body": "b"}, "after": 0, "want": "order/", "wait_s": 0}),
        ]
        for n in range(INPUTS):
            if n == INPUTS // 10:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await _feed(front, config, rng, framed)
            path, document = rng.choice(documents)
            body = json_bytes(rng, [document])
            status = await _post(app, gate, path, body)
            assert status in (200, 400, 403, 409, 413, 429), (n, SEED, path, body[:300], status)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < GROWTH, f"{grown >> 20} MiB more"
        assert hub.usage["g", 0].boxes <= config.boxes


async def _feed(front: RelayFront, config: RelayConfig, rng: random.Random, framed: list[bytes]) -> None:
    visitor = front.gate.arrive("127.0.0.1")
    connection, pipe = stream.StreamProtocol(front, config, set(), visitor), Pipe()
    connection.connection_made(pipe)  # type: ignore[arg-type]
    hello = stream.hello(TOKEN)
    data = (hello if rng.random() < 0.9 else mutated(rng, [hello])) + b"".join(mutated(rng, framed) for _ in range(2))
    at = 0
    while at < len(data) and not pipe.closed:
        into = connection.get_buffer(-1)
        size = min(len(into), rng.choice((1, 7, 64, 4096)), len(data) - at)
        into[:size] = data[at : at + size]
        connection.buffer_updated(size)
        at += size
    connection.connection_lost(None)
    await asyncio.sleep(0)


async def _post(app: RelayApp, gate: Gate, path: str, body: bytes) -> int:
    found = [0]
    parts = [body[: len(body) // 2], body[len(body) // 2 :]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        found[0] = message.get("status", found[0])

    visitor = gate.arrive("127.0.0.1")
    scope = {"type": "http", "path": path, "method": "POST", "query_string": b"", "root_path": ""}
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    async with asyncio.timeout(120):
        await app({**scope, "headers": headers, "visitor": visitor, "http_version": "1.1"}, receive, send)
    visitor.left()
    return found[0]


def test_both_fronts_of_a_relay_survive_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_requests, "MAX_WAIT_S", 0.01)  # longer ones, and two seconds by default, are cut
    asyncio.run(_attack_fronts(tmp_path))


async def _claim_and_leave(folder: Path, times: int) -> int:
    """Bytes that lie there when clients have announced the largest frame, sent a little of it, and gone."""
    config = settings(folder)
    async with running_hub(config) as (hub, _):
        front = RelayFront(hub, config, Gate(config, time.monotonic))
        gc.disable()  # a connection that has ended is part of cycles, and nobody says when those are collected
        tracemalloc.start()
        try:
            for _ in range(times):
                connection = stream.StreamProtocol(front, config, set(), front.gate.arrive("127.0.0.1"))
                connection.connection_made(Pipe())  # type: ignore[arg-type]
                data = stream.hello(TOKEN) + stream.LENGTH.pack(config.max_body) + b"x"
                connection.get_buffer(-1)[: len(data)] = data
                connection.buffer_updated(len(data))
                connection.connection_lost(None)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()


def test_a_connection_that_ends_in_the_middle_of_a_frame_leaves_nothing_of_it(tmp_path: Path) -> None:
    assert asyncio.run(_claim_and_leave(tmp_path, 3)) < 1 << 20


def test_documents_of_requests_raise_value_errors_only() -> None:
    documents: list[Any] = [{"a": [1, {"b": None}], "wait_s": 1}, {"deliveries": [1]}]

    def read(data: bytes) -> None:
        found = json_requests.document(data)
        for reading in (
            lambda: json_requests.whole(found, "a", 0),
            lambda: json_requests.seconds(found, "wait_s", 0.0, 9.0),
            lambda: json_requests.text(found, "a", "", 9),
            lambda: json_requests.entries(found.get("a"), "a"),
            lambda: json_requests.numbers(found.get("deliveries"), "deliveries"),
        ):
            try:
                reading()
            except ValueError:
                continue

    attack(read, lambda rng: json_bytes(rng, documents), ValueError)


def test_the_harness_itself_finds_what_is_wrong() -> None:
    """A parser with a fault of the usual kind is caught, so the silence of the others means something."""

    def careless(data: bytes) -> None:
        json.loads(data)["vote"] + 1

    with pytest.raises(AssertionError, match="input"):
        attack(careless, lambda rng: json_bytes(rng, [{"vote": 1}]), ValueError)
