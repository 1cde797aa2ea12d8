"""Signed records at the relay, and the worker's end of the halt path that goes over them."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.peer_protocol import relay_words
from uvcc_engine.contract.run_files import control
from uvcc_engine.contract.run_files.control import HaltRequest, read_halt, write_halt
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.relay.config import from_json
from uvcc_engine.relay.db import SqliteStore
from uvcc_engine.relay.relay_records import MAX_BODY, PER_WRITER, Records, RelayRecord
from uvcc_engine.relay.server import numbered, serving
from uvcc_engine.transcript.signed import boxes, orders
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.worker.relay_control import Orders

RUN = "r.full"
TOKEN = "token-of-party-0-0123456789"
HOLD, HALT, RELEASE = (HaltRequest(m, "n", RUN) for m in ("hold", "halt", "release"))


class Signer:
    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._raw = self._key.public_key().public_bytes_raw()
        self.line = sshsig.public_line(self._raw)

    def order(self, payload: bytes) -> str:
        return sshsig.sign(self._key, self._raw, orders.ORDER_NAMESPACE, payload)

    def beat(self, payload: bytes) -> str:
        return sshsig.sign(self._key, self._raw, orders.BEAT_NAMESPACE, payload)


def test_the_newest_of_a_name_counts_and_numbers_only_grow() -> None:
    now = [5.0]
    records = Records(lambda: now[0])
    first = records.put("g", 0, "beat/a", "1")
    now[0] = 4.0  # a clock that goes back, or a relay that was started again
    second = records.put("g", 0, "beat/a", "2")
    assert second > first
    assert [(r.writer, r.body) for r in records.since("g", -1)] == [(0, "2")]
    assert records.since("g", second) == records.since("h", -1) == records.since("g", -1, "order/") == []


async def test_numbers_grow_over_restarts_on_one_store_whatever_the_clock_says(tmp_path: Path) -> None:
    """A worker asks for what is newer than it knows: an order that got a lower number would never reach it."""
    newest, now = 0, [1_000_000.0]
    for back in (0.0, 600.0, -30.0, 86_400.0, 0.0):
        now[0] -= back
        store = SqliteStore(tmp_path / "relay.db")
        try:
            records = await numbered(store, lambda: now[0])
            for burst in range(3):  # longer than what is reserved at a time
                now[0] += burst * 9.0
                number = records.put("g", 0, "order/n", f"{back}")
                assert [r.body for r in records.since("g", newest)] == [f"{back}"]
                assert number > newest
                newest = number
        finally:
            store.close()


async def test_a_relay_that_is_killed_gives_out_no_number_twice(tmp_path: Path) -> None:
    """What is reserved is durable before the first number: the second relay has what lay on the disk at that moment."""
    store = SqliteStore(tmp_path / "relay.db")
    first = (await numbered(store, lambda: 5_000.0)).put("g", 0, "order/n", "1")
    later = tmp_path / "later"
    later.mkdir()
    for path in tmp_path.glob("relay.db*"):
        if path.is_file():
            shutil.copy(path, later)
    store.close()
    store = SqliteStore(later / "relay.db")
    assert (await numbered(store, lambda: 10.0)).put("g", 0, "order/n", "2") > first
    store.close()


def test_a_clock_that_runs_reserves_seldom() -> None:
    now, marks = [0.0], list[int]()
    records = Records(lambda: now[0], 0, marks.append)
    for _ in range(1000):  # a sign of life every tenth of a second, for 100 s
        now[0] += 0.1
        assert records.put("g", 0, "beat/a", "") <= marks[-1]
    assert len(marks) <= 25


def test_a_party_that_floods_pushes_out_only_its_own() -> None:
    records = Records(lambda: 1.0)
    records.put("g", 0, "order/n", "stop")
    for k in range(PER_WRITER + 10):
        records.put("g", 1, f"x{k}", "")
    found: list[RelayRecord] = []
    while page := records.since("g", found[-1].seq if found else -1):
        found += page
    kept = [(r.writer, r.name) for r in found]
    assert (0, "order/n") in kept
    assert sum(party == 1 for party, _ in kept) == PER_WRITER
    with pytest.raises(ValueError, match="at most"):
        records.put("g", 1, "big", "x" * (MAX_BODY + 1))


async def test_a_reader_waits_for_what_it_wants_and_no_longer_than_it_said() -> None:
    records = Records(lambda: 1.0)
    reading = asyncio.create_task(records.wait("g", -1, "order/", 60.0))
    await asyncio.sleep(0)
    records.put("g", 0, "beat/a", "not this")
    records.put("g", 0, "order/n", "this")
    assert [r.body for r in await reading] == ["this"]
    assert await records.wait("g", records.newest, "", 0.01) == []


def test_only_a_key_of_the_run_opens_what_was_sealed() -> None:
    operator, stranger = Signer(), Signer()
    body = orders.sealed({"mode": "halt"}, operator.order)
    assert orders.opened(body, orders.ORDER_NAMESPACE, [stranger.line, operator.line]) == {"mode": "halt"}
    assert orders.opened(body, orders.ORDER_NAMESPACE, [stranger.line]) is None
    assert orders.opened(body, orders.BEAT_NAMESPACE, [operator.line]) is None
    for bad in (
        "",
        "[]",
        "{}",
        '{"content":[],"signature":""}',
        body.replace("halt", "hold"),
        '{"content":{},"signature":3}',
    ):
        assert orders.opened(bad, orders.ORDER_NAMESPACE, [operator.line]) is None


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[str]:
    """A relay in a thread of this process; its URL."""
    data = {"db": "relay.db", "credentials": [{"party": 0, "group": "g", "token": TOKEN}]}
    up, url, ending = threading.Event(), [""], []

    async def serve() -> None:
        async with serving(from_json(data, tmp_path)) as running:
            url[0] = running.url
            ending.append((asyncio.get_running_loop(), running.stop))
            up.set()
            await running.finished()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(120)
    yield url[0]
    loop, stop = ending[0]
    loop.call_soon_threadsafe(stop)
    thread.join(120)


def _exchange(url: str, **asked: Any) -> dict[str, Any]:
    import httpx

    reply = httpx.post(f"{url}/records", json=asked, headers={"authorization": f"Bearer {TOKEN}"}, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_worker_obeys_a_signed_order_and_publishes_signed_evidence(relay: str, tmp_path: Path) -> None:
    operator, party, stranger = Signer(), Signer(), Signer()
    (tmp_path / "token").write_text(TOKEN)
    reader, seal = boxes.reader_of(Ed25519PrivateKey.generate()), "ab" * 32
    link = LinkSpec(relay_url=relay, token_file=str(tmp_path / "token"), halt_keys=[operator.line])
    link = replace(link, halt_readers=[boxes.public_of(reader)], halt_seal=seal)
    told: list[HaltRequest] = []
    obeyed = threading.Event()

    def tell(asked: HaltRequest) -> None:
        told.append(asked)
        obeyed.set()

    def order(signer: Signer, mode: str, nonce: str) -> None:
        content = {"type": "order", "run": RUN, "nonce": nonce, "mode": mode, "deadline_s": "0"}
        body = boxes.seal_with(orders.sealed(content, signer.order), bytes.fromhex(seal))
        _exchange(relay, put={"name": f"order/{nonce}", "body": body})

    order(operator, "halt", "of-an-earlier-attempt")
    beat = {"step": 7, "phase": "train", "halt_nonce": "n", "secret": "never published"}
    with Orders(link, RUN, "p0r0s0t0", tmp_path, sign=party.beat, last=lambda: beat, told=tell):
        said = _exchange(relay, after=-1, want="beat/", wait_s=100)["records"]
        order(stranger, "halt", "forged")
        order(operator, "hold", "n")
        assert obeyed.wait(120)
    assert [(a.mode, a.nonce) for a in told] == [("hold", "n")]
    found = read_halt(tmp_path, RUN)
    assert found is not None
    assert (found.mode, found.nonce) == (control.HOLD, "n")
    content = orders.opened(boxes.unseal(said[0]["body"], reader), orders.BEAT_NAMESPACE, [party.line])
    assert content is not None
    assert (content["coord"], content["step"], content["run"]) == ("p0r0s0t0", 7, RUN)
    assert "secret" not in json.dumps(content)


def test_a_halt_of_the_agent_is_never_weakened(tmp_path: Path) -> None:
    operator = Signer()
    write_halt(tmp_path, HALT)
    link = LinkSpec(relay_url="http://127.0.0.1:1", token_file="x", halt_keys=[operator.line])
    desk = Orders(link, RUN, "p0r0s0t0", tmp_path, sign=operator.beat, last=dict, told=lambda a: pytest.fail("obeyed"))
    desk.obey(orders.sealed({"run": RUN, "mode": "release", "nonce": "n"}, operator.order))
    assert read_halt(tmp_path, RUN) == HALT


def test_only_readers_open_a_seal_and_its_size_tells_nothing() -> None:
    readers = [boxes.reader_of(Ed25519PrivateKey.generate()) for _ in range(4)]
    keys = boxes.read_keys(boxes.public_of(r) for r in readers)
    for text in ("", "a", "step 7 loss 0.25 " * 100, "x" * 5000):
        body = boxes.seal_to(text, keys)
        assert [boxes.unseal(body, r) for r in readers] == [text] * 4
        assert boxes.unseal(body, boxes.reader_of(Ed25519PrivateKey.generate())) == ""
        assert len(body) == len(boxes.seal_to("y", keys)) < MAX_BODY
        assert boxes.seal_to(text, keys) != body
        order = boxes.seal_with(text[:900], bytes(32))
        assert boxes.unseal_with(order, bytes(32)) == text[:900]
        assert boxes.unseal_with(order, b"x" * 32) == ""
        assert len(order) == len(boxes.seal_with("hold", bytes(32)))
    for at in range(0, len(body), 97):
        altered = body[:at] + ("A" if body[at] != "A" else "B") + body[at + 1 :]
        assert boxes.unseal(altered, readers[0]) in ("", altered)
        assert boxes.unseal(body[:at], readers[0]) in ("", body[:at])
    assert boxes.unseal("not sealed", readers[0]) == boxes.unseal_with("not sealed", bytes(32)) == "not sealed"
    assert boxes.unseal("UVCS1." + "A" * 100_000, readers[0]) == ""


@pytest.mark.parametrize("bad", [["x"], [3], ["ab" * 31], ["00" * 32] * 17])
def test_a_reader_that_is_none_is_refused_at_the_start(bad: list[Any], tmp_path: Path) -> None:
    link = LinkSpec(relay_url="http://127.0.0.1:1", token_file="x", halt_keys=["k"])
    with pytest.raises(ConfigError):
        Orders(
            LinkSpec.from_json({**link.to_json(), "halt_readers": bad}),
            RUN,
            "p0r0s0t0",
            tmp_path,
            sign=str,
            last=dict,
            told=print,
        )
    with pytest.raises(ConfigError):
        Orders(replace(link, halt_seal=f"{bad[0]}0"), RUN, "p0r0s0t0", tmp_path, sign=str, last=dict, told=print)
    with pytest.raises(ConfigError, match="not usable"):
        boxes.seal_to("x", [bytes(32)])


def test_odd_orders_and_answers_end_nothing(tmp_path: Path) -> None:
    operator = Signer()
    link = LinkSpec(relay_url="http://127.0.0.1:1", token_file="x", halt_keys=[operator.line])
    desk = Orders(link, RUN, "p0r0s0t0", tmp_path, sign=operator.beat, last=dict, told=lambda a: pytest.fail("obeyed"))
    odd = [{"mode": ["hold"]}, {"mode": "hold", "nonce": 3}, {"mode": "hold", "deadline_s": "x"}]
    odd += [{"mode": "hold", "deadline_s": "inf"}, {"mode": "hold", "deadline_s": "nan"}, {"mode": None}]
    odd += [{"mode": "hold", "deadline_s": [1]}, {"mode": {}}, {"mode": "hold", "nonce": None}]
    for more in odd:
        desk.obey(orders.sealed({"run": RUN, "nonce": "n", **more}, operator.order))
    for text in (b"[" * 90_000, b"{}", b'{"seq": true, "records": []}', b'{"seq": 1, "records": {}}', b"3", b"\xff"):
        assert isinstance(relay_words.answer(text), Malformed)
    found = relay_words.answer(b'{"seq": 3, "records": [1, {"body": 2}, {"body": "x"}, {"name": "n", "body": "x"}]}')
    assert found == relay_words.RelayAnswer(seq=3, records=[relay_words.FetchedRecord(name="n", body="x")])
