"""The NATS link against a real nats-server with JetStream; skipped only where there is no such binary."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plane_kit import GROUP, Log, certificate, free_port, make_plane, run_parties

from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.links.nats_link import NatsLink

BINARY = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(BINARY is None, reason="no nats-server on this machine")
pytest.importorskip("nats")
ROOM = (2 << 30) + (512 << 20)  # for two streams


class Broker:
    """A nats-server that can be killed and started again on the same port and store."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.config = folder / "nats.conf"
        settings = {"listen": f"127.0.0.1:{self.port}", "authorization": {"token": "a-secret-token"}}
        jetstream = {"store_dir": str(folder / "store"), "max_file_store": ROOM}
        store = {"jetstream": jetstream, "ports_file_dir": str(folder)}
        self.config.write_text(json.dumps(settings | store))
        self.start()

    def start(self) -> None:
        assert BINARY is not None
        self.process = subprocess.Popen([BINARY, "-c", str(self.config)], stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if b"Server is ready" in line:
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    running = Broker(tmp_path)
    yield running
    running.kill()


def nats_links(folder: Path, broker: Broker) -> list[dict[str, Any]]:
    (folder / "token").write_text("a-secret-token")
    os.chmod(folder / "token", 0o600)
    url = f"nats://127.0.0.1:{broker.port}"
    return [{"kind": "nats", "nats_url": url, "token_file": str(folder / "token"), "group": GROUP}] * 3


def test_messages_larger_than_the_brokers_limit_arrive_once_and_in_order(tmp_path: Path, broker: Broker) -> None:
    links, logs = nats_links(tmp_path, broker), [Log() for _ in range(3)]
    large = os.urandom((2 << 20) + 5)

    def body(party: int) -> None:
        plane = make_plane(party, links[party], logs[party])
        others = [p for p in range(3) if p != party]
        for op in range(20):
            data = large if op == 10 else b"%d.%d" % (party, op)
            for p in others:
                plane.send(p, Tag(0, 0, op, 1), data)
            for p in others:
                assert plane.recv(p, Tag(0, 0, op, 1)) == (large if op == 10 else b"%d.%d" % (p, op))
        plane.close()

    run_parties(*(lambda p=p: body(p) for p in range(3)))
    assert not [e for log in logs for e in log.named("protocol_error")]


def test_a_broker_that_is_killed_and_comes_back_loses_nothing(tmp_path: Path, broker: Broker) -> None:
    links, logs = nats_links(tmp_path, broker), [Log(), Log()]
    halfway, back = threading.Event(), threading.Event()

    def sender() -> None:
        plane = make_plane(0, links[0], logs[0])
        for op in range(40):
            plane.send(1, Tag(0, 0, op, 1), b"%d" % op)
            plane.flush()
            if op == 20:
                assert plane.recv(1, Tag(0, 0, 0, 1)) == b"ten"
                halfway.set()
                assert back.wait(120)
        assert plane.recv(1, Tag(0, 0, 1, 1)) == b"all"
        plane.close()

    def reader() -> None:
        plane = make_plane(1, links[1], logs[1])
        for op in range(40):
            assert plane.recv(0, Tag(0, 0, op, 1)) == b"%d" % op
            if op == 10:
                plane.send(0, Tag(0, 0, 0, 1), b"ten")
        plane.send(0, Tag(0, 0, 1, 1), b"all")
        plane.close()

    def killer() -> None:
        assert halfway.wait(120)
        broker.kill()
        broker.start()
        back.set()

    run_parties(sender, reader, killer)
    assert logs[0].named("relay_down") or logs[1].named("relay_down")


def test_a_broker_that_stands_still_is_not_a_party_that_is_silent(tmp_path: Path, broker: Broker) -> None:
    """Its connections hold, and nothing comes through: each party took the other for lost, and the run ended."""
    links, logs = [{**link, "peer_timeout_s": 10.0} for link in nats_links(tmp_path, broker)], [Log(), Log()]
    met = threading.Barrier(3)

    def body(party: int) -> None:
        plane = make_plane(party, links[party], logs[party])
        for op in range(6):
            if op == 3:
                met.wait(120)
                met.wait(120)
            plane.send(1 - party, Tag(0, 0, op, 1), b"%d.%d" % (party, op))
            assert plane.recv(1 - party, Tag(0, 0, op, 1)) == b"%d.%d" % (1 - party, op)
        plane.close()

    def meanwhile() -> None:
        met.wait(120)
        broker.process.send_signal(signal.SIGSTOP)
        met.wait(120)
        end = time.monotonic() + 120
        while time.monotonic() < end and not all(log.named("relay_down") or log.named("peer_lost") for log in logs):
            logs[0].seen.wait(0.05)
        broker.process.send_signal(signal.SIGCONT)

    run_parties(lambda: body(0), lambda: body(1), meanwhile)
    for log in logs:
        assert [name for name, _ in log.events if name in ("relay_down", "relay_up")][-1] == "relay_up"


@pytest.mark.parametrize("loss", ["store", "password"])
def test_a_broker_that_lost_its_store_or_refuses_for_a_while_does_not_hold_up_the_parties_for_good(
    tmp_path: Path, broker: Broker, loss: str
) -> None:
    """Signs of life pass without a store: nobody was silent, nothing arrived, and nobody ever said so."""
    links, logs = nats_links(tmp_path, broker), [Log() for _ in range(3)]
    met = threading.Barrier(4)

    def body(party: int) -> None:
        plane = make_plane(party, links[party], logs[party])
        others = [p for p in range(3) if p != party]
        for op in range(12):
            if op == 6:
                met.wait(120)
                met.wait(120)
            for p in others:
                plane.send(p, Tag(0, 0, op, 1), b"%d.%d" % (party, op))
            for p in others:
                assert plane.recv(p, Tag(0, 0, op, 1)) == b"%d.%d" % (p, op)
        plane.close()

    def meanwhile() -> None:
        met.wait(120)
        broker.kill()
        if loss == "store":
            shutil.rmtree(tmp_path / "store")
        else:
            good = broker.config.read_text()
            broker.config.write_text(good.replace("a-secret-token", "another-token"))
            broker.start()
            while not all("Authorization" in str(log.named("relay_down")) for log in logs):
                logs[0].seen.wait(0.05)
            broker.kill()
            broker.config.write_text(good)
        broker.start()
        met.wait(120)

    run_parties(*(lambda p=p: body(p) for p in range(3)), meanwhile)
    for log in logs:
        told = [name for name, _ in log.events if name in ("relay_down", "relay_up")]
        assert told[-1] == "relay_up"
        reasons = [fields["why"] for fields in log.named("relay_down")]
        assert "disconnected" in reasons
        assert all(a != b for a, b in itertools.pairwise(reasons)), reasons  # several tries a second, one word each
        assert len(log.named("link_down")) <= 3
    if loss == "store":
        assert any("not found" in str(log.named("relay_down")) for log in logs)


def reader(broker: Broker, group: str, party: int) -> NatsLink:
    folder = broker.config.parent
    nats_links(folder, broker)
    url = f"nats://127.0.0.1:{broker.port}"
    return NatsLink(url=url, party=party, group=group, box=1, token_file=folder / "token")


def told(link: NatsLink, event: str = "") -> Notice:
    """What it says next of the broker, or next of this name."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        link.exchange(0.05, None)
        if found := [notice for notice in link.notices() if event in ("", notice.event)]:
            return found[0]
    raise AssertionError(f"no word of the broker ({event})")


def streams(broker: Broker, edit: dict[str, Any] | None = None) -> list[str]:
    """The names of what the broker keeps, after ``edit`` of the settings of each as its operator makes it."""

    async def look() -> list[str]:
        import nats

        client = await nats.connect(f"nats://127.0.0.1:{broker.port}", token="a-secret-token")
        found = [info.config for info in await client.jetstream().streams_info()]
        for config in found if edit else ():
            await client.jetstream().update_stream(replace(config, **(edit or {})))
        await client.close()
        return [str(config.name) for config in found]

    return asyncio.run(look())


def test_who_leaves_last_takes_the_stream_along_and_the_next_run_has_room(broker: Broker) -> None:
    """A stream's whole size is set aside while it is there: a broker refused every run after a few."""
    for run in range(3):
        links = [reader(broker, f"run-{run}", party) for party in range(3)]
        assert [told(link).event for link in links] == ["relay_up"] * 3
        for link in links:
            assert streams(broker) == [f"uvcc-run-{run}"]
            link.close()
    assert streams(broker) == []
    kept = [reader(broker, f"other-{n}", 0) for n in range(2)]
    assert [told(link).event for link in kept] == ["relay_up"] * 2
    late = reader(broker, "late", 0)
    why = told(late).fields["why"]
    assert "no room for the stream uvcc-late of 1024 MiB" in why
    assert "delete the streams of runs that were killed" in why
    kept[0].close()
    assert told(late, "relay_up")
    for link in (*kept, late):
        link.close()


def test_a_broker_that_is_slow_to_answer_is_not_told_of_as_gone(broker: Broker) -> None:
    broker.process.send_signal(signal.SIGSTOP)
    threading.Timer(2.5, broker.process.send_signal, [signal.SIGCONT]).start()  # nats-py's own patience is 2 s
    link = reader(broker, "run", 0)
    assert told(link).event == "relay_up"
    link.close()


def test_no_token_goes_to_a_broker_without_tls_where_tls_was_asked_for(broker: Broker) -> None:
    folder = broker.config.parent
    nats_links(folder, broker)
    for scheme, ca in (("tls", None), ("nats", certificate(folder))):
        url = f"{scheme}://127.0.0.1:{broker.port}"
        link = NatsLink(url=url, party=0, group="run", box=1, token_file=folder / "token", ca_file=ca)
        notice = told(link)
        assert notice.event == "relay_down"
        assert "it offers no TLS" in notice.fields["why"]
        link.close()
    broker.kill()
    settings = json.loads(broker.config.read_text())
    tls = {"cert_file": str(folder / "cert.pem"), "key_file": str(folder / "key.pem")}
    broker.config.write_text(json.dumps(settings | {"tls": tls}))
    broker.start()
    link = NatsLink(url=url, party=0, group="run", box=1, token_file=folder / "token", ca_file=folder / "cert.pem")
    assert told(link).event == "relay_up"
    link.close()


@pytest.mark.parametrize("fault", ["gone", "password"])
def test_a_party_that_was_never_let_in_can_give_up(broker: Broker, fault: str) -> None:
    """The client of the broker tries for ever, and whoever waited for its end with it."""
    if fault == "gone":
        broker.kill()
    else:
        other = broker.config.parent / "other"
        other.write_text("another-token")
    token = broker.config.parent / ("other" if fault == "password" else "token")
    nats_links(broker.config.parent, broker)
    link = NatsLink(url=f"nats://127.0.0.1:{broker.port}", party=0, group="run", box=1, token_file=token)
    assert told(link).event == "relay_down"
    ending = threading.Thread(target=link.close, daemon=True)
    ending.start()
    ending.join(120)
    assert not ending.is_alive()


def test_a_stream_whose_bound_its_operator_raised_is_taken_as_it_is(broker: Broker) -> None:
    """That is the cure which is told of a full one; whoever came back to it was refused for ever."""
    first = reader(broker, "run", 0)
    assert told(first).event == "relay_up"
    assert streams(broker, {"max_bytes": 2 << 30}) == ["uvcc-run"]
    second = reader(broker, "run", 1)
    assert told(second).event == "relay_up"
    for link in (first, second):
        link.close()
