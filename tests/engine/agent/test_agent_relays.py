"""Relays through the real agent: started, found again, moved, died, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import urllib.request
from typing import Any

import psutil
import pytest
from agent_harness import Pod, launched, wait_until

from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.run_files import files


def relay_health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
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
        with urllib.request.urlopen(f"{made['url']}/healthz", timeout=60) as answer:
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
        socket.create_connection(("127.0.0.1", int(made["url"].rsplit(":", 1)[1])), timeout=60)


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
        for n in (1, 2):
            os.kill(console.ask(wire.RELAY, run="r", action="start", config=config)["pid"], signal.SIGKILL)
            console.until(lambda m, n=n: m["op"] == wire.LINES and len(console.records("events.jsonl")) == n)
        again = console.ask(wire.RELAY, run="r", action="start", config=config)
        assert again["url"] == made["url"]
        assert again["pid"] != made["pid"]
        assert relay_health(made["url"]) == before
        assert [e["event"] for e in console.records("events.jsonl")] == ["relay_restarted"] * 2
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
