"""What the relay sees of a whole run: names, sizes and times. Everything that it receives and stores is looked through.

Three real workers train over a relay of this process, a console reads their signs of life and halts them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from private_kit import Fleet, Zygote, until

from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.relay.app import RelayFront
from uvcc_engine.relay.config import from_json
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.relay_records import Records
from uvcc_engine.relay.server import serving
from uvcc_engine.transcript.signed import boxes, orders
from uvcc_engine.transcript.signing import sshsig

JOB = PrivateJob(steps=4000, batch=16, checkpoint_every=5, test_rows=20)
GROUP = "test.full"
TOKENS = [hashlib.sha256(b"token %d" % p).hexdigest() for p in range(3)]


class Seen:
    """Everything that reaches the relay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: list[tuple[float, int, str, str]] = []
        self.mail: list[bytes] = []
        self.requests: list[bytes] = []
        put, enqueue, exchange = Records.put, Hub.enqueue, RelayFront.exchange

        def putting(records: Records, group: str, party: int, name: str, body: str) -> int:
            self.records.append((time.monotonic(), party, name, body))
            return put(records, group, party, name, body)

        def enqueuing(hub: Hub, who: Any, box: int, items: Any, done: Any) -> None:
            self.mail.extend(bytes(i.payload) + i.msg_id for i in items)
            enqueue(hub, who, box, items, done)

        async def exchanging(front: RelayFront, who: Any, body: bytes) -> Any:
            self.requests.append(bytes(body))
            return await exchange(front, who, body)

        monkeypatch.setattr(Records, "put", putting)
        monkeypatch.setattr(Hub, "enqueue", enqueuing)
        monkeypatch.setattr(RelayFront, "exchange", exchanging)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    credentials = [{"party": p, "group": GROUP, "token": t} for p, t in enumerate(TOKENS)]
    (tmp_path / "relay").mkdir()
    config = from_json({"db": "relay.db", "credentials": credentials}, tmp_path / "relay")
    up, found = threading.Event(), dict[str, Any]()

    async def serve() -> None:
        async with serving(config) as running:
            found["url"], found["stop"], found["loop"] = running.url, running.stop, asyncio.get_running_loop()
            up.set()
            await running.finished()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert up.wait(120)
    yield found["url"]
    found["loop"].call_soon_threadsafe(found["stop"])
    thread.join(120)


def post(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    connection.request("POST", "/records", json.dumps(asked), {"authorization": f"Bearer {TOKENS[0]}"})
    reply = connection.getresponse()
    found = json.loads(reply.read())
    connection.close()
    assert reply.status == 200, found
    return dict(found)


@pytest.mark.ci(__file__)
def test_the_relay_sees_names_sizes_and_times_only(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    key = Ed25519PrivateKey.generate()
    raw = key.public_key().public_bytes_raw()
    readers = [boxes.reader_of(key), *(boxes.reader_of(Ed25519PrivateKey.generate()) for _ in range(3))]
    seal = hashlib.sha256(b"of this run").digest()
    links = []
    for p, token in enumerate(TOKENS):
        (tmp_path / f"token{p}").write_text(token)
        link = {"kind": "relay", "relay_url": url, "token_file": str(tmp_path / f"token{p}"), "group": GROUP}
        link |= {"halt_keys": [sshsig.public_line(raw)], "halt_readers": [boxes.public_of(r) for r in readers]}
        links.append(link | {"halt_seal": seal.hex()})
    zygote = Zygote()
    try:
        fleet = Fleet(tmp_path / "fleet", zygote, JOB, links)
        fleet.launch()

        def beats() -> list[dict[str, Any]]:
            """What the signs of life say to whoever may read them."""
            bodies = [boxes.unseal(b, readers[0]) for _, _, name, b in seen.records if name.startswith(orders.BEAT)]
            return [json.loads(b)["content"] for b in bodies]

        until(lambda: any(len(json.loads(b.get("roots", "[]"))) > 3 for b in beats()), 500, "a sign of life with roots")
        order = {"type": "order", "run": fleet.run, "nonce": "5eed", "mode": "halt", "deadline_s": "0"}
        text = orders.sealed(order, lambda payload: sshsig.sign(key, raw, orders.ORDER_NAMESPACE, payload))
        post(url, {"put": {"name": "order/5eed", "body": boxes.seal_with(text, seal)}})
        assert fleet.wait() == [0, 0, 0]
    finally:
        zygote.close()

    said = beats()
    assert {b["coord"] for b in said} == {f"p{p}r0s0t0" for p in range(3)}
    losses = {b["loss"] for b in said if "loss" in b}
    roots = {r["root"] for b in said for r in json.loads(b.get("roots", "[]"))}
    assert len(losses) > 1
    assert len(roots) > 3
    assert max(b["step"] for b in said) > 0
    assert any(b.get("halt_nonce") == "5eed" for b in said)  # the order was obeyed, and that was read

    stored = [p.read_bytes() for p in (tmp_path / "relay").rglob("*") if p.is_file()]
    bodies = [body.encode() for *_, body in seen.records]
    decoded = [base64.b64decode(body.partition(b".")[2]) for body in bodies]
    everything = b"\n".join([*bodies, *decoded, *seen.mail, *seen.requests, *stored])
    assert len(everything) > 100_000
    assert seen.mail[0][:20] in everything
    telling = [repr(loss) for loss in losses] + [*roots, *(bytes.fromhex(r) for r in roots)]
    telling += [f"p{p}r0s0t0" for p in range(3)] + ["halt_nonce", "deadline", "SSH SIGNATURE", fleet.run + '"']
    for secret in telling:
        assert (secret if isinstance(secret, bytes) else secret.encode()) not in everything, secret
    assert not re.search(
        rb'"(loss|step|phase|roots?|mode|coord|run|type)"', everything
    )  # too short to go without quotes

    named = {name for _, _, name, _ in seen.records}
    assert named == {f"beat/p{p}r0s0t0" for p in range(3)} | {"order/5eed"}  # labels: who, not what
    assert len({len(body) for _, _, name, body in seen.records if name.startswith(orders.BEAT)}) == 1


def test_without_a_reader_nothing_of_a_sign_of_life_leaves_the_worker(tmp_path: Path) -> None:
    from uvcc_engine.worker.relay_control import Orders

    asked: list[dict[str, Any]] = []

    class Connection:
        def request(self, method: str, path: str, body: str, headers: Any) -> None:
            asked.append(json.loads(body))

        def getresponse(self) -> Any:
            raise OSError("far enough")

    (tmp_path / "token").write_text("t")
    link = LinkSpec(relay_url="http://127.0.0.1:1", token_file=str(tmp_path / "token"), halt_keys=["k"])
    last = {"step": 3, "loss": 0.5}
    desk = Orders(link, "r", "p0r0s0t0", tmp_path, sign=lambda payload: "s", last=lambda: last, told=lambda a: None)
    with pytest.raises(OSError, match="far enough"):
        desk.ask(Connection(), 0.0)  # type: ignore[arg-type]
    assert [set(a) for a in asked] == [{"after", "wait_s", "want"}]
