"""The automatic link: direct where it works, the relay where it does not, and over from one to the other in a run."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plane_kit import Log, direct_links, free_port, make_plane, relay_links, relay_thread, run_parties

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.connect import FAULTS_VARIABLE
from uvcc_engine.plane.links.auto import AutoLink
from uvcc_engine.plane.links.connection import Connection
from uvcc_engine.plane.links.direct import DirectLink
from uvcc_engine.plane.links.faults import FaultyLink
from uvcc_engine.plane.live import LivePlane


def auto_links(folder: Path, url: str) -> list[dict[str, Any]]:
    pairs = zip(relay_links(folder, url, "auto"), direct_links(), strict=True)
    return [relay | {"listen": direct["listen"], "peers": direct["peers"]} for relay, direct in pairs]


def paths(plane: LivePlane) -> dict[int, str]:
    link = plane._link
    assert isinstance(link, AutoLink)
    return {p: link.path_to(p) for p in range(3) if p != plane.party}


def ping_until(plane: LivePlane, op: int, due: dict[int, str]) -> int:
    """Rounds with both peers until this party's paths are ``due``; all parties stop at the same round."""
    others = [p for p in range(3) if p != plane.party]
    while True:
        done = b"y" if paths(plane) == due else b"n"
        for p in others:
            plane.send(p, Tag(0, 0, op, 1), done)
        said = [bytes(plane.recv(p, Tag(0, 0, op, 1))) for p in others]
        op += 1
        if done == b"y" and said == [b"y", b"y"]:
            return op


@pytest.mark.parametrize("front", ["stream", "relay"])
def test_direct_is_found_lost_and_replaced(tmp_path: Path, front: str) -> None:
    more = {"stream_listen": "127.0.0.1:0"} if front == "stream" else {}
    logs = [Log() for _ in range(3)]
    cut = threading.Barrier(3)
    with relay_thread(tmp_path, **more) as url:
        links = auto_links(tmp_path, url)

        def body(party: int) -> None:
            plane = make_plane(party, links[party], logs[party])
            others = [p for p in range(3) if p != party]
            op = ping_until(plane, 0, dict.fromkeys(others, "direct"))
            cut.wait(120)
            with plane._lock:
                link = plane._link
                assert isinstance(link, AutoLink)
                link._direct.sever()
            cut.wait(120)
            op = ping_until(plane, op, dict.fromkeys(others, front))
            plane.close()

        run_parties(*(lambda p=p: body(p) for p in range(3)))
    for party, log in enumerate(logs):
        for peer in {0, 1, 2} - {party}:
            told = [(e["kind"], e["why"]) for e in log.named("link_choice") if e["peer"] == peer]
            assert told[0][0] == front
            assert ("direct", "sealed frames passed both ways") in told
            assert told[-1] == (front, "the direct connection broke")


def test_a_path_that_breaks_at_once_has_been_told() -> None:
    """Nobody needs to ask the link for frames between the proof of a connection and its end."""
    relay = Mock(kind="relay", **{"exchange.return_value": [], "notices.return_value": [], "down_s.return_value": 0.0})
    direct = DirectLink(0, "", {})
    link = AutoLink(direct, [relay], [1])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        link.exchange(0.0, None)
        connection = Connection(here, 0.0, 1, "127.0.0.1")
        direct._adopt(connection)
        link.proven(1, connection)
        direct.sever()
        link.exchange(0.0, None)
        told = [(n.fields["kind"], n.fields["why"]) for n in link.notices() if n.event == "link_choice"]
        link.close()
    assert told == [
        ("relay", "not reachable directly (yet)"),
        ("direct", "sealed frames passed both ways"),
        ("relay", "the direct connection broke"),
    ]


def test_a_party_without_reachable_ports_goes_by_the_relay_alone(tmp_path: Path) -> None:
    with relay_thread(tmp_path) as url:
        links = relay_links(tmp_path, url, "auto")
        nowhere = {str(p): f"127.0.0.1:{free_port()}" for p in range(3)}

        def body(party: int) -> None:
            plane = make_plane(party, links[party] | {"peers": nowhere}, Log())
            others = [p for p in range(3) if p != party]
            ping_until(plane, 0, dict.fromkeys(others, "relay"))
            plane.close()

        run_parties(*(lambda p=p: body(p) for p in range(3)))


def test_the_ssh_port_is_never_probed() -> None:
    with pytest.raises(ConfigError, match="SSH"):
        make_plane(1, {"kind": "auto", "peers": {"0": "10.0.0.1:22"}}, Log())
    with pytest.raises(ConfigError, match="neither"):
        make_plane(1, {"kind": "auto"}, Log())
    with pytest.raises(ConfigError, match="kind"):
        make_plane(1, {"kind": "pigeon"}, Log())


def test_the_environment_can_rehearse_a_bad_network(monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"kind": "auto", "peers": {"0": f"127.0.0.1:{free_port()}"}}
    monkeypatch.setenv(FAULTS_VARIABLE, json.dumps({"drop": 0.5, "seed": 3}))
    plane = make_plane(1, link, Log())
    assert isinstance(plane._link, FaultyLink)
    plane.close(graceful=False)
    for wrong, why in (("{", "JSON"), ('{"dorp": 1}', "dorp")):
        monkeypatch.setenv(FAULTS_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=why):
            make_plane(1, link, Log())
