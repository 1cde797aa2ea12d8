"""The relay as a process: HTTP API, authorization, TLS, SIGTERM, kill -9."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from uvcc_engine.relay import binary, stream

LOOK_S = 0.02  # between two looks at what the relay counts
TOKENS = {(p, g): f"token-{p}-{g}-0123456789" for p in range(3) for g in ("g", "h")}


def settings(**more: Any) -> dict[str, Any]:
    credentials = [{"party": p, "group": g, "token": t} for (p, g), t in TOKENS.items()]
    base = {"db": "relay.db", "ready_file": "ready.json", "stream_listen": "127.0.0.1:0", "credentials": credentials}
    return base | more


class Process:
    """A relay process; ``ready`` is its ready file."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        path = folder / "relay.json"
        path.write_text(json.dumps(settings(**more)))
        os.chmod(path, 0o600)
        (folder / "ready.json").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "uvcc_engine.relay", "--config", str(path)], stderr=subprocess.PIPE
        )
        while not (folder / "ready.json").exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            threading.Event().wait(0.02)
        self.ready = json.loads((folder / "ready.json").read_text())

    def end(self, number: int) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(120)
        self.process.communicate()
        return code


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.end(signal.SIGKILL)


def client(url: str, party: int, group: str = "g", **more: Any) -> httpx.Client:
    headers = {"authorization": f"Bearer {TOKENS[party, group]}"}
    # over plain HTTP there is nothing to verify, and a store of certificates takes long to load
    return httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False, **{"verify": False} | more)


def message(receiver: int, msg_id: str, payload: bytes, **more: Any) -> dict[str, Any]:
    return {"receiver": receiver, "msg_id": msg_id, "payload_b64": base64.b64encode(payload).decode()} | more


def test_enqueue_poll_ack_over_json(relay: Process) -> None:
    url = relay.ready["url"]
    health = httpx.get(f"{url}/healthz", trust_env=False).json()
    assert health == {"ok": True, "version": 1, "stream": relay.ready["stream"]}
    with client(url, 0) as zero, client(url, 1) as one:
        assert zero.post("/enqueue", json=message(1, "m1", b"hello")).json() == {"ok": True, "status": "enqueued"}
        again = {"messages": [message(1, "m1", b"hello"), message(1, "m2", b"world")]}
        assert zero.post("/enqueue", json=again).json()["statuses"] == ["dedup", "enqueued"]
        collision = zero.post("/enqueue", json=message(1, "m1", b"other"))
        assert (collision.status_code, collision.json()["error"]) == (409, "collision")
        got = one.post("/poll", json={"wait_s": 0}).json()["messages"]
        assert [(m["sender"], base64.b64decode(m["payload_b64"])) for m in got] == [(0, b"hello"), (0, b"world")]
        ids = {"deliveries": [m["delivery"] for m in got]}
        assert one.post("/ack", json=ids).json() == {"ok": True, "acked": [True, True]}
        assert one.post("/ack", json=ids).status_code == 409
        text = one.get("/metrics").text
        assert "uvcc_relay_enqueued_total 2" in text
        assert 'uvcc_relay_queued_messages{group="g",party="0"} 0' in text


def test_a_long_poll_is_answered_by_the_message(relay: Process) -> None:
    url = relay.ready["url"]
    with client(url, 0) as zero, client(url, 1) as one, ThreadPoolExecutor(1) as pool:
        polling = pool.submit(one.post, "/poll", json={"wait_s": 100})
        while "uvcc_relay_waiting 1" not in zero.get("/metrics").text:
            time.sleep(LOOK_S)
        zero.post("/enqueue", json=message(1, "m", b"x"))
        assert len(polling.result(120).json()["messages"]) == 1


