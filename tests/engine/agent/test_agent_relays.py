"""Relays through the real agent: started, found again, moved, died, stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_harness import Pod, launched, wait_until

from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.agent.processes.relays import Relay, RelayTable
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.run_files import files


def relay_health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/healthz", timeout=120) as answer:
        return dict(json.loads(answer.read()))


def test_relay_is_started_found_again_and_stopped(pod: Pod) -> None:
    pod.start()
    config = {
        "db": "relay.sqlite",
        "credentials": [{"party": p, "group": "r", "token": f"secret-of-party-{p}-aaaaaaaa"} for p in range(3)],
    }
    with pod.console() as console:
        made = console.ask(wire.RELAY, run="r", action="start", config=config)
        assert made["ok"], made
        with urllib.request.urlopen(f"{made['url']}/healthz", timeout=120) as answer:
            assert answer.status == 200
        assert console.ask(wire.RELAY, run="r", action="start", config=config)["pid"] == made["pid"]
        stored = pod.root / "relay" / "r" / "config.json"
        assert stat.S_IMODE(stored.stat().st_mode) == 0o600
        assert "secret" not in " ".join(psutil.Process(made["pid"]).cmdline())
        who = ProcessId.of(made["pid"])
        assert who is not None
        pod.kill_agent()
        assert who.alive()
    pod.start()
    with pod.console() as console:
        assert console.hello["relays"] == {"r": made["url"]}
        assert console.ask(wire.RELAY, run="r", action="stop")["stopped"] == 1
        wait_until(lambda: not who.alive(), "the relay ends")
        failed = console.ask(wire.RELAY, run="r2", action="start", config={"db": "x", "credentals": []})
        assert "relay: unknown key" in failed["error"]


def test_a_relay_asked_for_while_it_ends_is_a_new_one(pod: Pod) -> None:
    pod.start()
    config = {"db": "relay.sqlite", "credentials": [{"party": 0, "group": "r", "token": "t" * 32}]}
    with pod.console() as console:
        pids = set()
        for _ in range(3):
            made = console.ask(wire.RELAY, run="r", action="start", config=config)
            assert relay_health(made["url"])["ok"]
            pids.add(made["pid"])
            console.ask(wire.RELAY, run="r", action="stop")
        assert len(pids) == 3
        assert console.ask(wire.STOP)["ok"]


def test_stop_takes_the_relay_along(pod: Pod) -> None:
    pod.start()
    config = {"db": "relay.sqlite", "credentials": [{"party": 0, "group": "r", "token": "t" * 32}]}
    with pod.console() as console:
        made = console.ask(wire.RELAY, run="r", action="start", config=config)
        who = ProcessId.of(made["pid"])
        assert who is not None
        assert console.ask(wire.STOP)["ok"]
    assert not who.alive()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(made["url"].rsplit(":", 1)[1])), timeout=120)


def test_a_relay_that_dies_is_started_again_at_its_addresses(pod: Pod) -> None:
    pod.start()
    credentials = [{"party": 0, "group": "r", "token": "t" * 32}]
    config = {"db": "relay.sqlite", "stream_listen": "127.0.0.1:0", "credentials": credentials}
    pod.run_dir().mkdir(parents=True)
    with pod.console() as console:
        made = console.ask(wire.RELAY, run="r", action="start", config=config)
        before = relay_health(made["url"])
        assert before["stream"]
        console.ask(wire.WATCH, run="r")
        os.kill(made["pid"], signal.SIGKILL)
        console.until(lambda m: m["op"] == wire.LINES and len(console.records("events.jsonl")) == 1)
        again = console.ask(wire.RELAY, run="r", action="start", config=config)
        assert again["url"] == made["url"]
        assert again["pid"] != made["pid"]
        assert relay_health(made["url"]) == before
        assert [e["event"] for e in console.records("events.jsonl")] == ["relay_restarted"]
        assert console.ask(wire.STOP)["ok"]


def test_the_workers_of_a_run_are_told_where_their_relay_is_now(pod: Pod) -> None:
    pod.start()
    place = pod.run_dir() / files.LINK
    with pod.console() as console:
        refused = console.ask(wire.RELINK, run="r", link={"relay_url": "http://127.0.0.1:1"})
        assert "no worker of run r" in refused["error"]
        launched(pod, console)
        assert console.ask(wire.RELINK, run="r", link={"relay_url": "http://127.0.0.1:1"})["told"] == 1
        assert files.read_json(place) == {"relay_url": "http://127.0.0.1:1"}
        for link in ({"relay_url": "127.0.0.1:1"}, {"relay_url": "http://h", "group": "g"}, {"stream": "h:1"}):
            assert not console.ask(wire.RELINK, run="r", link=link)["ok"]
        console.ask(wire.SIGNAL, run="r", signal="KILL", coord=None)
        console.proc("p0r0s0t0", "exited")
        launched(pod, console)
        assert not place.exists()  # the launch says where the relay is


def test_a_relay_whose_port_is_taken_for_a_while_is_started_again_when_it_is_free(pod: Pod) -> None:
    """A client's own port may be the relay's when it ends; that was the end of the run's relay once."""
    pod.start()
    credentials = [{"party": 0, "group": "r", "token": "t" * 32}]
    pod.run_dir().mkdir(parents=True)
    with pod.console() as console:
        made = console.ask(wire.RELAY, run="r", action="start", config={"db": "x.sqlite", "credentials": credentials})
        relay_health(made["url"])
        console.ask(wire.WATCH, run="r")
        agent = psutil.Process(console.hello["pid"])
        agent.suspend()
        os.kill(made["pid"], signal.SIGKILL)
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        at = ("127.0.0.1", int(made["url"].rsplit(":", 1)[1]))
        wait_until(lambda: _bound(taken, at), "the relay is dead, and its port is somebody else's")
        taken.listen()
        agent.resume()
        log = pod.root / "relay" / "r" / "relay.log"
        wait_until(lambda: "cannot listen" in log.read_text(), "the relay finds its port taken")
        taken.close()
        console.until(lambda m: m["op"] == wire.LINES and len(console.records("events.jsonl")) >= 2)
        wait_until(lambda: console.ask(wire.HELLO, version=wire.VERSION)["relays"] == {"r": made["url"]}, "it is back")
        assert relay_health(made["url"])["ok"]
        events = console.records("events.jsonl")
        assert {e["event"] for e in events} == {"relay_restarted"}
        assert events[0]["fields"]["why"] == "killed by signal 9"
        assert "cannot listen" in events[1]["fields"]["why"]
        assert console.ask(wire.STOP)["ok"]


