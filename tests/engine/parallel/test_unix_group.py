"""Collectives over Unix sockets: large tensors both ways at once, messages out of order, members that are gone."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
from parallel_kit import run_ranks

from uvcc_engine.contract.errors import ConfigError, PeerLostError
from uvcc_engine.parallel.groups import PartyGroups, Place
from uvcc_engine.parallel.topology import Coord, Topology
from uvcc_engine.parallel.unix_group import Line

BIG = 1 << 17  # a MiB of int64: several times what a socket holds


def test_large_tensors_move_both_ways_at_once() -> None:
    def body(groups: PartyGroups, events: list[Any]) -> dict[str, Any]:
        me = groups.place.coord.stage
        mine, other = torch.full((BIG,), me + 1), 1 - me
        sent = [groups.pp.send(mine, other, tag) for tag in (3, 4)]
        theirs = [groups.pp.receive(torch.zeros(BIG, dtype=torch.int64), other, tag) for tag in (4, 3)]
        for wait in sent:
            wait()
        whole = groups.pp.sum_(mine.clone())
        slices = groups.pp.sum_slices(mine)()
        return {
            "received": [int(t.sum()) for t in theirs],
            "sum": (int(whole.min()), int(whole.max())),
            "slice": (len(slices), int(slices[0])),
            "gathered": [int(t[-1]) for t in groups.pp.gather(mine)],
        }

    for stage, found in enumerate(run_ranks(Topology(1, 2, 1), body)):
        assert not isinstance(found, Exception), found
        assert found == {
            "received": [BIG * (2 - stage)] * 2,
            "sum": (3, 3),
            "slice": (BIG // 2, 3),
            "gathered": [1, 2],
        }


def test_a_large_sum_of_three_is_made_slice_by_slice_and_wraps() -> None:
    def body(groups: PartyGroups, events: list[Any]) -> Any:
        x = torch.arange(BIG + 1).reshape(-1, 1) + (1 << 62)
        groups.pp.sum_(x)
        wanted = 3 * torch.arange(BIG + 1) - (1 << 62)  # which 3 * 2^62 wraps to
        return bool((x.reshape(-1) == wanted).all()), groups.pp.sum_(torch.tensor([0.5, 0.25])).tolist()

    assert run_ranks(Topology(1, 3, 1), body) == [(True, [1.5, 0.75])] * 3


def test_a_member_that_ends_is_noticed_at_once_by_who_sends_and_who_receives() -> None:
    def body(groups: PartyGroups, events: list[Any]) -> str:
        if groups.place.coord.stage == 1:
            os._exit(0)
        try:
            groups.pp.receive(torch.zeros(1, dtype=torch.int64), 1, 1)
        except PeerLostError as error:
            return error.what
        return "nothing"

    found = run_ranks(Topology(1, 2, 1), body, timeout_s=600.0, end_gracefully=False)
    assert "pp #2 receive 1 from 1 did not finish: a member closed the connection" in found[0]


def test_a_message_of_another_size_is_refused_and_a_silent_member_ends_the_wait() -> None:
    ends = socket.socketpair()
    here, there = Line(ends[0], 0.05), Line(ends[1], 5.0)
    here.send(1, memoryview(b"four"))
    with pytest.raises(RuntimeError, match="4 bytes for operation 1, 2 were due"):
        there.receive(1, memoryview(bytearray(2)))
    with pytest.raises(RuntimeError, match="timed out waiting"):
        here.receive(2, memoryview(bytearray(1)))
    there.close()
    with pytest.raises(RuntimeError, match=r"a member is gone|a member closed"):
        here.receive(2, memoryview(bytearray(1)))
    here.close()


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_GROUP_BACKEND", "mpi")
    place = Place(Coord(0, 0, 0, 0), Topology(1, 2, 1), "127.0.0.1", 1)
    with pytest.raises(ConfigError, match="UVCC_GROUP_BACKEND is 'mpi'"):
        PartyGroups(place, device="cpu", timeout_s=1.0, on_event=lambda name, fields: None)