def test_a_credential_is_all_that_says_who_one_is(relay: Process) -> None:
    url = relay.ready["url"]
    good = message(1, "m", b"x")
    assert httpx.post(f"{url}/enqueue", json=good, trust_env=False).status_code == 401
    wrong = httpx.post(f"{url}/exchange", headers={"authorization": "Bearer nonsense"}, trust_env=False)
    assert wrong.status_code == 401
    assert httpx.get(f"{url}/metrics", trust_env=False).status_code == 401
    with client(url, 0) as zero, client(url, 1, "h") as stranger, client(url, 1) as one:
        assert zero.post("/enqueue", json=good | {"sender": 2}).status_code == 403
        assert zero.post("/enqueue", json=good | {"group_id": "h"}).status_code == 403
        assert zero.post("/enqueue", json=good | {"receiver": 0}).status_code == 403
        assert zero.post("/poll", json={"receiver": 1, "wait_s": 0}).status_code == 403
        assert zero.post("/enqueue", json=good).status_code == 200
        assert stranger.post("/poll", json={"wait_s": 0}).json()["messages"] == []
        got = one.post("/poll", json={"wait_s": 0}).json()["messages"]
        assert stranger.post("/ack", json={"deliveries": [got[0]["delivery"]]}).status_code == 409
        for bad in ({}, {"receiver": 1}, good | {"payload_b64": "?"}, good | {"msg_id": ""}, [1]):
            assert zero.post("/enqueue", json=bad).status_code == 400
        assert zero.post("/exchange", content=b"junk").status_code == 400


def test_a_full_queue_is_429_and_a_large_body_413(tmp_path: Path) -> None:
    relay = Process(tmp_path, quota_messages=1, max_body=200_000)
    with client(relay.ready["url"], 0) as zero:
        assert zero.post("/enqueue", json=message(1, "a", b"x")).status_code == 200
        refused = zero.post("/enqueue", json=message(1, "b", b"x"))
        assert (refused.status_code, refused.json()["error"]) == (429, "quota")
        assert zero.post("/exchange", content=bytes(300_000)).status_code == 413
    assert relay.end(signal.SIGTERM) == 0


def test_sigterm_answers_long_polls_and_keeps_what_it_took(tmp_path: Path) -> None:
    relay = Process(tmp_path)
    with client(relay.ready["url"], 0) as zero, client(relay.ready["url"], 1) as one, ThreadPoolExecutor(1) as pool:
        zero.post("/enqueue", json=message(2, "kept", b"kept"))
        polling = pool.submit(one.post, "/poll", json={"wait_s": 100})
        while "uvcc_relay_waiting 1" not in zero.get("/metrics").text:
            time.sleep(LOOK_S)
        assert relay.end(signal.SIGTERM) == 0
        assert polling.result(120).json()["messages"] == []
    relay = Process(tmp_path)
    with client(relay.ready["url"], 2) as two:
        got = two.post("/poll", json={"wait_s": 0}).json()["messages"]
        assert [base64.b64decode(m["payload_b64"]) for m in got] == [b"kept"]
    assert relay.end(signal.SIGTERM) == 0


def test_kill_9_loses_nothing_that_was_confirmed(tmp_path: Path) -> None:
    confirmed: list[str] = []
    for start in range(3):
        relay = Process(tmp_path)
        enough = threading.Event()

        def load(start: int = start, url: str = relay.ready["url"], enough: threading.Event = enough) -> None:
            with client(url, 0) as zero, contextlib.suppress(httpx.HTTPError):
                for n in range(100_000):
                    batch = [f"{start}.{n}.{k}" for k in range(10)]
                    body = {"messages": [message(1, m, m.encode()) for m in batch]}
                    assert zero.post("/enqueue", json=body).status_code == 200
                    confirmed.extend(batch)
                    if n == 20:
                        enough.set()

        thread = threading.Thread(target=load)
        thread.start()
        assert enough.wait(120)
        relay.end(signal.SIGKILL)  # in the middle of a request
        thread.join(120)
    relay = Process(tmp_path)
    found: list[str] = []
    with client(relay.ready["url"], 1) as one:
        while got := one.post("/poll", json={"wait_s": 0}).json()["messages"]:
            found += [base64.b64decode(m["payload_b64"]).decode() for m in got]
            one.post("/ack", json={"deliveries": [m["delivery"] for m in got]})
    relay.end(signal.SIGTERM)
    assert len(found) == len(set(found))
    assert set(confirmed) <= set(found)
    assert [f for f in found if f in set(confirmed)] == confirmed  # in order


def certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    return folder / "cert.pem"