def _bound(sock: socket.socket, at: tuple[str, int]) -> bool:
    try:
        sock.bind(at)
    except OSError:
        return False
    return True


def test_a_relay_has_ended_only_once_it_can_be_told_how(tmp_path: Path) -> None:
    """A process that was killed shows as ended a moment before its end can be collected."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        shown_as_ended = ProcessId(child.pid, -2, "")
        relay = Relay("r", tmp_path, shown_as_ended, 0.0, child)
        assert not shown_as_ended.alive()
        assert relay.alive()
        child.kill()
        while relay.alive():
            pass
        relay.end(1.0)
        assert relay.why == "killed by signal 9"


class NeverServing(RelayTable):
    """Whatever it starts has ended at once; ``serves``: it had served until then."""

    def __init__(self, root: Path) -> None:
        self.now, self.serves, self.starts = 1000.0, False, []
        super().__init__(root, lambda: self.now)

    def _spawn(self, run: str, folder: Path) -> Relay:
        self.starts.append(self.now)
        relay = self.known[run] = Relay(run, folder, ProcessId(2**22, 0.0, "none"), self.now)
        relay.url = "http://127.0.0.1:9" if self.serves else ""
        return relay

    def live(self, seconds: float, life: float = 0.0) -> list[Relay]:
        """Look twice a second for so long; each relay lives for ``life``. Returns who is given up."""
        given_up: list[Relay] = []
        end = self.now + seconds
        while self.now < end:
            over = all(self.now - r.since >= life for r in self.known.values())
            given_up += self.revive(self.reap() if over else ())[1]
            self.now += 0.5
        return given_up


@pytest.fixture
def never(tmp_path: Path) -> NeverServing:
    table = NeverServing(tmp_path)
    folder = tmp_path / "relay" / "r"
    folder.mkdir(parents=True)
    files.write_json(folder / "config.json", {"db": "x"})
    table.serves = True
    table._spawn("r", folder)
    return table


def test_a_relay_that_cannot_serve_is_tried_for_as_long_as_its_workers_wait(never: NeverServing) -> None:
    never.serves = False
    assert not never.live(895.0)
    gaps = [b - a for a, b in itertools.pairwise(never.starts[1:])]
    assert gaps[:6] == [1.5, 2.5, 4.5, 8.5, 16.5, 32.5]
    assert set(gaps[6:]) == {60.5}
    [given_up] = never.live(120.0)
    assert given_up.told() == {"url": "http://127.0.0.1:9", "restarts": len(never.starts) - 1, "why": "no log"}
    assert not never.known


def test_a_relay_that_serves_between_its_ends_is_never_given_up(never: NeverServing) -> None:
    """Five ends in all were once enough, however far apart."""
    assert not never.live(6 * 3600.0, life=700.0)
    gaps = [b - a for a, b in itertools.pairwise(never.starts)]
    assert len(gaps) > 25
    assert set(gaps[1:]) == {700.0}
    never.starts.clear()
    assert not never.live(7200.0, life=5.0)
    assert max(b - a for a, b in itertools.pairwise(never.starts)) == 65.0


def test_a_relay_that_is_stopped_is_not_started_when_its_time_comes(never: NeverServing) -> None:
    never.serves = False
    never.live(20.0)
    never.stop("r")
    before = len(never.starts)
    assert not never.live(2000.0)
    assert len(never.starts) == before


def test_a_relay_that_died_with_its_agent_is_started_by_the_next_one(pod: Pod) -> None:
    pod.start()
    credentials = [{"party": 0, "group": "r", "token": "t" * 32}]
    with pod.console() as console:
        made = console.ask(wire.RELAY, run="r", action="start", config={"db": "x.sqlite", "credentials": credentials})
        over = console.ask(wire.RELAY, run="over", action="start", config={"db": "x", "credentials": credentials})
        launched(pod, console)
        pod.kill_agent()
        for relay in (made, over):
            os.kill(relay["pid"], signal.SIGKILL)
    pod.start()
    with pod.console() as console:
        wait_until(lambda: console.ask(wire.HELLO, version=wire.VERSION)["relays"] == {"r": made["url"]}, "it is back")
        assert relay_health(made["url"])["ok"]
        assert console.ask(wire.STOP)["ok"]
