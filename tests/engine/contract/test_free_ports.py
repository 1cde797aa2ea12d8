"""Ports for processes that are about to meet: nobody gets one that somebody else was just given."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from uvcc_engine.contract.machine import free_ports
from uvcc_engine.contract.machine.free_ports import ports

MANY = 1500
ASK = f"import json; from uvcc_engine.contract.machine.free_ports import ports; print(json.dumps(ports({MANY})))"


def test_who_asks_after_another_gets_other_ports_though_none_is_bound_yet() -> None:
    """Two of so many at random would have dozens in common, and each of them ended a run of one of the two."""
    mine = ports(MANY)
    theirs = json.loads(subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=True).stdout)
    assert (len(set(mine)), len(set(theirs))) == (MANY, MANY)
    assert not set(mine) & set(theirs)


def test_a_server_takes_its_port_and_nobody_answers_there_before() -> None:
    (port,) = ports(1)
    with socket.socket() as early:
        assert early.connect_ex(("127.0.0.1", port)) != 0
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((host, port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_port_that_somebody_listens_on_is_no_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = ports(1)[0], ports(1)[0]
    monkeypatch.setattr(free_ports, "RANGE", (taken, free))
    with socket.create_server(("127.0.0.1", taken)):
        assert ports(1) == []  # the other one was given a moment ago