def test_tls_on_both_fronts(tmp_path: Path) -> None:
    cert = certificate(tmp_path)
    relay = Process(tmp_path, tls_cert="cert.pem", tls_key="key.pem")
    context = ssl.create_default_context(cafile=cert)
    assert relay.ready["url"].startswith("https://")
    with client(relay.ready["url"], 0, verify=context) as zero:
        assert zero.post("/enqueue", json=message(1, "m", b"sealed")).status_code == 200
    host, port = relay.ready["stream"].split(":")
    with socket.create_connection((host, int(port)), 120) as raw, context.wrap_socket(raw, server_hostname=host) as s:
        reply = Stream(s, TOKENS[1, "g"]).ask(b"", 0)
        assert [bytes(m.payload) for m in reply.messages] == [b"sealed"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(relay.ready["url"], trust_env=False)
    relay.end(signal.SIGTERM)


class Stream:
    """A minimal client of the stream front."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.file = sock.makefile("rwb")
        self.file.write(stream.hello(token))
        self.file.flush()
        assert self.file.read(4) == stream.MAGIC

    def write(self, items: list[binary.Item], acks: list[int], window: int = 1 << 20) -> None:
        body = b"".join(binary.request_pieces(0, 1, 0, window, acks, items))
        self.file.write(struct.pack("<I", len(body)) + body)
        self.file.flush()

    def read(self) -> binary.Reply:
        (length,) = struct.unpack("<I", self.file.read(4))
        return binary.read_reply(self.file.read(length))

    def ask(self, payload: bytes, receiver: int) -> binary.Reply:
        self.write([binary.Item(receiver, 0, 0, b"id" + payload, payload)] if payload else [], [])
        return self.read()


def connect_stream(relay: Process, party: int) -> Stream:
    host, port = relay.ready["stream"].split(":")
    return Stream(socket.create_connection((host, int(port)), 120), TOKENS[party, "g"])


def test_the_stream_front_confirms_in_order_and_pushes(relay: Process) -> None:
    zero, one = connect_stream(relay, 0), connect_stream(relay, 1)
    one.write([], [], window=2500)
    for n in range(5):
        zero.write([binary.Item(1, 0, 0, b"%d" % n, bytes([n]) * 1000)], [])
    assert [zero.read().fates for _ in range(5)] == [b"\0"] * 5
    got: list[binary.Message] = []
    while len(got) < 3:
        got += one.read().messages
    assert [m.payload[0] for m in got] == [0, 1, 2]  # the window is full: no more without acknowledgement
    one.write([], [m.delivery for m in got])
    while len(got) < 5:
        got += one.read().messages
    assert [m.payload[0] for m in got] == [0, 1, 2, 3, 4]
    another = connect_stream(relay, 1)
    another.write([], [])
    assert [m.payload[0] for m in another.read().messages] == [3, 4]  # unacknowledged: the newer consumer gets it
    assert one.file.read(1) == b""  # and the older connection ends


def test_a_request_may_arrive_byte_by_byte(relay: Process) -> None:
    zero = connect_stream(relay, 0)
    body = b"".join(binary.request_pieces(0, 1, 0, 1 << 20, [], [binary.Item(1, 0, 0, b"id", b"slowly")]))
    for byte in struct.pack("<I", len(body)) + body:
        zero.file.write(bytes([byte]))
        zero.file.flush()
    assert zero.read().fates == b"\0"


def test_the_stream_front_refuses_strangers_and_nonsense(relay: Process) -> None:
    host, port = relay.ready["stream"].split(":")
    for first, answer in ((stream.hello("not a token"), stream.REFUSED), (b"GET / HTTP/1.1\r\n\r\n", b"")):
        with socket.create_connection((host, int(port)), 120) as s:
            s.sendall(first)
            with contextlib.suppress(ConnectionResetError):
                assert s.makefile("rb").read() == answer
    broken = connect_stream(relay, 0)
    broken.file.write(struct.pack("<I", 12) + b"not a request"[:12])
    broken.file.flush()
    assert broken.file.read(1) == b""


def test_a_damaged_configuration_is_an_exit_code_and_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "relay.json"
    path.write_text(json.dumps({"db": "x"}))
    os.chmod(path, 0o600)
    found = subprocess.run(
        [sys.executable, "-m", "uvcc_engine.relay", "--config", str(path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "credentials" in found.stderr
