"""Exactly once across the end of a process: cursors and effect in one commit, over a real relay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plane_kit import SID, Log, kill, make_plane, relay_links, relay_thread, run_parties

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.plane import durable
from uvcc_engine.plane.api import Tag

COUNT = 40


def test_a_reader_that_dies_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    """The reader dies after every fifth message without a word; its effect counts every message exactly once."""
    with relay_thread(tmp_path, stream_listen="127.0.0.1:0") as url:
        links = [link | {"durable": True} for link in relay_links(tmp_path, url, "stream")]

        def sender() -> int:
            log = Log()
            plane = make_plane(0, links[0], log, state=tmp_path / "zero")
            for op in range(COUNT):
                plane.send(1, Tag(0, 0, op, 1), b"%d" % op)
                plane.flush()
            plane.send_control(1, b"all sent")
            assert plane.recv_control(1, 50) == b"all read"
            plane.close()
            return len(log.named("link_up"))

        def reader() -> list[int]:
            effect: list[int] = []
            while len(effect) < COUNT:
                plane = make_plane(1, links[1], Log(), state=tmp_path / "one")
                effect = [int(n) for n in (plane.restored or b"").split()]
                for n in range(min(5, COUNT - len(effect))):
                    effect.append(int(bytes(plane.recv(0, Tag(0, 0, len(effect), 1)))))
                    if n != 4:  # the last one is lost with the process and read again
                        plane.commit(b" ".join(b"%d" % e for e in effect))
                if len(effect) < COUNT:
                    kill(plane)  # no goodbye, no flush
            assert plane.recv_control(0, 50) == b"all sent"
            plane.send_control(0, b"all read")
            plane.close()
            return effect

        sessions, effect = run_parties(sender, reader)
    assert effect == list(range(COUNT))
    assert sessions >= COUNT // 5


def test_a_state_file_is_believed_only_if_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "plane.state"
    state = durable.PeerState({0: 3}, {0: 2})
    state.keep(1, Tag(1, 0, 1, 2), os.urandom(50))
    state.keep(2, Tag(1, 0, 2, 2), b"")
    assert durable.load(path, SID) is None
    durable.save(path, SID, b"step-7", {1: state, 2: durable.PeerState()})
    assert durable.load(path, SID) == (b"step-7", {1: state, 2: durable.PeerState()})
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UnreadableError, match="another subsession"):
        durable.load(path, bytes(32))
    for at in (0, 20, -1):
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(UnreadableError, match="damaged"):
            durable.load(tmp_path / "damaged", SID)


def test_a_plane_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    with relay_thread(tmp_path) as url:
        plane = make_plane(1, relay_links(tmp_path, url)[1], Log())
        with pytest.raises(ConfigError, match="durable"):
            plane.commit()
        plane.close(graceful=False)
