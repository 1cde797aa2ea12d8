"""A relay dies in the middle of a conversation and another, empty one takes its place elsewhere."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plane_kit import (
    Log,
    direct_links,
    free_port,
    make_plane,
    relay_links,
    relay_thread,
    run_parties,
    write_private,
)

from uvcc_engine.contract.errors import UnreachableError, UnreadableError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files import files
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.links.relay_locator import LOOK_S, RelayLocator

ROUNDS = 40
HALF = ROUNDS // 2
WAYS = pytest.mark.parametrize("kind", ["relay", "stream", pytest.param("auto", marks=pytest.mark.ci(__file__))])


def payload(party: int, op: int) -> bytes:
    return bytes([party, op]) * (1 + 500 * op)


@WAYS
def test_a_conversation_goes_on_over_a_relay_that_moved(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    logs, place = [Log() for _ in range(3)], tmp_path / files.LINK
    arrived, moved = threading.Barrier(4), threading.Event()

    def body(party: int, link: dict[str, Any]) -> None:
        plane = make_plane(party, link, logs[party], moves=place)
        others = [p for p in range(3) if p != party]
        for op in range(ROUNDS):
            if op == HALF:
                for extra in range(3):  # sent and not received when the relay dies
                    for p in others:
                        plane.send(p, Tag(1, 0, extra, 1), payload(party, extra))
                plane.flush()
                arrived.wait(120)
                moved.wait(120)
                for extra in range(3):
                    for p in others:
                        assert bytes(plane.recv(p, Tag(1, 0, extra, 1))) == payload(p, extra)
            for p in others:
                plane.send(p, Tag(0, 0, op, 1), payload(party, op))
            for p in others:
                assert bytes(plane.recv(p, Tag(0, 0, op, 1))) == payload(p, op)
        plane.close()

    def mover() -> None:
        with relay_thread(tmp_path / "a", stream_listen="127.0.0.1:0") as url:
            links = relay_links(tmp_path / "a", url, kind)
            begun.extend(links)
            ready.set()
            arrived.wait(120)
        where = f"127.0.0.1:{free_port()}"
        files.write_json(place, {"relay_url": f"http://{where}"})  # told before it answers there
        with relay_thread(tmp_path / "b", listen=where, stream_listen="127.0.0.1:0"):
            moved.set()
            done.wait(120)

    begun: list[dict[str, Any]] = []
    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=mover)
    thread.start()
    try:
        assert ready.wait(120)
        run_parties(*(lambda p=p: body(p, begun[p]) for p in range(3)))
    finally:
        moved.set()
        done.set()
        arrived.abort()
        thread.join()
    for log in logs:
        assert len(log.named("relay_moved")) == 1
        assert not log.named("peer_lost")
        assert len({(r[0], r[1], r[2]) for r in log.records}) == len(log.records)  # nothing came twice


@WAYS
def test_a_stranger_at_the_old_address_of_a_relay_ends_nothing(tmp_path: Path, kind: str) -> None:
    for name in ("ours", "strangers", "new"):
        (tmp_path / name).mkdir()
    logs, place = [Log() for _ in range(3)], tmp_path / files.LINK
    strangers = [{"party": p, "group": "another", "token": f"a-token-that-is-not-ours-{p}"} for p in range(3)]
    listen, stream = (f"127.0.0.1:{port}" for port in ports(2))
    with relay_thread(tmp_path / "ours", listen=listen, stream_listen=stream) as url:
        links = relay_links(tmp_path / "ours", url, kind)
        planes = [make_plane(p, links[p], logs[p], moves=place) for p in range(3)]
        run_parties(*(lambda p=p: greet(planes[p]) for p in range(3)))
    turned_away = threading.Barrier(4)

    def body(party: int) -> None:
        others = [p for p in range(3) if p != party]
        for p in others:
            planes[party].send(p, Tag(0, 0, 1, 1), payload(party, 1))
        log = logs[party]
        while log.seen.clear() or not any("refuses this party" in f["why"] for f in log.named("relay_down")):
            assert log.seen.wait(120), "no word of a relay that does not know us"
        turned_away.wait(120)
        for p in others:
            assert bytes(planes[party].recv(p, Tag(0, 0, 1, 1))) == payload(p, 1)
        planes[party].close()

    def mover() -> None:
        with relay_thread(tmp_path / "strangers", listen=listen, stream_listen=stream, credentials=strangers):
            turned_away.wait(120)
        with relay_thread(tmp_path / "new", stream_listen="127.0.0.1:0") as url:
            files.write_json(place, {"relay_url": url})
            done.wait(120)

    done = threading.Event()
    thread = threading.Thread(target=mover)
    thread.start()
    try:
        run_parties(*(lambda p=p: body(p) for p in range(3)))
    finally:
        done.set()
        turned_away.abort()
        thread.join()
    assert all(len(log.named("relay_moved")) == 1 for log in logs)


@WAYS
def test_a_stranger_that_stays_ends_the_wait_as_silence_does(tmp_path: Path, kind: str) -> None:
    strangers = [{"party": p, "group": "another", "token": f"a-token-that-is-not-ours-{p}"} for p in range(3)]
    listen, stream = (f"127.0.0.1:{port}" for port in ports(2))
    for name in ("ours", "strangers"):
        (tmp_path / name).mkdir()
    with relay_thread(tmp_path / "ours", listen=listen, stream_listen=stream) as url:
        links = relay_links(tmp_path / "ours", url, kind)
        planes = [make_plane(p, links[p], Log()) for p in range(3)]
        run_parties(*(lambda p=p: greet(planes[p]) for p in range(3)))
    planes[0]._waits = replace(planes[0]._waits, away_s=1.0)
    with relay_thread(tmp_path / "strangers", listen=listen, stream_listen=stream, credentials=strangers):
        with pytest.raises(UnreachableError, match=r"the relay \S+ has not been reached for"):
            planes[0].recv(1, Tag(0, 0, 1, 1))
        for plane in planes:
            plane.close(graceful=False)


@pytest.mark.parametrize("kind", ["relay", "stream", "auto"])
def test_a_relay_that_never_knew_the_token_says_so_at_once(tmp_path: Path, kind: str) -> None:
    with relay_thread(tmp_path, stream_listen="127.0.0.1:0") as url:
        link = relay_links(tmp_path, url, kind)[0]
        write_private(Path(link["token_file"]), "a-token-that-is-not-ours")
        plane = make_plane(0, link, Log())
        with pytest.raises(UnreachableError, match="refuses this party") as refused:
            plane.recv(1, Tag(0, 0, 0, 1))
        assert refused.value.hint == "check its token file"
        plane.close(graceful=False)


def test_nobody_is_lost_while_the_relay_is_away_but_there_is_an_end(tmp_path: Path) -> None:
    with relay_thread(tmp_path) as url:
        links = relay_links(tmp_path, url)
        planes = [make_plane(p, links[p], Log()) for p in range(3)]
        run_parties(*(lambda p=p: greet(planes[p]) for p in range(3)))
    planes[0]._waits = replace(planes[0]._waits, peer_s=0.2, away_s=1.0)
    with pytest.raises(UnreachableError, match=r"the relay \S+ has not been reached for"):
        planes[0].recv(1, Tag(0, 0, 1, 1))
    for plane in planes:
        plane.close(graceful=False)


def greet(plane: Any) -> None:
    others = [p for p in range(3) if p != plane.party]
    for p in others:
        plane.send(p, Tag(0, 0, 0, 1), b"here")
    for p in others:
        plane.recv(p, Tag(0, 0, 0, 1))


def test_where_the_relay_is_comes_from_the_newest_word(tmp_path: Path) -> None:
    now, place = [0.0], tmp_path / files.LINK
    at = RelayLocator(LinkSpec(relay_url="http://a", stream="a:1", group="g"), place, lambda: now[0])
    assert not at.moved()
    files.write_json(place, {"relay_url": "http://b", "kind": "other"})
    assert not at.moved()  # not looked at so soon
    now[0] = LOOK_S
    assert at.moved()
    assert at.link == LinkSpec(relay_url="http://b", group="g")
    now[0] += LOOK_S
    assert not at.moved()
    files.write_json(place, {"relay_url": "http://b"})
    now[0] += LOOK_S
    assert not at.moved()
    place.write_text(json.dumps("elsewhere"))
    now[0] += LOOK_S
    with pytest.raises(UnreadableError):
        at.moved()


def test_direct_links_need_no_place(tmp_path: Path) -> None:
    links = direct_links()
    planes = [make_plane(p, links[p], Log(), moves=tmp_path / files.LINK) for p in range(3)]
    run_parties(*(lambda p=p: greet(planes[p]) for p in range(3)))
    run_parties(*(lambda p=p: planes[p].close() for p in range(3)))
